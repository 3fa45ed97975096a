"""The files that are loaded: a checkpoint at full geometry, and what its KDA layers hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PLACE_ALIGNMENT_BYTES = 256
SHARDS = 4
EXPERTS = 5
EXPERT_WIDTH = 1024  # six MLPs of 3 * 1024 * 4096 F8 bytes: 27 % on top of a layer's KDA tensors
VOCABULARY = 8192  # 134 MB before the first layer, so that ends of shards cut layers
FORMAT = 1

Stored = tuple[str, tuple[int, ...], str, int, int]  # dtype, shape, file, begin, end


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


def make(root: Path, layers: int) -> DataSet:
    """The data set of so many layers under `root`; written when it is not there yet."""
    folder = root / f"layers-{layers}"
    if not _is_complete(folder):
        print(f"writing {layers} layers to {folder} ...", flush=True)
        _write(folder, layers)
    return load(folder)


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Dirty pages cannot be dropped from the page cache: write them out."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    described = folder / "layers.json"  # written last
    return described.exists() and json.loads(described.read_text())["format"] == FORMAT


def _write(folder: Path, layers: int) -> None:
    from kda_stream import KdaConfig
    from kda_stream.kda.classify import AttnBlockKind
    from kda_stream.testing import FIELD_TENSORS, Layout, bound_payload, write_checkpoint

    layout = Layout(
        config=KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4),
        kinds=(AttnBlockKind.KDA,) * layers,
        mtp=0,
        dense=0,
        experts=EXPERTS,
        mlp=EXPERT_WIDTH,
        vocabulary=VOCABULARY,
        shards=SHARDS,
    )
    checkpoint = write_checkpoint(folder / "checkpoint", layout)
    flush_to_disk(sorted(checkpoint.iterdir()))
    stored = _stored_tensors(sorted(checkpoint.glob("*.safetensors")))
    described = []
    for index in range(layers):
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
