"""The thread of a stream: it stages one layer after the other into free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from .bind import KdaBindReport, KdaWeights, bind_checked
from .closing import BackgroundThread
from .errors import ErrorCode, KdaStreamError, StreamError
from .kda.check import CheckedBlock
from .kda.config import KdaConfig
from .limits import BELL_SECONDS
from .staging.arena import PinnedArena
from .staging.reading import ReadChoice
from .staging.spans import CopyStop

Staged = tuple[KdaWeights, KdaBindReport]


class Stager:
    """What passes between a stream and its thread. The thread holds this, and not the stream.

    No lock is in it that Ctrl-C could leave locked: plain attributes and a queue that serves as a
    bell. `_ended` is set by the thread, `_stop` by the stream.
    """

    def __init__(
        self,
        config: KdaConfig,
        blocks: Iterable[CheckedBlock],
        arena: PinnedArena,
        choice: ReadChoice,
        alignment: int | None,
    ) -> None:
        self.staged: deque[Staged] = deque()
        self.failure: BaseException | None = None
        self._thread = BackgroundThread()
        self._ended = False
        self._stop = CopyStop()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._config = config
        self._blocks = blocks
        self.arena = arena
        self._choice = replace(choice, stop=self._stop)
        self._alignment = alignment

    # the stream's side

    def start(self) -> None:
        """Begin to stage in a thread of its own; raises RuntimeError when there can be none."""
        self._thread.start(self._run)

    @property
    def ended(self) -> bool:
        """Whether nothing more will be staged."""
        return self._ended or self._thread.is_over

    def take_failure(self) -> BaseException | None:
        """Why it ended before all was staged, told once."""
        failure, self.failure = self.failure, None
        if failure is None and not self._ended:
            return no_thread("it ended before its first line, as where memory is short")
        return failure

    def wait_for_bell(self) -> None:
        """Wait until the thread has done something, at most `BELL_SECONDS`."""
        with suppress(Empty):
            self._bell.get(timeout=BELL_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether the thread was told to end."""
        return self._stop.is_set

    def refuse_more(self) -> None:
        """Have the thread end at its next piece, and do not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Have the thread end, and wait for it; one that has not begun will do nothing."""
        self.refuse_more()
        self.arena.wake()
        while not self.ended:
            self.wait_for_bell()

    # the thread's side

    def _run(self) -> None:
        """Stage every layer; an error is left in `failure`."""
        try:
            for block in self._blocks:
                if not self._stage(block):
                    break
        except BaseException as error:  # handed to the consumer, who raises it
            self.failure = None if self._is_stopping() else _without_frames(error)
        self._ended = True
        self._bell.put(None)

    def _stage(self, block: CheckedBlock) -> bool:
        """Fill one slot with one layer; False when the stream is being closed."""
        slot = self.arena.wait_for_slot(self._is_stopping)
        if slot is None:
            return False
        staged = bind_checked(self._config, block, slot, self._choice, self._alignment)
        self.staged.append(staged)
        self._bell.put(None)
        return True

    def _is_stopping(self) -> bool:
        return self.stopping


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
