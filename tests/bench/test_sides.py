"""Every side of every comparison, on small data, in this process: they do the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import data
from bench.comparisons import ALL, BY_NAME
from bench.session import BenchError, Session, in_turn
from bench.sides import Comparison, Request, Side, UnavailableError, WrongBytesError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SMALL = data.small(2)
# Packages that are installed here at times only are tried by the bench itself.
TRIED = ("kda_stream", "safetensors", "sha256", "check_payload", "iter_", "safe_open", "rank")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def sides() -> Iterator[tuple[Comparison, Side]]:
    for comparison in ALL:
        for side in comparison.sides:
            if comparison.quick and side.load is not None and side.name.startswith(TRIED):
                yield comparison, side


def figures(comparison: Comparison, side: Side, root: Path, *, checked: bool) -> dict[str, Any]:
    place = comparison.make(root, SMALL)
    assert side.load is not None
    try:
        return side.load(Request(place.folder, cached=True, checked=checked))()
    except (ImportError, UnavailableError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("comparison", "side"),
    [pytest.param(*pair, id=f"{pair[0].name}: {pair[1].name}") for pair in sides()],
)
def test_a_side_takes_its_time_and_delivers_what_the_first_one_does(
    root: Path, comparison: Comparison, side: Side
) -> None:
    found = figures(comparison, side, root, checked=True)  # of loads, this compares the bytes
    first = figures(comparison, comparison.sides[0], root, checked=True)
    assert found["seconds"] > 0
    assert found.get("delivered") == first.get("delivered")
    assert comparison.name in ("loads", "ranks") or found["delivered"]


@pytest.mark.parametrize("name", ["weights", "first layer"])
def test_what_is_delivered_depends_on_the_bytes(tmp_path: Path, name: str) -> None:
    comparison = BY_NAME[name]
    before = figures(comparison, comparison.sides[0], tmp_path, checked=True)["delivered"]
    change_a_byte(data.load(tmp_path / SMALL.folder_name))
    assert figures(comparison, comparison.sides[0], tmp_path, checked=True)["delivered"] != before


def test_check_payload_is_held_against_the_digests_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = BY_NAME["payload"]
    [side] = [row for row in comparison.sides if row.name == comparison.own]
    figures(comparison, side, tmp_path, checked=True)
    described = data.load(tmp_path / SMALL.folder_name)
    moved = next(row for row in described.layers[0].tensors if row.nbytes > 8)
    wrong = data.Layer(0, (data.Tensor(**{**vars(moved), "begin": moved.begin + 1}),), "")
    monkeypatch.setattr(data, "load", lambda folder: data.DataSet(folder, (wrong,)))
    with pytest.raises(WrongBytesError, match="another digest"):
        figures(comparison, side, tmp_path, checked=True)


def test_sides_that_deliver_different_things_end_the_run(root: Path, tmp_path: Path) -> None:
    comparison = BY_NAME["payload"]
    session = Session(comparison, comparison.make(root, SMALL), tmp_path)
    run = {"entry": "sha256", "condition": "warm", "delivered": "9 bytes"}
    session.require_right(dict(run))
    session.require_right(run | {"condition": "cold"})
    with pytest.raises(BenchError, match="payload, check_payload, cold: 8 bytes"):
        session.require_right(
            {"entry": "check_payload", "condition": "cold", "delivered": "8 bytes"}
        )


def test_no_side_always_follows_the_same_other() -> None:
    sides = list(BY_NAME["loads"].sides)
    orders = [in_turn(sides, number) for number in range(6)]
    assert orders == [in_turn(sides, number) for number in range(6)]
    for order in orders:
        assert sorted(side.name for side in order) == sorted(side.name for side in sides)
    for side in sides:
        before = {order[order.index(side) - 1].name for order in orders}
        assert len(before) > 2, side.name


def test_of_two_sides_either_comes_first_at_times() -> None:
    sides = list(BY_NAME["opening"].sides)
    first = [in_turn(sides, number)[0].name for number in range(1, 6)]
    assert {first.count(side.name) for side in sides} == {2, 3}


def test_each_comparison_names_sides_that_it_has() -> None:
    for comparison in ALL:
        names = [side.name for side in comparison.sides]
        assert len(set(names)) == len(names)
        assert {comparison.own, *comparison.references} <= set(names), comparison.name


def test_the_sizes_that_a_run_is_told_to_need_are_about_right(root: Path) -> None:
    place = data.place(root, SMALL)
    assert SMALL.kda_bytes == pytest.approx(place.holds["kda_bytes"], rel=0.2)
    assert SMALL.file_bytes == pytest.approx(place.holds["file_bytes"], rel=0.2)
    full = data.full(12)  # what the published geometry gives: 275,481,088 bytes a layer
    assert full.kda_bytes == pytest.approx(12 * 275_481_088, rel=0.01)


def change_a_byte(described: data.DataSet) -> None:
    row = described.layers[0].tensors[0]
    with open(described.checkpoint / row.file, "r+b") as file:
        file.seek(row.begin)
        byte = file.read(1)[0]
        file.seek(row.begin)
        file.write(bytes([byte ^ 1]))
