"""A checkpoint: a directory, an index or one file, as one mapping of checked tensors."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, Final, Literal

from ..closing import Closing, finish_first
from ..errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    ErrorCode,
    HeaderError,
    InUseError,
    KdaStreamError,
    NotFoundError,
    PathError,
    ShardIndexError,
    ShardsMissingError,
    listed,
    shown,
)
from ..kda.config import hidden_layer_count, read_config
from ..kda.source import RawTensor
from ..limits import HEADER_BYTES_MAX, SHOWN_ITEMS_MAX
from .header import TensorInfo
from .layer import LayerIndex, LayerNames, LayerSource, find_layers
from .listing import CheckpointFiles, list_files
from .shard import Shard, open_shard

CONFIG_NAME: Final = "config.json"


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What opening a checkpoint found beside its tensors.

    `unlisted` are (tensor, shard file) that a shard holds and the index does not place there: no
    part of the checkpoint. `ignored_files` are safetensors files in the folder that the index does
    not name. `total_size_listed` is the index's claim, `tensor_bytes` the truth.
    """

    shards: int
    tensors: int
    tensor_bytes: int
    file_bytes: int
    unlisted: tuple[tuple[str, str], ...]
    ignored_files: tuple[str, ...]
    total_size_listed: int | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Each thing that was ignored, as a sentence."""
        notes = []
        if self.unlisted:
            notes.append(
                f"{len(self.unlisted)} tensors are not placed in their shard by the index and are "
                "ignored: " + listed([f"{name} in {file}" for name, file in self.unlisted])
            )
        if self.ignored_files:
            notes.append(
                f"{len(self.ignored_files)} safetensors files are not named by the index and are "
                "ignored: " + listed(list(self.ignored_files))
            )
        if self.total_size_listed not in (None, self.tensor_bytes):
            notes.append(
                f"the index claims a total_size of {self.total_size_listed} bytes, its tensors "
                f"have {self.tensor_bytes}"
            )
        return tuple(notes)


class Checkpoint(Closing):
    """An open checkpoint: a read-only mapping from tensor name to `RawTensor`.

    Made by `open_checkpoint`. Every header has been checked; no payload has been touched, and no
    descriptor is held. Tensors are lent: their views end with `close()`. Safe to use from several
    threads. A context manager.

    Attributes: `path` as given, `directory` that holds the shards, `report` (an `OpenReport`).
    """

    def __init__(
        self,
        path: str,
        files: CheckpointFiles,
        shards: Mapping[str, Shard],
        places: Mapping[str, str],
        unlisted: tuple[tuple[str, str], ...],
    ) -> None:
        self.path = path
        self.directory = files.directory
        self._shards = shards
        self._places = places
        self._closed = False
        self._layers_lock = threading.RLock()
        self._layers: LayerNames | None = None
        self.report = OpenReport(
            shards=len(shards),
            tensors=len(places),
            tensor_bytes=sum(shard.header.payload_bytes for shard in shards.values())
            - sum(shards[file].header.info(name).nbytes for name, file in unlisted),
            file_bytes=sum(shard.identity.file_bytes for shard in shards.values()),
            unlisted=unlisted,
            ignored_files=files.ignored_names,
            total_size_listed=None if files.index is None else files.index.total_size,
        )

    # the mapping

    def keys(self) -> list[str]:
        """Every tensor name, in the index's order."""
        return list(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> RawTensor:
        return self.tensor(name)

    def info(self, name: str) -> TensorInfo:
        """What the headers say of the tensor `name`; raises `NotFoundError` when there is none."""
        return self.shard_of(name).header.info(name)

    def tensor(self, name: str) -> RawTensor:
        """The tensor `name`, its bytes lent until `close()`.

        Raises `NotFoundError` when there is none, `ClosedError` after `close()`.
        """
        if self._closed:
            raise ClosedError(
                ErrorCode.CHECKPOINT_CLOSED,
                "the checkpoint is closed",
                path=self.path,
                tensor=name,
                hint="open it again",
            )
        return self.shard_of(name).tensor(name)

    def shard_of(self, name: str) -> Shard:
        """The shard that holds the tensor `name`; raises `NotFoundError` when none does."""
        file = self._places.get(name)
        if file is None:
            raise NotFoundError(
                ErrorCode.TENSOR_UNKNOWN,
                "the checkpoint has no such tensor",
                path=self.path,
                tensor=name,
                hint="keys() lists the names",
            )
        return self._shards[file]

    @property
    def shards(self) -> Mapping[str, Shard]:
        """The shards by file name, in the index's order."""
        return self._shards

    # layers

    @property
    def config_path(self) -> str | None:
        """The config.json beside the shards, or None when there is none."""
        path = os.path.join(self.directory, CONFIG_NAME)
        return path if os.path.lexists(path) else None

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json beside the shards as an object, or None; raises `ConfigError`."""
        return None if self.config_path is None else read_config(self.config_path)

    @property
    def layer_prefix(self) -> str:
        """What the full names of layer tensors have before the layer's number."""
        return self._layer_names().prefix

    def layers(self) -> tuple[LayerIndex, ...]:
        """The numbers of the layers, in numeric order, with `is_mtp` marked.

        A layer is an MTP layer when its number is at least the config's `num_hidden_layers`; with
        no config, none is marked. Raises `CheckpointError` when the names show no decoder or two,
        `ConfigError` when there is a config and it cannot be read.
        """
        return tuple(self._layer_index(number) for number in self._layer_names().by_number)

    def layer(self, index: int) -> LayerSource:
        """The layer of that number; raises `NotFoundError` when the checkpoint has none.

        Further, what `layers` raises.
        """
        layers = self._layer_names()
        number = int(index) if hasattr(index, "__index__") else None
        names = None if number is None else layers.by_number.get(number)
        if number is None or names is None:
            numbers = list(layers.by_number)
            raise NotFoundError(
                ErrorCode.LAYER_UNKNOWN,
                f"the checkpoint has no layer {shown(index)}",
                path=self.path,
                expected=f"one of {len(numbers)} layers from {numbers[0]} to {numbers[-1]} "
                f"under {layers.prefix}",
                hint="layers() lists them",
            )
        prefix = f"{layers.prefix}{number}."
        return LayerSource(self, self._layer_index(number), prefix, names)

    def require_every_layer(self) -> None:
        """Raise `CheckpointError` when the config counts decoder layers that have no tensors.

        With no config, or none that counts them, nothing is known and nothing is raised. Further,
        what `layers` raises.
        """
        expected = self._layer_count()
        present = {int(index) for index in self.layers() if not index.is_mtp}
        missing = 0 if expected is None else expected - len(present)
        if missing:
            first = islice((n for n in count() if n not in present), min(missing, SHOWN_ITEMS_MAX))
            more = f" and {missing - SHOWN_ITEMS_MAX} more" if missing > SHOWN_ITEMS_MAX else ""
            raise CheckpointError(
                ErrorCode.LAYERS_MISSING,
                "layers that the config counts have no tensors",
                path=self.path,
                expected=f"{expected} layers, as num_hidden_layers says",
                got=f"{missing} missing: {', '.join(map(str, first))}{more}",
                hint="the download is incomplete, or the config.json is another checkpoint's; "
                "name the layers to load some of them",
            )

    def _layer_names(self) -> LayerNames:
        with self._layers_lock:
            if self._layers is None:
                self._layers = find_layers(self._places, path=self.path)
            return self._layers

    def _layer_index(self, number: int) -> LayerIndex:
        layers = self._layer_count()
        return LayerIndex(number, is_mtp=layers is not None and number >= layers)

    def _layer_count(self) -> int | None:
        config = self.config
        return None if config is None else hidden_layer_count(config, self.config_path)

    # the end

    def close(self) -> None:
        """Unmap every shard; every view of a tensor ends, and using one raises ValueError.

        An array that was made from a view keeps the memory it points into: the maps are let go all
        the same, and `InUseError` names the shards that stay mapped until their arrays are gone.
        """
        self._closed = True
        kept: list[str] = []

        def close_all() -> None:
            kept[:] = [shard.file_name for shard in self._shards.values() if not shard.close()]

        finish_first(close_all)
        if kept:
            raise InUseError(
                ErrorCode.MEMORY_IN_USE,
                "arrays still point into mapped shards",
                path=self.directory,
                got=listed(kept),
                hint="drop the arrays, or copy them, before the checkpoint is closed",
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._places)} tensors"
        return f"Checkpoint({self.path!r}, {len(self._shards)} shards, {state})"


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    verify: Literal["all"] = "all",
    header_bytes_max: int = HEADER_BYTES_MAX,
) -> Checkpoint:
    """Open a checkpoint: a directory, an index file, or one shard; close it after use.

    Lists the files, looks at each, reads and checks every header, and checks the index against
    them, in that order; no payload byte is read. A directory must hold one index, or one shard and
    no index. `verify="all"` is the one level there is; `header_bytes_max` raises the cap for
    headers that are larger by right.

    Raises `PathError`, `HeaderError`, `ShardIndexError`, `ShardsMissingError`, or, when more than
    one shard is at fault, a `CheckpointError` whose `problems` are all of these.

    Example: `with open_checkpoint("GLM-5.3-Flash") as checkpoint: print(len(checkpoint))`.
    """
    if verify != "all":
        raise ArgumentError(
            ErrorCode.ARGUMENT, "verify is unknown", expected="'all'", got=repr(verify)
        )
    name = os.fsdecode(path)
    files = list_files(name)
    shards = _open_shards(files, header_bytes_max, name)
    return Checkpoint(name, files, shards, *_checked_places(files, shards, name))


# From the files to checked headers ---------------------------------------------------------------


def _open_shards(files: CheckpointFiles, header_bytes_max: int, path: str) -> dict[str, Shard]:
    paths = {name: os.path.join(files.directory, name) for name in files.shard_names}
    missing = tuple(name for name in paths if not os.path.lexists(paths[name]))
    if files.index is None:
        missing = ()
    shards: dict[str, Shard] = {}

    def open_one(name: str) -> None:
        shards[name] = open_shard(paths[name], header_bytes_max=header_bytes_max)

    present = tuple(name for name in paths if name not in missing)
    problems = _problems(open_one, present)
    if missing:
        problems.insert(0, _shards_missing(missing, files, len(paths)))
    _raise_all(problems, path, f"{len(paths) - len(shards)} of {len(paths)} shards")
    return shards


def _shards_missing(
    missing: tuple[str, ...], files: CheckpointFiles, count: int
) -> ShardsMissingError:
    error = ShardsMissingError(
        ErrorCode.INDEX_SHARDS_MISSING,
        "shards that the index names are missing",
        path=files.index_path,
        expected=f"{count} shards",
        got=f"{len(missing)} of {count} missing: {listed(list(missing))}",
        hint="the download is incomplete: fetch them",
    )
    error.missing = missing
    return error


def _checked_places(
    files: CheckpointFiles, shards: Mapping[str, Shard], path: str
) -> tuple[Mapping[str, str], tuple[tuple[str, str], ...]]:
    """Tensor name -> shard file, as the index says and the shards bear out; and the unlisted."""
    if files.index is None:
        return {name: file for file, shard in shards.items() for name in shard.header}, ()
    places = files.index.weight_map
    unlisted: list[tuple[str, str]] = []
    held = 0
    for file, shard in shards.items():
        listed_here = list(map(places.get, shard.header)).count(file)
        held += listed_here
        if listed_here != len(shard.header):
            unlisted += ((name, file) for name in shard.header if places.get(name) != file)
    if held != len(places):
        _refuse_lost(places, shards, path)
    return places, tuple(unlisted)


def _refuse_lost(places: Mapping[str, str], shards: Mapping[str, Shard], path: str) -> None:
    listed_in = Counter(places.values())
    lost: dict[str, list[str]] = {}
    for name, file in places.items():
        if name not in shards[file].header:
            lost.setdefault(file, []).append(name)

    def refuse(file: str) -> None:
        raise ShardIndexError(
            ErrorCode.INDEX_TENSORS_MISSING,
            "the index places tensors in a shard that does not hold them",
            path=shards[file].path,
            tensor=lost[file][0],
            expected=f"{listed_in[file]} tensors of the index",
            got=f"{len(lost[file])} missing: {listed(lost[file])}",
            hint="the index and the shards are of different saves: fetch both again",
        )

    _raise_all(_problems(refuse, tuple(lost)), path, f"{len(lost)} shards")


def _problems(check: Callable[[str], None], names: tuple[str, ...]) -> list[KdaStreamError]:
    """What `check` raises for each of the names."""
    problems: list[KdaStreamError] = []
    for name in names:
        try:
            check(name)
        except (HeaderError, PathError, ShardIndexError) as error:
            problems.append(error)
    return problems


def _raise_all(problems: list[KdaStreamError], path: str, which: str) -> None:
    """Raise the one problem, or one `CheckpointError` with all of them; nothing without any."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        whole = CheckpointError(
            ErrorCode.CHECKPOINT_PROBLEMS,
            f"{which} cannot be used",
            path=path,
            got="; ".join(error.finding for error in problems[:SHOWN_ITEMS_MAX]),
            hint=problems[0].hint,
        )
        whole.problems = tuple(problems)
        raise whole
