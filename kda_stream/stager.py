"""The thread of a stream: it stages one layer after the other into free slots."""

from __future__ import annotations

from _thread import start_new_thread
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from .bind import KdaBindReport, KdaWeights, bind_checked
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
    bell. `ended` is set by the thread, `_stop` by the stream, `began` by whichever is first.
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
        self.began = False
        self.ended = False
        self._stop = CopyStop()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._config = config
        self._blocks = blocks
        self.arena = arena
        self._choice = replace(choice, stop=self._stop)
        self._alignment = alignment

    # the stream's side

    def start(self) -> None:
        """Begin to stage in a thread of its own; raises RuntimeError when there can be none.

        In one step: threading.Thread.start waits under a lock, and Ctrl-C there would leave the
        lock locked and the new thread waiting for it for ever.
        """
        start_new_thread(self.run, ())
        self.began = True

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
        while self.began and not self.ended:
            self.wait_for_bell()

    # the thread's side

    def run(self) -> None:
        """Stage every layer; an error is left in `failure`."""
        self.began = True
        try:
            for block in self._blocks:
                if not self._stage(block):
                    break
        except BaseException as error:  # handed to the consumer, who raises it
            self.failure = None if self._is_stopping() else error
        self.ended = True
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
