"""The command line as a whole: which subcommands there are, and what becomes of an error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from .. import __version__
from ..errors import (
    ArgumentError,
    BindError,
    ConfigError,
    ErrorCode,
    KdaStreamError,
    MemoryRefusedError,
    NotFoundError,
    PathError,
)
from . import demo, diff, inspect, stream, verify
from .arguments import EXITS, PROGRAM, Parser
from .output import Exit, Result, parts, print_error, print_result

_SUBCOMMANDS: Final = (inspect, verify, stream, diff, demo)
_EXAMPLES: Final = """\
examples:
  kda-stream demo
  kda-stream inspect GLM-5.3-Flash
  kda-stream verify GLM-5.3-Flash --json
  kda-stream stream GLM-5.3-Flash --layers 0,1,9 --slots 3
"""
_LAYER_FINDINGS: Final = (
    ErrorCode.LAYERS_NONE,
    ErrorCode.LAYERS_TWO_PREFIXES,
    ErrorCode.LAYERS_MISSING,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kda-stream` with these arguments, by default the process's own; the exit status."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):
            output.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print_error("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return Exit.PIPE_CLOSED
    except OSError as error:  # any other one is caught where it belongs to a file
        with suppress(OSError):
            print_error(f"error: the output cannot be written: {error.strerror}")
        _discard_output()
        return Exit.CANNOT_READ


def _run(given: list[str]) -> Exit:
    command, as_json = None, "--json" in given
    try:
        arguments = _parser().parse_args(given)
        command = arguments.command
        result: Result = arguments.run(arguments)
    except SystemExit:  # --help, --version
        print(end="", flush=True)
        return Exit.DONE
    except (KdaStreamError, OSError, MemoryError) as error:
        known = _known(error)
        result = Result(_exit_of(known), problems=parts(known))
    print_result(command, result, as_json=as_json)
    return result.exit


def _discard_output() -> None:
    """Let nothing more be written, so that the interpreter does not try again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            os.dup2(nowhere, output.fileno())
    os.close(nowhere)


def _known(error: BaseException) -> KdaStreamError:
    """The error as one of the library's own."""
    if isinstance(error, KdaStreamError):
        return error
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        hint = "check the path, its permissions and the room on its disk"
        return PathError(ErrorCode.PATH_NOT_READABLE, what, path=error.filename, hint=hint)
    return MemoryRefusedError(ErrorCode.MEMORY_REFUSED, "out of memory", hint="use fewer slots")


def _exit_of(error: KdaStreamError) -> Exit:
    if isinstance(error, (ArgumentError, NotFoundError)):
        return Exit.USAGE
    if isinstance(error, (BindError, ConfigError)) or error.code in _LAYER_FINDINGS:
        return Exit.FINDING
    return Exit.CANNOT_READ


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Loads the KDA layers of safetensors checkpoints, checked byte for byte.",
        epilog=f"{_EXAMPLES}\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(commands)
    return parser
