"""A checkpoint: a directory, an index or one file, as one mapping of checked tensors."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, Literal, Protocol
from weakref import ref

from ..closing import Closing, finish_first, renew_locks_after_fork
from ..errors import (
    CheckpointError,
    ClosedError,
    ErrorCode,
    InUseError,
    KdaStreamError,
    NotFoundError,
    in_words,
    listed,
    shown,
)
from ..kda.config import hidden_layer_count, read_config
from ..kda.source import RawTensor
from ..limits import HEADER_BYTES_MAX, LINE_CHARS_MAX, SHOWN_ITEMS_MAX
from ..require import require_choice, require_kind, require_path
from .header import TensorInfo
from .layer import LayerIndex, LayerNames, LayerSource, find_layers
from .listing import CheckpointFiles, list_files
from .shard import Shard
from .shards import Shards

CONFIG_NAME: Final = "config.json"


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What is known of a checkpoint beside its tensors; of every shard unless some are unchecked.

    `shards_checked` is less than `shards` only under `verify="needed"`. `tensor_bytes` and
    `file_bytes` are ints, and None until every shard is checked (typed so that who checks them all
    need not ask); `unlisted` is of the checked ones.

    `unlisted` are (tensor, shard file) that a shard holds and the index does not place there: no
    part of the checkpoint. `ignored_files` are safetensors files in the folder that the index does
    not name. `total_size_listed` is the index's claim, `tensor_bytes` the truth.
    """

    shards: int
    shards_checked: int
    tensors: int
    tensor_bytes: int | Any  # or None, which only a caller who passes verify="needed" meets
    file_bytes: int | Any  # as above
    unlisted: tuple[tuple[str, str], ...]
    ignored_files: tuple[str, ...]
    total_size_listed: int | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Each thing that was ignored or is not known, as a sentence."""
        notes = []
        if self.shards_checked < self.shards:
            notes.append(
                f"{self.shards - self.shards_checked} of {self.shards} shards are not checked: "
                "none of their tensors was needed"
            )
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
        if None not in (self.total_size_listed, self.tensor_bytes) and (
            self.total_size_listed != self.tensor_bytes
        ):
            notes.append(
                f"the index claims a total_size of {self.total_size_listed} bytes, its tensors "
                f"have {self.tensor_bytes}"
            )
        return tuple(notes)


class Reader(Protocol):
    """Somebody who brings payload in by a thread of its own."""

    def end_with(self, error: KdaStreamError) -> None:
        """Have the thread end, and wait for it; `error` is why no more will come, if it was to."""
        ...


class Checkpoint(Closing):
    """An open checkpoint: a read-only mapping from tensor name to `RawTensor`.

    Made by `open_checkpoint`. A shard's header has been checked before anything of it is handed
    out; no payload has been touched, and no descriptor is held. Tensors are lent: their views end
    with `close()`. Safe to use from several threads. A context manager.

    `checkpoint[name]` is `tensor(name)`; `len`, `in` and iteration are over the names, in the
    index's order. Attributes: `path` as given, `directory` that holds the shards.
    """

    def __init__(self, path: str, files: CheckpointFiles, shards: Shards) -> None:
        self.path = path
        self.directory = files.directory
        self._files = files
        self._shards = shards
        self._places = _places(files, shards)
        self._closed = False
        self._readers: list[ref[Reader]] = []
        self.renew_locks()
        renew_locks_after_fork(self)
        self._layers: LayerNames | None = None
        self._config: Mapping[str, Any] | None = None

    def renew_locks(self) -> None:
        """Make new locks, as in a forked child."""
        self._layers_lock = threading.RLock()

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
        """What its header says of the tensor `name`; raises what `shard_of` raises."""
        return self.shard_of(name).header.info(name)

    def tensor(self, name: str) -> RawTensor:
        """The tensor `name`, its bytes lent until `close()`.

        Raises what `shard_of` raises, and `ClosedError` after `close()`.
        """
        if self._closed:
            raise self._closed_error(name)
        return self.shard_of(name).tensor(name)

    def shard_of(self, name: str) -> Shard:
        """The shard that holds the tensor `name`, checked now if it is not yet.

        Raises `NotFoundError` when there is no such tensor. Under `verify="needed"` also what
        `open_checkpoint` raises for the one shard, and `ClosedError` after `close()`.
        """
        return self._shards[self.file_of(name)]

    def file_of(self, name: str) -> str:
        """The file name of the shard that holds the tensor `name`; no shard is checked for it.

        Raises `NotFoundError` when there is no such tensor.
        """
        file = self._places.get(name)
        if file is None:
            raise NotFoundError(
                ErrorCode.TENSOR_UNKNOWN,
                "the checkpoint has no such tensor",
                path=self.path,
                tensor=name,
                hint="keys() lists the names",
            )
        return file

    @property
    def shards(self) -> Mapping[str, Shard]:
        """The shards by file name, in the order of these; looking one up checks it if need be."""
        return self._shards

    @property
    def is_checked(self) -> bool:
        """Whether every shard is checked, as from the start but with `verify="needed"`."""
        return len(self._shards.checked) == len(self._shards)

    @property
    def report(self) -> OpenReport:
        """What is known by now."""
        checked, unlisted, index = self._shards.checked, self._shards.unlisted, self._files.index
        is_whole = self.is_checked
        ignored_bytes = sum(self._shards[file].header.info(name).nbytes for name, file in unlisted)
        payload_bytes = sum(shard.header.payload_bytes for shard in checked)
        return OpenReport(
            shards=len(self._shards),
            shards_checked=len(checked),
            tensors=len(self._places),
            tensor_bytes=payload_bytes - ignored_bytes if is_whole else None,
            file_bytes=sum(shard.identity.file_bytes for shard in checked) if is_whole else None,
            unlisted=unlisted,
            ignored_files=self._files.ignored_names,
            total_size_listed=None if index is None else index.total_size,
        )

    # layers

    @property
    def config_path(self) -> str | None:
        """The config.json beside the shards, or None when there is none."""
        path = os.path.join(self.directory, CONFIG_NAME)
        return path if os.path.lexists(path) else None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json beside the shards as an object, or None; raises `ConfigError`."""
        if self._config is None and self.config_path is not None:
            self._config = read_config(self.config_path)
        return self._config

    @property
    def layer_prefix(self) -> str:
        """What the full names of layer tensors have before the layer's number.

        Raises `CheckpointError` when the names show no decoder or two.
        """
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
        number = None if isinstance(index, bool) else _as_number(index)
        names = None if number is None else layers.by_number.get(number)
        if number is None or names is None:
            numbers = list(layers.by_number)
            raise NotFoundError(
                ErrorCode.LAYER_UNKNOWN,
                f"the checkpoint has no layer {shown(in_words(index, repr))}",
                path=self.path,
                expected=_layers_text(numbers, layers.prefix),
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

    def add_reader(self, reader: Reader) -> None:
        """Have `close` end a reader, which may be copying, before its files are unmapped."""
        self._readers = [*(known for known in self._readers if known() is not None), ref(reader)]

    def close(self) -> None:
        """Unmap every shard; every view of a tensor ends, and using one raises ValueError.

        An array that was made from a view keeps the memory it points into: the maps are let go all
        the same, and `InUseError` names the shards that stay mapped until their arrays are gone.
        """
        self._closed = True
        kept: list[str] = []

        def close_all() -> None:
            for known in self._readers:
                reader = known()
                if reader is not None:
                    reader.end_with(self._closed_error(None))
            kept[:] = self._shards.close()

        finish_first(close_all)
        if kept:
            raise InUseError(
                ErrorCode.MEMORY_IN_USE,
                "arrays still point into mapped shards",
                path=self.directory,
                got=listed(kept),
                hint="drop the arrays, or copy them, before the checkpoint is closed",
            )

    def _closed_error(self, name: str | None) -> ClosedError:
        return ClosedError(
            ErrorCode.CHECKPOINT_CLOSED,
            "the checkpoint is closed",
            path=self.path,
            tensor=name,
            hint="open it again",
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._places)} tensors"
        path = shown(repr(self.path), LINE_CHARS_MAX)
        return f"Checkpoint({path}, {len(self._shards)} shards, {state})"


def require_checkpoint(checkpoint: object) -> None:
    """Raise `ArgumentError` when `checkpoint` is none."""
    hint = "open it: with open_checkpoint(path) as checkpoint:"
    require_kind("checkpoint", checkpoint, Checkpoint, "an open Checkpoint", hint)


def _layers_text(numbers: Sequence[int], prefix: str) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}, the only one under {prefix}"
    return f"one of {len(numbers)} layers from {numbers[0]} to {numbers[-1]} under {prefix}"


def _as_number(index: object) -> int | None:
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return None


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    verify: Literal["all", "needed"] = "all",
    header_bytes_max: int = HEADER_BYTES_MAX,
) -> Checkpoint:
    """Open a checkpoint: a directory, an index file, or one shard; close it after use.

    Lists the files, looks at each, reads and checks every header, and checks the index against
    them, in that order; no payload byte is read. A directory must hold one index, or one shard and
    no index. `header_bytes_max` raises the cap for headers that are larger by right.

    With `verify="needed"` only the index is checked here, and that its shards are there. A shard is
    opened, checked and identified when the first of its tensors is asked for, with the errors that
    would come here else; layers and names are known without. A checkpoint with no index is checked
    here all the same.

    Raises `PathError`, `HeaderError`, `ShardIndexError`, `ShardsMissingError`, or, when more than
    one shard is at fault, a `CheckpointError` whose `problems` are all of these; `CheckpointError`
    too for a directory that is no one checkpoint; `ArgumentError`.

    Example: `with open_checkpoint("GLM-5.3-Flash") as checkpoint: print(len(checkpoint))`.
    """
    hint = '"needed" checks a shard when the first of its tensors is asked for'
    require_choice("verify", verify, ("all", "needed"), hint)
    name = require_path(path)
    files = list_files(name)
    shards = Shards(files, header_bytes_max, name)
    if verify == "all":
        shards.check_all()
    else:
        shards.require_present()
    return Checkpoint(name, files, shards)


def _places(files: CheckpointFiles, shards: Shards) -> Mapping[str, str]:
    """Tensor name -> shard file: as the index says, or as the one shard does, which is checked."""
    if files.index is not None:
        return files.index.weight_map
    return {name: file for file, shard in shards.items() for name in shard.header}
