"""The pages in a real browser: no error, the right numbers, tables that sort, nothing loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kda_stream.cli.page.sampling import CacheSample, MemorySample, Sampler
from kda_stream.cli.page.stream_report import LayerTime, stream_page
from kda_stream.staging.residency import MemoryUse
from kda_stream.testing import DSA, KDA, Layout, write_checkpoint, write_shard

Opened = Callable[..., AbstractContextManager[Any]]
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1400, "height": 900}


def kda_stream(*arguments: object, cwd: Path) -> dict[str, Any]:
    """Run the command; the facts of its --json."""
    command = [sys.executable, "-m", "kda_stream.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and both its pages; not to be changed."""
    folder = tmp_path_factory.mktemp("pages")
    write_checkpoint(folder / "small", Layout(kinds=(KDA, KDA, KDA, DSA) * 6, shards=12))
    for arguments in (("inspect", "--html"), ("stream", "--report")):
        command, option = arguments
        facts = kda_stream(command, "small", option, f"{command}.html", cwd=folder)
        (folder / f"{command}.json").write_text(json.dumps(facts))
    return folder


def facts(folder: Path, command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{command}.json").read_text())
    return found


def column(page: Any, table: str, number: int) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        f"#{table} tbody td:nth-child({number})",
        "cells => cells.map(cell => cell.dataset.value ?? cell.textContent)",
    )
    return found


def shown_figures(page: Any) -> dict[str, str]:
    found: dict[str, str] = page.eval_on_selector_all(
        "dl.facts data",
        "all => Object.fromEntries(all.map(one => [one.dataset.fact, one.innerText]))",
    )
    return found


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_checkpoint_is_drawn_without_an_error_and_with_its_numbers(
    opened: Opened, folder: Path, scheme: str, viewport: dict[str, int]
) -> None:
    told = facts(folder, "inspect")
    with opened(folder / "inspect.html", color_scheme=scheme, viewport=viewport) as page:
        figures = shown_figures(page)
        assert figures["layers"] == "25"
        assert figures["shards"] == "12"
        assert figures["tensors"] == f"{told['tensors']:,}"
        assert figures["kda_bytes"] == f"{told['kda_bytes'] / 1e3:.3f} kB"
        marks = page.eval_on_selector_all(".strip b", "all => all.map(one => one.innerText)")
        assert "".join(marks) == "KKKD" * 6 + "M"
        assert sum(map(int, column(page, "layers", 4))) == told["kda_bytes"]
        assert sum(map(int, column(page, "shards", 3))) == told["file_bytes"]
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_stream_is_drawn_without_an_error_and_with_its_numbers(
    opened: Opened, folder: Path, scheme: str, viewport: dict[str, int]
) -> None:
    told = facts(folder, "stream")
    with opened(folder / "stream.html", color_scheme=scheme, viewport=viewport) as page:
        figures = shown_figures(page)
        assert figures["layers"] == str(told["layers"])
        assert figures["seconds"] == f"{told['seconds']:.3f} s"
        assert figures["bytes_per_second"] == f"{told['bytes_per_second'] / 1e9:.3f} GB/s"
        assert column(page, "layers", 2) == list(map(str, told["layer_numbers"]))
        assert sum(map(int, column(page, "layers", 5))) == told["bytes"]
        bars = page.locator(".plot > rect")
        assert bars.count() == told["layers"]
        assert all(box["width"] > 0 for box in [bars.nth(0).bounding_box()])
        assert page.locator(".plot polyline").count() >= 5
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


@pytest.mark.parametrize("name", ["inspect", "stream"])
def test_a_figure_stays_beside_its_unit_and_within_its_card(
    opened: Opened, folder: Path, name: str
) -> None:
    broken = """all => all.filter(one => {
        const line = parseFloat(getComputedStyle(one).lineHeight);
        return one.offsetHeight > 1.5 * line || one.scrollWidth > one.clientWidth;
    }).map(one => one.innerText)"""
    for width in (360, 420, 900, 1300):
        with opened(folder / f"{name}.html", viewport={"width": width, "height": 900}) as page:
            assert page.eval_on_selector_all("dd data", broken) == [], width


def test_each_sample_of_the_page_cache_is_a_round_dot(opened: Opened, folder: Path) -> None:
    with opened(folder / "stream.html", viewport=WIDE) as page:
        dots = page.locator("path.dots")
        assert dots.count() == 1
        drawn = dots.evaluate("one => [one.getAttribute('d'), getComputedStyle(one)]")[0]
        line = page.locator("section:has(path.dots) polyline").get_attribute("points")
        assert [at.removesuffix("h0") for at in drawn.split("M")[1:]] == line.split()
        style = "one => getComputedStyle(one).strokeLinecap"
        assert dots.evaluate(style) == "round"


def test_a_shard_is_drawn_as_wide_as_its_share_of_the_longest(opened: Opened, folder: Path) -> None:
    sizes = [shard["bytes"] for shard in facts(folder, "inspect")["shards"]]
    with opened(folder / "inspect.html", viewport=WIDE) as page:
        wide = page.eval_on_selector_all(
            ".map:not(.dtypes) .bar > rect.other",
            "all => all.map(one => one.getBoundingClientRect().width)",
        )
    assert len(wide) == len(sizes)
    for width, size in zip(wide, sizes, strict=True):
        assert width / max(wide) == pytest.approx(size / max(sizes), abs=0.01)


def test_it_is_dark_where_the_reader_s_system_is(opened: Opened, folder: Path) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(folder / "inspect.html", color_scheme=scheme) as page:
            grounds[scheme] = page.evaluate(
                "getComputedStyle(document.documentElement).backgroundColor"
            )
    assert grounds == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 26)"}


def test_a_stream_of_hours_is_drawn_without_an_error(opened: Opened, folder: Path) -> None:
    """As many samples as are kept, and more layers than have a bar."""
    sampler = Sampler([])
    sampler.memory = [
        MemorySample(10.0 * at, MemoryUse(10**9 + at, 10**6, 10**9, 2 * 10**9))
        for at in range(1024)
    ]
    sampler.cache = [CacheSample(10.0 * at, at * 10**8) for at in range(1024)]
    layers = [
        LayerTime(at, 10**9, 20.0 * at, 20.0 * (at + 1), "direct", "it was asked for", None)
        for at in range(500)
    ]
    data = stream_page(facts(folder, "stream") | {"seconds": 10_000.0}, layers, sampler)
    (folder / "hours.html").write_bytes(data)
    with opened(folder / "hours.html", viewport=WIDE) as page:
        points = page.eval_on_selector_all(".plot polyline", "all => all.map(a => a.points.length)")
        assert max(points) >= 1000
        assert page.locator(".plot > rect").count() == 400
        assert "and 100 layers more, in the table" in page.locator("main").inner_text()
        assert "minutes" in page.locator(".plot").first.inner_html()
    assert len(data) < 1_000_000


# Sorting ------------------------------------------------------------------------------------------


def heading(page: Any, table: str, text: str) -> Any:
    return page.locator(f"#{table} th button", has_text=text).first


def order(page: Any, table: str) -> list[str | None]:
    found: list[str | None] = page.eval_on_selector_all(
        f"#{table} th", "all => all.map(one => one.getAttribute('aria-sort'))"
    )
    return found


def test_a_click_sorts_numbers_as_numbers_and_a_second_one_turns_them(
    opened: Opened, folder: Path
) -> None:
    sizes = sorted(shard["bytes"] for shard in facts(folder, "inspect")["shards"])
    with opened(folder / "inspect.html") as page:
        assert order(page, "shards") == ["ascending", *[None] * 5]
        heading(page, "shards", "Bytes").click()
        assert list(map(int, column(page, "shards", 3))) == sizes[::-1]
        assert order(page, "shards") == [None, None, "descending", None, None, None]
        heading(page, "shards", "Bytes").click()
        assert list(map(int, column(page, "shards", 3))) == sizes
        assert order(page, "shards") == [None, None, "ascending", None, None, None]
        heading(page, "shards", "Shard").click()
        heading(page, "shards", "Shard").click()
        assert column(page, "shards", 1) == [str(n) for n in range(1, 13)]


def test_fractions_sort_by_what_they_are(opened: Opened, folder: Path) -> None:
    with opened(folder / "stream.html") as page:
        before = list(map(float, column(page, "layers", 3)))
        heading(page, "layers", "Seconds").click()
        assert list(map(float, column(page, "layers", 3))) == sorted(before, reverse=True)


def test_the_keyboard_sorts_too(opened: Opened, folder: Path) -> None:
    with opened(folder / "inspect.html") as page:
        heading(page, "layers", "Kind").focus()
        page.keyboard.press("Enter")
        kinds = column(page, "layers", 2)
        assert kinds == sorted(kinds)
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert order(page, "layers") == [None, None, "ascending", None, None]


def test_lists_of_layers_sort_by_their_numbers(opened: Opened, folder: Path) -> None:
    with opened(folder / "inspect.html") as page:
        heading(page, "layers", "Shards").click()
        first = [int(text.split(",")[0]) for text in column(page, "layers", 5) if text]
        assert first == sorted(first)
        assert max(first) >= 10


@pytest.mark.parametrize("name", ["inspect", "stream"])
def test_without_scripts_all_is_there_and_nothing_looks_like_a_button(
    opened: Opened, folder: Path, name: str
) -> None:
    with opened(folder / f"{name}.html", java_script_enabled=False) as page:
        assert page.locator("button").count() == 0
        assert page.locator("#layers tbody tr").count() == (25 if name == "inspect" else 18)


# Safety -------------------------------------------------------------------------------------------


def test_a_name_that_attacks_is_shown_as_text(opened: Opened, tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = [
        t._replace(name=t.name.replace(Layout().prefix, f"{attack}.layers."))
        for t in Layout(shards=1, kinds=(KDA,), mtp=0).tensors()
    ]
    write_shard(tmp_path / "<img src=x onerror=alert(3)>.safetensors", rows)
    kda_stream("inspect", tmp_path, "--html", "page.html", cwd=tmp_path)
    with opened(tmp_path / "page.html") as page:
        assert attack in page.locator("dl.words").inner_text()
        assert "<img src=x onerror=alert(3)>.safetensors" in page.locator("#shards").inner_text()
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 2
        told = page.evaluate("JSON.parse(document.getElementById('facts').textContent)")
        assert told["prefix"] == f"{attack}.layers."


def test_the_page_s_policy_lets_nothing_be_loaded_and_no_other_script_run(
    browser: Any, folder: Path
) -> None:
    """As if a name had got through: what it would ask for is blocked by the page itself."""
    page = browser.new_page()
    asked: list[str] = []
    page.route("http://**", lambda route: (asked.append(route.request.url), route.abort()))
    page.goto((folder / "inspect.html").as_uri())
    blocked = page.evaluate(
        """async () => {
            const blocked = [];
            document.addEventListener("securitypolicyviolation",
                event => blocked.push(event.effectiveDirective));
            const add = (tag, attributes) =>
                document.body.append(Object.assign(document.createElement(tag), attributes));
            add("img", {src: "http://127.0.0.1:9/x.png"});
            add("script", {src: "http://127.0.0.1:9/x.js"});
            add("script", {textContent: "window.ran = true"});
            add("iframe", {src: "http://127.0.0.1:9/"});
            await fetch("http://127.0.0.1:9/").catch(() => null);
            await new Promise(resolve => setTimeout(resolve, 200));
            return [blocked.sort(), window.ran === undefined];
        }"""
    )
    assert blocked == [
        ["connect-src", "frame-src", "img-src", "script-src-elem", "script-src-elem"],
        True,
    ]
    assert asked == []
    page.close()


# On paper -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["inspect", "stream"])
def test_printed_it_shows_every_row(opened: Opened, folder: Path, name: str) -> None:
    with opened(folder / f"{name}.html") as page:
        page.emulate_media(media="print")
        hidden = page.eval_on_selector_all(
            ".scroll", "all => all.filter(one => one.scrollHeight > one.clientHeight + 1).length"
        )
        assert hidden == 0
        assert page.pdf()[:5] == b"%PDF-"
