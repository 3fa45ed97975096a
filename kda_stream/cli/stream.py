"""`kda-stream stream`: the main job, with nobody to hand the weights to."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.layer import LayerIndex
from ..kda.check import FamilyChoice
from ..kda.families import BLOCKS, GLM5_NEXT
from ..staging.locking import LOCK_POLICIES, LockPolicy, LockReport
from ..staging.reading import READ_PATHS, RESIDENCIES, ReadPath, Residency
from ..staging.residency import MemoryUse, memory_use
from ..stream import KdaLayer, KdaLayerStream, StreamReport, stream_kda_layers
from .arguments import Commands, Parser, add_command, add_family, add_path, names_files
from .output import Exit, Result, exact_size, path_line, plural, row, size
from .page.stream_report import StreamRecord
from .progress import Figures, Progress

Watch = Callable[[KdaLayer, KdaLayerStream], None]


def add_parser(commands: Commands[Parser]) -> None:
    """Add `stream` to the subcommands."""
    parser = add_command(
        commands,
        "stream",
        "stage KDA layers in page-locked memory, one after the other, and tell how it went",
        example="GLM-5.3-Flash --layers 0,1,9 --slots 3",
        run=_run,
    )
    add_path(parser)
    add_family(parser)
    parser.add_argument(
        "--layers", type=_layer_numbers, metavar="N,N,...", help="these layers (default: every one)"
    )
    parser.add_argument(
        "--slots", type=int, default=2, metavar="N", help="how many layers fit in (default: 2)"
    )
    parser.add_argument(
        "--lock",
        choices=LOCK_POLICIES,
        default="prefer",
        help="lock the memory or fail, lock it if allowed (default), or do not lock it",
    )
    parser.add_argument(
        "--read",
        choices=READ_PATHS,
        default="auto",
        help="copy out of the mapped file, read through the page cache, read past it, or what "
        "suits each layer (default)",
    )
    parser.add_argument(
        "--residency",
        choices=RESIDENCIES,
        default="auto",
        help="keep in the page cache what gets there, drop it, or what suits the memory (default)",
    )
    parser.add_argument(
        "--alignment",
        type=int,
        metavar="BYTES",
        help="begin each tensor at a multiple of this (default: as far into a page as in its file)",
    )
    page = parser.add_argument(
        "--report",
        metavar="FILE",
        help="draw how it went, as a page for a browser, in this new file: rate, memory, page "
        "cache, each layer's time",
    )
    names_files(page)


def _layer_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ArgumentTypeError(
            f"expected numbers such as 0,1,9 and no ranges, got {text!r}"
        ) from None


def _run(arguments: Namespace) -> Result:
    with Progress(quiet=arguments.quiet) as progress:
        return stream_path(
            arguments.path,
            progress=progress.show,
            family=arguments.family,
            layers=arguments.layers,
            slots=arguments.slots,
            lock=arguments.lock,
            read=arguments.read,
            residency=arguments.residency,
            alignment=arguments.alignment,
            report=arguments.report,
        )


def stream_path(
    path: str,
    watch: Watch | None = None,
    *,
    progress: Callable[[Figures], None] | None = None,
    family: FamilyChoice = GLM5_NEXT,
    layers: Sequence[int] | None = None,
    slots: int = 2,
    lock: LockPolicy = "prefer",
    read: ReadPath = "auto",
    residency: Residency = "auto",
    alignment: int | None = None,
    report: str | None = None,
) -> Result:
    """Stream the KDA layers of the checkpoint at `path`; `watch` is shown each of them.

    `progress` is told behind each of them how far that is.

    With `report` memory and page cache are sampled meanwhile, and how it went is drawn as a page,
    in a new file of that name; raises `PathError`, before it opens anything, where that cannot be
    made.

    The facts: `path`, `layers` (how many), `layer_numbers` (in order), `families` (of how many
    layers each), `bytes`, `seconds`, `bytes_per_second`, `reads` (how many layers by the way they
    were read), `notes`, `slots`, `slot_bytes`, `peak_anonymous_bytes` (the most resident at any
    layer), `peak_resident_bytes` (the most of any kind at any time; both null where the system does
    not count them), `lock` (as `LockReport`, of locking alone) and `report` (the file of the page,
    null without). Raises what `open_checkpoint`, `stream_kda_layers` and the stream do.
    """
    with StreamRecord(report) as record, open_checkpoint(path) as checkpoint:
        stream = stream_kda_layers(
            checkpoint,
            family=family,
            layers=layers,
            slots=slots,
            lock=lock,
            read=read,
            residency=residency,
            alignment=alignment,
        )
        bytes_total = _bytes_of(checkpoint, stream.layers)
        anonymous_bytes = memory_use().anonymous_bytes
        families: Counter[str] = Counter()
        with record.sampling(checkpoint, stream.layers), stream:
            for layer in stream:
                record.add(layer, stream)
                if watch is not None:
                    watch(layer, stream)
                if progress is not None:
                    progress(_figures(stream, bytes_total))
                families[layer.report.family] += 1
                if anonymous_bytes is not None:
                    anonymous_bytes = max(anonymous_bytes, memory_use().anonymous_bytes or 0)
            streamed = stream.report
        return record.told(_told(path, stream.layers, families, streamed, anonymous_bytes))


def _bytes_of(checkpoint: Checkpoint, layers: Sequence[LayerIndex]) -> int:
    """The bytes of these layers' attention, which is all that is streamed of a checked layer."""
    nbytes = 0
    for index, times in Counter(layers).items():
        source = checkpoint.layer(index)
        attention = [name for name in source.names() if name.startswith(BLOCKS)]
        nbytes += times * sum(checkpoint.info(source.prefix + name).nbytes for name in attention)
    return nbytes


def _figures(stream: KdaLayerStream, bytes_total: int) -> Figures:
    report = stream.report
    return Figures(report.bytes, bytes_total, report.seconds, report.layers, len(stream.layers))


def _told(
    path: str,
    layers: Sequence[int],
    families: Counter[str],
    report: StreamReport,
    peak_anonymous_bytes: int | None,
) -> Result:
    memory = memory_use()
    rate = report.bytes / report.seconds
    lines = [
        path_line(path),
        *row(
            "streamed",
            f"{plural(report.layers, 'KDA layer')}, {exact_size(report.bytes)}",
        ),
        *row("family", ", ".join(f"{name} ({n:,})" for name, n in families.items())),
        *row(
            "time",
            f"{report.seconds:.3f} s, {rate / 1e9:.3f} GB/s, {_reads_text(report)}",
        ),
        *row("memory", _memory_text(peak_anonymous_bytes, memory, report)),
        *row("locked", _lock_text(report.lock)),
        *(line for note in report.notes for line in row("note", note)),
    ]
    facts = {
        "path": path,
        "layers": report.layers,
        "layer_numbers": [int(number) for number in layers],
        "families": dict(families),
        "bytes": report.bytes,
        "seconds": report.seconds,
        "bytes_per_second": rate,
        "reads": dict(report.reads),
        "notes": list(report.notes),
        "slots": report.slots,
        "slot_bytes": report.slot_bytes,
        "peak_anonymous_bytes": peak_anonymous_bytes,
        "peak_resident_bytes": memory.peak_bytes,
        "lock": _lock_json(report.lock),
    }
    return Result(Exit.DONE, facts, lines)


def _reads_text(report: StreamReport) -> str:
    return ", ".join(f"{plural(layers, 'layer')} {path}" for path, layers in report.reads.items())


def _memory_text(anonymous_bytes: int | None, memory: MemoryUse, report: StreamReport) -> str:
    slots = f"{plural(report.slots, 'slot')} of {size(report.slot_bytes)}"
    if anonymous_bytes is None or memory.peak_bytes is None:
        return f"{slots}; this system does not count what is resident"
    return (
        f"{slots}; peak {size(anonymous_bytes)} anonymous, "
        f"{size(memory.peak_bytes)} with the pages of files"
    )


def _lock_text(lock: LockReport) -> str:
    if lock.locked:
        return f"yes, {lock.locked_bytes:,} bytes"
    if lock.refusal is None:
        return "no, by --lock off"
    limit = "no limit" if lock.limit_bytes is None else f"a limit of {lock.limit_bytes:,}"
    return f"no: {lock.wanted_bytes:,} bytes wanted under {limit}: {lock.refusal}"


def _lock_json(lock: LockReport) -> dict[str, Any]:
    return {
        "policy": lock.policy,
        "locked": lock.locked,
        "wanted_bytes": lock.wanted_bytes,
        "locked_bytes": lock.locked_bytes,
        "locked_before_bytes": lock.locked_before_bytes,
        "limit_bytes": lock.limit_bytes,
        "refusal": lock.refusal,
    }
