"""`kda-stream completion`: a script that lets the shell complete this command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from ..errors import ArgumentError, ErrorCode, NotInstalledError
from .arguments import FILES, FOLDERS, NAMES, Commands, Parser, add_command
from .output import Exit, Result

_SHELLS: Final = ("bash", "zsh", "tcsh")
_WHERE_TO: Final = """
It needs: pip install 'kda-stream[terminal]'

in ~/.bashrc:                 eval "$(kda-stream completion bash)"
in ~/.zshrc, after compinit:  eval "$(kda-stream completion zsh)"
once, for ~/.tcshrc:          kda-stream completion tcsh > ~/.kda-stream.tcsh
in ~/.tcshrc:                 source ~/.kda-stream.tcsh"""


def add_parser(commands: Commands[Parser]) -> None:
    """Add `completion` to the subcommands."""
    summary = "print a script that completes this command line in a shell"
    parser = add_command(commands, "completion", summary, example="bash", run=_run)
    parser.description = f"{parser.description}\n{_WHERE_TO}"
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=_SHELLS,
        help=f"{', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}",
    )


def _run(arguments: argparse.Namespace) -> Result:
    return completion_script(arguments.whole, arguments.shell)


def completion_script(parser: argparse.ArgumentParser, shell: str) -> Result:
    """A script of that shell that completes the command line of `parser`; made by shtab.

    The facts: `shell` and `script`. Raises `NotInstalledError` without shtab, and `ArgumentError`
    for a shell that this version of it does not have.
    """
    try:
        import shtab
    except ImportError as error:
        raise NotInstalledError(
            ErrorCode.NOT_INSTALLED,
            "completion needs the package shtab",
            expected="shtab",
            got=str(error),
            hint="pip install 'kda-stream[terminal]'",
        ) from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "shtab does not know the shell",
            expected=" or ".join(shtab.SUPPORTED_SHELLS),
            got=shell,
            hint="pip install --upgrade shtab",
        )
    completed = {FILES: shtab.FILE, FOLDERS: shtab.DIRECTORY}
    for action in _actions(parser):
        if NAMES in vars(action):
            vars(action)["complete"] = completed[vars(action)[NAMES]]
    script = shtab.complete(parser, shell)
    return Result(
        Exit.DONE,
        {"shell": shell, "script": script},
        script.rstrip("\n").split("\n"),
        is_script=True,
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of the command line, those of its subcommands too."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
