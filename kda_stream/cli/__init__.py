"""The `kda-stream` command. All of it but this is imported where Ctrl-C is caught already."""

from __future__ import annotations

TYPE_CHECKING = False  # the typing module alone would take longer than all that is here
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kda-stream` with these arguments, by default the process's own; the exit status.

    Ctrl-C is told in a line and is no error. With the process's own arguments the process ends by
    it, and Ctrl-C does nothing any more once there is an exit status.
    """
    is_process = argv is None
    try:
        from . import interrupts

        if is_process:
            interrupts.begin()
        from .command import run

        status = run(argv)
        if is_process:
            interrupts.ignore()
    except KeyboardInterrupt:
        from . import interrupts

        if is_process:
            interrupts.end_process()
        return interrupts.tell()
    return status
