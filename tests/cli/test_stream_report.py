"""`kda-stream stream --report`: the page's numbers, and what is noted and sampled for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.running import COMMAND, ENVIRONMENT, SHARDS, Run
from support.checkpoints import UNEVEN, Geometry
from support.checkpoints import write_checkpoint as write_sparse
from support.families import FAMILIES, write_family
from support.html_pages import Element, Page, read_page
from support.terminals import shards_are_open

from kda_stream import open_checkpoint
from kda_stream.cli.page import sampling
from kda_stream.cli.page.sampling import Sampler
from kda_stream.cli.page.stream_report import LayerTime, rate_points
from kda_stream.cli.page.svg import Line, Unit, round_ticks, time_chart
from kda_stream.testing import Layout, write_checkpoint

WIDE = Geometry(hidden=2048, heads=32, head_dim=128, conv_kernel=4)  # 75 MB a layer


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of eight large layers of zeros, which takes no room; not to be changed."""
    return write_sparse(tmp_path_factory.mktemp("wide"), geometry=WIDE, sparse=True).folder


@pytest.fixture
def page(run: Run, small: Path, tmp_path: Path) -> Page:
    assert run("stream", small, "--report", "page.html").status == 0
    return read_page(tmp_path / "page.html")


# What it is ---------------------------------------------------------------------------------------


def test_the_report_is_one_file_that_loads_nothing(page: Page) -> None:
    page.require_self_contained()


def test_the_result_names_the_report(run: Run, small: Path) -> None:
    assert run("stream", small, "--report", "a.html").stdout.endswith("\n  page      a.html\n")
    assert run("stream", small, "--report", "b.html", "--json").json["report"] == "b.html"
    ran = run("stream", small, "--json")
    assert ran.json["report"] is None
    assert "page  " not in run("stream", small).stdout


def test_a_file_that_is_there_is_refused_before_the_stream_begins(run: Run, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    ran = run("stream", tmp_path / "absent", "--report", "page.html")
    assert ran.status == 3
    assert ran.errors == ["error: page.html: it cannot be written: got File exists"]
    assert (tmp_path / "page.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "status"), [(("--layers", "99"), 2), (("--alignment", "3"), 2), ((), 1)]
)
def test_a_stream_that_is_refused_leaves_no_report(
    run: Run, tmp_path: Path, options: tuple[str, ...], status: int
) -> None:
    written = write_family(tmp_path / "k3", FAMILIES["KIMI_K3"], UNEVEN, layers=4)
    before = sorted(os.listdir(tmp_path))
    assert run("stream", written.folder, *options, "--report", "page.html").status == status
    assert sorted(os.listdir(tmp_path)) == before


def test_a_stream_that_fails_on_its_way_leaves_no_report(copied: Path, tmp_path: Path) -> None:
    """A shard that is no longer the one that was checked when the stream comes to it."""
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "from kda_stream import PayloadError\n"
        "from kda_stream.cli.stream import stream_path\n"
        "def cut(layer, stream):\n"
        f"    os.truncate({str(copied / SHARDS[2])!r}, 100)\n"
        "try:\n"
        f"    stream_path({str(copied)!r}, cut, report='page.html')\n"
        "except PayloadError:\n"
        "    sys.exit(3)\n"
    )
    before = sorted(os.listdir(tmp_path))
    done = subprocess.run(
        [COMMAND[0], "script.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=30
    )
    assert done.returncode == 3, done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_an_interrupted_stream_leaves_no_report(wide: Path, tmp_path: Path) -> None:
    layers = ",".join(["0", "1", "2", "4", "5", "6"] * 100)
    child = subprocess.Popen(
        [*COMMAND, "stream", str(wide), "--layers", layers, "--report", "page.html"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not shards_are_open(child.pid):
            time.sleep(0.005)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 130, stderr
    assert os.listdir(tmp_path) == []


def test_a_stream_without_a_report_samples_nothing(small: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from kda_stream.cli import main\n"
        "from kda_stream.cli.page import stream_report\n"
        "stream_report.Sampler = None\n"
        f"sys.exit(main(['stream', {str(small)!r}, *sys.argv[1:]]))\n"
    )
    for options, status in (((), 0), (("--report", "page.html"), 1)):
        done = subprocess.run(
            [COMMAND[0], "script.py", *options], cwd=tmp_path, env=ENVIRONMENT, capture_output=True
        )
        assert done.returncode == status


def test_memory_that_is_not_locked_is_told_with_the_reason(
    run: Run, small: Path, tmp_path: Path
) -> None:
    run("stream", small, "--lock", "off", "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    assert "into not page-locked memory" in page.root.one("p", class_="lead").text
    assert "Page-lockednoby --lock off" in page.root.one("dl", class_="facts").text


# Its numbers --------------------------------------------------------------------------------------


def test_the_report_holds_the_facts_of_json(run: Run, small: Path, tmp_path: Path) -> None:
    found = run("stream", small, "--json", "--report", "page.html").json
    for name in ("schema_version", "command", "exit_status", "problems"):
        del found[name]
    page = read_page(tmp_path / "page.html")
    assert page.facts == found
    assert page.figures == {
        "layers": str(found["layers"]),
        "bytes": str(found["bytes"]),
        "seconds": str(found["seconds"]),
        "bytes_per_second": str(found["bytes_per_second"]),
        "lock.locked_bytes": str(found["lock"]["locked_bytes"]),
        "peak_anonymous_bytes": str(found["peak_anonymous_bytes"]),
        "peak_resident_bytes": str(found["peak_resident_bytes"]),
    }
    seconds, rate = found["seconds"], found["bytes_per_second"]
    assert page.root.one("p", class_="lead").text.startswith(
        f"6 KDA layers, 259.872 kB in {seconds:.3f} s: {rate / 1e9:.3f} GB/s, 6 layers mapped, "
    )


def test_each_layer_is_told_in_the_order_it_was_handed_out(
    run: Run, small: Path, tmp_path: Path
) -> None:
    run("stream", small, "--layers", "4,0,4", "--read", "positional", "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    rows = page.rows("layers")
    assert [row[:2] for row in rows] == [["1", "4"], ["2", "0"], ["3", "4"]]
    assert [int(row[4]) for row in rows] == [page.facts["bytes"] // 3] * 3
    assert {row[5] for row in rows} == {"positional"}
    body = page.root.one("div", id="layers").one("tbody")
    seconds = [float(str(row.all("td")[2].attributes["data-value"])) for row in body.all("tr")]
    assert 0 < sum(seconds) <= page.facts["seconds"]
    assert sum(seconds) == pytest.approx(page.facts["seconds"], abs=0.05)


def test_each_layer_has_a_bar_as_high_as_its_time_drawn_by_its_way(
    run: Run, wide: Path, tmp_path: Path
) -> None:
    run("stream", wide, "--read", "direct", "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    rects = bars(page)
    assert {rect.attributes["class"] for rect in rects} == {"way-direct"}
    titles = [rect.one("title").text for rect in rects]
    rows = page.rows("layers")
    assert [title.split(",")[0] for title in titles] == [
        f"layer {row[1]}: {row[2]} s" for row in rows
    ]
    heights = [float(str(rect.attributes["height"])) for rect in rects]
    times = [float(row[2]) for row in rows]
    for height, seconds in zip(heights, times, strict=True):
        assert height / max(heights) == pytest.approx(seconds / max(times), abs=0.02)


def test_a_rate_is_told_in_the_unit_of_its_axis(run: Run, small: Path, tmp_path: Path) -> None:
    run("stream", small, "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    (section,) = (part for part in page.root.all("section") if part.one("h2").text == "Rate")
    unit = "MB/s" if "MB/s" in section.one("svg", class_="plot").text else "GB/s"
    assert re.search(rf"over all: \d+\.\d{{3}} {unit}", section.text)


def test_why_a_layer_was_read_so_is_broken_between_words(
    run: Run, small: Path, tmp_path: Path
) -> None:
    run("stream", small, "--report", "page.html")
    cells = read_page(tmp_path / "page.html").root.all("td", class_="long")
    assert {cell.text for cell in cells} == {"100 % of it was in the page cache"}


def bars(page: Page) -> list[Element]:
    (section,) = (
        part for part in page.root.all("section") if part.one("h2").text == "Time of each layer"
    )
    return section.one("svg", class_="plot").all("rect")


def test_memory_is_sampled_from_before_the_slots_until_they_are_given_back(
    run: Run, wide: Path, tmp_path: Path
) -> None:
    run("stream", wide, "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    rows = page.rows("memory")
    times = [float(row[0]) for row in rows]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] >= page.facts["seconds"] - 0.001
    anonymous = [int(row[1]) for row in rows]
    slot_bytes = page.facts["slot_bytes"]
    assert anonymous[0] < slot_bytes
    assert anonymous[-1] < slot_bytes
    assert max(anonymous) > slot_bytes or len(rows) < 4


def test_the_page_cache_of_the_shards_is_followed(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one", Layout(shards=1))
    file = folder / "model-00001-of-00001.safetensors"
    run("stream", folder, "--report", "page.html")
    page = read_page(tmp_path / "page.html")
    told = page.rows("cache")[-1][1]
    assert file.stat().st_size - 4096 < int(told) <= file.stat().st_size + 4096


def test_sampling_takes_less_than_a_hundredth_of_the_time(
    run: Run, wide: Path, tmp_path: Path
) -> None:
    layers = ",".join(["0", "1", "2", "4", "5", "6"] * 10)
    run("stream", wide, "--layers", layers, "--report", "page.html")
    text = read_page(tmp_path / "page.html").root.one("summary").text
    share = float(text.split("(")[1].split(" %")[0])
    assert share < 1, text


# Sampling -----------------------------------------------------------------------------------------


def test_a_sampler_takes_one_sample_before_and_one_after(small: Path) -> None:
    with open_checkpoint(small) as checkpoint:
        with Sampler(checkpoint.shards.values()) as sampler:
            assert len(sampler.memory) == len(sampler.cache) == 1
        sampler.take_last()
        assert len(sampler.memory) == len(sampler.cache) == 2
        whole = sum(shard.identity.file_bytes for shard in checkpoint.shards.values())
    for sample in sampler.cache:
        assert 0 < sample.cached_bytes <= whole


def test_of_many_samples_every_other_is_kept_and_fewer_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(sampling, "_SAMPLES_MAX", 16)
    with Sampler([]) as sampler:
        time.sleep(0.3)
    times = [sample.seconds for sample in sampler.memory]
    assert len(times) <= 16
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] > 0.15


class Asked:
    """Stands for `cached_bytes`: takes its time, and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processor_seconds: float) -> None:
        self.times = 0
        self._processor_seconds = processor_seconds
        monkeypatch.setattr(sampling, "cached_bytes", self)
        monkeypatch.setattr(sampling, "INTERVAL_SECONDS", 0.001)

    def __call__(self, *_: object) -> int:
        self.times += 1
        until = time.thread_time() + self._processor_seconds
        while time.thread_time() < until:
            time.sleep(0)
        return 1000 + self.times


def test_the_page_cache_is_asked_for_where_a_layer_has_come_and_nowhere_else(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, 0.0)
    with open_checkpoint(small) as checkpoint:
        shards = list(checkpoint.shards.values())
        with Sampler(shards) as sampler:
            time.sleep(0.05)
            assert asked.times == 3
            sampler.touch([shards[1].path, shards[1].path])
            time.sleep(0.2)
            assert asked.times == 4
        sampler.take_last()
    assert asked.times == 7
    told = [sample.cached_bytes for sample in sampler.cache]
    assert told[0] == 1001 + 1002 + 1003
    assert told[1] in {told[0] - before + 1004 for before in (1001, 1002, 1003)}
    assert told[2] == 1005 + 1006 + 1007


def test_a_page_cache_that_is_slow_to_tell_is_asked_less_often(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, 0.01)
    with open_checkpoint(small) as checkpoint:
        (shard, *_) = checkpoint.shards.values()
        with Sampler([shard]) as sampler:
            for _ in range(20):
                sampler.touch([shard.path])
                time.sleep(0.01)
        assert asked.times == 1
        sampler.take_last()
    assert asked.times == 2
    assert len(sampler.memory) > 10


def test_the_end_does_not_wait_for_every_shard_of_a_slow_page_cache(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(small) as checkpoint:
        shards = list(checkpoint.shards.values())
        with Sampler(shards) as sampler:
            asked = Asked(monkeypatch, 0.3)
            sampler.touch(shard.path for shard in shards)
            while not asked.times:
                time.sleep(0.001)
    assert asked.times < 3
    assert sampler.cache_refusal is None
    assert len(sampler.cache) == 1


def test_a_shard_that_changes_under_the_sampling_ends_it_with_a_reason(copied: Path) -> None:
    with open_checkpoint(copied) as checkpoint:
        with Sampler([checkpoint.shards[SHARDS[0]]]) as sampler:
            os.truncate(copied / SHARDS[0], 100)
        sampler.take_last()
    assert len(sampler.cache) == 1
    assert sampler.cache_refusal is not None
    assert "has changed" in sampler.cache_refusal


def test_figures_that_the_system_does_not_give_are_told_as_such(
    small: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from kda_stream.cli import main, stream\n"
        "from kda_stream.cli.page import sampling\n"
        "from kda_stream.staging.residency import MemoryUse\n"
        "stream.memory_use = sampling.memory_use = lambda: MemoryUse(None, None, None, None)\n"
        "sampling.cached_bytes = lambda *_: None\n"
        f"sys.exit(main(['stream', {str(small)!r}, '--report', 'page.html']))\n"
    )
    subprocess.run([COMMAND[0], "script.py"], cwd=tmp_path, env=ENVIRONMENT, check=True)
    page = read_page(tmp_path / "page.html")
    text = page.root.one("main").text
    assert "This system does not count what is resident." in text
    assert "Not known: the system does not tell what of these files is in it." in text
    assert page.figures["peak_anonymous_bytes"] == "null"
    assert "Peak, anonymousnot counted" in text
    assert page.facts["peak_anonymous_bytes"] is None


# The charts ---------------------------------------------------------------------------------------


def layer_times(*ends: float, nbytes: int = 100) -> list[LayerTime]:
    begins = [0.0, *ends]
    return [
        LayerTime(n, nbytes, begin, end, "direct", "", None)
        for n, (begin, end) in enumerate(zip(begins, ends, strict=False))
    ]


def test_layers_that_come_evenly_are_an_even_rate() -> None:
    points = rate_points(layer_times(*(n / 4 for n in range(1, 41))), 1.0)
    assert points[-1][0] == 10
    assert {round(rate, 6) for _, rate in points} == {400}


def test_the_rate_is_that_of_the_last_moments() -> None:
    points = dict(rate_points(layer_times(1.0, 2.0, 2.5, 3.0), 1.0))
    assert points[1.0] == points[2.0] == pytest.approx(100)
    assert points[2.5] == pytest.approx(150)
    assert points[3.0] == pytest.approx(200)


def test_a_layer_that_took_no_time_is_counted_and_divides_nothing() -> None:
    points = dict(rate_points(layer_times(1.0, 2.0, 2.0, 3.0), 1.0))
    assert points[2.0] == pytest.approx(100)
    assert points[3.0] == pytest.approx(200)


def test_a_line_of_many_points_has_all_of_them() -> None:
    points = [(at / 10, at % 7) for at in range(2000)]
    chart = time_chart([Line("line-1", points)], 200.0, 6.0, Unit("bytes", 1), "told")
    (drawn,) = re.findall(r'<polyline points="([^"]*)"', chart)
    assert len(drawn.split()) == 2000
    assert re.fullmatch(r"[0-9., ]+", drawn)


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (7.733, [0, 2, 4, 6]),
        (34, [0, 10, 20, 30]),
        (0.061, [0, 0.02, 0.04, 0.06]),
        (999, [0, 200, 400, 600, 800]),
        (0, [0]),
    ],
)
def test_ticks_are_round_and_few(most: float, ticks: list[float]) -> None:
    assert round_ticks(most, 5) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("command", "option", "fact"),
    [("stream", "--report", "layers"), ("inspect", "--html", "tensors")],
)
def test_where_the_page_cannot_be_written_at_last_the_figures_are_told_all_the_same(
    run: Run, small: Path, tmp_path: Path, command: str, option: str, fact: str
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    page = tmp_path / "page.html"
    whole = run(command, small, "--json").json
    found = run(command, small, option, page, "--json", before=limit).json
    assert (found["exit_status"], found[fact]) == (3, whole[fact])
    assert found[option.removeprefix("--")] is None
    (problem,) = found["problems"]
    assert (problem["code"], problem["path"]) == ("path-not-writable", str(page))
    text = run(command, small, option, page, before=limit)
    assert (text.status, len(text.errors)) == (3, 1)
    assert len(text.stdout.splitlines()) == len(run(command, small).stdout.splitlines())
    assert not page.exists()
