"""Many layers: the next one is staged by a background thread while the consumer works on this."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from .bind import (
    KdaBindReport,
    KdaWeights,
    bind_checked,
)
from .checkpoint.checkpoint import Checkpoint, require_checkpoint
from .checkpoint.layer import LayerIndex
from .closing import Closing, finish_first
from .errors import (
    ArgumentError,
    ErrorCode,
    StreamError,
    shown,
)
from .kda.check import CheckedBlock, FamilyChoice
from .kda.config import KdaConfig
from .kda.families import GLM5_NEXT
from .kda.tensor_parallel import KdaTpPlan
from .layout import fields_of, kda_slot_bytes, require_alignment, slot_bytes_for
from .limits import KEPT_SECONDS
from .selection import all_checked, checked_in_turn, config_of, indices_of, kda_layers
from .stager import Stager, Stopwatch, no_thread
from .staging.arena import PinnedArena, require_arena_arguments
from .staging.locking import LockPolicy, LockReport
from .staging.reading import ReadChoice, ReadPath, Residency, require_read_choice
from .staging.registration import HostRegistrar, require_registrar

_Bound = tuple[KdaWeights, KdaBindReport]
_LayerStager = Stager[CheckedBlock, _Bound]


class KdaLayer:
    """One staged layer.

    `index` is its number (a `LayerIndex`, which is an int), `weights` are its `KdaWeights`, and
    `report` is the `KdaBindReport` of its bind. Its slot is lent until the
    stream's next step; after `hold`, until `release`.
    """

    def __init__(self, weights: KdaWeights, report: KdaBindReport) -> None:
        self.index = report.layer_idx
        self.weights = weights
        self.report = report

    def hold(self) -> KdaLayer:
        """Keep the slot over the stream's next steps, until `release`; from any thread.

        While every slot is held the stream waits for one, however long, and after `KEPT_SECONDS`
        logs that it does: release in another thread, or have a free slot. A held layer of which
        nothing is left (neither it nor its weights) is released by that. Raises `StreamError` when
        the slot was given back before.
        """
        if not self.weights.lease.hold():
            raise StreamError(
                ErrorCode.STREAM_MISUSE,
                f"layer {self.index} was given back and cannot be held any more",
                hint="call hold() before the stream's next step",
            )
        return self

    @property
    def held(self) -> bool:
        """Whether the layer is held and not yet released."""
        return self.weights.lease.held

    def release(self) -> None:
        """Give the slot back, from any thread; every `data` ends. Again: no effect."""
        self.weights.release()

    def __repr__(self) -> str:
        return f"KdaLayer({self.index}, {self.report.bytes} bytes)"


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What a stream has handed out so far.

    `layers` and `bytes` of weights; `seconds` from the stream's beginning to its end; `slots` of
    `slot_bytes`; `reads` counts the layers by the way that they were brought in, and `notes` tell
    what could not be had of it (see `ReadReport`); `lock` tells of the slots' memory.
    """

    layers: int
    bytes: int
    seconds: float
    slots: int
    slot_bytes: int
    reads: Mapping[str, int]
    notes: tuple[str, ...]
    lock: LockReport


class KdaLayerStream(Closing):
    """The KDA layers of a checkpoint, one after the other; made by `stream_kda_layers`.

    A context manager and, inside it, an iterator of `KdaLayer`. `layers` are the numbers of all
    that it will hand out, in order. Leaving it ends the thread and gives back the slots; the
    checkpoint stays open.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: KdaConfig,
        layers: tuple[LayerIndex, ...],
        blocks: Iterable[CheckedBlock],
        slots: int,
        slot_bytes: int,
        lock: LockPolicy,
        register: HostRegistrar | None,
        choice: ReadChoice,
        alignment: int | None,
    ) -> None:
        self.layers = layers
        self._checkpoint = checkpoint
        self._config = config
        self._blocks = blocks
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._lock_policy: LockPolicy = lock
        self._register = register
        self._choice = choice
        self._alignment = alignment
        self._stager: _LayerStager | None = None
        self._process = os.getpid()
        self._current: KdaLayer | None = None
        self._has_told = False
        self._past: list[weakref.ref[KdaLayer]] = []
        self._handed_out = 0
        self._bytes = 0
        self._reads: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def __enter__(self) -> KdaLayerStream:
        if self._stager is not None:
            self._refuse_misuse(
                "the stream was entered before", "make another one for a second pass"
            )
        watch = Stopwatch()
        arena = PinnedArena(
            self._slot_bytes, slots=self._slots, lock=self._lock_policy, register=self._register
        )
        fill = partial(_bind_next, self._config, self._alignment)
        self._stager = Stager(self._blocks, fill, arena, self._choice, watch)
        self._checkpoint.add_reader(self._stager)
        try:
            self._stager.start(self)
        except RuntimeError as error:
            self.close()
            raise no_thread(str(error)) from None
        except BaseException:  # the body is not entered, so nobody else would close
            self.close()
            raise
        return self

    def __iter__(self) -> Iterator[KdaLayer]:
        self._entered()
        return self

    def __next__(self) -> KdaLayer:
        stager = self._entered()
        self._give_back_current()
        tell_if_held = partial(self._tell_if_held, stager, Stopwatch())
        layer = self._current = KdaLayer(*stager.next_staged(tell_if_held))
        self._handed_out += 1
        self._bytes += layer.report.bytes
        self._reads[layer.report.read.path] += 1
        self._notes.update(dict.fromkeys(layer.report.read.notes))
        return layer

    def __length_hint__(self) -> NoReturn:
        """Called by list() and tuple() before they begin: they would keep layers already gone."""
        self._refuse_collecting()

    @property
    def report(self) -> StreamReport:
        """What was handed out so far; raises `StreamError` before the stream was entered."""
        stager = self._entered(also_closed=True)
        return StreamReport(
            layers=self._handed_out,
            bytes=self._bytes,
            seconds=stager.watch.seconds,
            slots=self._slots,
            slot_bytes=self._slot_bytes,
            reads=dict(self._reads),
            notes=tuple(self._notes),
            lock=stager.arena.report,
        )

    def close(self) -> None:
        """End the thread, end every layer that was handed out, give back the slots.

        Again: no effect. Takes at most the time of one piece of a copy (50 ms and a read). Raises
        `InUseError` when arrays still point into the slots, and `MemoryRefusedError` when a driver
        does not unregister them.
        """
        finish_first(self._close)

    def _close(self) -> None:
        if self._stager is None or os.getpid() != self._process:  # fork took no thread along
            return
        self._stager.stop()
        self._stager.staged.clear()
        self._current = None
        self._stager.arena.close()

    # the consumer's side

    def _entered(self, *, also_closed: bool = False) -> _LayerStager:
        if self._stager is None:
            self._refuse_misuse(
                "the stream was not entered", "write: with stream_kda_layers(...) as stream:"
            )
        if os.getpid() != self._process:
            self._refuse_misuse(
                "the stream belongs to the process before the fork", "make another one in this one"
            )
        if self._stager.stopping and not also_closed:
            self._refuse_misuse("the stream is closed", "make another one for a second pass")
        return self._stager

    def _give_back_current(self) -> None:
        """Before the next step: the last layer's slot goes back, unless it is held.

        A loop's variable may still refer to a layer that is past, and to one from a loop before;
        when more of them are kept, neither released nor held, they are being collected.
        """
        self._past = [past for past in self._past if past() is not None]
        if len(self._past) > 1:
            gc.collect()  # a layer in a cycle, as of an error and its traceback, is not kept
            self._past = [past for past in self._past if past() is not None]
        if len(self._past) > 1:
            self._refuse_collecting()
        layer = self._current  # read once: close() in another thread may clear it
        if layer is not None and layer.weights.lease.release_unless_held():
            self._past.append(weakref.ref(layer))
        self._current = None

    def _tell_if_held(self, stager: _LayerStager, waited: Stopwatch) -> None:
        """Log, once, that the next layer waits for nothing but layers that are held."""
        if self._has_told or not stager.is_waiting or waited.seconds < KEPT_SECONDS:
            return
        import logging  # for this alone

        self._has_told = True
        logging.getLogger("kda_stream").warning(
            "%s: every slot has been held for %g s, and the next layer waits: release() a layer, "
            "in another thread than the loop's, or take more slots",
            shown(self._checkpoint.path),
            KEPT_SECONDS,
        )

    def _refuse_collecting(self) -> NoReturn:
        self._refuse_misuse(
            f"layers are being collected, but the stream has {self._slots} slots and each step "
            "overwrites the last layer",
            "use a for loop and copy what is needed, or hold() the layers, with a slot for each",
        )

    def _refuse_misuse(self, what: str, hint: str) -> NoReturn:
        path = self._checkpoint.path
        raise StreamError(ErrorCode.STREAM_MISUSE, what, path=path, hint=hint)


def _bind_next(
    config: KdaConfig, alignment: int | None, block: CheckedBlock, stager: _LayerStager
) -> _Bound | None:
    slot = stager.free_slot()
    return None if slot is None else bind_checked(config, block, slot, stager.choice, alignment)


def stream_kda_layers(
    checkpoint: Checkpoint,
    *,
    layers: Iterable[int] | None = None,
    slots: int = 2,
    lock: LockPolicy = "prefer",
    register: HostRegistrar | None = None,
    config: KdaConfig | None = None,
    family: FamilyChoice = GLM5_NEXT,
    read: ReadPath = "auto",
    residency: Residency = "auto",
    alignment: int | None = None,
    plan: KdaTpPlan | None = None,
) -> KdaLayerStream:
    """Stream KDA layers through `slots` reused slots of page-locked memory.

    `layers` are layer numbers, handed out in the order given; None means every KDA layer in numeric
    order. Every one of them is checked here, from metadata, before a byte of payload is read; of a
    checkpoint that was opened with `verify="needed"`, each before its own. Use the stream in a
    `with`: a layer is lent until the next step of the loop, or until it is released
    when held. `config` is the geometry, by default that of the config.json beside the shards.
    `family` is as for `bind_kda_weights`; with "auto" each layer's is its own.
    `lock` and `register` are as for `PinnedArena`; `read`, `residency` and `alignment` are as for
    `bind_kda_weights`, each layer's way chosen for itself. With a `plan` the layers are the part of
    its rank, and geometry and family are the plan's.

    Raises `BindError` with every problem of every layer, `CheckpointError` when layers that the
    config counts are missing and `layers` names none, `ConfigError` when there is no geometry,
    `NotFoundError` for a layer that the checkpoint lacks; on `with`, `MemoryRefusedError`; while it
    is used, `PayloadError`, and `StreamError` when layers are collected (as by `list(stream)`).

    Example:
        with stream_kda_layers(checkpoint) as stream:
            for layer in stream:
                upload(layer.weights)
    """
    require_read_choice(read, residency)
    require_alignment(alignment)
    require_registrar(register)
    require_checkpoint(checkpoint)
    if plan is not None:
        _require_alone(plan, config, family)
        config, family = plan.config, plan.family
    geometry = config_of(checkpoint) if config is None else config
    slot_bytes = kda_slot_bytes(geometry, family)
    require_arena_arguments(slot_bytes, slots, lock)
    if layers is None:
        checkpoint.require_every_layer()
    chosen = kda_layers(checkpoint, family) if layers is None else indices_of(checkpoint, layers)
    if checkpoint.is_checked:
        checked = all_checked(geometry, checkpoint, chosen, family, plan)
        if checked:
            slot_bytes = max(_slot_bytes(geometry, block) for block in checked)
        blocks = iter(checked)
    else:
        blocks = checked_in_turn(geometry, checkpoint, chosen, family, plan)
    choice = ReadChoice(read, residency, len(chosen) * slot_bytes)
    return KdaLayerStream(
        checkpoint,
        geometry,
        chosen,
        blocks,
        slots,
        slot_bytes,
        lock,
        register,
        choice,
        alignment,
    )


def _slot_bytes(config: KdaConfig, block: CheckedBlock) -> int:
    return slot_bytes_for(fields_of(config, block.family, block.tensors))


def _require_alone(plan: object, config: KdaConfig | None, family: FamilyChoice) -> None:
    """Raise `ArgumentError` when `plan` is none, or something it decides is given beside it."""
    if isinstance(plan, KdaTpPlan) and config is None and family in (GLM5_NEXT, plan.model_family):
        return
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "the plan is none, or what it decides is given once more",
        expected="a KdaTpPlan, with no config and no other family beside it",
        got=f"{type(plan).__name__} beside {'no config' if config is None else 'a config'} "
        f"and family {family}",
        hint="give config and family to KdaTpPlan",
    )
