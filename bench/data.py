"""The files that are loaded: a checkpoint, at full geometry as a rule, and what its layers hold."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PLACE_ALIGNMENT_BYTES = 256
SHARDS = 4
EXPERTS = 5
FORMAT = 2  # another one whenever what is written changes: a folder of before is written anew

Stored = tuple[str, tuple[int, ...], str, int, int]  # dtype, shape, file, begin, end


@dataclass(frozen=True)
class Geometry:
    """How large the checkpoint is. `is_full` is said of the layers, not of their number."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    expert_width: int
    vocabulary: int
    is_full: bool

    @property
    def folder_name(self) -> str:
        return f"layers-{self.layers}" if self.is_full else f"small-{self.layers}"

    @property
    def kda_bytes(self) -> int:
        """About what the KDA layers hold: the four large tensors of each, and 2.6 % more."""
        large = 4 * self.heads * self.head_dim * self.hidden * 2
        return int(self.layers * large * 1.026)

    @property
    def file_bytes(self) -> int:
        """About what the shards hold."""
        experts = self.layers * (EXPERTS + 1) * 3 * self.expert_width * self.hidden
        return self.kda_bytes + experts + 2 * self.vocabulary * self.hidden * 2


@dataclass(frozen=True)
class Place:
    """A data set: its folder, and how much it holds, such as layers and bytes."""

    folder: Path
    holds: dict[str, int]


def full(layers: int) -> Geometry:
    """That of GLM-5.3-Flash: 275 MB a KDA layer.

    Its six small MLPs put 27 % on top of the KDA tensors; what the vocabulary takes lies before the
    first layer, so that ends of shards cut layers.
    """
    return Geometry(layers, 4096, 64, 128, expert_width=1024, vocabulary=8192, is_full=True)


def small(layers: int) -> Geometry:
    """2 MB a KDA layer."""
    return Geometry(layers, 512, 8, 64, expert_width=128, vocabulary=1024, is_full=False)


@dataclass(frozen=True)
class Tensor:
    """One KDA tensor: bytes [begin, end) of a file, and its offset `place` in the buffer."""

    name: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    place: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layer:
    """A KDA layer: its tensors in the order of the buffer, and the SHA-256 of their bytes."""

    index: int
    tensors: tuple[Tensor, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class FileRange:
    """Bytes [begin, end) of a file, which belong to the KDA layer `layer`."""

    layer: int
    begin: int
    end: int
    path: Path


@dataclass(frozen=True)
class DataSet:
    """A checkpoint that was written, and all that a load of it has to deliver."""

    folder: Path
    layers: tuple[Layer, ...]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def shards(self) -> tuple[Path, ...]:
        return tuple(sorted(self.checkpoint.glob("*.safetensors")))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def buffer_bytes(self) -> int:
        return max(tensor.place + tensor.nbytes for tensor in self.layers[0].tensors)

    def ranges(self) -> list[FileRange]:
        """Each layer's runs of adjacent tensors, layer by layer."""
        runs: list[FileRange] = []
        for layer in self.layers:
            first_of_layer = len(runs)
            for tensor in sorted(layer.tensors, key=lambda tensor: (tensor.file, tensor.begin)):
                path = self.checkpoint / tensor.file
                last = runs[-1] if len(runs) > first_of_layer else None
                if last is not None and (last.path, last.end) == (path, tensor.begin):
                    runs[-1] = FileRange(layer.index, last.begin, tensor.end, path)
                else:
                    runs.append(FileRange(layer.index, tensor.begin, tensor.end, path))
        return runs


def load(folder: Path) -> DataSet:
    """The data set in `folder`, which `make` has written."""
    described = json.loads((folder / "layers.json").read_text())
    layers = tuple(
        Layer(
            layer["index"],
            tuple(Tensor(**{**row, "shape": tuple(row["shape"])}) for row in layer["tensors"]),
            layer["sha256"],
        )
        for layer in described["layers"]
    )
    return DataSet(folder, layers)


def place(root: Path, geometry: Geometry) -> Place:
    """The data set of the geometry under `root`; written when it is not there yet."""
    folder = root / geometry.folder_name
    if not _is_complete(folder):
        print(f"writing {geometry.layers} layers to {folder} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # copies in other formats are of what was there
        _write(folder, geometry)
    described = load(folder)
    file_bytes = sum(path.stat().st_size for path in described.shards)
    holds = {"layers": geometry.layers, "kda_bytes": described.nbytes, "file_bytes": file_bytes}
    return Place(folder, holds)


def tensor_sizes(folder: Path) -> list[int]:
    """The bytes of every tensor of the checkpoint in `folder`, of KDA layers or not."""
    stored = _stored_tensors(sorted((folder / "checkpoint").glob("*.safetensors")))
    return [end - begin for _, _, _, begin, end in stored.values()]


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Dirty pages cannot be dropped from the page cache: write them out."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    described = folder / "layers.json"  # written last
    return described.exists() and json.loads(described.read_text())["format"] == FORMAT


def _write(folder: Path, geometry: Geometry) -> None:
    from kda_stream import KdaConfig
    from kda_stream.kda.classify import AttnBlockKind
    from kda_stream.testing import FIELD_TENSORS, Layout, bound_payload, write_checkpoint

    layout = Layout(
        config=KdaConfig(geometry.hidden, geometry.heads, geometry.head_dim, conv_kernel=4),
        kinds=(AttnBlockKind.KDA,) * geometry.layers,
        mtp=0,
        dense=0,
        experts=EXPERTS,
        mlp=geometry.expert_width,
        vocabulary=geometry.vocabulary,
        shards=SHARDS,
    )
    checkpoint = write_checkpoint(folder / "checkpoint", layout)
    flush_to_disk(sorted(checkpoint.iterdir()))
    stored = _stored_tensors(sorted(checkpoint.glob("*.safetensors")))
    described = []
    for index in range(geometry.layers):
        prefix = f"{layout.prefix}{index}.self_attn."
        tensors: list[Tensor] = []
        place = 0
        for field, leaves in FIELD_TENSORS.items():
            place = -(-place // PLACE_ALIGNMENT_BYTES) * PLACE_ALIGNMENT_BYTES
            for leaf in leaves:  # q, k and v conv lie side by side
                dtype, shape, file, begin, end = stored[prefix + leaf]
                tensors.append(Tensor(prefix + leaf, field, dtype, shape, file, begin, end, place))
                place += tensors[-1].nbytes
        digest = hashlib.sha256()
        for data in bound_payload(layout, index).values():
            digest.update(data)
        described.append(asdict(Layer(index, tuple(tensors), digest.hexdigest())))
    text = json.dumps({"format": FORMAT, "layers": described}, indent=1)
    (folder / "layers.json").write_text(text + "\n")


def _stored_tensors(paths: list[Path]) -> dict[str, Stored]:
    """Name -> where it is stored, read here by hand: no loader is asked."""
    stored: dict[str, Stored] = {}
    for path in paths:
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, row in header.items():
            begin, end = (8 + header_bytes + offset for offset in row["data_offsets"])
            stored[name] = (row["dtype"], tuple(row["shape"]), path.name, begin, end)
    return stored
