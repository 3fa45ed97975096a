"""`kda-stream env`: what a bug report needs of the machine, and of a path on it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..errors import CheckpointError, ConfigError, ErrorCode, KdaStreamError, PathError
from ..files import open_regular_file
from ..kda.check import check_kda_block, identify_block
from ..kda.config import KdaConfig
from ..layout import fields_of, lay_out
from ..selection import config_of, kda_layers
from ..staging.reading import ReadChoice, foresee
from ..staging.residency import direct_alignment, file_system_of
from .arguments import CHECKPOINT, Commands, Parser, add_command, names_files
from .failures import exit_of, known, parts
from .machine import machine_facts, machine_lines
from .output import Exit, Result, path_row, row, size


def add_parser(commands: Commands[Parser]) -> None:
    """Add `env` to the subcommands."""
    summary = "tell what a bug report needs: versions, memory, limits, and the disk at PATH"
    parser = add_command(commands, "env", summary, example="GLM-5.3-Flash", run=_run)
    path = parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=os.curdir,
        help=f"any path, or a checkpoint: {CHECKPOINT} (default: the current directory)",
    )
    names_files(path)


def _run(arguments: Namespace) -> Result:
    return env_of(arguments.path)


def env_of(path: str) -> Result:
    """Tell of the machine, of the disk at `path`, and how a checkpoint there would be read now.

    The facts: `path`, those of `machine_facts`, `disk` (`file_system`, `is_remote`, `free_bytes`,
    `direct_alignment_bytes`; each null where it is not known or there is none) and `read`, which is
    null where `path` is no checkpoint with KDA layers: `layer` (the first of them), `path` (the way
    that read="auto" takes for it), `reason`, `cached_bytes` (of it, in the page cache) and `bytes`.
    Of a layer that cannot be bound `reason` says why, and those behind `layer` are null.

    What is wrong with a checkpoint is a problem of the result. No payload is read, but where the
    kernel does not count the page cache: there a bind reads 64 bytes to tell, and so does this.
    """
    failure: KdaStreamError | None = None
    with ExitStack() as opened:
        checkpoint, read = None, None
        try:
            checkpoint = opened.enter_context(open_checkpoint(path))
            read = _read(checkpoint)
        except (KdaStreamError, OSError, MemoryError) as error:
            refusal = known(error)
            failure = None if refusal.code in _NO_CHECKPOINT else refusal
        disk = _disk(path, checkpoint)
    facts = {"path": path, **machine_facts(), "disk": disk, "read": read}
    lines = [
        *machine_lines(facts),
        path_row("path", path),
        *row("disk", _disk_text(disk)),
        *row("read", _read_text(read, failure, is_built=facts["native"])),
    ]
    if failure is None:
        return Result(Exit.DONE, facts, lines)
    return Result(exit_of(failure), facts, lines, parts(failure))


_NO_CHECKPOINT: Final = (ErrorCode.CHECKPOINT_NO_SHARDS, ErrorCode.NOT_BUILT)
"""With these codes there is nothing wrong with the path."""


# The disk ----------------------------------------------------------------------------------------


def _disk(path: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Of the disk that the first shard lies on, which may be another one than that of a link."""
    if checkpoint is not None:
        path = next(iter(checkpoint.shards.values())).path
    facts: dict[str, Any] = {
        "file_system": None,
        "is_remote": None,
        "free_bytes": None,
        "direct_alignment_bytes": None,
    }
    with suppress(OSError, KdaStreamError), _open(path) as descriptor:
        status = os.fstatvfs(descriptor)
        facts["free_bytes"] = status.f_bavail * status.f_frsize
        system = file_system_of(descriptor)
        facts |= {"file_system": system.name, "is_remote": system.is_remote}
        facts["direct_alignment_bytes"] = _direct_alignment_bytes(path, descriptor)
    return facts


@contextmanager
def _open(path: str) -> Iterator[int]:
    """A descriptor of the file or the folder; a named pipe is not waited for."""
    if not os.path.isdir(path):
        with open_regular_file(path) as file:
            yield file.fileno()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _direct_alignment_bytes(path: str, descriptor: int) -> int | None:
    """The block of direct reads; in a folder of any file there, since a folder itself has none."""
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            file = next((at.path for at in entries if at.is_file(follow_symlinks=False)), None)
        if file is None:
            return None
        with _open(file) as inner:
            return _direct_alignment_bytes(file, inner)
    alignment = direct_alignment(descriptor)
    if alignment is None or not alignment.offset_bytes:
        return None
    return max(alignment.memory_bytes, alignment.offset_bytes)


def _disk_text(disk: dict[str, Any]) -> str:
    if disk["free_bytes"] is None:
        return "not known"
    where = {True: "remote", False: "local", None: "not known whether remote"}[disk["is_remote"]]
    block = disk["direct_alignment_bytes"]
    direct = "no alignment of direct reads is told"
    if block is not None:
        direct = f"direct reads in blocks of {block:,} bytes"
    system = disk["file_system"] or "an unknown file system"
    return f"{system}, {where}, {size(disk['free_bytes'])} free, {direct}"


# The checkpoint ----------------------------------------------------------------------------------


def _read(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """How its first KDA layer would be read now; None where it has none."""
    try:
        layer = kda_layers(checkpoint)[0]
    except CheckpointError:
        return None
    source = checkpoint.layer(layer)
    try:
        family, config = identify_block(source, _config(checkpoint))
        block = check_kda_block(config, layer, source, family)
        layout = lay_out(fields_of(config, family, block.tensors), block.tensors, None)
        report = foresee(layout.wanted, ReadChoice(whole_bytes=block.nbytes))
    except KdaStreamError as error:
        facts: dict[str, Any] = {
            "path": None,
            "reason": error.finding,
            "cached_bytes": None,
            "bytes": None,
        }
    else:
        facts = {
            "path": report.path,
            "reason": "; ".join((report.reason, *report.notes)),
            "cached_bytes": report.cached_before_bytes,
            "bytes": block.nbytes,
        }
    return {"layer": int(layer), **facts}


def _config(checkpoint: Checkpoint) -> KdaConfig | None:
    """The config's geometry; None where there is none, and that of the tensors has to do."""
    try:
        return config_of(checkpoint)
    except (ConfigError, PathError):
        return None


def _read_text(
    read: dict[str, Any] | None, failure: KdaStreamError | None, *, is_built: bool
) -> str:
    if not is_built:
        return "no checkpoint can be opened without the compiled part"
    if failure is not None:
        return "not known: see the error"
    if read is None:
        return "there is no checkpoint with KDA layers"
    if read["path"] is None:
        return f"layer {read['layer']} cannot be bound: {read['reason']}"
    cached = read["cached_bytes"]
    count = "an unknown number" if cached is None else f"{cached:,}"
    return (
        f"layer {read['layer']} is read {read['path']} now: {read['reason']}; {count} of "
        f"{read['bytes']:,} bytes are cached"
    )
