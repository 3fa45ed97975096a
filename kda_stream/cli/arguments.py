"""What the parsers of all subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final, NoReturn

from ..errors import ArgumentError, ErrorCode, shown
from ..limits import LINE_CHARS_MAX
from .output import Result

PROGRAM: Final = "kda-stream"
EXITS: Final = """\
exit status:
  0    done; verify: no problem
  1    a finding: verify: any problem in the files, a broken or missing shard too;
       stream: a layer or a config that it refuses
  2    wrong usage: an unknown option, a layer that the checkpoint lacks
  3    cannot read: no such path, no permission; inspect and stream: a broken or missing
       shard or index, failing payload, refused memory
  130  interrupted
  141  the reader of the output went away
"""


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print and exit with, so that it can become JSON."""

    def error(self, message: str) -> NoReturn:
        """Raise an `ArgumentError`."""
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            shown(message, LINE_CHARS_MAX),
            hint=f"`{self.prog} --help` tells more",
        )


Commands = argparse._SubParsersAction  # argparse gives it no other name


def add_command(
    commands: Commands[Parser],
    name: str,
    summary: str,
    *,
    example: str,
    run: Callable[[argparse.Namespace], Result],
) -> Parser:
    """A parser for the subcommand `name`, which takes --json and is run by `run`."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {PROGRAM} {name} {example}\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no text")
    parser.set_defaults(run=run)
    return parser


def add_path(parser: Parser) -> None:
    """The argument that names a checkpoint."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a directory with an index, an index file, a directory with one shard, or a shard",
    )
