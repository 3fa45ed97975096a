"""How far a long command has come, in words."""

from __future__ import annotations

import pytest

from kda_stream.cli.progress import Figures


def test_all_facts_of_a_stream_are_on_one_line() -> None:
    figures = Figures(3 * 10**9, 9 * 10**9, 1.5, layers=12, layers_total=34)
    assert figures.texts()[0] == "12 of 34 layers, 3.000 GB of 9.000 GB, 2.000 GB/s, 3 s left"
    assert figures.fraction == pytest.approx(1 / 3)


def test_of_what_does_not_go_by_layers_bytes_come_first() -> None:
    assert Figures(10**6, 10**9, 1.0).texts() == [
        "1.000 MB of 1.000 GB, 0.001 GB/s, 17 min left",
        "1.000 MB of 1.000 GB, 0.001 GB/s",
        "1.000 MB of 1.000 GB",
        "0 %",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(99, "99 s"), (100, "2 min"), (5940, "99 min"), (6000, "1 h 40 min")]
)
def test_the_time_that_is_left_is_in_units_that_suit_it(seconds: int, words: str) -> None:
    assert Figures(10**9, 10**9 * (1 + seconds), 1.0).facts()[-1] == f"{words} left"


def test_before_anything_has_come_no_time_is_told() -> None:
    figures = Figures(0, 10**9, 0.0)
    assert figures.texts() == ["0 bytes of 1.000 GB, 0.000 GB/s", "0 bytes of 1.000 GB", "0 %"]
    assert figures.fraction == 0


def test_nothing_to_do_is_all_done_and_more_than_all_is_all() -> None:
    assert Figures(0, 0, 1.0).fraction == 1
    assert Figures(11, 10, 1.0).fraction == 1
    assert Figures(11, 10, 1.0).facts()[-1] == "0 s left"
