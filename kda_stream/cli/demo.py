"""`kda-stream demo`: a small checkpoint, written and put through the other subcommands."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import ArgumentError, ErrorCode, KdaStreamError, PayloadError
from ..stream import KdaLayer, KdaLayerStream
from .arguments import Commands, Parser, add_command, names_files
from .inspect import inspect_path
from .output import Exit, Result, path_line, path_row, plural, row
from .stream import stream_path
from .verify import verify_path


def add_parser(commands: Commands[Parser]) -> None:
    """Add `demo` to the subcommands."""
    summary = "write a small checkpoint, then inspect, verify and stream it"
    parser = add_command(commands, "demo", summary, example="small-checkpoint", run=_run)
    directory = parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="where to write it, new or empty (default: a temporary directory)",
    )
    names_files(directory, folders_alone=True)


def _run(arguments: Namespace) -> Result:
    return run_demo(arguments.directory)


def run_demo(directory: str | None = None) -> Result:
    """Write the checkpoint of `testing.Layout()`, then inspect, verify and stream it.

    Every streamed byte is compared with what was written. The files stay when a `directory` is
    given, which must be new or empty, else `ArgumentError` is raised. The facts: `directory`,
    `kept`, `bytes_checked`, and the facts of `inspect`, `verify` and `stream` under these names.
    """
    if directory is None:
        with TemporaryDirectory(prefix="kda-stream-demo-") as made:
            return _demonstrated(made, kept=False)
    if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.listdir(directory)):
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the demo writes into a directory of its own",
            path=directory,
            expected="a path where nothing is, or an empty directory",
            hint="give another path, or none for a temporary directory",
        )
    return _demonstrated(directory, kept=True)


def _demonstrated(directory: str, *, kept: bool) -> Result:
    from ..testing import Layout, bound_payload, write_checkpoint  # hashlib, safetensors and more

    layout = Layout()
    write_checkpoint(directory, layout)
    lines = [f"wrote a checkpoint in the layout of GLM-5.3-Flash, {layout.shards} shards"]
    facts: dict[str, Any] = {"directory": directory, "kept": kept, "bytes_checked": 0}
    differing: list[KdaStreamError] = []

    def compare(layer: KdaLayer, _: KdaLayerStream) -> None:
        written = bound_payload(layout, layer.index)
        for field, tensor in layer.weights.items():
            facts["bytes_checked"] += tensor.data.nbytes
            if tensor.data != written[field]:
                differing.append(_difference(directory, layer.index, field))

    steps: dict[str, Callable[[str], Result]] = {
        "inspect": inspect_path,
        "verify": verify_path,
        "stream": lambda path: stream_path(path, compare),
    }
    for command, step in steps.items():
        result = step(directory)
        lines += ["", f"$ kda-stream {command} {path_line(directory)}", *result.lines]
        lines += [result.verdict] if result.verdict else []
        facts[command] = result.facts
        if result.exit:
            return Result(result.exit, facts, lines, result.problems)
    layers = plural(len(layout.kda_layers), "layer")
    verdict = "some of them not as they were written" if differing else "each as it was written"
    place = "kept" if kept else "removed again (`kda-stream demo DIR` keeps them)"
    lines += [
        "",
        *row("checked", f"{facts['bytes_checked']:,} streamed bytes of {layers}, {verdict}"),
        path_row("files", directory),
        *row("", place),
    ]
    return Result(Exit.FINDING if differing else Exit.DONE, facts, lines, differing)


def _difference(directory: str, layer: int, field: str) -> PayloadError:
    return PayloadError(
        ErrorCode.FILE_CHANGED,
        f"layer {layer}: {field} was not streamed as it was written",
        path=directory,
        expected="the bytes of kda_stream.testing.payload",
        hint="the files were changed meanwhile, or memory or disk is faulty; else report a bug",
    )
