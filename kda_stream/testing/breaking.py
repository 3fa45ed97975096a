"""The ways to break one thing of a sound checkpoint; `broken` gives each its name and error."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..foreign import LENGTH_BYTES
from ..kda.tensors import ATTENTION_PREFIX
from .checkpoints import CONFIG_NAME, INDEX_NAME, Layout, StoredTensor, write_shard


@dataclass(frozen=True, slots=True)
class Victim:
    """A sound checkpoint in `folder`, that one thing is to be broken of.

    That is `shard`, which holds `A_log` of the first KDA layer, and of its entries `tensor`, that
    one; or the index, the config or the names of `layer`, the first KDA layer.
    """

    folder: Path
    layout: Layout

    @property
    def layer(self) -> str:
        """What the names of the first KDA layer begin with."""
        return f"{self.layout.prefix}{self.layout.kda_layers[0]}."

    @property
    def tensor(self) -> str:
        """The full name of the first KDA layer's A_log."""
        return f"{self.layer}{ATTENTION_PREFIX}A_log"

    @property
    def shard(self) -> Path:
        """The shard that holds `tensor`."""
        return self._holder(lambda names: self.tensor in names)

    @property
    def other_shard(self) -> Path:
        """A shard that does not hold `tensor`."""
        return self._holder(lambda names: self.tensor not in names)

    def _holder(self, is_wanted: Callable[[set[str]], bool]) -> Path:
        held = {file: {t.name for t in ts} for file, ts in self.layout.files().items()}
        return self.folder / next(file for file, names in held.items() if is_wanted(names))


Act = Callable[[Victim], object]
Entries = dict[str, dict[str, Any]]


# A shard, as a file ------------------------------------------------------------------------------


def file_bytes(change: Callable[[bytes], bytes]) -> Act:
    """The shard's bytes go through `change`."""

    def act(victim: Victim) -> None:
        victim.shard.write_bytes(change(victim.shard.read_bytes()))

    return act


def instead_of_file(make: Callable[[Path], object]) -> Act:
    """The shard is taken away, and `make` called with its path."""

    def act(victim: Victim) -> None:
        path = victim.shard
        path.unlink()
        make(path)

    return act


def bind_socket(path: Path) -> None:
    """A socket under the name `path`, which may be longer than an address of a socket can."""
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def header_of_length(length: int) -> Act:
    """The shard's header says that it is `length` bytes long."""
    return file_bytes(lambda data: length.to_bytes(8, "little") + data[LENGTH_BYTES:])


def sparse_file(nbytes: int, start: bytes) -> Act:
    """The shard is `start` and zeros up to `nbytes`, which take no room on the disk."""

    def act(victim: Victim) -> None:
        victim.shard.write_bytes(start)
        os.truncate(victim.shard, nbytes)

    return act


# A header ----------------------------------------------------------------------------------------


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The header's text and the payload."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    return data[LENGTH_BYTES:end], data[end:]


def _joined(text: bytes, payload: bytes) -> bytes:
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + payload


def header_bytes(change: Callable[[bytes], bytes]) -> Act:
    """The header's text, without its padding, goes through `change`; its length is put right."""

    def changed(data: bytes) -> bytes:
        text, payload = _split(data)
        return _joined(change(text.rstrip(b" ")), payload)

    return file_bytes(changed)


def header_text(change: Callable[[str], str]) -> Act:
    """As `header_bytes`, for text."""
    return header_bytes(lambda text: change(text.decode("utf-8")).encode("utf-8"))


def metadata(text: str) -> Act:
    """`text`, which is JSON, in the place of the header's metadata."""

    def changed(header: str) -> str:
        members = json.loads(header)
        members.pop("__metadata__", None)
        return f'{{"__metadata__":{text},{_compact(members)[1:]}'

    return header_text(changed)


def entry(text: str) -> Act:
    """`text`, which may be no JSON, in the place of the tensor's entry."""
    return entry_from(lambda _: text)


def member(*, dtype: str = "", shape: str = "", offsets: str = "") -> Act:
    """Another text in the place of values of the tensor's entry; `{}` in it is the old value."""

    def changed(old: dict[str, str]) -> str:
        new = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        members = (f'"{key}":{(new[key] or "{}").format(text)}' for key, text in old.items())
        return "{" + ",".join(members) + "}"

    return entry_from(changed)


def resized(change: Callable[[int], int]) -> Act:
    """Another count of values in the tensor's shape, which has one axis."""

    def changed(old: dict[str, str]) -> Iterator[tuple[str, str]]:
        for key, text in old.items():
            yield key, f"[{change(json.loads(text)[0])}]" if key == "shape" else text

    return keys(changed)


def keys(change: Callable[[dict[str, str]], Iterable[tuple[str, str]]]) -> Act:
    """Other members in the tensor's entry: from (key: JSON text) to (key, JSON text)."""
    return entry_from(lambda old: "{" + ",".join(f'"{k}":{text}' for k, text in change(old)) + "}")


def entry_from(change: Callable[[dict[str, str]], str]) -> Act:
    """Another text in the place of the tensor's entry, from its members (key: JSON text)."""

    def act(victim: Victim) -> None:
        def changed(header: str) -> str:
            members: Entries = json.loads(header)
            old = _compact(members[victim.tensor])
            texts = {key: _compact(value) for key, value in members[victim.tensor].items()}
            return _compact(members).replace(
                f'"{victim.tensor}":{old}', f'"{victim.tensor}":{change(texts)}'
            )

        header_text(changed)(victim)

    return act


def ranges(change: Callable[[list[list[int]]], object]) -> Act:
    """The data offsets of all entries, in ascending order, are changed in place."""

    def changed(header: str) -> str:
        members: Entries = json.loads(header)
        tensors = [value for name, value in members.items() if name != "__metadata__"]
        change(sorted((value["data_offsets"] for value in tensors), key=tuple))
        return _compact(members)

    return header_text(changed)


def same_range_twice(offsets: list[list[int]]) -> None:
    """Two tensors of one size on the same bytes: the sum of the sizes is still the payload's."""
    for number, (begin, end) in enumerate(offsets):
        for other in offsets[number + 1 :]:
            if other[1] - other[0] == end - begin > 0:
                other[:] = [begin, end]
                return
    raise LookupError("no two tensors of the shard have one size")


def shifted(number: int, by: int) -> Callable[[list[list[int]]], None]:
    """One range, counted from the first, moved by some bytes."""

    def change(offsets: list[list[int]]) -> None:
        offsets[number][:] = [at + by for at in offsets[number]]

    return change


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def named(name: str) -> Act:
    """The tensor's name in the header is `name`, a text between JSON's quotes."""

    def act(victim: Victim) -> None:
        header_text(lambda text: text.replace(f'"{victim.tensor}":', f'"{name}":'))(victim)

    return act


def named_twice(spelling: Callable[[str], str] = str) -> Act:
    """A second entry, over no bytes, under the tensor's own name in that spelling."""

    def act(victim: Victim) -> None:
        again = f'"{spelling(victim.tensor)}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        header_text(lambda text: f"{text[:-1]},{again}}}")(victim)

    return act


def escaped_first_letter(name: str) -> str:
    """`name` as JSON may spell it, with an escape for its first letter."""
    return f"\\u{ord(name[0]):04x}{name[1:]}"


# The index, the config, the folder ---------------------------------------------------------------


def index_text(change: Callable[[str], str]) -> Act:
    """The index's text goes through `change`."""

    def act(victim: Victim) -> None:
        path = victim.folder / INDEX_NAME
        path.write_text(change(path.read_text("utf-8")), "utf-8")

    return act


def index_of(document: object) -> Act:
    """The index is `document`."""
    return index_text(lambda _: json.dumps(document))


def weight_map(change: Callable[[dict[str, Any], Victim], object]) -> Act:
    """The weight map is changed in place."""

    def act(victim: Victim) -> None:
        path = victim.folder / INDEX_NAME
        document = json.loads(path.read_text("utf-8"))
        change(document["weight_map"], victim)
        path.write_text(json.dumps(document, indent=2), "utf-8")

    return act


def placed_in(shard: object) -> Act:
    """The index places the tensor in `shard`, whatever that is."""
    return weight_map(lambda places, victim: places.update({victim.tensor: shard}))


def tensor_listed_twice(victim: Victim) -> None:
    """The weight map gives the tensor's name a second time."""
    index_text(
        lambda text: text.replace(
            f'"{victim.tensor}":', f'"{victim.tensor}": "{victim.shard.name}", "{victim.tensor}":'
        )
    )(victim)


def config_text(change: Callable[[str], str]) -> Act:
    """The config's text goes through `change`."""

    def act(victim: Victim) -> None:
        path = victim.folder / CONFIG_NAME
        path.write_text(change(path.read_text("utf-8")), "utf-8")

    return act


def config(change: Callable[[dict[str, Any]], object]) -> Act:
    """The config's `text_config` is changed in place."""

    def changed(text: str) -> str:
        document = json.loads(text)
        change(document["text_config"])
        return json.dumps(document)

    return config_text(changed)


def in_folder(change: Callable[[Path], object]) -> Act:
    """`change` is called with the folder's path."""
    return lambda victim: change(victim.folder)


def without_shards(victim: Victim) -> None:
    """No safetensors file and no index is left."""
    for path in (*victim.folder.glob("*.safetensors"), victim.folder / INDEX_NAME):
        path.unlink()


# The tensors -------------------------------------------------------------------------------------


def tensors(change: Callable[[StoredTensor, Victim], Iterable[StoredTensor]]) -> Act:
    """Every tensor goes through `change`; shards and index are written anew, and are sound."""

    def act(victim: Victim) -> None:
        places = {}
        for file, held in victim.layout.files().items():
            changed = [new for tensor in held for new in change(tensor, victim)]
            write_shard(victim.folder / file, changed)
            places.update({tensor.name: file for tensor in changed})
        path = victim.folder / INDEX_NAME
        path.write_text(json.dumps({"weight_map": places}, indent=2), "utf-8")

    return act


def kda_tensor(leaf: str, change: Callable[[StoredTensor], Iterable[StoredTensor]]) -> Act:
    """Those tensors of the first KDA layer whose names end with `leaf` go through `change`."""

    def changed(tensor: StoredTensor, victim: Victim) -> Iterable[StoredTensor]:
        is_meant = tensor.name.startswith(victim.layer) and tensor.name.endswith(leaf)
        return change(tensor) if is_meant else [tensor]

    return tensors(changed)


def last_kda_layer(change: Callable[[StoredTensor], Iterable[StoredTensor]]) -> Act:
    """The tensors of the last KDA layer go through `change`."""

    def changed(tensor: StoredTensor, victim: Victim) -> Iterable[StoredTensor]:
        last = f"{victim.layout.prefix}{victim.layout.kda_layers[-1]}."
        return change(tensor) if tensor.name.startswith(last) else [tensor]

    return tensors(changed)


# What files of other kinds begin with ------------------------------------------------------------

LFS_POINTER: Final = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 5365306704\n"
)
HTML_PAGE: Final = b"<!DOCTYPE html>\n<html><body>Sign in to download</body></html>\n"
JSON_ERROR: Final = b'{"error":"Repository not found"}\n'


def replaced_by(data: bytes) -> Act:
    """The shard's bytes are `data`."""
    return file_bytes(lambda _: data)


def starting_with(magic: bytes) -> Act:
    """A binary file of another kind: `magic`, and then no text."""
    return replaced_by(magic + bytes(range(256)))
