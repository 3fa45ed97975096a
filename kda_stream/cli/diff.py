"""`kda-stream diff`: the KDA layers of two checkpoints, tensor by tensor."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..errors import (
    CheckpointError,
    ErrorCode,
    KdaStreamError,
    PayloadDigestError,
    PayloadValueError,
)
from ..kda.classify import is_kda_block
from ..kda.families import BLOCKS
from ..manifest import ManifestEntry
from ..payload import check_payload
from .arguments import CHECKPOINT, Commands, Parser, add_command, names_files
from .output import Exit, Result, path_row, plural, row
from .progress import Figures, Progress

Names = Mapping[tuple[int, str], str]  # (layer, layer-relative name) to full name


def add_parser(commands: Commands[Parser]) -> None:
    """Add `diff` to the subcommands."""
    summary = "compare the KDA layers of two checkpoints: names, dtypes, shapes, and bytes if asked"
    example = "GLM-5.3-Flash GLM-5.3-Flash --payload"
    parser = add_command(commands, "diff", summary, example=example, run=_run)
    for name in ("a", "b"):
        names_files(parser.add_argument(name, metavar=name.upper(), help=CHECKPOINT))
    parser.add_argument(
        "--payload", action="store_true", help="read these tensors, and compare their bytes too"
    )


def _run(arguments: Namespace) -> Result:
    with Progress(quiet=arguments.quiet) as progress:
        return diff_paths(arguments.a, arguments.b, payload=arguments.payload, watch=progress.show)


def diff_paths(
    a: str, b: str, *, payload: bool = False, watch: Callable[[Figures], None] | None = None
) -> Result:
    """Compare the KDA layers of the checkpoints at `a` and `b`; raises what `open_checkpoint` does.

    The facts: `a`, `b`, `same`, `tensors` (how many were compared), `layers_a`, `layers_b` (the
    numbers of the KDA layers) and `payload` (whether bytes were compared). Each difference is a
    problem, with what `a` has as expected and what `b` has as got.
    """
    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        names_a, names_b = _kda_names(one), _kda_names(other)
        shared = [key for key in names_a if key in names_b]
        problems = [
            *_lost(names_a, names_b, one, other),
            *_kinds(shared, names_a, names_b, one, other),
        ]
        if payload:
            wanted_a, wanted_b = ([names[key] for key in shared] for names in (names_a, names_b))
            found_a, found_b = _digests(((one, wanted_a), (other, wanted_b)), watch)
            problems += _bytes(shared, names_a, names_b, found_a, found_b, other)
    return _told(a, b, names_a, names_b, shared, problems, payload)


def _kda_names(checkpoint: Checkpoint) -> Names:
    """The attention tensors of every KDA layer, in numeric order."""
    found: dict[tuple[int, str], str] = {}
    for index in checkpoint.layers():
        source = checkpoint.layer(index)
        names = source.names()
        if is_kda_block(names) and not index.is_mtp:
            attention = sorted(name for name in names if name.startswith(BLOCKS))
            found.update({(int(index), name): source.prefix + name for name in attention})
    return found


def _lost(a: Names, b: Names, one: Checkpoint, other: Checkpoint) -> Iterator[KdaStreamError]:
    for here, there, checkpoint, where in ((a, b, other, "B"), (b, a, one, "A")):
        for key in here:
            if key not in there:
                yield CheckpointError(
                    ErrorCode.DIFF,
                    f"{where} has no such tensor in its KDA layers",
                    path=checkpoint.path,
                    tensor=here[key],
                    hint="the two store the layer in different ways: kda-stream inspect tells each",
                )


def _kinds(
    shared: list[tuple[int, str]], a: Names, b: Names, one: Checkpoint, other: Checkpoint
) -> Iterator[KdaStreamError]:
    for key in shared:
        here, there = one.info(a[key]), other.info(b[key])
        if (here.dtype, here.shape) != (there.dtype, there.shape):
            yield CheckpointError(
                ErrorCode.DIFF,
                "the tensor has another dtype or shape",
                path=other.shard_of(b[key]).path,
                tensor=b[key],
                expected=f"{here.dtype} {list(here.shape)}",
                got=f"{there.dtype} {list(there.shape)}",
                hint="one of the two was cast or written anew",
            )


def _digests(
    wanted: Sequence[tuple[Checkpoint, list[str]]], watch: Callable[[Figures], None] | None
) -> list[Mapping[str, ManifestEntry]]:
    """The digests of these tensors of each checkpoint, one checkpoint after the other."""
    began_seconds = time.monotonic()
    total = sum(checkpoint.info(name).nbytes for checkpoint, names in wanted for name in names)
    before = 0

    def progress(done: int, _: int) -> None:
        if watch is not None:
            watch(Figures(before + done, total, time.monotonic() - began_seconds))

    found = []
    for checkpoint, names in wanted:
        report = check_payload(checkpoint, digests=True, names=names, progress=progress)
        for problem in report.problems:
            if not isinstance(problem, PayloadValueError):
                raise problem
        before += report.bytes
        found.append(report.tensors)
    return found


def _bytes(
    shared: list[tuple[int, str]],
    a: Names,
    b: Names,
    found_a: Mapping[str, ManifestEntry],
    found_b: Mapping[str, ManifestEntry],
    other: Checkpoint,
) -> Iterator[KdaStreamError]:
    for key in shared:
        here, there = found_a[a[key]], found_b[b[key]]
        if here.sha256 != there.sha256 and str(here) == str(there):
            yield PayloadDigestError(
                ErrorCode.DIFF,
                "the tensor has other bytes",
                path=other.shard_of(b[key]).path,
                tensor=b[key],
                expected=f"sha256 {here.sha256}",
                got=f"sha256 {there.sha256}",
                hint="the two are different trainings, or one is damaged",
            )


def _told(
    a: str,
    b: str,
    names_a: Names,
    names_b: Names,
    shared: list[tuple[int, str]],
    problems: list[KdaStreamError],
    payload: bool,
) -> Result:
    layers_a, layers_b = (sorted({number for number, _ in names}) for names in (names_a, names_b))
    facts: dict[str, Any] = {
        "a": a,
        "b": b,
        "same": not problems,
        "tensors": len(shared),
        "layers_a": layers_a,
        "layers_b": layers_b,
        "payload": payload,
    }
    what = "names, dtypes, shapes and bytes" if payload else "names, dtypes and shapes"
    lines = [
        path_row("A", a),
        path_row("B", b),
        *row("layers", f"{len(layers_a)} KDA layers in A, {len(layers_b)} in B"),
        *row("compared", f"{what} of {plural(len(shared), 'tensor')} that both have"),
    ]
    verdict = plural(len(problems), "difference") if problems else "no difference"
    return Result(Exit.FINDING if problems else Exit.DONE, facts, lines, problems, verdict)
