"""`kda-stream inspect --html`: the page's numbers, its map, and names that attack it."""

from __future__ import annotations

import json
import os
import re
import time
import unicodedata
from pathlib import Path

import pytest
from cli.running import INDEX, SHARDS, EditConfig, Rewrite, Run
from support.checkpoints import UNEVEN
from support.families import FAMILIES, write_family
from support.html_pages import Element, Page, read_page

import kda_stream.cli.page
from kda_stream import AttnBlockKind, KdaConfig, open_checkpoint
from kda_stream.testing import DSA, KDA, Layout, StoredTensor, write_checkpoint, write_shard

STYLE = Path(kda_stream.cli.page.__file__).with_name("page.css")


@pytest.fixture
def page(run: Run, small: Path, tmp_path: Path) -> Page:
    assert run("inspect", small, "--html", "page.html").status == 0
    return read_page(tmp_path / "page.html")


# What it is ---------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_loads_nothing(page: Page) -> None:
    page.require_self_contained()


def test_the_result_names_the_page_s_file(run: Run, small: Path) -> None:
    assert "\n  page      page.html\n" in run("inspect", small, "--html", "page.html").stdout
    assert run("inspect", small, "--html", "two.html", "--json").json["html"] == "two.html"
    ran = run("inspect", small, "--json")
    assert ran.json["html"] is None
    assert "page" not in run("inspect", small).stdout


def test_a_file_that_is_there_is_never_replaced(run: Run, small: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    ran = run("inspect", small, "--html", "page.html")
    assert ran.status == 3
    assert ran.stdout == ""
    assert ran.errors == ["error: page.html: it cannot be written: got File exists"]
    assert (tmp_path / "page.html").read_text() == "mine"


def test_a_page_that_cannot_be_made_is_told_before_the_checkpoint_is_opened(
    run: Run, tmp_path: Path
) -> None:
    ran = run("inspect", tmp_path / "absent", "--html", "nowhere/page.html")
    assert ran.status == 3
    assert ran.errors == [
        "error: nowhere/page.html: it cannot be written: got No such file or directory"
    ]


def test_a_checkpoint_that_cannot_be_read_leaves_no_page(
    run: Run, copied: Path, tmp_path: Path
) -> None:
    (copied / SHARDS[1]).write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    assert run("inspect", copied, "--html", "page.html").status == 3
    assert sorted(os.listdir(tmp_path)) == before


# Its numbers --------------------------------------------------------------------------------------


def test_the_page_holds_the_facts_of_json(run: Run, small: Path, tmp_path: Path) -> None:
    found = run("inspect", small, "--json", "--html", "page.html").json
    for name in ("schema_version", "command", "exit_status", "problems"):
        del found[name]
    assert read_page(tmp_path / "page.html").facts == found


def test_the_figures_at_the_head_are_those_of_json(page: Page) -> None:
    facts = page.facts
    assert page.figures == {
        "layers": str(len(facts["layer_details"])),
        "kda_bytes": str(facts["kda_bytes"]),
        "tensor_bytes": str(facts["tensor_bytes"]),
        "shards": str(len(facts["shards"])),
        "tensors": str(facts["tensors"]),
    }
    lead = page.root.one("p", class_="lead").text
    assert lead == (
        "9 layers: 6 KDA, 2 DSA, 1 MTP. 771.484 kB in 355 tensors and 3 shards; the KDA layers are "
        "259.872 kB of it (33.7 %), in 3 of 3 shards."
    )


def test_the_tables_have_each_layer_shard_and_dtype_as_json_tells_them(page: Page) -> None:
    facts = page.facts
    files = [shard["file"] for shard in facts["shards"]]
    assert page.rows("layers") == [
        [
            str(layer["index"]),
            "MTP (DSA)" if layer["is_mtp"] else layer["kind"],
            layer["family"] or "",
            str(layer["kda_bytes"]),
            ", ".join(str(files.index(file) + 1) for file in layer["kda_shards"]),
        ]
        for layer in facts["layer_details"]
    ]
    shards = page.rows("shards")
    assert [[row[1], row[2], row[3]] for row in shards] == [
        [shard["file"], str(shard["bytes"]), str(shard["tensors"])] for shard in facts["shards"]
    ]
    assert sum(int(row[4]) for row in shards) == facts["kda_bytes"]
    assert [row[5] for row in shards] == ["0-2", "2, 4-5", "5-6"]
    for row in page.rows("dtypes"):
        whole, other = facts["dtypes"][row[0]], facts["other_dtypes"][row[0]]
        assert row[1:3] == [str(whole["bytes"]), str(whole["tensors"])]
        assert int(row[3]) == whole["bytes"] - other["bytes"]
        assert int(row[4]) == whole["tensors"] - other["tensors"]


def test_a_table_sorts_by_numbers_that_stand_beside_what_is_shown(page: Page) -> None:
    for cell in page.root.all("td", class_="number"):
        assert cell.text.replace(",", "") == cell.attributes["data-value"].removesuffix(".0")


def test_of_layers_of_two_families_the_head_says_which_are_of_which(
    run: Run, tmp_path: Path
) -> None:
    glm, f32_conv = FAMILIES["GLM5_NEXT"], FAMILIES["GLM5_NEXT_F32_CONV"]
    written = write_family(tmp_path / "two", (glm, f32_conv, f32_conv), UNEVEN, layers=8)
    run("inspect", written.folder, "--html", "page.html")
    text = read_page(tmp_path / "page.html").root.one("dl", class_="words").text
    assert "GLM5_NEXT (layers 0, 4); GLM5_NEXT_F32_CONV (layers 1-2, 5-6)" in text


# Its map ------------------------------------------------------------------------------------------


def cells(page: Page) -> str:
    """The strip of layers as letters."""
    return "".join(mark.text for mark in page.root.one("ol", class_="strip").all("b"))


def test_the_strip_has_a_letter_for_each_layer(page: Page) -> None:
    assert cells(page) == "KKKDKKKDM"
    titles = [str(li.attributes["title"]) for li in page.root.one("ol", class_="strip").all("li")]
    assert titles[2] == (
        f"layer 2: KDA, GLM5_NEXT, 43,312 bytes (43.312 kB), {SHARDS[0]}, {SHARDS[1]}"
    )
    assert titles[8] == "layer 8: MTP"


def percent(element: Element, name: str) -> float:
    text = element.attributes.get(name)
    assert text is not None
    return float(text.removesuffix("%"))


def test_each_kda_layer_is_drawn_where_it_lies_to_the_scale_of_bytes(
    page: Page, small: Path
) -> None:
    with open_checkpoint(small) as checkpoint:
        most = max(shard.identity.file_bytes for shard in checkpoint.shards.values())
        bars = page.root.one("ol", class_="map").all("svg")
        assert len(bars) == len(checkpoint.shards)
        for bar, (file, shard) in zip(bars, checkpoint.shards.items(), strict=True):
            whole, *marked = bar.all("rect")
            assert percent(whole, "width") == pytest.approx(
                100 * shard.identity.file_bytes / most, abs=0.01
            )
            drawn: dict[int, list[tuple[float, float]]] = {}
            for rect in marked:
                layer = re.match(r"KDA layer (\d+):", rect.one("title").text)
                assert layer is not None
                begin = percent(rect, "x")
                drawn.setdefault(int(layer[1]), []).append((begin, begin + percent(rect, "width")))
            assert sorted(drawn) == [n for n in (0, 1, 2, 4, 5, 6) if held(shard.header, n)]
            for layer_number, ranges in drawn.items():
                names = held(shard.header, layer_number)
                for name in names:
                    info = shard.header.info(name)
                    start = shard.header.payload_begin
                    begin, end = (100 * (start + at) / most for at in (info.begin, info.end))
                    assert any(a - 0.02 <= begin and end <= b + 0.02 for a, b in ranges), name
                width = sum(b - a for a, b in ranges)
                nbytes = sum(shard.header.info(name).nbytes for name in names)
                assert width == pytest.approx(100 * nbytes / most, abs=0.5), file


def held(header: object, layer: int) -> list[str]:
    """The KDA tensors of a layer that a shard's header lists."""
    prefix = f"{Layout().prefix}{layer}.self_attn."
    return [name for name in header if name.startswith(prefix)]  # type: ignore[attr-defined]


def test_a_kda_layer_that_lies_in_one_piece_is_one_piece_of_the_map(
    run: Run, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "one", Layout(shards=1))
    run("inspect", tmp_path / "one", "--html", "page.html")
    bar = read_page(tmp_path / "page.html").root.one("ol", class_="map").one("svg")
    told = [
        (rect.one("title").text.split(":")[0], percent(rect, "width"))
        for rect in bar.all("rect")[1:]
    ]
    # The safetensors package puts every F32 tensor before all BF16 ones: small pieces, joined.
    assert [name for name, width in told if width > 1] == [
        f"KDA layer {layer}" for layer in (0, 1, 2, 4, 5, 6)
    ]
    assert told[0][0] == "KDA layers 0-1"


def test_small_pieces_of_several_layers_take_no_large_piece_in(run: Run, tmp_path: Path) -> None:
    """The F32 tensors of both layers, joined, then layer 0 and layer 1, all without a gap."""
    layout = Layout(kinds=(KDA, KDA), mtp=0, config=KdaConfig(2048, 1, 8, 4))
    rows = [tensor for tensor in layout.tensors() if "self_attn" in tensor.name]
    write_shard(tmp_path / "two.safetensors", rows)
    run("inspect", tmp_path / "two.safetensors", "--html", "page.html")
    bar = read_page(tmp_path / "page.html").root.one("ol", class_="map").one("svg")
    told = [rect.one("title").text.split(":")[0] for rect in bar.all("rect")[1:]]
    assert told == ["KDA layers 0-1", "KDA layer 0", "KDA layer 1"]


def test_a_kda_block_in_an_mtp_layer_is_no_kda_layer_of_the_map(
    run: Run, edit_config: EditConfig, tmp_path: Path
) -> None:
    path = edit_config(lambda config: config.update(num_hidden_layers=6))
    run("inspect", path, "--html", "page.html")
    page = read_page(tmp_path / "page.html")
    assert cells(page) == "KKKDKKMMM"
    assert sum(int(row[4]) for row in page.rows("shards")) == page.facts["kda_bytes"]
    assert page.rows("layers")[6][1] == "MTP (KDA)"


def test_400_shards_and_201_layers_make_a_small_page(run: Run, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "many", Layout(kinds=(KDA, KDA, KDA, DSA) * 50, shards=400, experts=1, dense=0)
    )
    run("inspect", tmp_path / "many", "--html", "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
    page = read_page(tmp_path / "page.html")
    assert cells(page) == "KKKD" * 50 + "M"
    assert len(page.rows("shards")) == 400
    assert len(page.rows("layers")) == 201


def test_of_more_layers_than_any_model_has_the_first_thousand_are_shown(
    run: Run, tmp_path: Path
) -> None:
    rows = [StoredTensor(f"layers.{n}.norm.weight", "BF16", (1,)) for n in range(1500)]
    write_shard(tmp_path / "many.safetensors", rows)
    run("inspect", tmp_path / "many.safetensors", "--html", "page.html")
    page = read_page(tmp_path / "page.html")
    assert page.figures["layers"] == "1500"
    assert len(cells(page)) == len(page.rows("layers")) == 1000
    assert page.root.one("main").text.count("and 500 more, not shown") == 2


def test_layer_numbers_that_are_missing_are_a_gap_in_the_strip(
    run: Run, rewritten: Rewrite, tmp_path: Path
) -> None:
    path = rewritten(lambda t: t._replace(name=t.name.replace("layers.8.", f"layers.{10**30}.")))
    run("inspect", path, "--html", "page.html")
    strip = read_page(tmp_path / "page.html").root.one("ol", class_="strip")
    gap = strip.one("li", class_="gap")
    assert gap.attributes["title"] == f"no layers 8 to {10**30 - 1}"
    assert len(strip.all("li")) == 10


def test_a_file_without_decoder_layers_is_drawn_without_them(
    run: Run, rewritten: Rewrite, tmp_path: Path
) -> None:
    path = rewritten(lambda t: t if t.name == "lm_head.weight" else None, Layout(shards=1))
    assert run("inspect", path / "model-00001-of-00001.safetensors", "--html", "p.html").status == 0
    page = read_page(tmp_path / "p.html")
    assert page.root.all("ol", class_="strip") == []
    assert page.rows("shards")[0][1:4] == [
        "model-00001-of-00001.safetensors",
        str(page.facts["shards"][0]["bytes"]),
        "1",
    ]
    assert "not known: prefix, layers" in page.root.one("ul", class_="notes").text
    assert [one.text for one in page.root.all("ul", class_="legend")] == ["other tensors"] * 2


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((KDA, DSA), "KDA layerother tensors"),
        ((KDA, KDA), "KDA layerthe next one: the shades alternateother tensors"),
    ],
)
def test_a_legend_has_what_is_drawn_and_nothing_else(
    run: Run, tmp_path: Path, kinds: tuple[AttnBlockKind, ...], told: str
) -> None:
    path = write_checkpoint(tmp_path / "c", Layout(kinds=kinds, shards=1))
    assert run("inspect", path, "--html", "p.html").status == 0
    legends = [one.text for one in read_page(tmp_path / "p.html").root.all("ul", class_="legend")]
    assert legends[1:] == [told, "KDA layersother tensors"]


def test_an_empty_checkpoint_is_drawn(run: Run, tmp_path: Path) -> None:
    write_shard(tmp_path / "empty.safetensors", ())
    assert run("inspect", tmp_path / "empty.safetensors", "--html", "page.html").status == 0
    assert read_page(tmp_path / "page.html").rows("dtypes") == []


# Names that attack it -----------------------------------------------------------------------------

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section"),
    *("h1", "h2", "p", "dl", "dt", "dd", "div", "data", "small", "ul", "ol", "li", "b", "i"),
    *("span", "svg", "rect", "table", "thead", "tbody", "tr", "th", "td", "script"),
}
ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&lt;\x1b[2J\u202e\x00\u2028"


def hostile(prefix: str, folder: Path) -> Path:
    """A checkpoint whose layers' prefix, folder and shard have names made to break out."""
    folder.mkdir(parents=True)
    rows = [
        t._replace(name=t.name.replace(Layout().prefix, prefix))
        for t in Layout(shards=1, kinds=(KDA, DSA), mtp=0).tensors()
    ]
    file = "<b onclick=alert(3)>&\"'.safetensors"
    write_shard(folder / file, rows)
    (folder / INDEX).write_text(json.dumps({"weight_map": {row.name: file for row in rows}}))
    (folder / "<script>\x1b\u202e\n.safetensors").write_bytes(b"")  # a note names it
    return folder


def every_element(element: Element) -> list[Element]:
    below = [child for child in element.children if isinstance(child, Element)]
    return below + [deep for child in below for deep in every_element(child)]


def test_names_from_files_are_text_and_never_markup(run: Run, tmp_path: Path) -> None:
    folder = hostile(f"{ATTACK}.layers.", tmp_path / "<" / "script><b>")
    assert run("inspect", folder, "--html", "page.html").status == 0
    page = read_page(tmp_path / "page.html")
    page.require_self_contained()
    assert {element.tag for element in every_element(page.root)} <= ELEMENTS
    for element in every_element(page.root):
        assert not any(name.startswith("on") for name in element.attributes)
    words = page.root.one("dl", class_="words").text
    assert "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&lt;\\x1b[2J\\u202e" in words
    assert page.facts["prefix"] == f"{ATTACK}.layers."
    assert page.facts["path"] == str(folder)


def test_no_character_that_is_not_seen_gets_into_the_page(run: Run, tmp_path: Path) -> None:
    folder = hostile(f"{ATTACK}.layers.", tmp_path / "h")
    run("inspect", folder, "--html", "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert {c for c in source if unicodedata.category(c)[0] == "C"} <= {"\n"}


def test_a_shard_s_own_name_is_escaped_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "<i>\x1b\u202e\r\n.safetensors"
    write_shard(path, Layout(shards=1).tensors())
    assert run("inspect", path, "--html", "page.html").status == 0
    page = read_page(tmp_path / "page.html")
    assert page.root.one("h1").text == "<i>\\x1b\\u202e\\r\\n.safetensors"
    assert page.rows("shards")[0][1] == "<i>\\x1b\\u202e\\r\\n.safetensors"
    assert page.facts["shards"][0]["file"] == path.name


def test_json_in_the_page_cannot_end_its_block(run: Run, tmp_path: Path) -> None:
    folder = hostile("</script><!--<script>.layers.", tmp_path / "h")
    run("inspect", folder, "--html", "page.html")
    page = read_page(tmp_path / "page.html")
    text = page.root.one("script", id="facts").text
    assert not set(text) & set("<>&")
    assert json.loads(text)["prefix"] == "</script><!--<script>.layers."


def test_a_path_that_is_no_unicode_is_drawn(run: Run, small: Path, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    os.symlink(small, path)
    # The arguments of `run` are strings; this one goes back to the same bytes.
    assert run("inspect", path, "--html", "page.html").status == 0
    assert read_page(tmp_path / "page.html").root.one("h1").text == "\\udcff\\udcfe"


def test_a_name_of_ten_megabytes_makes_no_large_page(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    prefix = "<" * 10_000_000 + ".layers."
    write_shard(folder / "a.safetensors", [StoredTensor(f"{prefix}0.norm.weight", "BF16", (4,))])
    began = time.monotonic()
    assert run("inspect", folder, "--html", "page.html").status == 0
    assert time.monotonic() - began < 10
    assert (tmp_path / "page.html").stat().st_size < 100_000
    assert cells(read_page(tmp_path / "page.html")) == "?"


# How it looks -------------------------------------------------------------------------------------


def colours() -> dict[str, dict[str, str]]:
    """The colours of each theme by name."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)[:2]
    themes = {
        name: dict(re.findall(r"--([\w-]+): (#\w{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }
    assert themes["light"].keys() == themes["dark"].keys()
    return themes


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_signs_stand_out_from_what_is_behind_them(theme: str) -> None:
    """4.5 for text and 3 for signs, as the Web Content Accessibility Guidelines ask."""
    colour = colours()[theme]
    texts = [(ink, ground) for ink in ("ink", "quiet") for ground in ("page", "card")]
    texts += [("on-strong", "kda"), ("on-strong", "mtp"), ("on-dsa", "dsa")]
    signs = [(sign, "other") for sign in ("kda", "kda-next")]
    signs += [(f"line-{n}", "card") for n in (1, 2, 3, 4)]
    for least, pairs in ((4.5, texts), (3.0, signs)):
        for one, other in pairs:
            assert contrast(colour[one], colour[other]) >= least, (one, other)
    assert contrast(colour["kda"], colour["kda-next"]) >= 1.8
