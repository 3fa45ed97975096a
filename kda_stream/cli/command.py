"""The command line as a whole: which subcommands there are, and what becomes of an error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from .. import __version__
from ..errors import KdaStreamError
from . import completion, demo, diff, env, inspect, stream, verify
from .arguments import EXITS, PROGRAM, Parser
from .failures import exit_of, known, parts
from .output import Exit, Result, print_result
from .terminal import discard, print_error, printing_all

_SUBCOMMANDS: Final = (inspect, verify, stream, diff, demo, env, completion)
_EXAMPLES: Final = """\
examples:
  kda-stream demo
  kda-stream inspect GLM-5.3-Flash
  kda-stream verify GLM-5.3-Flash --json
  kda-stream stream GLM-5.3-Flash --layers 0,1,9 --slots 3
  kda-stream env GLM-5.3-Flash
"""


def run(argv: Sequence[str] | None = None) -> Exit:
    """Run `kda-stream` with these arguments, by default the process's own; the exit status.

    Raises KeyboardInterrupt, and no error.
    """
    given = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(printing_all, given)
    status = _run_to_the_end(sys.argv[1:] if argv is None else list(argv))
    sys.stdout, sys.stderr = given
    return status


def _run_to_the_end(given: list[str]) -> Exit:
    try:
        return _run(given)
    except BrokenPipeError:
        _discard_both()
        return Exit.PIPE_CLOSED
    except OSError as error:  # any other one is caught where it belongs to a file
        with suppress(OSError):
            print_error(f"error: the output cannot be written: {error.strerror}")
        _discard_both()
        return Exit.CANNOT_READ


def _run(given: list[str]) -> Exit:
    parser = command_parser()
    command, as_json, quiet = None, "--json" in given, False
    try:
        arguments, unknown = parser.parse_known_args(given)
        if unknown:
            arguments.own.error(f"unrecognized arguments: {' '.join(unknown)}")
        command, as_json, quiet = arguments.command, arguments.json, arguments.quiet
        result: Result = arguments.run(arguments)
    except SystemExit:  # --help, --version
        print(end="", flush=True)
        return Exit.DONE
    except (KdaStreamError, OSError, MemoryError) as error:
        failure = known(error)
        result = Result(exit_of(failure), problems=parts(failure))
    print_result(command, result, as_json=as_json, quiet=quiet)
    return result.exit


def _discard_both() -> None:
    for output in (sys.stdout, sys.stderr):
        discard(output)


def command_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog=PROGRAM,
        description="Loads the KDA layers of safetensors checkpoints, checked byte for byte.",
        epilog=f"{_EXAMPLES}\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(whole=parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(commands)
    return parser
