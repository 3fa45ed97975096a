"""The thread of a stream: it stages one item after the other into free slots."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar
from weakref import ref

from .closing import BackgroundThread
from .errors import ErrorCode, KdaStreamError, StreamError
from .limits import BELL_SECONDS, ENDING_SECONDS
from .staging.arena import PinnedArena, Slot
from .staging.reading import ReadChoice
from .staging.spans import CopyStop

Item = TypeVar("Item")
Staged = TypeVar("Staged")


class Stopwatch:
    """How long a stream has run: `seconds` since it was made, until its end."""

    def __init__(self) -> None:
        self._began_seconds = time.monotonic()
        self._ended_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Since it was made; after `stop`, until then."""
        ended = time.monotonic() if self._ended_seconds is None else self._ended_seconds
        return ended - self._began_seconds

    def stop(self) -> None:
        """Let `seconds` be what they are now. Again: no effect."""
        if self._ended_seconds is None:
            self._ended_seconds = time.monotonic()


class Stager(Generic[Item, Staged]):
    """What passes between a stream and its thread. The thread holds this, and not the stream.

    `fill` makes of an item what the stream is handed: it gets a slot by `free_slot`, and brings in
    by `choice`; None from it ends the staging. `watch` stops when nothing more comes. No lock is in
    here that Ctrl-C could leave locked: plain attributes and a queue that serves as a bell.
    `_ended` is set by the thread, `_stop` by the stream.
    """

    def __init__(
        self,
        items: Iterable[Item],
        fill: Callable[[Item, Stager[Item, Staged]], Staged | None],
        arena: PinnedArena,
        choice: ReadChoice,
        watch: Stopwatch,
    ) -> None:
        self.watch = watch
        self.staged: deque[Staged] = deque()
        self.failure: BaseException | None = None
        self._is_ended_by_other = False
        self._reason: KdaStreamError | None = None
        self._process = os.getpid()
        self.is_waiting = False
        self._thread = BackgroundThread()
        self._ended = False
        self._stop = CopyStop()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._items = items
        self._fill = fill
        self.arena = arena
        self._stream: ref[object] | None = None
        self._dropped: deque[object] = deque()
        # Of no method of this object, which would be in a cycle with it.
        end_if_dropped = partial(_end_if_dropped, self._dropped, self._stop)
        self.choice = replace(choice, stop=self._stop, between=end_if_dropped)

    # the stream's side

    def start(self, stream: object) -> None:
        """Begin to stage in a thread of its own; raises RuntimeError when there can be none.

        It ends when it is told to, or when `stream` is dropped.
        """
        # No line of Python in the callback: a KeyboardInterrupt would be lost in it.
        self._stream = ref(stream, self._dropped.append)
        self._thread.start(self._run)

    @property
    def ended(self) -> bool:
        """Whether nothing more will be staged."""
        return self._ended or self._thread.is_over

    def next_staged(self, while_waiting: Callable[[], None] | None = None) -> Staged:
        """What is staged next, waited for, with calls of `while_waiting` in between.

        Raises why it ended before all was staged, or StopIteration.
        """
        while not self.staged and not self.ended:
            if while_waiting is not None:
                while_waiting()
            self.wait_for_bell()
        if not self.staged:
            self.watch.stop()
            failure = self.take_failure()
            try:
                raise StopIteration if failure is None else failure
            finally:
                del failure  # else its traceback would keep this frame, and both the slot's views
        return self.staged.popleft()

    def take_failure(self) -> BaseException | None:
        """Why it ended before all was staged, told once."""
        failure, self.failure = self.failure or self._reason, None
        self._reason = None
        if failure is None and not self._ended:
            return no_thread("it ended before its first line, as where memory is short")
        return failure

    def wait_for_bell(self) -> None:
        """Wait until the thread has done something, at most `BELL_SECONDS`."""
        with suppress(Empty):
            self._bell.get(timeout=BELL_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether the stream has told the thread to end."""
        return (self._stop.is_set and not self._is_ended_by_other) or bool(self._dropped)

    def stop(self) -> None:
        """Have the thread end, and wait for it; one that has not begun will do nothing."""
        self._is_ended_by_other = False
        self._reason = None
        self._end()

    def _end(self) -> None:
        self.watch.stop()
        self._stop.set()
        self.arena.wake()
        while not self.ended:
            self.wait_for_bell()

    def end_with(self, error: KdaStreamError) -> None:
        """Have the thread end, and wait for it; where more was to come, that is why it does not.

        Without effect in a forked child, which has no such thread.
        """
        if self.ended or os.getpid() != self._process:
            return
        if not self.stopping:
            self._reason = error
            self._is_ended_by_other = True
        self._end()

    # the thread's side

    def free_slot(self) -> Slot | None:
        """A slot of the arena, once one is free; None when the stream is being closed."""
        self.is_waiting = True
        slot = self.arena.wait_for_slot(self._is_stopping)
        self.is_waiting = False
        return slot

    def wait_until(self, done: Callable[[], bool]) -> bool:
        """Wait until `done()`; False when the stream is being closed before."""
        self.is_waiting = True
        while not done() and not self._is_stopping():
            time.sleep(ENDING_SECONDS)
        self.is_waiting = False
        return not self._is_stopping()

    def _run(self) -> None:
        """Stage every item; an error is left in `failure`."""
        try:
            for item in self._items:
                staged = self._fill(item, self)
                if staged is None:
                    break
                self.staged.append(staged)
                del item, staged  # what was handed out is not kept here
                self._bell.put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            self.failure = None if self._is_stopping() else _without_frames(error)
        self._ended = True
        self._bell.put(None)

    def _is_stopping(self) -> bool:
        return self._stop.is_set or bool(self._dropped)


def _end_if_dropped(dropped: deque[object], stop: CopyStop) -> None:
    if dropped:
        stop.set()


def _without_frames(error: BaseException) -> BaseException:
    """The error; one of the library says all that it has to without the frames it came through.

    They hold the stager and its slots, which would hold them, until the collector comes by.
    """
    part: BaseException | None = error if isinstance(error, KdaStreamError) else None
    while part is not None:
        part.__traceback__ = None
        part = part.__context__
    return error


def no_thread(reason: str) -> StreamError:
    """The error for a stream whose thread the system does not give."""
    return StreamError(
        ErrorCode.STREAM_NO_THREAD,
        "no thread can be started for the stream",
        got=reason,
        hint="raise the limits on threads and on address space",
    )
