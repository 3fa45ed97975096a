"""`python -m bench` itself, on small data, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import data as data_sets
from bench.__main__ import PART_FOLDER, arguments, out_folder
from bench.readme import RESULTS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into the page cache")


def bench(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env=environment or None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def quick(data: Path, out: Path, *only: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """The results of a quick run of the sides that hold a text of `only`, warm."""
    chosen = [word for text in only for word in ("--only", text)]
    usual = ("--quick", "--conditions", "warm", "--layers", 1, "--data", data, "--out", out)
    done = bench(*usual, *options, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def test_a_quick_run_measures_both_sides_and_writes_all(data: Path, tmp_path: Path) -> None:
    before = (ROOT / "README.md").read_bytes()
    only = ("opening", "payload: sha256, at once", "payload: check_payload, digests")
    results = quick(data, tmp_path, *only)
    assert results["quick"]
    assert [row["name"] for row in results["comparisons"]] == ["opening many", "payload"]
    entries = [entry["name"] for row in results["comparisons"] for entry in row["entries"]]
    assert entries == ["kda_stream", "safetensors", "check_payload, digests", "sha256, at once"]
    for comparison in results["comparisons"]:
        assert [run["round"] for run in comparison["runs"]] == [0, 0, 1, 1]
        assert {run["outcome"] for run in comparison["runs"]} == {"done"}
        assert all(run["seconds"] > 0 for run in comparison["runs"])
    page = (tmp_path / "results.md").read_text()
    assert "| **check_payload, digests** |" in page
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.json", "results.md", "results.svg", "results-all.svg"}
    assert (ROOT / "README.md").read_bytes() == before


def test_loads_are_checked_against_the_stored_bytes_and_ceilings_run(
    data: Path, tmp_path: Path
) -> None:
    only = ("loads: kda_stream mapped keep", "loads: ceiling: pread, 1 thread")
    [loads] = quick(data, tmp_path, *only)["comparisons"]
    if "ceiling: pread, 1 thread" in loads["skipped"]:
        pytest.skip(loads["skipped"]["ceiling: pread, 1 thread"])
    assert sorted((run["entry"], run["round"]) for run in loads["runs"]) == [
        ("ceiling: pread, 1 thread", 1),
        ("kda_stream mapped keep", 0),
        ("kda_stream mapped keep", 1),
    ]
    assert {run["payload_bytes"] for run in loads["runs"]} == {loads["data"]["kda_bytes"]}


def test_a_run_that_was_cut_off_goes_on_with_what_it_had_whole(data: Path, tmp_path: Path) -> None:
    only = ("opening", "payload: sha256, at once")
    [opening] = quick(data, tmp_path, only[0])["comparisons"]
    went_on = quick(data, tmp_path, *only, options=["--go-on"])["comparisons"]
    assert went_on[0] == opening
    assert [one["name"] for one in went_on] == ["opening many", "payload"]
    assert quick(data, tmp_path, only[0])["comparisons"][0]["runs"] != opening["runs"]


@pytest.mark.parametrize(
    "change",
    [
        lambda results: results["machine"].update(python="2.7"),
        lambda results: results["comparisons"][0].update(rounds=7),
        lambda results: results["comparisons"][0]["entries"].pop(),
        lambda results: results["comparisons"][0]["conditions"].clear(),
        lambda results: results.update(quick=False),
        lambda results: results.update(format=0),
    ],
    ids=["machine", "rounds", "sides", "conditions", "size of data", "format"],
)
def test_what_another_run_has_measured_is_measured_again(
    data: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    before = quick(data, tmp_path, "opening")
    change(before)
    (tmp_path / "results.json").write_text(json.dumps(before))
    again = quick(data, tmp_path, "opening", options=["--go-on"])
    assert again["comparisons"][0]["runs"] != before["comparisons"][0]["runs"]
    assert again["comparisons"][0]["rounds"] == 1


def test_data_of_another_form_is_written_anew(tmp_path: Path) -> None:
    geometry = data_sets.small(1)
    folder = data_sets.place(tmp_path, geometry).folder
    described = json.loads((folder / "layers.json").read_text())
    (folder / "layers.json").write_text(json.dumps({**described, "format": 0}))
    (folder / "kda.pt").write_text("a copy of what was there before")
    data_sets.place(tmp_path, geometry)
    assert json.loads((folder / "layers.json").read_text()) == described
    assert not (folder / "kda.pt").exists()


def test_wrong_bytes_end_the_run(data: Path, tmp_path: Path) -> None:
    data_sets.place(data, data_sets.small(1))
    described = data / "small-1" / "layers.json"
    sound = described.read_text()
    layers = json.loads(sound)
    layers["layers"][0]["sha256"] = "0" * 64
    described.write_text(json.dumps(layers))
    try:
        done = bench(
            "--quick", "--layers", 1, "--data", data, "--out", tmp_path, "--only", "mapped keep"
        )
    finally:
        described.write_text(sound)
    assert done.returncode == 1
    assert "layer 0 has other bytes than were stored" in done.stderr


def test_it_says_what_it_will_cost_before_it_writes(data: Path, tmp_path: Path) -> None:
    only = "payload: sha256"
    done = bench("--quick", "--layers", 1, "--data", data, "--out", tmp_path, "--only", only)
    first = done.stdout.splitlines()[0]
    assert first.startswith("8 runs, about 1 min; writes ")
    assert "are free" in first


def test_without_the_compiled_part_nothing_is_written(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['kda_stream._native'] = None\n"
        "from bench.__main__ import main\n"
        "sys.argv = ['bench', '--quick', '--data', sys.argv[1], '--out', sys.argv[2]]\n"
        "sys.exit(main())"
    )
    data, out = tmp_path / "data", tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", script, str(data), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--conditions", "hot"], "unknown conditions: hot"),
        (["--only", "no such side"], "nothing is left"),
        (["--only", "ranks", "--conditions", "warm"], "nothing is left"),
    ],
)
def test_options_that_ask_for_nothing_are_refused(arguments: list[str], told: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    "words", ["--quick", "--only ranks", "--conditions warm", "--layers 2", "--quick --rounds 9"]
)
def test_a_run_that_leaves_something_out_does_not_touch_what_the_readme_shows(words: str) -> None:
    assert out_folder(arguments().parse_args(words.split())) == PART_FOLDER
    assert out_folder(arguments().parse_args([])) == RESULTS
    assert out_folder(arguments().parse_args([*words.split(), "--out", "here"])) == Path("here")


def test_redrawing_makes_all_again_out_of_results_json(tmp_path: Path) -> None:
    results = Path(__file__).parent / "results.json"
    (tmp_path / "results.json").write_bytes(results.read_bytes())
    assert bench("--redraw", "--out", tmp_path).returncode == 0
    assert "## Whole loads" in (tmp_path / "results.md").read_text()
    assert bench("--redraw", "--out", tmp_path / "nowhere").returncode == 1
