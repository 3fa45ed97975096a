"""Any order of opening, binding, streaming, giving back and faults of the files, against a model.

The model (`support.states`) says for each action which bytes or which error must come. After each
action all that is in hand is compared with it, and so are the maps, descriptors and locked memory
of the process; at the end nothing may be left. A signal ends the whole run: pytest then prints
where it was.

The usual run draws the same actions each time. For others, and more of them:
`STATES_EXAMPLES=2000 python -m pytest tests/test_states.py`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.checkpoints import FIELD_LEAVES, GLM_PREFIX, MEDIUM, UNEVEN, Geometry
from support.files import descriptors_under
from support.states import (
    ALL_LAYERS,
    CONTENTS,
    CUTS,
    LAYERS,
    MEMORY_GIVEN_BACK,
    MTP_LAYER,
    TOUCHES,
    Bound,
    Folder,
    Loan,
    MapPlace,
    Memory,
    Opened,
    Refusal,
    Seen,
    Streamed,
    code_of,
    must,
)

from kda_stream import (
    InUseError,
    PinnedArena,
    SlotError,
    StreamError,
    bind_kda_weights,
    check_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.errors import ErrorCode as Code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EXAMPLES = int(os.environ.get("STATES_EXAMPLES", "0"))
USUAL_EXAMPLES = 80
STEPS = 50
STEP_SECONDS = 30
CHECKPOINTS_MAX, STREAMS_MAX, ARENAS_MAX, IN_HAND_MAX, PAST_MAX = 4, 2, 2, 6, 2

CHANGED = {Code.FILE_CHANGED, Code.PAYLOAD_END, Code.PAYLOAD_FAULT, Code.PAYLOAD_READ}
"""What a load may say of a file that changes while it is read."""

Draw = Callable[..., Any]
Fault = tuple[str, str]
Verify = Literal["all", "needed"]

INDEX_FAULTS = ("misplaced", "garbage", None)

verifies = st.sampled_from(["all", "needed"])
openings = st.sampled_from([*["the folder"] * 5, *["the index"] * 2, 0, 1, 2])
kda_numbers = st.sampled_from([0, 1, 2, 4, 5])
any_numbers = st.sampled_from([*ALL_LAYERS, LAYERS + 1])
layer_choices = st.one_of(
    st.none(),
    st.none(),
    st.lists(kda_numbers, min_size=4, max_size=8),
    st.lists(kda_numbers, max_size=8),
    st.lists(any_numbers, max_size=3),
)
reads = st.sampled_from(["auto", "mapped", "positional", "direct"])
residencies = st.sampled_from(["auto", "keep", "drop"])
alignments = st.sampled_from([None, None, 256])
locks = st.sampled_from(["prefer", "off"])
delays = st.sampled_from([0, 0.0002, 0.001])
now_and_then = st.integers(0, 5).map(lambda n: n == 5)

# what is done to a shard: the folder's method, and how
replacements = st.tuples(st.just("replace"), st.sampled_from(CONTENTS))
rewritings = st.tuples(st.just("rewrite"), st.sampled_from(CONTENTS))
deletions = st.just(("delete", "from its folder"))
touches = st.tuples(st.just("touch"), st.sampled_from(TOUCHES))
cuts = st.tuples(st.just("cut"), st.sampled_from(CUTS))
coolings = st.just(("cool", "out of the page cache"))
faults = st.one_of(replacements, rewritings, deletions, touches, cuts, coolings)
changes = st.one_of(
    st.just(("rewrite", "other bytes")),
    st.just(("rewrite", "other order")),
    st.just(("cut", "in the payload")),
    replacements,
    deletions,
    touches,
)
changes_or_none = st.one_of(changes, changes, st.none())


def locked_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("VmLck:")[1].split()[0]) * 1024


def maps_under(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(f"{folder}/" in line for line in lines)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def comes_true(condition: Callable[[], bool], seconds: float = 3) -> bool:
    """Whether it does in time: a thread takes a moment to end."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def made_of(view: memoryview, thing: str) -> Any:
    if thing == "an array":
        return np.frombuffer(view, dtype=np.uint8)
    return view[:] if thing == "a slice" else view


def soon(seconds: float, call: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that begins to call after some time, which a timer would not keep so exactly."""

    def run() -> None:
        time.sleep(seconds)
        call(*arguments)

    return threading.Thread(target=run)


class States(RuleBasedStateMachine):
    """What may be done with a checkpoint, in any order.

    There is one rule, which chooses among all actions: Hypothesis would turn half of the rules off
    in each example, and few of them would get far. What is drawn never depends on what is left to
    chance: the same draws are the same actions.
    """

    numbers = itertools.count()

    def __init__(self, root: Path) -> None:
        super().__init__()
        gc.collect()
        self.root = root
        self.checkpoints: list[Opened] = []
        self.sources: dict[tuple[Opened, int], Any] = {}
        self.arenas: list[Memory] = []
        self.streams: list[Streamed] = []
        self.bounds: list[Bound] = []
        self.seen: list[Seen] = []
        self.memories_of_nobody: list[Memory] = []
        self.steps_in_peace = 0
        self.threads_before = threads()
        self.locked_before = locked_bytes()

    @initialize(
        geometry=st.sampled_from([UNEVEN, MEDIUM]),
        verify=verifies,
        peace_steps=st.sampled_from([1, 4, 12]),
    )
    def begin(self, geometry: Geometry, verify: Verify, peace_steps: int) -> None:
        """For `peace_steps` steps no error is provoked, so that there is much to go wrong then."""
        self.peace_steps = peace_steps
        self.folder = Folder(self.root / f"c{next(self.numbers)}", geometry)
        self.shards = list(self.folder.files)
        self.open_the("the folder", verify)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        self.steps_in_peace += 1
        action = data.draw(st.sampled_from(self.actions()), "action")
        getattr(self, action)(data.draw)
        event(action)
        for bound in [bound for bound in self.bounds if bound.loan.released][:-PAST_MAX]:
            self.forget(bound)  # so that there is room for others

    def actions(self) -> list[str]:
        """The names of what can be done now, each as often as it is worth."""
        can_read = bool(self.checkpoints)
        is_peace_over = self.steps_in_peace > self.peace_steps
        shares = {
            "bind": 8 * (can_read and len(self.bounds) < IN_HAND_MAX),
            "open": 2 * (len(self.checkpoints) < CHECKPOINTS_MAX),
            "give_weights_back": 2 * len(self.bounds),
            "view": 4 * (can_read and len(self.seen) < IN_HAND_MAX),
            "forget_what_was_seen": 2 * bool(self.seen),
            "make_an_arena": 3 * (len(self.arenas) < ARENAS_MAX),
            "use_an_arena": len(self.arenas),
            "start_a_stream": 4 * (can_read and len(self.streams) < STREAMS_MAX),
            "go_on_with_a_stream": 2 * min(4, len(self.that_go_on())),
            "go_on_when_another_thread_gives_back": 4 * bool(self.held_back()),
            "end_a_stream": sum(2 if stream.is_done else 1 for stream in self.streams),
            "close_a_checkpoint": can_read and is_peace_over,
            "check": can_read,
            "change_a_shard": 3 * is_peace_over,
            "change_the_config": is_peace_over,
            "bind_while_a_shard_changes": bool(self.whole() and is_peace_over),
            "stream_while_a_shard_changes": bool(self.whole() and is_peace_over),
        }
        return [action for action, share in shares.items() for _ in range(share)]

    # opening, checking, closing

    def open(self, draw: Draw) -> None:
        """Whatever is there, or after a repair."""
        if draw(st.integers(0, 2), "repaired"):
            self.folder.repair()
        index = draw(st.sampled_from(["good", "good", "good", self.folder.index, *INDEX_FAULTS]))
        self.folder.set_index(index)
        self.open_the(draw(openings), draw(verifies))

    def open_the(self, where: str | int, verify: Verify) -> None:
        if isinstance(where, int):
            where = self.shards[where]
        opened = Opened(self.folder, where, verify)
        if opened.open(lambda: open_checkpoint(opened.path, verify=verify)):
            self.checkpoints.append(opened)
            assert set(opened.real.keys()) == set(opened.places)
        event(f"open: {opened.outcome}")

    def a_checkpoint(self, draw: Draw) -> Opened:
        """One of them; those that can be read from more often than the others."""
        still_open = [opened for opened in self.checkpoints if not opened.closed]
        likely = [*self.checkpoints, *still_open, *self.whole(), *self.whole()]
        opened: Opened = draw(st.sampled_from(likely), "checkpoint")
        return opened

    def whole(self) -> list[Opened]:
        """Those of which every shard was checked and none has changed."""
        return [opened for opened in self.checkpoints if opened.is_whole]

    def check(self, draw: Draw) -> None:
        opened, layer = self.a_checkpoint(draw), draw(any_numbers, "layer")
        layers = must(opened.read_config(), opened.real.layers)
        if layers is not None:
            mtp = {MTP_LAYER} if opened.knows_config else set()
            assert list(layers) == opened.layers
            assert {int(n) for n in layers if n.is_mtp} == mtp.intersection(opened.layers)
        name = f"{GLM_PREFIX}{layer}.self_attn.o_proj.weight"
        must(opened.info(name), lambda: opened.real.info(name))
        tensor = must(opened.tensor(name), lambda: opened.real[name])
        if tensor is not None:
            stored = self.folder.saved.written.tensors[name]
            assert (tensor.dtype, tensor.shape) == (stored.dtype, stored.shape)
        source = self.source(opened, layer)
        if source is not None:
            config = self.folder.config_given
            report = must(opened.check(layer), lambda: check_kda_weights(config, layer, source))
            assert report is None or (report.bound, report.read.path) == (15, "none")

    def source(self, opened: Opened, layer: int) -> Any:
        """The layer's source, asked for once and then kept, whatever happens."""
        if (opened, layer) not in self.sources:
            source = must(opened.layer(layer), lambda: opened.real.layer(layer))
            if source is None:
                return None
            self.sources[opened, layer] = source
        return self.sources[opened, layer]

    def close_a_checkpoint(self, draw: Draw) -> None:
        self.steps_in_peace = 0
        opened = self.a_checkpoint(draw)
        is_refused = self.is_pinned(opened) and not opened.closed
        refusal = Refusal(InUseError, Code.MEMORY_IN_USE, str(self.folder.path))
        must(refusal if is_refused else None, opened.real.close)
        opened.closed = True
        opened.real.close()
        if draw(st.booleans(), "forgotten"):
            self.checkpoints.remove(opened)
            self.sources = {key: kept for key, kept in self.sources.items() if key[0] != opened}

    def is_pinned(self, opened: Opened) -> bool:
        return any(one.pins and one.is_of_map_of(opened) for one in self.seen)

    # binding

    def bind(self, draw: Draw) -> None:
        opened = self.a_checkpoint(draw)
        layer = draw(st.one_of(kda_numbers, kda_numbers, kda_numbers, any_numbers), "layer")
        with_room = [memory for memory in self.arenas if memory.claim(None) is None]
        memory: Memory | None = draw(
            st.sampled_from([*self.arenas, *with_room * 3, None]), "memory"
        )
        slot = None if memory is None else draw(st.sampled_from([None, *range(memory.slots)]))
        copy = draw(st.sampled_from([True, True, False]), "copy")
        read, residency, alignment = draw(reads), draw(residencies), draw(alignments)
        if not copy:
            alignment = None  # would be refused
        source = self.source(opened, layer)
        if source is None:
            return
        refusal = opened.check(layer)
        if refusal is None and memory is not None:
            refusal = memory.claim(slot)
            if refusal is None and not memory.is_large_enough:
                refusal = Refusal(SlotError, Code.SLOT_TOO_SMALL)
        refusal = refusal or opened.load(layer, read)
        bound = must(
            refusal,
            lambda: bind_kda_weights(
                self.folder.config_given,
                layer,
                source,
                into=None if memory is None else memory.into(slot),
                copy=copy,
                read=read,
                residency=residency,
                alignment=alignment,
            ),
        )
        event(f"bind: {'done' if refusal is None else refusal.code.value}")
        if bound is None:
            return
        weights, report = bound
        opened.note_read(layer, read, conv_alone=not copy)
        assert report.layer_idx == layer
        assert report.shards == tuple(map(self.folder.path_of, opened.files_of(layer)))
        assert report.read.path == ("view" if not copy else read) or (copy and read == "auto")
        assert report.lock is not None
        number = weights.lease.slot.number
        if memory is None:
            memory = Memory(1, report.lock.locked_bytes, is_of_a_bind=True)
            self.memories_of_nobody.append(memory)
        assert number not in memory.taken, "a slot was given twice"
        assert slot in (None, number)
        expected, maps = opened.expected(layer), {}
        if not copy:
            expected = {"conv": expected["conv"]}
            maps = {
                name: opened.place(f"{GLM_PREFIX}{layer}.self_attn.{leaves[0]}")
                for name, leaves in FIELD_LEAVES.items()
                if name != "conv"
            }
        self.bounds.append(Bound(layer, weights, Loan(memory, number, expected), maps=maps))

    def give_weights_back(self, draw: Draw) -> None:
        """Those that are forgotten alone are given back when nothing made of them is left."""
        lent = [bound for bound in self.bounds if not bound.loan.released]
        bound = draw(st.sampled_from([*self.bounds, *lent, *lent]), "weights")
        what = draw(st.sampled_from(["release", "release", "release and forget", "forget", "hold"]))
        if what == "hold":
            self.hold(bound)
        if "release" in what:
            refusal = bound.loan.release()
            must(refusal, bound.release)
            event(f"release: {'done' if refusal is None else refusal.code.value}")
        if "forget" in what:
            self.forget(bound)

    def hold(self, bound: Bound) -> None:
        if bound.layer is not None:
            misuse = Refusal(StreamError, Code.STREAM_MISUSE) if bound.loan.released else None
            must(misuse, bound.layer.hold)
            bound.loan.held = not bound.loan.released

    def forget(self, bound: Bound) -> None:
        bound.forget()
        self.bounds.remove(bound)

    # views, and what is made of them

    def view(self, draw: Draw) -> None:
        """View a field of a layer's weights, which may be forgotten then, or a tensor."""
        thing = draw(st.sampled_from(["a view", "a slice", "an array"]))
        if self.bounds and draw(st.integers(0, 2)):
            bound = draw(st.sampled_from(self.bounds), "weights")
            name = draw(st.sampled_from(sorted(FIELD_LEAVES)))
            if name in bound.maps:
                self.view_map(bound.maps[name], functools.partial(bound.data, name), thing)
            else:
                self.view_slot(bound, name, thing)
            if draw(now_and_then, "weights forgotten"):
                self.forget(bound)
        else:
            opened, layer = self.a_checkpoint(draw), draw(st.sampled_from(ALL_LAYERS))
            leaf = draw(st.sampled_from(["self_attn.o_proj.weight", "input_layernorm.weight"]))
            name = f"{GLM_PREFIX}{layer}.{leaf}"
            tensor = must(opened.tensor(name), lambda: opened.real[name])
            if tensor is not None:
                self.view_map(opened.place(name), lambda: tensor.data, thing)

    def view_slot(self, bound: Bound, name: str, thing: str) -> None:
        refusal = MEMORY_GIVEN_BACK if bound.loan.views_ended else None
        made = must(refusal, lambda: made_of(bound.data(name), thing))
        if made is not None:
            expected = bound.loan.expected[name]
            self.seen.append(Seen(made, bound.loan, expected, pins=thing != "a view"))

    def view_map(self, place: MapPlace, view: Callable[[], memoryview], thing: str) -> None:
        if place.opened.may_be_mapped(place.shard):
            assert code_of(view) in (None, Code.FILE_CHANGED)
            return  # which of them is left to chance
        made = must(place.opened.map(place.shard), lambda: made_of(view(), thing))
        if made is not None:
            self.seen.append(Seen(made, place, b"", pins=thing != "a view"))

    def forget_what_was_seen(self, draw: Draw) -> None:
        seen = draw(st.sampled_from(self.seen), "seen")
        seen.forget()
        self.seen.remove(seen)

    # arenas

    def make_an_arena(self, draw: Draw) -> None:
        slots, lock, debug = draw(st.integers(1, 3)), draw(locks), draw(st.booleans(), "debug")
        is_small = draw(now_and_then, "small")
        nbytes = 16 if is_small else kda_slot_bytes(self.folder.config_given)
        arena = PinnedArena(nbytes, slots=slots, lock=lock, debug=debug)
        locked = arena.report.locked_bytes
        memory = Memory(slots, locked, debug=debug, is_large_enough=not is_small, arena=arena)
        self.arenas.append(memory)

    def use_an_arena(self, draw: Draw) -> None:
        """One that is forgotten and not closed goes with the last thing that lies in it."""
        memory = draw(st.sampled_from(self.arenas), "arena")
        what = draw(st.sampled_from([*["claim"] * 5, "close", "forget", "close and forget"]))
        if what == "claim":
            self.claim_or_abandon(memory, draw(st.sampled_from(range(memory.slots)), "slot"))
        if "close" in what:
            must(memory.close(), memory.into(None).close)
        if "forget" in what:
            memory.forget()
            self.arenas.remove(memory)
            self.memories_of_nobody.append(memory)

    def claim_or_abandon(self, memory: Memory, slot: int) -> None:
        if slot in memory.claimed:
            memory.into(slot).abandon()
            memory.claimed.remove(slot)
        elif must(memory.claim(slot), memory.into(slot).claim) is not None:
            memory.claimed.add(slot)

    # streams

    def start_a_stream(self, draw: Draw) -> None:
        opened = self.a_checkpoint(draw)
        layers = draw(layer_choices, "layers")
        slots, lock = draw(st.integers(1, 3), "slots"), draw(locks)
        read, residency = draw(reads), draw(residencies)
        config = self.folder.config_given if draw(st.booleans(), "config is given") else None
        refusal = opened.geometry() if config is None else None
        in_turn = False
        if refusal is None:
            refusal, in_turn = opened.stream(layers)
        chosen = opened.kda_layers if layers is None else layers
        stream = must(
            refusal,
            lambda: stream_kda_layers(
                opened.real,
                layers=layers,
                slots=slots,
                lock=lock,
                config=config,
                read=read,
                residency=residency,
            ),
        )
        event(f"stream: {'begun' if refusal is None else refusal.code.value}")
        if stream is not None:
            stream.__enter__()
            memory = Memory(slots, stream.report.lock.locked_bytes)
            self.streams.append(Streamed(opened, chosen, read, memory, stream, in_turn=in_turn))

    def that_go_on(self) -> list[Streamed]:
        """The streams that need not wait; one that has more layers to give more often."""
        go_on = [stream for stream in self.streams if not stream.would_wait]
        return [*go_on, *3 * [stream for stream in go_on if stream.staged]]

    def go_on_with_a_stream(self, draw: Draw) -> None:
        """Without `keeps` no name for a past layer is left; its weights stay in hand."""
        stream = draw(st.sampled_from(self.that_go_on()), "stream")
        keeps, holds = draw(now_and_then, "keeps"), draw(now_and_then, "holds")
        for _ in range(draw(st.integers(1, 3), "steps")):
            current = stream.current
            if current is not None and not keeps and not current.loan.held:
                current.layer = None
            del current
            stream.come_to_rest()
            if stream.would_wait or not self.step(stream):
                break
            if holds:
                self.hold(self.bounds[-1])

    def step(self, stream: Streamed) -> bool:
        """Take a step; whether a layer came."""
        bound = stream.step(self.bounds)
        event(f"step: {stream.outcome}")
        if bound is not None:
            self.bounds.append(bound)
        return bound is not None

    def held_back(self) -> list[tuple[Streamed, Bound]]:
        """Streams that wait for a slot, each with a layer that could be given back."""
        return [
            (stream, bound)
            for stream in self.streams
            for bound in self.bounds
            if stream.would_wait
            and bound.loan.memory is stream.memory
            and not (bound.loan.released or bound.loan.is_pinned)
        ]

    def go_on_when_another_thread_gives_back(self, draw: Draw) -> None:
        stream, bound = draw(st.sampled_from(self.held_back()), "stream, layer")
        must(bound.loan.release(), lambda: None)
        releasing = soon(0.002, bound.release)
        releasing.start()
        self.step(stream)
        releasing.join()

    def end_a_stream(self, draw: Draw) -> None:
        """One that is not closed ends its thread, and its memory goes with the last layer."""
        stream = draw(st.sampled_from(self.streams), "stream")
        if draw(st.booleans(), "closed"):
            stream.close()
            self.step(stream)  # is refused
            stream.close()
        stream.forget()
        self.streams.remove(stream)
        self.memories_of_nobody.append(stream.memory)

    # faults of the files

    def change_a_shard(self, draw: Draw) -> None:
        self.steps_in_peace = 0
        self.change(draw(st.sampled_from(self.shards), "shard"), draw(faults, "fault"))

    def change(self, shard: str, fault: Fault) -> None:
        what, how = fault
        getattr(self.folder, what)(shard, how)

    def change_the_config(self, draw: Draw) -> None:
        self.steps_in_peace = 0
        self.folder.set_config(draw(st.sampled_from(["good", "garbage", None]), "config"))

    # faults while a load runs

    def bind_while_a_shard_changes(self, draw: Draw) -> None:
        """Right bytes or an error, until the change is done; after it, the error."""
        self.steps_in_peace = 0
        opened = draw(st.sampled_from(self.whole()), "checkpoint")
        layer, read, fault = draw(kda_numbers, "layer"), draw(reads), draw(changes, "fault")
        delay, which = draw(delays, "delay"), draw(st.integers(0, 1), "which shard")
        source = self.source(opened, layer)
        if source is None or opened.check(layer) or opened.load(layer, read):
            return
        expected, shards = opened.expected(layer), opened.files_of(layer)
        opened.note_read(layer, "auto")

        def bind() -> None:
            weights, _ = bind_kda_weights(self.folder.config_given, layer, source, read=read)
            found = {name: bytes(tensor.data) for name, tensor in weights.items()}
            weights.release()
            assert found == expected

        changing = soon(delay, self.change, shards[which % len(shards)], fault)
        changing.start()
        codes = {code_of(bind)}
        while changing.is_alive():
            codes.add(code_of(bind))
        changing.join()
        event(f"bind while a shard changes: {sorted(map(str, codes))}")
        assert codes <= {None, *CHANGED}
        assert code_of(bind) is Code.FILE_CHANGED

    def stream_while_a_shard_changes(self, draw: Draw) -> None:
        """Right layers in order, and perhaps an error instead of the rest.

        With no fault the checkpoint is closed meanwhile.
        """
        self.steps_in_peace = 0
        opened = draw(st.sampled_from(self.whole()), "checkpoint")
        slots, read, fault = draw(st.integers(1, 3)), draw(reads), draw(changes_or_none, "fault")
        shard, delay = draw(st.sampled_from(self.shards), "shard"), draw(delays, "delay")
        layers = [n for n in opened.kda_layers if opened.check(n) is None]
        if opened.stream(layers)[0] or any(opened.load(n, read) for n in layers):
            return
        expected = [opened.expected(n) for n in layers]
        for n in layers:
            opened.note_read(n, "auto")
        may_come: set[Code | None] = {None, *CHANGED}
        closed: set[Code | None] = set()
        changing = soon(delay, self.change, shard, fault)
        if fault is None:
            may_come = {None, Code.CHECKPOINT_CLOSED, Code.MEMORY_GIVEN_BACK}
            changing = soon(delay, lambda: closed.add(code_of(opened.real.close)))
        found: list[dict[str, bytes]] = []

        def drain() -> None:
            for layer in stream:
                found.append({name: bytes(t.data) for name, t in layer.weights.items()})

        config = self.folder.config_given
        with stream_kda_layers(
            opened.real, layers=layers, slots=slots, read=read, config=config
        ) as stream:
            changing.start()
            code = code_of(drain)
            changing.join()
        opened.closed = fault is None
        event(f"stream while a shard changes: {code}, {sorted(map(str, closed))}")
        assert code in may_come
        assert found == expected[: len(found)]
        assert code is not None or len(found) == len(layers)
        is_in_use = self.is_pinned(opened)
        may_be_in_use = is_in_use or read in ("auto", "mapped")
        assert None not in closed or not is_in_use
        assert closed <= {None, *([Code.MEMORY_IN_USE] if may_be_in_use else [])}

    # what must be so after each of them

    @invariant()
    def nothing_takes_long(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, STEP_SECONDS)

    @invariant()
    def all_that_is_in_hand_is_right(self) -> None:
        for stream in self.streams:
            stream.come_to_rest()
        for opened in self.checkpoints:
            assert opened.real.report.shards_checked == len(opened.checked)
        in_hand: list[Bound | Seen | Memory] = [*self.bounds, *self.seen, *self.arenas]
        for one in in_hand:
            one.assert_right()

    @invariant()
    def nothing_more_is_open_or_mapped_or_locked(self) -> None:
        if not hasattr(self, "folder"):
            return
        assert descriptors_under(self.folder.path) == []
        surely, perhaps = self.maps()
        assert surely <= maps_under(self.folder.path) <= surely + perhaps
        memories = [*self.arenas, *(stream.memory for stream in self.streams)]
        memories += self.memories_of_nobody
        locked = self.locked_before + sum(memory.locked_now for memory in memories)
        assert comes_true(lambda: locked_bytes() == locked), f"{locked_bytes()}, not {locked}"

    def maps(self) -> tuple[int, int]:
        """How many maps of shards there must be, and how many more there may be."""
        known = {
            (one.place.opened, one.place.shard)
            for one in self.seen
            if one.pins and isinstance(one.place, MapPlace)
        }
        perhaps = 0
        for opened in self.checkpoints:
            for name, is_known in opened.mapped.items():
                if not opened.closed and is_known:
                    known.add((opened, name))
                elif not opened.closed:
                    perhaps += 1
        return len(known), perhaps

    def teardown(self) -> None:
        """Give everything back; nothing may be left, unless an exception is on its way."""
        is_cut_short = sys.exc_info()[0] is not None
        with suppress(Exception) if is_cut_short else nullcontext():
            self.give_everything_back()
            self.nothing_is_left()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def give_everything_back(self) -> None:
        for seen in self.seen:
            seen.forget()
        for stream in self.streams:
            stream.close()
            stream.forget()
        for bound in self.bounds:
            bound.release()
            bound.forget()
        for opened in self.checkpoints:
            opened.real.close()
        for memory in self.arenas:
            for slot in memory.claimed:
                memory.into(slot).abandon()
            memory.into(None).close()

    def nothing_is_left(self) -> None:
        assert comes_true(lambda: threads() <= self.threads_before), "a thread is left"
        assert comes_true(lambda: locked_bytes() == self.locked_before), "locked memory is left"
        if hasattr(self, "folder"):
            assert descriptors_under(self.folder.path) == []
            assert maps_under(self.folder.path) == 0
            self.folder.remove()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is given back must go without it; and it would come at another time in each run."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def hangs_are_errors() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"a step took more than {STEP_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.mlock
@pytest.mark.usefixtures("no_collector", "hangs_are_errors")
def test_in_any_order_of_actions_and_faults_only_right_bytes_or_the_right_error_come(
    tmp_path: Path,
) -> None:
    run_state_machine_as_test(
        lambda: States(tmp_path),
        settings=settings(
            max_examples=EXAMPLES or USUAL_EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
