"""Every comparison; `ALL` is the table, in the order of the page."""

from __future__ import annotations

from ..sides import Comparison
from . import first_layer, loads, opening, payload, ranks, weights

ALL: tuple[Comparison, ...] = (
    loads.COMPARISON,
    *opening.COMPARISONS,
    first_layer.COMPARISON,
    weights.COMPARISON,
    payload.COMPARISON,
    ranks.COMPARISON,
)
BY_NAME = {comparison.name: comparison for comparison in ALL}

__all__ = ["ALL", "BY_NAME"]
