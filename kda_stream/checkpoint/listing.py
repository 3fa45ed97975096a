"""From a path to a checkpoint's files: which index, which shards, what is ignored beside them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from ..errors import CheckpointError, ErrorCode, listed
from ..files import read_small_file, refuse_path
from ..limits import INDEX_BYTES_MAX
from .index import Index, parse_index

SHARD_SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
_OF_SEVERAL: Final = re.compile(r"-of-0*(?!1\.)[1-9][0-9]*\.safetensors$")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint, before any shard is opened; without an index there is one."""

    directory: str
    index_path: str | None
    index: Index | None
    shard_names: tuple[str, ...]
    ignored_names: tuple[str, ...]


def list_files(path: str) -> CheckpointFiles:
    """The files that `path` stands for: a directory, an index file or one shard.

    Raises `PathError`, `ShardIndexError`, or `CheckpointError` for a directory that is none or two.
    """
    if not path:
        refuse_path(path, FileNotFoundError())
    if not os.path.isabs(path):  # so that a later chdir changes nothing
        try:
            path = os.path.join(os.getcwd(), path)
        except OSError as error:
            refuse_path(path, error)
    if os.path.isdir(path):
        return _list_directory(path)
    directory = os.path.dirname(path)
    if path.endswith(".json"):
        return _list_indexed(directory, path)
    return CheckpointFiles(directory, None, None, (os.path.basename(path),), ())


def _list_directory(path: str) -> CheckpointFiles:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        refuse_path(path, error)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    shards = [name for name in names if name.endswith(SHARD_SUFFIX)]
    if len(indexes) == 1:
        return _list_indexed(path, os.path.join(path, indexes[0]))
    if indexes:
        raise CheckpointError(
            ErrorCode.CHECKPOINT_TWO_INDEXES,
            "the directory holds more than one index",
            path=path,
            expected="one index",
            got=listed(indexes),
            hint="pass the path of the index to load",
        )
    if len(shards) == 1 and not _OF_SEVERAL.search(shards[0]):
        return CheckpointFiles(path, None, None, (shards[0],), ())
    if shards:
        count = f"{len(shards)} shards" if len(shards) > 1 else "one shard of several"
        raise CheckpointError(
            ErrorCode.CHECKPOINT_NO_INDEX,
            f"the directory holds {count} and no index",
            path=path,
            expected="a model.safetensors.index.json",
            got=listed(shards),
            hint="fetch the index too, or pass the path of one shard",
        )
    raise CheckpointError(
        ErrorCode.CHECKPOINT_NO_SHARDS,
        "the directory holds no safetensors file",
        path=path,
        expected="model.safetensors, or shards and their index",
        got=listed(names) or "an empty directory",
        hint="pass the folder that holds the weights",
    )


def _list_indexed(directory: str, index_path: str) -> CheckpointFiles:
    index = parse_index(read_small_file(index_path, INDEX_BYTES_MAX), path=index_path)
    named = tuple(sorted(index.shard_tensors))
    try:
        present = {name for name in os.listdir(directory) if name.endswith(SHARD_SUFFIX)}
    except OSError as error:
        refuse_path(directory, error)
    return CheckpointFiles(
        directory, index_path, index, named, tuple(sorted(present.difference(named)))
    )
