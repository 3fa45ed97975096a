"""The `kda-stream` command. All of it but this is imported where Ctrl-C is caught already."""

from __future__ import annotations

TYPE_CHECKING = False  # the typing module alone would take longer than all that is here
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kda-stream` with these arguments, by default the process's own; the exit status.

    Never raises KeyboardInterrupt. With the process's own arguments that is its end: signals from
    the keyboard are ignored afterwards, so that the interpreter's end is quiet too.
    """
    is_process = argv is None
    try:
        from . import interrupts

        if is_process:
            interrupts.begin()
        from .command import run

        status = run(argv)
        if is_process:
            interrupts.end(was_interrupted=False)
    except KeyboardInterrupt:
        from . import interrupts

        if is_process:
            interrupts.end(was_interrupted=True)
        return interrupts.tell()
    return status
