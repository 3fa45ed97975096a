"""`register=`: an arena's memory as a GPU driver knows it, by a driver that is a strict fake."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunPython
from support.checkpoints import Written
from support.fake_driver import (
    ALREADY,
    INVALID,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    FakeDriver,
    is_mapped,
    locked_bytes,
)

from kda_stream import (
    ArgumentError,
    Checkpoint,
    ErrorCode,
    HostRegistrar,
    InUseError,
    KdaConfig,
    MemoryRefusedError,
    PinnedArena,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.staging.pages import Mapping, map_anonymous
from kda_stream.staging.registration import Registration

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake reads /proc")
SLOT_BYTES = 5000
TESTS = Path(__file__).resolve().parents[1]
PROLOGUE = f"""
import gc, json, os, sys, time
sys.path.insert(0, {str(TESTS)!r})
import numpy
from support.fake_driver import FakeDriver, is_mapped
from kda_stream import MemoryRefusedError, PinnedArena, open_checkpoint, stream_kda_layers
driver = FakeDriver()
"""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver()
    yield made
    made.assert_clean()


def arena_of(driver: HostRegistrar, **options: Any) -> PinnedArena:
    return PinnedArena(SLOT_BYTES, slots=3, register=driver, **options)


def array_in(arena: PinnedArena) -> Any:
    return np.frombuffer(arena.claim().lend().view(0, 64), np.uint8)


class MineError(Exception):
    pass


# --- what is registered ---------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["require", "prefer", "off"])
def test_the_whole_arena_is_registered_at_once_and_told(driver: FakeDriver, lock: Any) -> None:
    with arena_of(driver, lock=lock) as arena:
        begin = array_in(arena).ctypes.data
        assert driver.ranges == [(begin, begin + arena.nbytes)]
        assert arena.report.registered
        assert arena.report.registration_refusal is None
        assert driver.names == ["register"]
    assert driver.names == ["register", "unregister"]


def test_an_arena_without_a_driver_is_not_registered_and_nothing_was_refused() -> None:
    with PinnedArena(SLOT_BYTES, lock="off") as arena:
        assert (arena.report.registered, arena.report.registration_refusal) == (False, None)


@pytest.mark.mlock
@pytest.mark.parametrize(("lock", "is_locked"), [("require", True), ("off", False)])
def test_pages_are_locked_before_they_are_registered_and_until_they_are_not(
    driver: FakeDriver, lock: Any, is_locked: bool
) -> None:
    before = locked_bytes()
    with arena_of(driver, lock=lock) as arena:
        nbytes = arena.nbytes if is_locked else 0
        assert arena.report.locked is is_locked
    assert driver.locked == [before + nbytes, before + nbytes]
    assert locked_bytes() == before


def test_a_slot_is_filled_and_lent_as_ever(driver: FakeDriver) -> None:
    with arena_of(driver) as arena:
        for fill in (b"\1", b"\2"):
            slot = arena.claim()
            slot.prepare_for_direct_reads()
            slot.memory()[:] = fill * SLOT_BYTES
            lease = slot.lend()
            assert bytes(lease.view(0, SLOT_BYTES)) == fill * SLOT_BYTES
            lease.release()
        assert driver.names == ["register"]


@pytest.mark.parametrize("answer", [0, NOT_SUPPORTED])
def test_the_pages_that_a_driver_has_are_not_moved_into_huge_ones(
    monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    moved: list[object] = []
    monkeypatch.setattr(Mapping, "collapse", lambda *_: moved.append(None))
    with arena_of(FakeDriver(answers=[answer] if answer else [])) as arena:
        arena.claim().lend().release()
        arena.slots[0].prepare_for_direct_reads()
    assert bool(moved) is bool(answer)


def test_a_stream_registers_its_arena_and_reports_it(
    checkpoint: Checkpoint, config: KdaConfig, driver: FakeDriver
) -> None:
    stream = stream_kda_layers(checkpoint, register=driver, slots=2)
    assert driver.calls == [], "not before it is entered"
    with stream:
        for layer in stream:
            assert layer.report.lock is not None
            assert layer.report.lock.registered
        assert stream.report.lock.registered
    assert driver.names == ["register", "unregister"]
    ((begin, end),) = driver.ranges
    assert end - begin >= 2 * kda_slot_bytes(config)


def mapped_files(folder: Path) -> list[tuple[int, int]]:
    """The address ranges of every map of a file in the folder."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            begin, end = line.split()[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def test_no_byte_of_a_mapped_shard_is_ever_registered(
    written: Written, config: KdaConfig, driver: FakeDriver
) -> None:
    maps: list[tuple[int, int]] = []
    with (
        open_checkpoint(written.folder) as checkpoint,
        arena_of(driver) as arena,
        stream_kda_layers(checkpoint, read="mapped", register=driver) as stream,
    ):
        weights, report = bind_kda_weights(
            config, 0, checkpoint.layer(0), into=arena, copy=False, read="mapped"
        )
        assert report.read.path == "view"
        assert report.lock is not None
        assert report.lock.registered
        q_proj = np.frombuffer(weights.q_proj.data, np.uint8).ctypes.data
        for layer in stream:
            assert layer.report.read.path == "mapped"
            maps += mapped_files(written.folder)
        conv = np.frombuffer(weights.conv.data, np.uint8).ctypes.data
        arenas = list(driver.ranges)
    assert any(begin <= q_proj < end for begin, end in maps), "the views lie in the file's map"
    assert any(begin <= conv < end for begin, end in arenas), "what is joined lies in the arena"
    assert len(arenas) == 2
    for begin, end in arenas:
        assert not any(begin < last and first < end for first, last in maps)


@pytest.mark.parametrize(
    "register", [7, "cuda", True, FakeDriver, object(), len], ids=lambda value: str(type(value))
)
def test_what_is_no_registrar_is_refused_before_anything_is_made(
    checkpoint: Checkpoint, register: Any
) -> None:
    for make in (
        lambda: arena_of(register),
        lambda: stream_kda_layers(checkpoint, register=register),
    ):
        with pytest.raises(ArgumentError, match="CudaHost"):
            make()


# --- what a driver may answer ---------------------------------------------------------------------

ANSWERS = {
    INVALID: ("invalid value (1)", "nvidia-smi"),
    OUT_OF_MEMORY: ("out of memory (2)", "fewer slots"),
    ALREADY: ("already registered (712)", "start the process anew"),
    NOT_SUPPORTED: ("not supported (801)", "pin_memory"),
    46: ("(46)", "list of errors"),
    -1: ("(-1)", "list of errors"),
}


@pytest.mark.parametrize("lock", ["prefer", "off"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_refusal_is_reported_with_its_cause_and_the_next_step_and_the_arena_works(
    answer: int, lock: Any
) -> None:
    driver = FakeDriver(answers=[answer])
    with arena_of(driver, lock=lock) as arena:
        report = arena.report
        assert not report.registered
        assert report.registration_refusal is not None
        for part in ANSWERS[answer]:
            assert part in report.registration_refusal
        assert array_in(arena).size == 64
    assert driver.names == ["register"], "what was not registered here is not unregistered"
    driver.assert_clean()


@pytest.mark.parametrize("answer", ANSWERS)
def test_require_raises_what_the_driver_answered_and_leaves_nothing(answer: int) -> None:
    driver = FakeDriver(answers=[answer])
    locked = locked_bytes()
    with pytest.raises(MemoryRefusedError) as caught:
        arena_of(driver, lock="require")
    error = caught.value
    assert error.code is ErrorCode.REGISTER_REFUSED
    reason, step = ANSWERS[answer]
    assert reason in str(error.got)
    assert step in str(error.hint)
    assert 'lock="prefer"' in str(error.hint)
    del error, caught
    assert not any(is_mapped(*found) for found in driver.ranges)
    assert locked_bytes() == locked
    assert driver.names == ["register"]
    driver.assert_clean()


@pytest.mark.parametrize("does_it_first", [False, True])
@pytest.mark.parametrize("lock", ["require", "prefer"])
def test_a_driver_that_raises_is_a_refusal_and_its_memory_is_surely_not_registered(
    lock: Any, does_it_first: bool
) -> None:
    driver = FakeDriver(answers=[MineError("no\nluck")], does_it_first=does_it_first)
    if lock == "require":
        with pytest.raises(MemoryRefusedError, match="MineError") as caught:
            arena_of(driver, lock=lock)
        assert caught.value.code is ErrorCode.REGISTER_REFUSED
    else:
        with arena_of(driver, lock=lock) as arena:
            assert not arena.report.registered
            assert r"MineError: no\nluck" in (arena.report.registration_refusal or "")
    assert driver.names == ["register", "unregister"]
    driver.assert_clean()


def test_an_answer_that_is_no_number_is_a_refusal() -> None:
    class Silent(FakeDriver):
        def register(self, address: int, nbytes: int) -> Any:
            super().register(address, nbytes)

    driver = Silent()
    with arena_of(driver) as arena:
        assert "TypeError" in (arena.report.registration_refusal or "")
    driver.assert_clean()


def test_a_stream_under_require_is_refused_where_it_is_entered(checkpoint: Checkpoint) -> None:
    driver = FakeDriver(answers=[NOT_SUPPORTED])
    with (
        pytest.raises(MemoryRefusedError) as caught,
        stream_kda_layers(checkpoint, lock="require", register=driver),
    ):
        pass
    assert caught.value.code is ErrorCode.REGISTER_REFUSED
    driver.assert_clean()


# --- each way of going ----------------------------------------------------------------------------


def closed(arena: PinnedArena) -> None:
    arena.close()
    arena.close()


def left_by_an_error(arena: PinnedArena) -> None:
    with pytest.raises(MineError), arena:
        raise MineError


def given_back_with_its_lease(arena: PinnedArena) -> None:
    arena.claim().lend(closes_arena=True).release()


def dropped(_: PinnedArena) -> None:
    pass


def dropped_in_a_cycle(arena: PinnedArena) -> None:
    arena.me = arena  # type: ignore[attr-defined]


def dropped_while_a_slot_is_filled(arena: PinnedArena) -> None:
    arena.claim().memory()[:4] = b"abcd"


@pytest.mark.parametrize(
    "go",
    [
        closed,
        left_by_an_error,
        given_back_with_its_lease,
        dropped,
        dropped_in_a_cycle,
        dropped_while_a_slot_is_filled,
    ],
)
def test_whichever_way_an_arena_goes_it_is_unregistered_once_and_then_unmapped(
    driver: FakeDriver, go: Callable[[PinnedArena], None]
) -> None:
    go(arena_of(driver))
    gc.collect()
    assert driver.names == ["register", "unregister"]
    assert not any(is_mapped(*found) for found in driver.ranges)


def test_an_arena_that_is_closed_under_arrays_is_unregistered_at_once(driver: FakeDriver) -> None:
    arena = arena_of(driver)
    array = array_in(arena)
    with pytest.raises(InUseError):
        arena.close()
    assert driver.names == ["register", "unregister"]
    assert all(is_mapped(*found) for found in driver.ranges)
    assert array[0] == 0
    del array
    assert not any(is_mapped(*found) for found in driver.ranges)
    assert driver.names == ["register", "unregister"]


def test_an_arena_that_is_dropped_under_arrays_is_unregistered_before_they_go(
    driver: FakeDriver,
) -> None:
    array = array_in(arena_of(driver))
    assert array[0] == 0
    del array
    assert driver.names == ["register", "unregister"]
    assert not any(is_mapped(*found) for found in driver.ranges)


def test_weights_keep_an_arena_that_was_dropped_registered(
    checkpoint: Checkpoint, config: KdaConfig, driver: FakeDriver
) -> None:
    arena = PinnedArena(kda_slot_bytes(config), register=driver)
    weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0), into=arena)
    del arena
    assert driver.names == ["register"]
    del weights
    assert driver.names == ["register", "unregister"]


def test_a_stream_that_is_dropped_without_close_is_unregistered(
    checkpoint: Checkpoint, driver: FakeDriver
) -> None:
    stream = stream_kda_layers(checkpoint, register=driver, slots=1)
    stream.__enter__()
    next(stream)
    del stream
    end = time.monotonic() + 10
    while driver.standing and time.monotonic() < end:
        time.sleep(0.01)
    assert driver.names == ["register", "unregister"]


@pytest.mark.parametrize("how", ["pass", "sys.exit(0)", "stream.close()", "del stream, arena"])
def test_what_lives_when_the_interpreter_ends_is_unregistered_before(
    run_python: RunPython, written: Written, how: str, tmp_path: Path
) -> None:
    script = """
class Told(FakeDriver):
    def unregister(self, address):
        answer = super().unregister(address)
        with open("told", "a") as file:
            print(self.names, self.wrong, len(self.standing), file=file)
        return answer
arena = PinnedArena(5000, register=Told())
array = numpy.frombuffer(arena.slots[0].claim().lend().view(0, 64), numpy.uint8)
checkpoint = open_checkpoint(sys.argv[1])
stream = stream_kda_layers(checkpoint, register=Told())
stream.__enter__()
next(stream)
print(json.dumps(None), flush=True)
"""
    run_python(PROLOGUE + script + how, written.folder)
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["['register', 'unregister'] [] 0"] * 2


@pytest.mark.parametrize("how", ["arena.close()", "del arena", "sys.exit(7)", "os._exit(7)"])
def test_a_forked_child_unregisters_nothing(run_python: RunPython, how: str) -> None:
    script = f"""
arena = PinnedArena(5000, register=driver)
calls = os.open("calls", os.O_CREAT | os.O_RDWR | os.O_APPEND)
driver.unregister = lambda address, do=driver.unregister: (os.write(calls, b"x"), do(address))[1]
child = os.fork()
if child == 0:
    {how}
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
in_child = os.path.getsize("calls")
standing = len(driver.standing)
arena.close()
print(json.dumps([code, in_child, standing, os.path.getsize("calls"), driver.wrong]))
"""
    assert run_python(PROLOGUE + script) == [7, 0, 1, 1, []]


def test_a_forked_child_registers_and_unregisters_what_is_its_own(run_python: RunPython) -> None:
    script = """
arena = PinnedArena(5000, register=driver)
child = os.fork()
if child == 0:
    own = FakeDriver()
    PinnedArena(5000, register=own).close()
    os._exit(0 if own.names == ["register", "unregister"] else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
arena.close()
print(json.dumps([code, driver.names]))
"""
    assert run_python(PROLOGUE + script) == [0, ["register", "unregister"]]


def test_a_driver_is_not_kept_behind_its_last_arena() -> None:
    driver = FakeDriver()
    arena = arena_of(driver)
    arena.close()
    alive = weakref.ref(driver)
    del driver, arena
    gc.collect()
    assert alive() is None


# --- a driver that does not unregister ------------------------------------------------------------


@pytest.mark.parametrize(
    ("unanswers", "told"),
    [
        ([INVALID], r"invalid value \(1\)"),
        ([NOT_REGISTERED], r"not registered \(713\)"),
        ([46], r"\(46\)"),
        ([MineError("a"), MineError("gone")], "MineError: gone"),
    ],
)
def test_a_driver_that_does_not_unregister_is_told_once_and_the_memory_goes(
    unanswers: list[Any], told: str
) -> None:
    driver = FakeDriver(unanswers=unanswers)
    locked = locked_bytes()
    arena = arena_of(driver)
    with pytest.raises(MemoryRefusedError, match=told) as caught:
        arena.close()
    assert caught.value.code is ErrorCode.UNREGISTER_REFUSED
    del caught
    assert not any(is_mapped(*found) for found in driver.ranges)
    assert locked_bytes() == locked
    calls = list(driver.calls)
    arena.close()
    del arena
    assert driver.calls == calls, "and it is not asked again"
    assert driver.wrong == []


def test_it_is_told_before_arrays_that_are_left_are() -> None:
    driver = FakeDriver(unanswers=[INVALID])
    arena = arena_of(driver)
    array = array_in(arena)
    with pytest.raises(MemoryRefusedError):
        arena.close()
    with pytest.raises(InUseError):
        arena.close()
    arena.close()
    del array


def test_a_stream_tells_it_where_it_is_left(checkpoint: Checkpoint) -> None:
    driver = FakeDriver(unanswers=[INVALID])
    with (
        pytest.raises(MemoryRefusedError) as caught,
        stream_kda_layers(checkpoint, register=driver) as stream,
    ):
        assert sum(1 for _ in stream) == 6
    assert caught.value.code is ErrorCode.UNREGISTER_REFUSED
    stream.close()
    assert driver.names == ["register", "unregister"]


def test_a_lease_that_takes_its_arena_along_tells_it() -> None:
    driver = FakeDriver(unanswers=[INVALID])
    lease = arena_of(driver).claim().lend(closes_arena=True)
    with pytest.raises(MemoryRefusedError):
        lease.release()
    lease.release()


def test_its_error_keeps_nothing_that_only_a_collector_would_find() -> None:
    driver = FakeDriver(unanswers=[INVALID])
    arena = arena_of(driver)
    alive = weakref.ref(driver)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(MemoryRefusedError):
            arena.close()
        del driver, arena
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["del arena", "pass"], ids=["dropped", "at the end"])
def test_where_nobody_can_be_told_it_is_printed(
    run_python: RunPython, tmp_path: Path, how: str
) -> None:
    script = f"""
sys.stderr = open("printed", "w")
arena = PinnedArena(5000, register=FakeDriver(unanswers=[1]))
print(json.dumps(None), flush=True)
{how}
"""
    run_python(PROLOGUE + script)
    assert "the driver did not unregister the memory" in (tmp_path / "printed").read_text()


# --- interrupts -----------------------------------------------------------------------------------

INTERRUPTS = [KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("does_it_first", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_an_interrupt_of_registering_comes_out_and_leaves_nothing(
    interrupt: type[BaseException], does_it_first: bool
) -> None:
    driver = FakeDriver(answers=[interrupt()], does_it_first=does_it_first)
    locked = locked_bytes()
    with pytest.raises(interrupt):
        arena_of(driver)
    assert driver.names == ["register", "unregister"]
    assert locked_bytes() == locked
    gc.collect()
    assert not any(is_mapped(*found) for found in driver.ranges)
    driver.assert_clean()


@pytest.mark.parametrize("does_it_first", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("interrupt", [*INTERRUPTS, TimeoutError])
def test_an_interrupt_of_unregistering_comes_out_when_it_is_done(
    interrupt: type[BaseException], does_it_first: bool
) -> None:
    driver = FakeDriver(unanswers=[interrupt()], does_it_first=does_it_first)
    arena = arena_of(driver)
    with pytest.raises(interrupt) as caught:
        arena.close()
    del caught
    assert not any(is_mapped(*found) for found in driver.ranges)
    driver.assert_clean()
    arena.close()


def test_an_arena_that_is_dropped_is_unregistered_although_ctrl_c_comes_between(
    run_python: RunPython,
) -> None:
    script = """
told = []
sys.unraisablehook = lambda what: told.append(what.exc_type.__name__)
driver = FakeDriver(unanswers=[KeyboardInterrupt()])
PinnedArena(5000, register=driver)
print(json.dumps([driver.names, len(driver.standing), driver.wrong, told]))
"""
    names = ["register", "unregister", "unregister"]
    assert run_python(PROLOGUE + script) == [names, 0, [], ["KeyboardInterrupt"]]


MOMENTS = {
    "an arena": ("PinnedArena(5000, register=driver)", 2e-6),
    "a stream": ("stream_kda_layers(checkpoint, slots=1, register=driver)", 6e-6),
}


@pytest.mark.parametrize("what", MOMENTS)
def test_a_signal_at_any_moment_leaves_nothing_registered_and_no_memory(
    run_python: RunPython, written: Written, what: str
) -> None:
    made, step = MOMENTS[what]
    script = f"""
import signal
from support.fake_driver import locked_bytes
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
checkpoint = open_checkpoint(sys.argv[1])
caught = left = 0
locked = locked_bytes()
for turn in range(400):
    opened = None
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + {step} * turn)
        with {made} as opened:
            if sys.argv[2] == "a stream":
                next(opened)
        time.sleep(0.003)
    except KeyboardInterrupt:
        caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    if opened is not None:
        opened.close()  # where it came before the first line of the with, or of its end
    opened = None
    gc.collect()
    end = time.monotonic() + 1
    while driver.standing and time.monotonic() < end:
        time.sleep(0.001)  # a stream's thread is the last to let its arena go
    left += locked_bytes() != locked
print(json.dumps([caught, left, len(driver.standing), driver.wrong]))
"""
    caught, left, standing, wrong = run_python(PROLOGUE + script, written.folder, what)
    assert caught > 100
    assert wrong == []
    assert (left, standing) == (0, 0)


# --- threads --------------------------------------------------------------------------------------


def test_threads_make_and_close_arenas_by_one_driver(driver: FakeDriver) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(40):
                arena = arena_of(driver, lock="off")
                if turn % 2:
                    arena.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert failures == []
    assert sorted(driver.names) == ["register"] * 160 + ["unregister"] * 160


def test_an_arena_that_two_threads_close_is_unregistered_once() -> None:
    class Slow(FakeDriver):
        def unregister(self, address: int) -> int:
            time.sleep(0.01)
            return super().unregister(address)

    for _ in range(5):
        driver = Slow()
        arena = arena_of(driver)
        threads = [threading.Thread(target=arena.close, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert driver.names == ["register", "unregister"]
        driver.assert_clean()


def test_a_registration_that_two_threads_end_is_ended_once() -> None:
    class Slow(FakeDriver):
        def unregister(self, address: int) -> int:
            time.sleep(0.01)
            return super().unregister(address)

    driver = Slow()
    mapping = map_anonymous(SLOT_BYTES)
    registration = Registration(driver, mapping)
    assert registration.begin() is None
    threads = [threading.Thread(target=registration.end, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert driver.names == ["register", "unregister"]
    mapping.close()


def test_a_signal_handler_that_closes_the_arena_while_it_is_closed_does_no_harm() -> None:
    class Signalled(FakeDriver):
        def unregister(self, address: int) -> int:
            if self.names.count("unregister") == 0:
                self.calls.append(("unregister", address))
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().unregister(address)

    driver = Signalled()
    arena = arena_of(driver)
    before = signal.signal(signal.SIGUSR1, lambda *_: arena.close())
    try:
        arena.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    driver.assert_clean()
