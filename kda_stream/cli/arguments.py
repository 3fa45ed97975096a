"""What the parsers of all subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ..errors import ArgumentError, ErrorCode, shown
from ..kda.check import FamilyChoice
from ..kda.families import FAMILIES, GLM5_NEXT
from ..limits import LINE_CHARS_MAX
from .output import Result

PROGRAM: Final = "kda-stream"
EXITS: Final = """\
exit status:
  0    done; verify: no problem
  1    a finding: verify: any problem in the files, a broken or missing shard too;
       diff: a difference; stream: a layer or a config that it refuses
  2    wrong usage: an unknown option, a layer that the checkpoint lacks
  3    cannot read: no such path, no permission, a file that cannot be written, refused
       memory; all but verify: a broken or missing shard or index, failing payload
  130  interrupted
  141  the reader of the output went away
"""


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print and exit with, so that it can become JSON."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.color = False  # Python 3.14 colours help, and minds other rules than terminal.py

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
    """A parser for the subcommand `name`, which takes --json and -q, and is run by `run`."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {PROGRAM} {name} {example}\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no text")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no facts and no progress: errors alone"
    )
    parser.set_defaults(run=run, own=parser)
    return parser


def names_files(action: argparse.Action, *, folders_alone: bool = False) -> None:
    """Let the shell complete what the argument takes: files, or folders alone."""
    vars(action)[NAMES] = FOLDERS if folders_alone else FILES


NAMES: Final = "names"
FILES: Final = "files"
FOLDERS: Final = "folders"

CHECKPOINT: Final = (
    "a directory with an index, an index file, a directory with one shard, or a shard"
)


def add_path(parser: Parser) -> None:
    """The argument that names a checkpoint."""
    names_files(parser.add_argument("path", metavar="PATH", help=CHECKPOINT))


def add_family(parser: Parser) -> None:
    """The option that says which family of checkpoints the KDA layers must be of."""
    parser.add_argument(
        "--family",
        type=_family,
        choices=(*FAMILIES, "auto"),
        default=GLM5_NEXT,
        metavar="NAME",
        help=f"the table that each KDA layer must be: {', '.join(map(str, FAMILIES))}, or auto: "
        f"the one that it is (default: {GLM5_NEXT})",
    )


def _family(text: str) -> FamilyChoice:
    if text == "auto":
        return "auto"
    named = {family.name: family for family in FAMILIES}
    if text.upper() not in named:
        raise argparse.ArgumentTypeError(f"{text!r} is no family: {', '.join(named)}, or auto")
    return named[text.upper()]
