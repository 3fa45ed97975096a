"""A model of a checkpoint's folder and of all that was handed out of it.

It is told what is done, and says what must come: which bytes, or which error. It knows the files'
bytes because it wrote them, and asks the library nothing. What is handed out is kept beside what
is known of it; `assert_right` compares the two. Touches no mapped byte behind the end of its file.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from support.checkpoints import (
    FIELD_LEAVES,
    GLM_PREFIX,
    Geometry,
    Written,
    save_raw_shard,
    write_checkpoint,
)
from support.files import DSA_NAMES, INDEX_NAME, KDA_NAMES
from support.page_cache import cool

from kda_stream import (
    BindError,
    BoundTensor,
    Checkpoint,
    CheckpointError,
    ClosedError,
    ConfigError,
    HeaderError,
    InUseError,
    KdaConfig,
    KdaLayer,
    KdaLayerStream,
    KdaStreamError,
    KdaWeights,
    NotFoundError,
    PathMissingError,
    PayloadError,
    PinnedArena,
    ShardIndexError,
    ShardsMissingError,
    SlotError,
    StreamError,
)
from kda_stream.errors import ErrorCode as Code
from kda_stream.staging.arena import SlotState

LAYERS: Final = 6
MTP_LAYER: Final = LAYERS
ALL_LAYERS: Final = range(LAYERS + 1)
SHARDS: Final = 3
KDA_SIGNS: Final = frozenset(KDA_NAMES) - frozenset(DSA_NAMES)
MISPLACED: Final = "lm_head.weight"
AT_REST_SECONDS: Final = 10

Result = TypeVar("Result")


# What must come ----------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """An error that must come: its class, its code, and the path that it names unless None."""

    kind: type[KdaStreamError]
    code: Code
    path: str | None = None
    problems: tuple[Refusal, ...] = ()

    def is_met_by(self, error: KdaStreamError) -> bool:
        problems: Sequence[KdaStreamError] = getattr(error, "problems", ())
        return (
            (type(error), error.code) == (self.kind, self.code)
            and self.path in (None, error.path)
            and (
                not self.problems
                or (
                    len(problems) == len(self.problems)
                    and all(r.is_met_by(e) for r, e in zip(self.problems, problems, strict=True))
                )
            )
        )


MEMORY_GIVEN_BACK: Final = Refusal(ClosedError, Code.MEMORY_GIVEN_BACK)


def must(refusal: Refusal | None, call: Callable[[], Result]) -> Result | None:
    """The call's result; None when it was refused. Exactly the refusal must come, or none."""
    try:
        result = call()
    except KdaStreamError as error:
        if refusal is None or not refusal.is_met_by(error):
            raise AssertionError(f"not {refusal}, but {error.code}: {error}") from error
        return None
    assert refusal is None, f"{refusal} did not come"
    return result


def code_of(call: Callable[[], object]) -> Code | None:
    """The code of the error that the call raises, or None."""
    try:
        call()
    except KdaStreamError as error:
        return error.code
    return None


def first(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """The first that there is; those behind it are not asked for."""
    return next(filter(None, refusals), None)


def is_ended(view: Any) -> bool:
    """Whether using the view raises ValueError."""
    try:
        view.tobytes()
    except ValueError:
        return True
    return False


# Files -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Contents:
    """What a shard's file may hold, and where the tensors lie in it, from the file's start on."""

    name: str
    data: bytes = field(repr=False)
    places: Mapping[str, tuple[int, int]] = field(repr=False)

    @property
    def header_end(self) -> int:
        return 8 + int.from_bytes(self.data[:8], "little")


LFS_POINTER: Final = Contents(
    "an LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n", {}
)
CONTENTS: Final = ("as written", "other bytes", "other order", "odd start", LFS_POINTER.name)
CUTS: Final = (
    "at its start",
    "in the length field",
    "in the header",
    "behind the header",
    "in the payload",
    "before the last byte",
)
TOUCHES: Final = ("its times", "its times, to what they were", "its mode", "its name, and back")


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it is written, its shards in memory: by file name and name of contents."""

    written: Written
    shards: Mapping[str, Mapping[str, Contents]]
    index: bytes
    config: bytes


@functools.cache
def saved(geometry: Geometry) -> Saved:
    """A checkpoint, and what else its shards may hold: tensors of the same names and kinds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        written = write_checkpoint(path, geometry=geometry, layers=LAYERS, shards=SHARDS)
        files = sorted(set(written.weight_map.values()))
        shards = {file: _contents_of(written, path / file) for file in files}
        index = (path / INDEX_NAME).read_bytes()
        config = (path / "config.json").read_bytes()
    return Saved(written, shards, index, config)


def _contents_of(written: Written, path: Path) -> dict[str, Contents]:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    places = {
        name: (begin + row["data_offsets"][0], begin + row["data_offsets"][1])
        for name, row in json.loads(data[8:begin]).items()
        if name != "__metadata__"
    }
    found = {"as written": Contents("as written", data, places)}
    other = data[:begin] + _changed(data[begin:], 0xFF)
    found["other bytes"] = Contents("other bytes", other, places)
    for name, key, start in (("other order", 0x55, 0), ("odd start", 0xAA, 1)):
        tensors = {
            tensor: replace(stored, data=_changed(stored.bytes_of(tensor), key))
            for tensor, stored in reversed(list(written.tensors.items()))
            if tensor in places
        }
        begins = save_raw_shard(path, tensors, start=start)
        places_here = {t: (at, at + tensors[t].nbytes) for t, at in begins.items()}
        found[name] = Contents(name, path.read_bytes(), places_here)
    return {**found, LFS_POINTER.name: LFS_POINTER}


def _changed(data: bytes, key: int) -> bytes:
    return data.translate(bytes(value ^ key for value in range(256)))


@dataclass(eq=False)
class File:
    """A file on the disk, under a name or not: `length` bytes of its contents.

    `stamp` is another one after each change of anything about it.
    """

    contents: Contents
    length: int
    stamp: int

    def bytes_at(self, begin: int, end: int) -> bytes | None:
        """The bytes [begin, end), or None when the file is too short for them."""
        return self.contents.data[begin:end] if end <= self.length else None


class Folder:
    """The folder on the disk and what is known of it. Each fault changes both."""

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self.path = path
        self.saved = saved(geometry)
        self.config_given = KdaConfig(
            geometry.hidden, geometry.heads, geometry.head_dim, geometry.conv_kernel
        )
        self.files: dict[str, File | None] = dict.fromkeys(self.saved.shards)
        self.index: str | None = None
        self.config: str | None = None
        self._stamp = 0
        self._aside = path.with_name(path.name + "-aside")
        path.mkdir()
        self._aside.mkdir()
        self._clock = self._aside / "clock"
        self._clock.touch()
        self.set_index("good")
        self.set_config("good")
        for file in self.files:
            self.replace(file, "as written")
        self.has_direct_reads = self._has_direct_reads()

    def path_of(self, file: str) -> str:
        return str(self.path / file)

    @property
    def index_path(self) -> str:
        return self.path_of(INDEX_NAME)

    @property
    def config_path(self) -> str:
        return self.path_of("config.json")

    @property
    def missing(self) -> list[str]:
        return [name for name, file in self.files.items() if file is None]

    def placed(self) -> Mapping[str, str]:
        """Tensor name -> file, as the index says and in its order."""
        places: dict[str, str] = json.loads(self.saved.index)["weight_map"]
        return {**places, MISPLACED: list(self.files)[1]} if self.index == "misplaced" else places

    def fault_of(self, name: str) -> Refusal | None:
        """What opening the shard must raise now, its header being all that is looked at."""
        path, file = self.path_of(name), self.files[name]
        if file is None:
            return Refusal(PathMissingError, Code.PATH_MISSING, path)
        if file.length < 8:
            return Refusal(HeaderError, Code.HEADER_FILE_TOO_SHORT, path)
        if file.contents is LFS_POINTER and file.length >= 23:
            return Refusal(HeaderError, Code.HEADER_FOREIGN_FILE, path)
        if file.length < file.contents.header_end:
            return Refusal(HeaderError, Code.HEADER_LENGTH_OVER_FILE, path)
        if file.length < len(file.contents.data):
            return Refusal(HeaderError, Code.FILE_SHORT, path)
        return None

    # the faults; each takes the shard's name, and how it is to be done

    def cut(self, name: str, where: str) -> None:
        """Cut the file that stands under the name, if it is long enough."""
        file = self.files[name]
        if file is None:
            return
        end = len(file.contents.data)
        header_end = min(file.contents.header_end, end)
        lengths = 0, 5, (8 + header_end) // 2, header_end, (header_end + end) // 2, end - 1
        length = lengths[CUTS.index(where)]
        if length < file.length:
            self._change(file, lambda: os.truncate(self.path_of(name), length))
            file.length = length

    def replace(self, name: str, contents: str) -> None:
        """Put another file under the name, in one step."""
        new = self.saved.shards[name][contents]
        aside = self._aside / "new"

        def put() -> None:
            aside.write_bytes(new.data)
            aside.rename(self.path_of(name))

        file = File(new, len(new.data), 0)
        self._change(file, put)
        self.files[name] = file

    def rewrite(self, name: str, contents: str) -> None:
        """Write other bytes into the file that stands under the name."""
        file = self.files[name]
        if file is None:
            self.replace(name, contents)
            return
        new = self.saved.shards[name][contents]

        def write() -> None:
            with open(self.path_of(name), "r+b") as opened:
                opened.write(new.data)
                opened.truncate()

        self._change(file, write)
        file.contents, file.length = new, len(new.data)

    def delete(self, name: str, _: str) -> None:
        if self.files[name] is not None:
            os.unlink(self.path_of(name))
            self.files[name] = None

    def touch(self, name: str, how: str) -> None:
        """Change something about the file and none of its bytes."""
        file = self.files[name]
        if file is None:
            return
        path = self.path_of(name)
        before = os.stat(path)
        times = before.st_atime_ns, before.st_mtime_ns
        changes: tuple[Callable[[], None], ...] = (
            lambda: os.utime(path),
            lambda: os.utime(path, ns=times),
            lambda: os.chmod(path, before.st_mode ^ 0o040),
            lambda: self._move_away_and_back(path),
        )
        self._change(file, changes[TOUCHES.index(how)])

    def cool(self, name: str, _: str) -> None:
        """Have it leave the page cache; nothing about the file changes."""
        if self.files[name] is not None:
            cool(Path(self.path_of(name)))

    def set_index(self, state: str | None) -> None:
        self.index = state
        text = self.saved.index
        if state == "misplaced":
            document = json.loads(text)
            document["weight_map"] = dict(self.placed())
            text = json.dumps(document).encode()
        self._set(INDEX_NAME, b'{"weight_map":' if state == "garbage" else text, state)

    def set_config(self, state: str | None) -> None:
        self.config = state
        self._set("config.json", b"<html>" if state == "garbage" else self.saved.config, state)

    def repair(self) -> None:
        """Put all that is broken right; what can be opened is left as it is."""
        for name in self.files:
            if self.fault_of(name) is not None:
                self.replace(name, "as written")
        self.set_index("good")
        self.set_config("good")

    def remove(self) -> None:
        shutil.rmtree(self.path)
        shutil.rmtree(self._aside)

    def _set(self, name: str, text: bytes, state: str | None) -> None:
        path = self.path / name
        if state is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(text)

    def _move_away_and_back(self, path: str) -> None:
        away = self._aside / "away"
        os.rename(path, away)
        os.utime(away)  # not every file system takes a rename for a change of the file
        os.rename(away, path)

    def _change(self, file: File, change: Callable[[], None]) -> None:
        """Change a file at a time that no file has: two changes in one tick look like one."""
        self._wait_for_a_tick()
        change()
        self._stamp += 1
        file.stamp = self._stamp

    def _wait_for_a_tick(self) -> None:
        os.utime(self._clock)
        before = os.stat(self._clock).st_ctime_ns
        while os.stat(self._clock).st_ctime_ns == before:
            time.sleep(0.0002)
            os.utime(self._clock)

    def _has_direct_reads(self) -> bool:
        with suppress(OSError, AttributeError):
            os.close(os.open(self.path_of(next(iter(self.files))), os.O_RDONLY | os.O_DIRECT))
            return True
        return False


# What is handed out ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Checked:
    """A shard as it was when its header was checked."""

    file: File
    stamp: int
    contents: Contents


class Opened:
    """A checkpoint that was opened, and what it must know."""

    def __init__(self, folder: Folder, where: str, verify: Literal["all", "needed"]) -> None:
        """`where` is "the folder", "the index", or the name of a shard."""
        self.folder = folder
        self.verify = verify
        self.one_file = where if where in folder.files else None
        self.path = {
            "the folder": str(folder.path),
            "the index": folder.index_path,
        }.get(where, folder.path_of(where))
        self.where = where
        self.places: Mapping[str, str] = {}
        self.checked: dict[str, Checked] = {}
        self.mapped: dict[str, bool] = {}  # True where it is known, False where it may be
        self.knows_config = False
        self.closed = False
        self.outcome = ""
        self._real: Checkpoint | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.checked)} shards checked"
        return f"<{self.where}, {self.verify}, {state}>"

    @property
    def real(self) -> Checkpoint:
        assert self._real is not None
        return self._real

    def open(self, call: Callable[[], Checkpoint]) -> bool:
        """Open it; whether it was not refused."""
        refusal = self._opening()
        self.outcome = "done" if refusal is None else refusal.code.value
        self._real = must(refusal, call)
        return self._real is not None

    # opening

    def _opening(self) -> Refusal | None:
        folder = self.folder
        if self.one_file is not None:
            fault = folder.fault_of(self.one_file)
            if fault is None:
                places = folder.files[self.one_file].contents.places  # type: ignore[union-attr]
                self.places = dict.fromkeys(places, self.one_file)
                self._note_checked(self.one_file)
            return fault
        if folder.index is None and self.where == "the index":
            return Refusal(PathMissingError, Code.PATH_MISSING, folder.index_path)
        if folder.index is None:
            is_empty = len(folder.missing) == len(folder.files)
            code = Code.CHECKPOINT_NO_SHARDS if is_empty else Code.CHECKPOINT_NO_INDEX
            return Refusal(CheckpointError, code, self.path)
        if folder.index == "garbage":
            return Refusal(ShardIndexError, Code.INDEX_NOT_JSON, folder.index_path)
        self.places = folder.placed()
        if self.verify == "needed":
            return self._missing() if folder.missing else None
        faults = [self._missing()] if folder.missing else []
        found = {name: folder.fault_of(name) for name in folder.files}
        faults += [fault for fault in found.values() if fault and fault.code != Code.PATH_MISSING]
        faults = faults or [lost for name in folder.files if (lost := self._lost(name))]
        if not faults:
            for name in folder.files:
                self._note_checked(name)
            return None
        if len(faults) == 1:
            return faults[0]
        problems = tuple(faults)
        return Refusal(CheckpointError, Code.CHECKPOINT_PROBLEMS, self.path, problems)

    def _missing(self) -> Refusal:
        return Refusal(ShardsMissingError, Code.INDEX_SHARDS_MISSING, self.folder.index_path)

    def _lost(self, name: str) -> Refusal | None:
        """What is wrong with a good shard that lacks what the index places in it."""
        held = self.folder.files[name].contents.places  # type: ignore[union-attr]
        if all(tensor in held for tensor, place in self.places.items() if place == name):
            return None
        return Refusal(ShardIndexError, Code.INDEX_TENSORS_MISSING, self.folder.path_of(name))

    def _note_checked(self, name: str) -> None:
        file = self.folder.files[name]
        assert file is not None
        self.checked[name] = Checked(file, file.stamp, file.contents)

    # tensors

    def look_up(self, name: str) -> Refusal | None:
        """Have the shard checked, if it is not yet."""
        if name in self.checked:
            return None
        if self.closed:
            return Refusal(ClosedError, Code.CHECKPOINT_CLOSED, self.folder.path_of(name))
        if self.folder.files[name] is None:
            return self._missing()
        fault = self.folder.fault_of(name) or self._lost(name)
        if fault is None:
            self._note_checked(name)
        return fault

    def tensor(self, name: str) -> Refusal | None:
        """What asking for the tensor must raise."""
        if self.closed:
            return Refusal(ClosedError, Code.CHECKPOINT_CLOSED, self.path)
        return self.info(name)

    def info(self, name: str) -> Refusal | None:
        """What asking for what is known of the tensor must raise; once checked, nothing."""
        if name not in self.places:
            return Refusal(NotFoundError, Code.TENSOR_UNKNOWN, self.path)
        return self.look_up(self.places[name])

    def place(self, name: str) -> MapPlace:
        """Where the map of a shard that was checked holds the tensor."""
        shard = self.places[name]
        return MapPlace(self, shard, *self.checked[shard].contents.places[name])

    def stored_bytes(self, name: str) -> bytes:
        """The tensor's bytes as they were when its shard was checked."""
        contents = self.checked[self.places[name]].contents
        begin, end = contents.places[name]
        return contents.data[begin:end]

    # the config

    def read_config(self) -> Refusal | None:
        """What whoever wants the number of layers must raise."""
        if not self.knows_config and self.folder.config == "garbage":
            return Refusal(ConfigError, Code.CONFIG_NOT_JSON, self.folder.config_path)
        self.knows_config = self.knows_config or self.folder.config is not None
        return None

    def geometry(self) -> Refusal | None:
        """What a stream that is given no config must raise."""
        if self.folder.config is None:
            return Refusal(ConfigError, Code.CONFIG_MISSING, str(self.folder.path))
        if self.folder.config == "garbage":
            return Refusal(ConfigError, Code.CONFIG_NOT_JSON, self.folder.config_path)
        return None

    # layers

    def names(self, layer: int) -> list[str]:
        """The names of a layer, relative to it."""
        prefix = f"{GLM_PREFIX}{layer}."
        return [name.removeprefix(prefix) for name in self.places if name.startswith(prefix)]

    @property
    def layers(self) -> list[int]:
        return [layer for layer in ALL_LAYERS if self.names(layer)]

    @property
    def kda_layers(self) -> list[int]:
        """The layers that a stream takes by itself, broken ones among them."""
        return [n for n in self.layers if not KDA_SIGNS.isdisjoint(self.names(n))]

    def layer(self, layer: int) -> Refusal | None:
        if not self.names(layer):
            return Refusal(NotFoundError, Code.LAYER_UNKNOWN, self.path)
        return self.read_config()

    def every_layer(self) -> Refusal | None:
        """What a stream of every layer must raise for those that are not there."""
        refusal = self.read_config()
        if refusal is None and self.knows_config and not set(self.layers).issuperset(range(LAYERS)):
            return Refusal(CheckpointError, Code.LAYERS_MISSING, self.path)
        return refusal

    def check(self, layer: int) -> Refusal | None:
        """What a check of the layer's metadata must raise; its shards are looked up in turn.

        In the order of the index: which shard is the first at fault, and how many were checked
        before it, depends on that.
        """
        names = self.names(layer)
        attention = [name for name in names if name.startswith("self_attn.")]
        refusal = first(self.tensor(f"{GLM_PREFIX}{layer}.{name}") for name in attention)
        if refusal is None and set(attention) != set(KDA_NAMES):
            return Refusal(BindError, Code.BIND_REFUSED)
        return refusal

    def files_of(self, layer: int) -> list[str]:
        """The shards of a KDA layer, in the order of first use."""
        return list(dict.fromkeys(self.places[f"{GLM_PREFIX}{layer}.{n}"] for n in KDA_NAMES))

    def is_changed(self, name: str) -> bool:
        checked, file = self.checked[name], self.folder.files[name]
        return file is not checked.file or file.stamp != checked.stamp

    def changed(self, names: Sequence[str]) -> Refusal | None:
        """What a load out of these shards must raise."""
        changed = filter(self.is_changed, names)
        return first(
            Refusal(PayloadError, Code.FILE_CHANGED, self.folder.path_of(name)) for name in changed
        )

    def stream(self, layers: Sequence[int] | None) -> tuple[Refusal | None, bool]:
        """What a stream of these layers, or all, must raise; whether it checks them in turn."""
        refusal = first(map(self.layer, layers)) if layers is not None else self.every_layer()
        if refusal is not None:
            return refusal, False
        if len(self.checked) < len(set(self.places.values())):
            return None, True
        return first(map(self.check, self.kda_layers if layers is None else layers)), False

    def load(self, layer: int, read: str) -> Refusal | None:
        """What bringing in a layer that was checked must raise."""
        files = self.files_of(layer)
        refusal = self.changed(files)
        if refusal is None and self.closed:
            return Refusal(ClosedError, Code.CHECKPOINT_CLOSED)
        if refusal is None and read == "direct" and not self.folder.has_direct_reads:
            return Refusal(PayloadError, Code.DIRECT_REFUSED)
        return refusal

    def note_read(self, layer: int, read: str, *, conv_alone: bool = False) -> None:
        """Which maps a load that went well has made, or may have made."""
        names = KDA_NAMES if not conv_alone else [name for name in KDA_NAMES if "conv1d" in name]
        for name in dict.fromkeys(self.places[f"{GLM_PREFIX}{layer}.{n}"] for n in names):
            if read == "mapped":
                self.mapped[name] = True
            elif read == "auto":
                self.mapped.setdefault(name, False)

    def expected(self, layer: int) -> dict[str, bytes]:
        """The bytes of each weight of a layer that was checked."""
        return {
            name: b"".join(self.stored_bytes(f"{GLM_PREFIX}{layer}.self_attn.{x}") for x in leaves)
            for name, leaves in FIELD_LEAVES.items()
        }

    def map(self, name: str) -> Refusal | None:
        """What asking for mapped bytes of a checked shard must raise."""
        if self.closed:
            return Refusal(ClosedError, Code.CHECKPOINT_CLOSED, self.folder.path_of(name))
        refusal = None if self.mapped.get(name) else self.changed([name])
        if refusal is None:
            self.mapped[name] = True
        return refusal

    @property
    def is_whole(self) -> bool:
        """Whether every shard of an open checkpoint was checked, and none has changed since."""
        return not self.closed and all(
            name in self.checked and not self.is_changed(name) for name in self.places.values()
        )

    def may_be_mapped(self, name: str) -> bool:
        """Whether it cannot be told if there is a map of a shard that has changed since."""
        return not self.closed and self.mapped.get(name) is False and self.is_changed(name)


@dataclass(frozen=True)
class MapPlace:
    """Bytes of a checkpoint's map of a shard."""

    opened: Opened
    shard: str
    begin: int
    end: int

    def bytes_now(self) -> bytes | None:
        """What the map shows; None where touching it would kill the process."""
        return self.opened.checked[self.shard].file.bytes_at(self.begin, self.end)


# Slots, and what lies in them --------------------------------------------------------------------


class Memory:
    """Memory for layers: an arena of the caller's, a stream's, or one that a bind made for itself.

    `in_hand` while somebody has that which closes it.
    """

    def __init__(
        self,
        slots: int,
        locked_bytes: int,
        *,
        debug: bool = sys.flags.dev_mode,
        is_large_enough: bool = True,
        arena: PinnedArena | None = None,
        is_of_a_bind: bool = False,
    ) -> None:
        self.slots = slots
        self.locked_bytes = locked_bytes
        self.debug = debug
        self.is_large_enough = is_large_enough
        self.arena = arena
        self.is_of_a_bind = is_of_a_bind
        self.in_hand = not is_of_a_bind
        self.closed = False
        self.claimed: set[int] = set()
        self.loans: list[Loan] = []

    def __repr__(self) -> str:
        return f"<{self.slots} slots{', closed' * self.closed}>"

    @property
    def taken(self) -> set[int]:
        return self.claimed | {loan.slot for loan in self.loans if not loan.is_free}

    def state(self, slot: int) -> SlotState:
        if slot in self.claimed:
            return SlotState.FILLING
        return SlotState.LENT if slot in self.taken else SlotState.FREE

    def into(self, slot: int | None) -> Any:
        """The arena, or one of its slots."""
        assert self.arena is not None
        return self.arena if slot is None else self.arena.slots[slot]

    def forget(self) -> None:
        """Drop the arena without closing it."""
        self.arena, self.in_hand = None, False

    def assert_right(self) -> None:
        """Hold each slot's state against what it must be."""
        if self.arena is not None and not self.closed:
            for slot in self.arena.slots:
                assert slot.state is self.state(slot.number), f"slot {slot.number} of {self}"

    @property
    def locked_now(self) -> int:
        """How many of its bytes must be locked."""
        is_kept = self.in_hand or any(loan.owners or loan.seen for loan in self.loans)
        return self.locked_bytes if is_kept and not self.closed else 0

    def claim(self, slot: int | None) -> Refusal | None:
        """What taking this slot, or any, must raise."""
        if self.closed:
            return Refusal(ClosedError, Code.ARENA_CLOSED)
        if slot in self.taken or len(self.taken) == self.slots:
            return Refusal(SlotError, Code.SLOT_NOT_FREE)
        return None

    def close(self) -> Refusal | None:
        """What closing it must raise; every loan ends."""
        if self.closed:
            return None
        if self.claimed:
            return Refusal(SlotError, Code.SLOT_NOT_FREE)
        self.closed = True
        for loan in self.loans:
            loan.released = loan.views_ended = True
        is_in_use = any(loan.is_pinned for loan in self.loans)
        return Refusal(InUseError, Code.MEMORY_IN_USE) if is_in_use else None


class Loan:
    """A layer in a slot, and the bytes that lie there by field.

    `owners` counts who could give it back: the weights in the caller's hands, and the stream.
    """

    def __init__(
        self, memory: Memory, slot: int, expected: Mapping[str, bytes], owners: int = 1
    ) -> None:
        self.memory = memory
        self.slot = slot
        self.expected = expected
        self.owners = owners
        self.held = False
        self.released = False
        self.views_ended = False
        self.seen: list[Seen] = []
        memory.loans = [*(loan for loan in memory.loans if loan.owners or loan.seen), self]

    def __repr__(self) -> str:
        return f"<slot {self.slot} of {self.memory}>"

    @property
    def is_pinned(self) -> bool:
        return any(one.pins for one in self.seen)

    @property
    def is_free(self) -> bool:
        """Whether its slot is: given back, or forgotten with all that was made of it."""
        is_seen = self.is_pinned or (self.seen and not self.views_ended)
        return self.released or not (self.owners or is_seen)

    def release(self) -> Refusal | None:
        """What giving it back must raise."""
        if self.released:
            return None
        self.views_ended = True
        if self.is_pinned and self.memory.debug:
            return Refusal(InUseError, Code.MEMORY_IN_USE)
        self.released = True
        if self.memory.is_of_a_bind:
            self.memory.closed = True
        return None


class Bound:
    """The weights of a layer in the caller's hands, and the stream's layer around them.

    `maps` are the fields that were left in the checkpoint's maps. `passed` when the stream has
    stepped over it, and given it back.
    """

    def __init__(
        self,
        number: int,
        weights: KdaWeights,
        loan: Loan,
        *,
        maps: Mapping[str, MapPlace] | None = None,
        layer: KdaLayer | None = None,
    ) -> None:
        self.number = number
        self.weights: KdaWeights | None = weights
        self.loan = loan
        self.maps = maps or {}
        self.layer = layer
        self.passed = False

    def __repr__(self) -> str:
        state = "given back" if self.loan.released else "held" if self.loan.held else "lent"
        return f"<layer {self.number}, {state}>"

    def release(self) -> None:
        """Give it back; the model is not told."""
        lent = self.layer or self.weights
        assert lent is not None
        lent.release()

    def forget(self) -> None:
        """Drop it without giving it back."""
        self.loan.owners -= 1
        self.weights = self.layer = None

    def data(self, name: str) -> memoryview:
        tensor: BoundTensor = getattr(self.weights, name)
        return tensor.data

    def assert_right(self) -> None:
        """Hold all that can be read without killing the process against what it must be."""
        for name, expected in self.loan.expected.items():
            if self.loan.views_ended:
                must(MEMORY_GIVEN_BACK, functools.partial(self.data, name))
            else:
                assert self.data(name) == expected, f"{name} of {self}"
        for name, place in self.maps.items():
            bytes_now = place.bytes_now()
            if place.opened.closed:
                must(place.opened.map(place.shard), functools.partial(self.data, name))
            elif place.opened.mapped.get(place.shard) and bytes_now is not None:
                assert self.data(name) == bytes_now, f"{name} of {self}"
        if self.layer is not None:
            assert self.layer.held is (self.loan.held and not self.loan.released)


class Seen:
    """A view of a slot's field or of a map; or an array or a slice that was made of one.

    These `pin` the memory: they cannot be ended. Once their slot was given back they are not looked
    at any more, as the library says.
    """

    def __init__(self, thing: Any, place: Loan | MapPlace, expected: bytes, *, pins: bool) -> None:
        self.thing = thing
        self.place = place
        self.expected = expected
        self.pins = pins
        if isinstance(place, Loan):
            place.seen.append(self)

    def is_of_map_of(self, opened: Opened) -> bool:
        return isinstance(self.place, MapPlace) and self.place.opened is opened

    def forget(self) -> None:
        if isinstance(self.place, Loan):
            self.place.seen.remove(self)
        self.thing = None

    def __repr__(self) -> str:
        return f"<{'an array or a slice' if self.pins else 'a view'} of {self.place}>"

    def assert_right(self) -> None:
        """Hold it against what it must show, unless touching it would kill the process."""
        place = self.place
        if isinstance(place, Loan):
            ended, is_stale = place.views_ended, place.released
            expected: bytes | None = self.expected
        else:
            ended, is_stale = place.opened.closed, False
            expected = place.bytes_now()
        if ended and not self.pins:
            assert is_ended(self.thing), f"{self} can still be used"
        elif not is_stale and expected is not None:
            assert self.thing.tobytes() == expected, f"{self} shows other bytes"


# Streams -----------------------------------------------------------------------------------------


class Streamed:
    """A stream that was entered: what it has staged, and how it will end."""

    def __init__(
        self,
        opened: Opened,
        layers: Sequence[int],
        read: str,
        memory: Memory,
        real: KdaLayerStream,
        *,
        in_turn: bool,
    ) -> None:
        self.opened = opened
        self.layers = layers
        self.read = read
        self.memory = memory
        self.in_turn = in_turn
        self.staged: deque[tuple[int, dict[str, bytes]]] = deque()
        self.failure: Refusal | None = None
        self.ended = False
        self.current: Bound | None = None
        self.handed_out = 0
        self.outcome = ""
        self._real: KdaLayerStream | None = real
        self._next_layer = 0
        self._is_next_checked = False

    def __repr__(self) -> str:
        return f"<a stream of {list(self.layers)} after {self.handed_out}>"

    @property
    def real(self) -> KdaLayerStream:
        assert self._real is not None
        return self._real

    def close(self) -> None:
        self.let_go_of_current()
        must(self.memory.close(), self.real.close)
        assert self.real.report.layers == self.handed_out

    def forget(self) -> None:
        """Drop it, closed or not."""
        self.let_go_of_current()
        self.memory.in_hand = False
        self._real = None

    @property
    def is_done(self) -> bool:
        """Whether no more layer will come."""
        return self.ended and not self.staged

    @property
    def would_wait(self) -> bool:
        """Whether the next step has to wait until a held layer is given back."""
        gives_back = self.current is not None and not self.current.loan.held
        return not (self.staged or self.ended or gives_back or self.memory.closed)

    # what its thread does

    def come_to_rest(self) -> None:
        """Stage all that there are slots for, and wait until the thread has done so too."""
        if not self.memory.closed:
            self._stage_all()
            self._wait_for_the_thread()

    def _stage_all(self) -> None:
        while not self.ended:
            if self._next_layer == len(self.layers):
                self.ended = True
                return
            layer = self.layers[self._next_layer]
            if self.opened.closed:  # which has ended the thread, whatever there is to find
                self._fail(Refusal(ClosedError, Code.CHECKPOINT_CLOSED))
            elif self.in_turn and not self._is_next_checked:
                self._fail(self.opened.layer(layer) or self.opened.check(layer))
                self._is_next_checked = True
            elif len(self.memory.taken) + len(self.staged) == self.memory.slots:
                return
            else:
                self._fail(self.opened.load(layer, self.read))
                if not self.ended:
                    self.opened.note_read(layer, self.read)
                    self.staged.append((layer, self.opened.expected(layer)))
                    self._next_layer += 1
                    self._is_next_checked = False

    def _fail(self, refusal: Refusal | None) -> None:
        self.failure = refusal
        self.ended = refusal is not None

    def _wait_for_the_thread(self) -> None:
        """Nothing public tells; without it each fault would come at another moment in each run."""
        stager = self.real._stager
        assert stager is not None
        waiting = stager.arena._memory.changed._waiters  # type: ignore[attr-defined]
        end = time.monotonic() + AT_REST_SECONDS
        while not stager.ended:
            is_full = all(slot.state is SlotState.LENT for slot in stager.arena.slots)
            if is_full and waiting and not self.ended:
                return
            assert time.monotonic() < end, f"{self} does not come to rest"
            time.sleep(0.0002)

    # what its consumer does

    def step(self, bounds: Sequence[Bound]) -> Bound | None:
        """Take a step; the layer, or None at the end and where it was refused."""
        refusal, staged = self._step_in_the_model(bounds)
        self.outcome = "a layer" if staged else "the end" if refusal is None else refusal.code.value
        layer = must(refusal, lambda: next(self.real, None))
        if staged is None:
            assert layer is None, f"{layer} came"
            return None
        number, expected = staged
        assert layer is not None, f"layer {number} did not come"
        assert layer.index == layer.report.layer_idx == number
        slot = layer.weights.lease.slot.number
        assert slot not in self.memory.taken, f"slot {slot} was given twice"
        loan = Loan(self.memory, slot, expected, owners=2)
        self.handed_out += 1
        self.current = Bound(number, layer.weights, loan, layer=layer)
        return self.current

    def _step_in_the_model(
        self, bounds: Sequence[Bound]
    ) -> tuple[Refusal | None, tuple[int, dict[str, bytes]] | None]:
        """What the step must raise, or give; the current layer is given back by it."""
        kept = [b for b in bounds if b.passed and b.layer and b.loan.memory is self.memory]
        if self.memory.closed or len(kept) > 1:
            return Refusal(StreamError, Code.STREAM_MISUSE, self.opened.path), None
        current = self.current
        if current is not None and not (current.loan.held or current.loan.released):
            refusal = current.loan.release()
            if refusal is not None:
                return refusal, None
            current.passed = True
        self.let_go_of_current()
        self._stage_all()
        if self.staged:
            return None, self.staged.popleft()
        refusal, self.failure = self.failure, None
        return refusal, None

    def let_go_of_current(self) -> None:
        if self.current is not None:
            self.current.loan.owners -= 1
            self.current = None
