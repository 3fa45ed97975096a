"""The geometry that a layer's own tensors have, where no config tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..limits import INTEGER_MAX
from .config import SPELLINGS, KdaConfig
from .family import KdaFamily
from .source import RawTensor
from .tensors import TensorSpec, counted_dim


@dataclass(frozen=True, slots=True)
class StoredGeometry:
    """What tensors tell of a geometry: `config`, and which of its extents they do tell.

    `told` are names of `KdaConfig` attributes; in `config` every other extent is 1.
    """

    config: KdaConfig
    told: frozenset[str]

    def tells(self, spec: TensorSpec) -> bool:
        """Whether the shape of that tensor is known."""
        dims = set(map(counted_dim, spec.dims))
        return all(isinstance(dim, int) or dim in self.told for dim in dims)


def stored_geometry(tensors: Mapping[str, RawTensor | None], family: KdaFamily) -> StoredGeometry:
    """The geometry that most of the tensors have if they are of that family."""
    seen: dict[str, Counter[int]] = {name: Counter() for name in (*SPELLINGS, "qkv_dim")}
    for spec in family.tensors:
        tensor = tensors.get(spec.name)
        if tensor is not None and len(tensor.shape) == len(spec.dims):
            for dim, extent in zip(spec.dims, tensor.shape, strict=True):
                if isinstance(dim, str) and dim in seen and 0 < extent <= INTEGER_MAX:
                    seen[dim][int(extent)] += 1
    found = {name: max(c, key=c.__getitem__) for name, c in seen.items() if c}
    width = found.pop("qkv_dim", None)
    if width is not None:
        for name, other in (("heads", "head_dim"), ("head_dim", "heads")):
            if other in found:
                found.setdefault(name, max(1, width // found[other]))
    told = frozenset(found)
    if width is not None or told.issuperset(("heads", "head_dim")):
        told |= {"qkv_dim"}
    if width is not None:
        found.setdefault("heads", width)  # with neither known, their product is right at least
    return StoredGeometry(KdaConfig(**{name: found.get(name, 1) for name in SPELLINGS}), told)
