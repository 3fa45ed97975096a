"""`kda-stream verify`: is everything as the library needs it? Payload is read only when asked."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from ..bind import check_kda_weights
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..errors import (
    BindError,
    ErrorCode,
    KdaStreamError,
    MemoryRefusedError,
    NotBuiltError,
    PathError,
    PayloadValueError,
)
from ..files import NewFile, read_small_file
from ..kda.check import BindProblem, FamilyChoice, ProblemKind
from ..kda.classify import AttnBlockKind
from ..kda.config import KdaConfig, hidden_layer_count
from ..kda.families import FAMILIES, GLM5_NEXT
from ..limits import MANIFEST_BYTES_MAX
from ..manifest import ManifestEntry, manifest_problems, manifest_text, parse_manifest
from ..payload import PayloadReport, check_payload
from ..selection import config_of, kda_layers
from .arguments import Commands, Parser, add_command, add_family, add_path, names_files
from .failures import parts
from .numbering import numbering_problems
from .output import Exit, Result, note_rows, path_line, plural, row, size, some
from .progress import Figures, Progress
from .survey import (
    LayerFacts,
    count_kinds,
    geometry_json,
    geometry_text,
    kinds_text,
    survey_layers,
)

Watch = Callable[[Figures], None]


@dataclass(slots=True)
class _Checked:
    """What was found out of a checkpoint whose files are sound."""

    family: FamilyChoice
    layers: tuple[LayerFacts, ...] = ()
    kda: tuple[int, ...] = ()
    config: KdaConfig | None = None
    families: Counter[str] = field(default_factory=Counter)
    payload: PayloadReport | None = None
    manifest: str | None = None
    unwritten: PathError | None = None
    problems: list[KdaStreamError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_parser(commands: Commands[Parser]) -> None:
    """Add `verify` to the subcommands."""
    summary = (
        "check headers, index, config and each KDA layer; weights are read only with --payload"
    )
    parser = add_command(commands, "verify", summary, example="GLM-5.3-Flash", run=_run)
    add_path(parser)
    add_family(parser)
    parser.add_argument(
        "--payload",
        action="store_true",
        help="read all payload once: files named by their sha256 must have it, KDA tensors must "
        "hold no NaN and no infinity, nor zeros alone, and zeros where they are padded",
    )
    manifests = parser.add_mutually_exclusive_group()
    for option, does in (
        ("--manifest", "compare each tensor's sha256 with those in FILE"),
        ("--write-manifest", "write each tensor's sha256 to FILE, which must be new"),
    ):
        names_files(
            manifests.add_argument(option, metavar="FILE", help=f"implies --payload: {does}")
        )


def _run(arguments: Namespace) -> Result:
    with Progress(quiet=arguments.quiet) as progress:
        return verify_path(
            arguments.path,
            family=arguments.family,
            payload=arguments.payload,
            manifest=arguments.manifest,
            write_manifest=arguments.write_manifest,
            watch=progress.show,
        )


def verify_path(
    path: str,
    *,
    family: FamilyChoice = GLM5_NEXT,
    payload: bool = False,
    manifest: str | None = None,
    write_manifest: str | None = None,
    watch: Watch | None = None,
) -> Result:
    """Check headers, index, config and the bind of each KDA layer; never raises for a bad file.

    With `payload` also all bytes; with `manifest` against that file, with `write_manifest` into
    that new one; `watch` is told how far that is. Raises `PathError` and `ManifestError` for a
    manifest that cannot be read or written, before anything else is done.

    The facts: `path`, `sound`, and, once headers and index hold, `shards` (how many), `tensors`,
    `tensor_bytes`, `layers` (how many of each kind), `geometry`, `kda_layers_bound` (how many would
    bind), `families` (of how many layers each), `payload` (null, or `bytes`, `seconds`,
    `bytes_per_second`, `files_named_by_digest`, `kda_tensors`, `manifest`, which is null,
    "written", "not written" or "compared") and `notes`. Every problem is in the result.
    """
    with ExitStack() as opened:
        listed = None if manifest is None else _Listed.at(manifest)
        new = None if write_manifest is None else opened.enter_context(NewFile(write_manifest))
        try:
            checkpoint = opened.enter_context(open_checkpoint(path))
        except KdaStreamError as error:
            return _not_opened(path, parts(error))
        checked = _check(checkpoint, family)
        if payload or listed is not None or new is not None:
            _check_payload(checkpoint, checked, listed, new, watch)
        return _told(checkpoint, checked)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The manifest at `path`, and what it lists."""

    path: str
    entries: dict[str, ManifestEntry]

    @classmethod
    def at(cls, path: str) -> _Listed:
        text = read_small_file(path, MANIFEST_BYTES_MAX)
        return cls(path, parse_manifest(text, path=path))


def _check_payload(
    checkpoint: Checkpoint,
    checked: _Checked,
    listed: _Listed | None,
    new: NewFile | None,
    watch: Watch | None,
) -> None:
    began_seconds = time.monotonic()

    def progress(done: int, total: int) -> None:
        if watch is not None:
            watch(Figures(done, total, time.monotonic() - began_seconds))

    digests = listed is not None or new is not None
    report = check_payload(checkpoint, digests=digests, progress=progress)
    checked.payload = report
    checked.problems += report.problems
    if listed is not None:
        checked.manifest = "compared"
        shards = {name: checkpoint.shard_of(name).path for name in checkpoint}
        checked.problems += manifest_problems(listed.entries, report.tensors, shards, listed.path)
    elif new is None:
        return
    elif not all(isinstance(problem, PayloadValueError) for problem in report.problems):
        checked.manifest = "not written"
        checked.notes.append("no manifest was written: not all payload is what it must be")
    else:
        try:
            new.finish(manifest_text(report.tensors).encode())
        except PathError as error:
            checked.manifest, checked.unwritten = "not written", error
            return
        checked.manifest = "written"
        checked.notes.append(
            f"the digests of {plural(len(report.tensors), 'tensor')} were written, and compared "
            "with nothing"
        )


def _not_opened(path: str, problems: Sequence[KdaStreamError]) -> Result:
    facts = {"path": path, "sound": False}
    if all(_is_unreadable(problem, path) for problem in problems):
        return Result(Exit.CANNOT_READ, facts, problems=problems)
    verdict = f"cannot be loaded, {plural(len(problems), 'problem')}"
    return Result(Exit.FINDING, facts, [path_line(path)], problems, verdict)


def _is_unreadable(error: KdaStreamError, path: str) -> bool:
    """Whether nothing is said of the files: they are not at fault, or there is none at `path`."""
    if isinstance(error, (NotBuiltError, MemoryRefusedError)):
        return True
    return isinstance(error, PathError) and (
        error.code is ErrorCode.PATH_NOT_READABLE or error.path == os.path.abspath(path)
    )


def _check(checkpoint: Checkpoint, family: FamilyChoice) -> _Checked:
    checked = _Checked(family, notes=list(checkpoint.report.notes))
    try:
        checked.layers = survey_layers(checkpoint)
        _note_what_is_not_counted(checkpoint, checked)
        checked.problems += numbering_problems(checkpoint, checked.layers)
        checked.kda = kda_layers(checkpoint)
        checked.config = config_of(checkpoint)
        for number in checked.kda:
            source = checkpoint.layer(number)
            try:
                report = check_kda_weights(checked.config, number, source, family=family)
            except BindError as refusal:
                checked.problems += _bind_errors(checkpoint, source.prefix, refusal)
            else:
                checked.families[report.family] += 1
        _note_another_family(checked)
    except KdaStreamError as error:  # no decoder, no KDA layer, or no usable config
        checked.problems += parts(error)
    unknown = [
        int(layer.index)
        for layer in checked.layers
        if layer.label == AttnBlockKind.UNKNOWN and not layer.is_broken_kda
    ]
    if unknown:
        checked.notes.append(
            f"{plural(len(unknown), 'layer')} of neither kind, not checked: "
            f"{some(unknown, len(unknown))}"
        )
    return checked


def _note_another_family(checked: _Checked) -> None:
    """Say of layers that are refused, and are exactly those of another family, of which."""
    numbers = set(checked.kda)
    found = {layer.family for layer in checked.layers if int(layer.index) in numbers}
    told = {str(checked.family), *checked.families}  # of that asked for, the config may not fit
    others = sorted(name for name in found if name and name not in told)
    if others and checked.family != "auto":
        checked.notes.append(
            f"the layers are those of {' and '.join(others)}: pass --family {others[0]}, or auto"
        )


def _note_what_is_not_counted(checkpoint: Checkpoint, checked: _Checked) -> None:
    config = checkpoint.config
    if config is None or hidden_layer_count(config, checkpoint.config_path) is None:
        lack = "there is no config" if config is None else "the config has no num_hidden_layers"
        checked.notes.append(
            f"{lack}: it is not known whether layers are missing, and which are MTP layers"
        )


_FAULTS: Final = {
    ProblemKind.UNKNOWN: "it is no tensor of a KDA block",
    ProblemKind.REPEATED: "it is listed twice",
    ProblemKind.MISSING: "it is missing from its KDA block",
    ProblemKind.DTYPE: "it has the wrong dtype for a KDA block",
    ProblemKind.SHAPE: "it has the wrong shape for a KDA block",
    ProblemKind.BYTES: "it has the wrong byte count for a KDA block",
}


def _bind_errors(checkpoint: Checkpoint, prefix: str, refusal: BindError) -> list[BindError]:
    """An error for each tensor that keeps the layer from being bound."""
    return [
        _bind_error(problem, prefix, checkpoint.path, refusal.hint) for problem in refusal.problems
    ]


def _bind_error(problem: BindProblem, prefix: str, path: str, hint: str | None) -> BindError:
    error = BindError(
        ErrorCode.BIND_REFUSED,
        _FAULTS[problem.kind],
        path=problem.shard or path,
        tensor=prefix + problem.tensor,
        expected=_kind_text(problem.expected_dtype, problem.expected_shape),
        got=_kind_text(problem.stored_dtype, problem.stored_shape),
        hint=hint,
    )
    if problem.kind is ProblemKind.BYTES:
        error.expected, error.got = f"{problem.expected_bytes} bytes", f"{problem.stored_bytes}"
    error.problems = (problem,)
    return error


def _kind_text(dtype: str | None, shape: tuple[int, ...] | None) -> str | None:
    return None if dtype is None else f"{dtype} {list(shape or ())}"


def _told(checkpoint: Checkpoint, checked: _Checked) -> Result:
    report, config, problems = checkpoint.report, checked.config, checked.problems
    counts = count_kinds(checked.layers)
    bound = "not checked"
    if config is not None:
        bound = _bound_text(checked)
    lines = [
        path_line(checkpoint.path),
        *row(
            "files",
            f"{plural(report.shards, 'shard')}, {plural(report.tensors, 'tensor')}, "
            f"{size(report.tensor_bytes)}: every header and the index hold",
        ),
        *row("geometry", "not known" if config is None else geometry_text(config)),
        *row("bind", bound),
        *_payload_rows(checked),
        *note_rows(checked.notes),
    ]
    found = plural(len(problems), "problem") if problems else "no problem"
    kinds = kinds_text(counts) if checked.layers else "layers not known"
    verdict = f"{plural(report.shards, 'shard')}, {kinds}, {found}"
    facts = {
        "path": checkpoint.path,
        "sound": not problems,
        "shards": report.shards,
        "tensors": report.tensors,
        "tensor_bytes": report.tensor_bytes,
        "layers": counts,
        "geometry": geometry_json(config),
        "kda_layers_bound": checked.families.total(),
        "families": dict(checked.families),
        "payload": _payload_json(checked),
        "notes": checked.notes,
    }
    result = Result(Exit.FINDING if problems else Exit.DONE, facts, lines, problems, verdict)
    return result if checked.unwritten is None else result.without_file(checked.unwritten)


def _bound_text(checked: _Checked) -> str:
    sizes = {family.name: len(family.tensors) for family in FAMILIES}
    held = [f"{count} the {sizes[name]} of {name}" for name, count in checked.families.items()]
    if len(held) == 1:
        (name,) = checked.families
        held = [f"the {sizes[name]} tensors of {name}"]
    return (
        f"{checked.families.total()} of {len(checked.kda)} KDA layers hold exactly "
        f"{', '.join(held) or _asked_text(checked.family)}, each with its dtype and shape"
    )


def _asked_text(family: FamilyChoice) -> str:
    if family == "auto":
        return "the tensors of a family"
    return f"the {len(family.tensors)} tensors of {family}"


def _payload_rows(checked: _Checked) -> list[str]:
    report = checked.payload
    if report is None:
        return []
    compared = "" if checked.manifest is None else f"; manifest {checked.manifest}"
    return row(
        "payload",
        f"{size(report.bytes)} read in {report.seconds:.1f} s, {size(_rate(report))}/s; "
        f"{plural(report.files_named_by_digest, 'file')} compared with the sha256 in their names; "
        f"values of {plural(report.kda_tensors, 'KDA tensor')} looked at{compared}",
    )


def _payload_json(checked: _Checked) -> dict[str, Any] | None:
    report = checked.payload
    if report is None:
        return None
    return {
        "bytes": report.bytes,
        "seconds": report.seconds,
        "bytes_per_second": _rate(report),
        "files_named_by_digest": report.files_named_by_digest,
        "kda_tensors": report.kda_tensors,
        "manifest": checked.manifest,
    }


def _rate(report: PayloadReport) -> float:
    return report.bytes / report.seconds if report.seconds else 0.0
