"""Tensor parallelism: what of a KDA block each rank holds, and a source that gives just that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import ArgumentError, ErrorCode, in_words
from ..limits import RANKS_SHOWN_MAX
from ..require import require_kind
from .check import check_kda_block, require_family, require_source
from .config import KdaConfig, require_config
from .families import GLM5_NEXT
from .family import KdaFamily
from .source import KdaTensorSource, RawTensor
from .tensors import Dim, Padded, TensorSpec, counted_dim, extent


@dataclass(frozen=True, slots=True, init=False)
class KdaTpPlan:
    """What one of `size` ranks holds of a KDA block: its `heads / size` heads, in order of rank.

    Every tensor is cut along the axis on which the heads lie: rows of the projections to q, k, v,
    of the convolutions (each of q, k and v first cut, then joined), of what computes gate and decay
    per channel or head; columns of `o_proj`. What no heads lie on (`f_a`, `g_a`, `o_norm`) is whole
    on every rank. `model_config` and `model_family` describe the whole block, `config` and `family`
    the rank's part of it: bind with these. They differ in the number of heads; and where the
    model's `A_log` is padded, the last rank's part alone has the padding, and checks it.

    Raises `ArgumentError` for a rank that is none of `size`, and for a size that does not divide
    the heads. Source of the rule: how the engines that serve these models shard them.

    Example: `KdaTpPlan(config, rank=0, size=8).config.heads == config.heads // 8`.
    """

    model_config: KdaConfig
    model_family: KdaFamily = field(repr=False)
    rank: int
    size: int
    config: KdaConfig
    family: KdaFamily = field(repr=False)

    def __init__(
        self, config: KdaConfig, rank: int, size: int, family: KdaFamily = GLM5_NEXT
    ) -> None:
        require_config(config)
        _require_rank(config, rank, size)
        require_family(family)
        local = replace(config, heads=config.heads // size)
        tensors = tuple(_local_spec(spec, config, local, rank, size) for spec in family.tensors)
        values = {
            "model_config": config,
            "model_family": family,
            "rank": rank,
            "size": size,
            "config": local,
            "family": family if tensors == family.tensors else replace(family, tensors=tensors),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def part(self, spec: TensorSpec) -> tuple[int, int, int] | None:
        """The rank's part of a tensor of the whole block: (axis, begin, end); None: all of it.

        `begin` and `end` are indices along `axis` of the stored tensor, padding included.
        """
        axis = spec.heads_axis
        if axis is None or self.size == 1:
            return None
        whole = spec.expected_shape(self.model_config)[axis]
        each = extent(counted_dim(spec.dims[axis]), self.config)
        begin = self.rank * each
        return axis, begin, whole if self.rank == self.size - 1 else begin + each


class KdaShardedSource:
    """A rank's part of a layer: a `KdaTensorSource` again, to be bound with `plan.config`.

    `get` gives a part of the tensor that `source` gives, without reading or moving a byte. The
    first one checks the whole layer, from metadata: it must be a block of `plan.model_family` at
    `plan.model_config`, else `BindError` is raised with every problem. So a checkpoint whose
    tensors are cut already is refused. Names and tensors outside the block are passed on.

    Example:
        plan = KdaTpPlan(KdaConfig.from_json(path), rank=0, size=2)
        source = KdaShardedSource(checkpoint.layer(0), plan)
        weights, report = bind_kda_weights(plan.config, 0, source, family=plan.family)
    """

    index: int
    """The layer's number; not there when `source` has none."""

    def __init__(self, source: KdaTensorSource, plan: KdaTpPlan) -> None:
        require_source(source)
        hint = "make one: KdaTpPlan(config, rank, size)"
        require_kind("plan", plan, KdaTpPlan, "a KdaTpPlan", hint)
        index = getattr(source, "index", None)
        if index is not None:
            self.index = index
        self.plan = plan
        self._source = source
        self._specs = {spec.name: spec for spec in plan.model_family.tensors}
        self._whole: Mapping[str, RawTensor] | None = None

    def names(self) -> list[str]:
        """Every layer-relative name, as of `source`."""
        return self._source.names()

    def get(self, name: str) -> RawTensor | None:
        """The rank's part of the tensor `name`, or None when there is none of that name."""
        spec = self._specs.get(name)
        if spec is None:
            return self._source.get(name)
        if self._whole is None:
            plan, layer_idx = self.plan, getattr(self, "index", -1)
            self._whole = check_kda_block(
                plan.model_config, layer_idx, self._source, plan.model_family
            ).tensors
        part = self.plan.part(spec)
        return self._whole[name] if part is None else self._whole[name].part(*part)

    def __repr__(self) -> str:
        return f"KdaShardedSource({self._source!r}, rank {self.plan.rank} of {self.plan.size})"


def _local_spec(
    spec: TensorSpec, config: KdaConfig, local: KdaConfig, rank: int, size: int
) -> TensorSpec:
    """What the rank's part of a tensor must be: padding is behind the last rank's values."""

    def local_dim(dim: Dim) -> Dim:
        if not isinstance(dim, Padded) or size == 1:
            return dim
        tail = spec.tail(config)
        each = extent(dim.dim, local)
        return Padded(dim.dim, each + tail) if tail and rank == size - 1 else dim.dim

    return replace(spec, dims=tuple(map(local_dim, spec.dims)))


def _require_rank(config: KdaConfig, rank: int, size: int) -> None:
    if type(size) is not int or size < 1 or config.heads % size:
        divisors = [
            n for n in range(1, min(config.heads, RANKS_SHOWN_MAX) + 1) if config.heads % n == 0
        ]
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "size does not divide the heads: ranks are cut by heads",
            expected=f"a divisor of {config.heads} heads: {', '.join(map(str, divisors))}",
            got=in_words(size, repr),
            hint="run that many ranks, or replicate the KDA layers on the others",
        )
    if type(rank) is not int or not 0 <= rank < size:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "rank is none",
            expected=f"0 to {size - 1}",
            got=in_words(rank, repr),
            hint="ranks are counted from 0",
        )
