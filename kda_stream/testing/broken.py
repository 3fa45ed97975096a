"""`Broken`: checkpoints by the one thing that is broken in each, and the error that each must give.

The kinds are those that people report of real checkpoints, and those that readers of the format
disagree on.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from ..errors import ArgumentError
from ..errors import ErrorCode as Code
from ..limits import HEADER_BYTES_MAX, INTEGER_MAX
from .breaking import (
    HTML_PAGE,
    JSON_ERROR,
    LFS_POINTER,
    Act,
    Victim,
    bind_socket,
    config,
    config_text,
    entry,
    entry_from,
    escaped_first_letter,
    file_bytes,
    header_bytes,
    header_of_length,
    header_text,
    in_folder,
    index_of,
    index_text,
    instead_of_file,
    kda_tensor,
    keys,
    last_kda_layer,
    member,
    metadata,
    named,
    named_twice,
    placed_in,
    ranges,
    replaced_by,
    resized,
    same_range_twice,
    shifted,
    sparse_file,
    starting_with,
    tensor_listed_twice,
    tensors,
    weight_map,
    without_shards,
)
from .checkpoints import CONFIG_NAME, INDEX_NAME, Layout, write_checkpoint

# Met when layers, geometry or weights are asked for: every file by itself is sound.
_LATER: Final = frozenset(
    {
        *(Code.LAYERS_NONE, Code.LAYERS_TWO_PREFIXES, Code.LAYERS_MISSING),
        *(Code.CONFIG_MISSING, Code.CONFIG_NOT_JSON, Code.CONFIG_KEY_MISSING),
        *(Code.CONFIG_VALUE, Code.CONFIG_CONTRADICTION, Code.BIND_REFUSED),
    }
)
_DIGITS: Final = "9" * 5000
_DEEP: Final = "[" * 100_000


@dataclass(frozen=True, eq=False)
class _Fault:
    code: Code
    act: Act = field(repr=False)


class Broken(Enum):
    """A checkpoint that must be refused, named by what is broken in it.

    The first word says where: `FILE` (what stands under a shard's name), `HEADER`, `METADATA`,
    `ENTRY`, `DTYPE`, `SHAPE`, `OFFSETS` (in one shard's header), `INDEX` (it and the set of
    shards), `NAMES` (of tensors and layers), `BLOCK` (a KDA layer's tensors) or `CONFIG`.
    `write_broken_checkpoint` writes it.
    """

    FILE_MISSING = _Fault(Code.INDEX_SHARDS_MISSING, instead_of_file(lambda _: None))
    FILE_DANGLING_LINK = _Fault(
        Code.PATH_DANGLING_LINK, instead_of_file(lambda path: path.symlink_to("no-such-blob"))
    )
    FILE_LINK_TO_ITSELF = _Fault(
        Code.PATH_NOT_READABLE, instead_of_file(lambda path: path.symlink_to(path.name))
    )
    FILE_DIRECTORY = _Fault(Code.PATH_NOT_REGULAR, instead_of_file(Path.mkdir))
    FILE_NAMED_PIPE = _Fault(Code.PATH_NOT_REGULAR, instead_of_file(os.mkfifo))
    FILE_SOCKET = _Fault(Code.PATH_NOT_REGULAR, instead_of_file(bind_socket))
    FILE_EMPTY = _Fault(Code.HEADER_FILE_TOO_SHORT, replaced_by(b""))
    FILE_SEVEN_BYTES = _Fault(Code.HEADER_FILE_TOO_SHORT, file_bytes(lambda data: data[:7]))
    FILE_ZEROS = _Fault(Code.HEADER_LENGTH_ZERO, file_bytes(lambda data: bytes(len(data))))
    FILE_LFS_POINTER = _Fault(Code.HEADER_FOREIGN_FILE, replaced_by(LFS_POINTER))
    FILE_HTML_PAGE = _Fault(Code.HEADER_FOREIGN_FILE, replaced_by(HTML_PAGE))
    FILE_JSON_ERROR = _Fault(Code.HEADER_FOREIGN_FILE, replaced_by(JSON_ERROR))
    FILE_GGUF = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"GGUF\x03\0\0\0"))
    FILE_ZIP = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"PK\x03\x04\x14\0\0\0\x08\0"))
    FILE_PICKLE = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"\x80\x02}q\0X\x01\0"))
    FILE_GZIP = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"\x1f\x8b\x08\0\0\0\0\0\0\x03"))
    FILE_NUMPY = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"\x93NUMPY\x01\0v\0"))
    FILE_HDF5 = _Fault(Code.HEADER_FOREIGN_FILE, starting_with(b"\x89HDF\r\n\x1a\n"))
    FILE_CUT_IN_HEADER = _Fault(Code.HEADER_LENGTH_OVER_FILE, file_bytes(lambda data: data[:20]))
    FILE_CUT_IN_PAYLOAD = _Fault(
        Code.FILE_SHORT, file_bytes(lambda data: data[: len(data) - len(data) // 4])
    )
    FILE_CUT_BY_A_BYTE = _Fault(Code.FILE_SHORT, file_bytes(lambda data: data[:-1]))
    FILE_A_BYTE_TOO_LONG = _Fault(Code.FILE_LONG, file_bytes(lambda data: data + b"\0"))
    FILE_WRITTEN_TWICE = _Fault(Code.FILE_LONG, file_bytes(lambda data: data + data))
    FILE_OF_ANOTHER_SHARD = _Fault(
        Code.INDEX_TENSORS_MISSING,
        lambda victim: victim.shard.write_bytes(victim.other_shard.read_bytes()),
    )

    HEADER_LENGTH_ZERO = _Fault(Code.HEADER_LENGTH_ZERO, header_of_length(0))
    HEADER_LENGTH_SHORT = _Fault(Code.HEADER_NOT_JSON, header_of_length(100))
    HEADER_LENGTH_OVER_FILE = _Fault(Code.HEADER_LENGTH_OVER_FILE, header_of_length(2**40))
    HEADER_LENGTH_ALL_BITS = _Fault(Code.HEADER_LENGTH_OVER_FILE, header_of_length(INTEGER_MAX))
    HEADER_LENGTH_BIG_ENDIAN = _Fault(
        Code.HEADER_LENGTH_OVER_FILE, file_bytes(lambda data: data[7::-1] + data[8:])
    )
    HEADER_LENGTH_OVER_CAP = _Fault(
        Code.HEADER_LENGTH_OVER_CAP,
        sparse_file(2 * HEADER_BYTES_MAX, (HEADER_BYTES_MAX + 1).to_bytes(8, "little") + b"{"),
    )
    HEADER_NOT_UTF8 = _Fault(
        Code.HEADER_NOT_UTF8, header_bytes(lambda text: text.replace(b"A_log", b"\xff_log", 1))
    )
    HEADER_UTF_16 = _Fault(
        Code.HEADER_NOT_UTF8, header_bytes(lambda text: text.decode().encode("utf-16"))
    )
    HEADER_BYTE_ORDER_MARK = _Fault(Code.HEADER_START, header_text(lambda text: "\ufeff" + text))
    HEADER_SPACE_BEFORE = _Fault(Code.HEADER_START, header_text(lambda text: " " + text))
    HEADER_SPACES_ALONE = _Fault(Code.HEADER_START, header_text(lambda text: " " * len(text)))
    HEADER_A_LIST = _Fault(Code.HEADER_START, header_text(lambda text: f"[{text}]"))
    HEADER_PADDED_WITH_ZEROS = _Fault(Code.HEADER_PADDING, header_text(lambda text: text + "\0\0"))
    HEADER_PADDED_WITH_A_LINE_BREAK = _Fault(
        Code.HEADER_PADDING, header_text(lambda text: text + "\n")
    )
    HEADER_CUT = _Fault(Code.HEADER_NOT_JSON, header_text(lambda text: text[: len(text) // 2]))
    HEADER_COMMA_AT_THE_END = _Fault(
        Code.HEADER_NOT_JSON, header_text(lambda text: text[:-1] + ",}")
    )
    HEADER_COMMENT = _Fault(Code.HEADER_NOT_JSON, header_text(lambda text: "{/* */" + text[1:]))
    HEADER_SINGLE_QUOTES = _Fault(
        Code.HEADER_NOT_JSON, header_text(lambda text: text.replace('"', "'"))
    )
    HEADER_TWO_OBJECTS = _Fault(Code.HEADER_NOT_JSON, header_text(lambda text: text + text))
    HEADER_NOT_A_NUMBER = _Fault(Code.HEADER_NOT_JSON, member(shape="[NaN]"))
    HEADER_NESTED_DEEPLY = _Fault(Code.HEADER_NESTING, entry(_DEEP))
    HEADER_NAME_TWICE = _Fault(Code.HEADER_DUPLICATE_KEY, named_twice())
    HEADER_NAME_TWICE_ONCE_ESCAPED = _Fault(
        Code.HEADER_DUPLICATE_KEY, named_twice(escaped_first_letter)
    )

    METADATA_TWICE = _Fault(
        Code.HEADER_DUPLICATE_KEY, header_text(lambda text: '{"__metadata__":{},' + text[1:])
    )
    METADATA_KEY_TWICE = _Fault(Code.HEADER_DUPLICATE_KEY, metadata('{"a":"b","a":"c"}'))
    METADATA_NULL = _Fault(Code.HEADER_METADATA, metadata("null"))
    METADATA_A_LIST = _Fault(Code.HEADER_METADATA, metadata('["pt"]'))
    METADATA_VALUE_A_NUMBER = _Fault(Code.HEADER_METADATA, metadata('{"step":1}'))
    METADATA_VALUE_NULL = _Fault(Code.HEADER_METADATA, metadata('{"step":null}'))
    METADATA_VALUE_AN_OBJECT = _Fault(Code.HEADER_METADATA, metadata('{"a":{"b":"c"}}'))
    METADATA_HALF_A_CHARACTER = _Fault(Code.HEADER_LONE_SURROGATE, metadata(r'{"a":"\udfff"}'))

    ENTRY_NULL = _Fault(Code.ENTRY_NOT_OBJECT, entry("null"))
    ENTRY_A_STRING = _Fault(Code.ENTRY_NOT_OBJECT, entry('"F32"'))
    ENTRY_A_LIST = _Fault(
        Code.ENTRY_NOT_OBJECT, entry_from(lambda old: f"[{','.join(old.values())}]")
    )
    ENTRY_EMPTY = _Fault(Code.ENTRY_KEYS, entry("{}"))
    ENTRY_WITHOUT_DTYPE = _Fault(
        Code.ENTRY_KEYS, keys(lambda old: [(k, old[k]) for k in ("shape", "data_offsets")])
    )
    ENTRY_WITHOUT_SHAPE = _Fault(
        Code.ENTRY_KEYS, keys(lambda old: [(k, old[k]) for k in ("dtype", "data_offsets")])
    )
    ENTRY_WITHOUT_OFFSETS = _Fault(
        Code.ENTRY_KEYS, keys(lambda old: [(k, old[k]) for k in ("dtype", "shape")])
    )
    ENTRY_KEY_MORE = _Fault(Code.ENTRY_KEYS, keys(lambda old: [*old.items(), ("strides", "[1]")]))
    ENTRY_KEY_IN_CAPITALS = _Fault(
        Code.ENTRY_KEYS, keys(lambda old: [(k.upper(), text) for k, text in old.items()])
    )
    ENTRY_KEY_TWICE = _Fault(
        Code.HEADER_DUPLICATE_KEY, keys(lambda old: [("shape", "[1]"), *old.items()])
    )

    DTYPE_UNKNOWN = _Fault(Code.DTYPE_UNKNOWN, member(dtype='"F128"'))
    DTYPE_IN_SMALL_LETTERS = _Fault(Code.DTYPE_UNKNOWN, member(dtype='"f32"'))
    DTYPE_EMPTY = _Fault(Code.DTYPE_UNKNOWN, member(dtype='""'))
    DTYPE_NULL = _Fault(Code.DTYPE_UNKNOWN, member(dtype="null"))
    DTYPE_A_NUMBER = _Fault(Code.DTYPE_UNKNOWN, member(dtype="32"))
    DTYPE_WIDER_THAN_ITS_BYTES = _Fault(Code.OFFSETS_SIZE, member(dtype='"F64"'))
    DTYPE_NARROWER_THAN_ITS_BYTES = _Fault(Code.OFFSETS_SIZE, member(dtype='"BF16"'))

    SHAPE_NEGATIVE_TWICE = _Fault(Code.SHAPE_INVALID, member(shape="[-2,-2]"))
    SHAPE_MINUS_ZERO = _Fault(Code.SHAPE_INVALID, member(shape="[-0]"))
    SHAPE_A_BOOLEAN = _Fault(Code.SHAPE_INVALID, member(shape="[true]"))
    SHAPE_A_FRACTION = _Fault(Code.SHAPE_INVALID, member(shape="[4.0]"))
    SHAPE_A_STRING = _Fault(Code.SHAPE_INVALID, member(shape='["4"]'))
    SHAPE_NULL = _Fault(Code.SHAPE_INVALID, member(shape="null"))
    SHAPE_NO_LIST = _Fault(Code.SHAPE_INVALID, member(shape="4"))
    SHAPE_A_LIST_OF_LISTS = _Fault(Code.SHAPE_INVALID, member(shape="[{}]"))
    SHAPE_OF_5000_DIGITS = _Fault(Code.SHAPE_INVALID, member(shape=f"[{_DIGITS}]"))
    SHAPE_PRODUCT_WRAPS_TO_ZERO = _Fault(Code.SHAPE_OVERFLOW, member(shape=f"[{2**62},4]"))
    SHAPE_PRODUCT_TOO_LARGE_BESIDE_ZERO = _Fault(
        Code.SHAPE_OVERFLOW, member(shape=f"[{2**62},4,0]", offsets="[0,0]")
    )
    SHAPE_OF_HALF_A_BYTE = _Fault(Code.SHAPE_PARTIAL_BYTE, member(dtype='"F4"', shape="[3]"))
    SHAPE_LARGER_THAN_ITS_BYTES = _Fault(Code.OFFSETS_SIZE, resized(lambda count: 2 * count))
    SHAPE_SMALLER_THAN_ITS_BYTES = _Fault(Code.OFFSETS_SIZE, resized(lambda count: count - 1))

    OFFSETS_REVERSED = _Fault(Code.OFFSETS_INVALID, ranges(lambda found: found[0].reverse()))
    OFFSETS_NEGATIVE = _Fault(Code.OFFSETS_INVALID, member(offsets="[-16,0]"))
    OFFSETS_FRACTIONS = _Fault(Code.OFFSETS_INVALID, member(offsets="[0.0,16.0]"))
    OFFSETS_BOOLEANS = _Fault(Code.OFFSETS_INVALID, member(offsets="[false,true]"))
    OFFSETS_OVER_64_BITS = _Fault(Code.OFFSETS_INVALID, member(offsets=f"[{2**64},{2**64 + 16}]"))
    OFFSETS_ONE = _Fault(Code.OFFSETS_INVALID, member(offsets="[0]"))
    OFFSETS_THREE = _Fault(Code.OFFSETS_INVALID, member(offsets="[0,16,32]"))
    OFFSETS_NO_LIST = _Fault(Code.OFFSETS_INVALID, member(offsets='"0,16"'))
    OFFSETS_OF_TWO_TENSORS_EQUAL = _Fault(Code.OFFSETS_OVERLAP, ranges(same_range_twice))
    OFFSETS_SHARE_A_BYTE = _Fault(Code.OFFSETS_OVERLAP, ranges(shifted(1, -1)))
    OFFSETS_LEAVE_A_HOLE = _Fault(Code.OFFSETS_HOLE, ranges(shifted(-1, 1)))
    OFFSETS_START_LATE = _Fault(Code.OFFSETS_HOLE, ranges(shifted(0, 8)))

    INDEX_MISSING = _Fault(Code.CHECKPOINT_NO_INDEX, in_folder(lambda f: (f / INDEX_NAME).unlink()))
    INDEX_TWICE = _Fault(
        Code.CHECKPOINT_TWO_INDEXES,
        in_folder(lambda f: (f / f"consolidated.{INDEX_NAME[6:]}").write_text("{}")),
    )
    INDEX_AND_SHARDS_MISSING = _Fault(Code.CHECKPOINT_NO_SHARDS, without_shards)
    INDEX_CUT = _Fault(Code.INDEX_NOT_JSON, index_text(lambda text: text[: len(text) // 2]))
    INDEX_LFS_POINTER = _Fault(Code.INDEX_NOT_JSON, index_text(lambda _: LFS_POINTER.decode()))
    INDEX_HTML_PAGE = _Fault(Code.INDEX_NOT_JSON, index_text(lambda _: HTML_PAGE.decode()))
    INDEX_EMPTY = _Fault(Code.INDEX_NOT_JSON, index_text(lambda _: ""))
    INDEX_NESTED_DEEPLY = _Fault(Code.INDEX_NOT_JSON, index_text(lambda _: _DEEP))
    INDEX_NAME_TWICE = _Fault(Code.INDEX_NOT_JSON, tensor_listed_twice)
    INDEX_A_LIST = _Fault(Code.INDEX_WEIGHT_MAP, index_of([]))
    INDEX_WITHOUT_WEIGHT_MAP = _Fault(Code.INDEX_WEIGHT_MAP, index_of({"metadata": {}}))
    INDEX_WEIGHT_MAP_EMPTY = _Fault(Code.INDEX_WEIGHT_MAP, index_of({"weight_map": {}}))
    INDEX_WEIGHT_MAP_A_LIST = _Fault(Code.INDEX_WEIGHT_MAP, index_of({"weight_map": ["A_log"]}))
    INDEX_SHARD_IN_PARENT = _Fault(Code.INDEX_SHARD_NAME, placed_in("../model.safetensors"))
    INDEX_SHARD_ABSOLUTE = _Fault(Code.INDEX_SHARD_NAME, placed_in("/etc/passwd"))
    INDEX_SHARD_ON_A_DRIVE = _Fault(Code.INDEX_SHARD_NAME, placed_in("C:\\model.safetensors"))
    INDEX_SHARD_IN_SUBFOLDER = _Fault(Code.INDEX_SHARD_NAME, placed_in("sub/model.safetensors"))
    INDEX_SHARD_THE_PARENT = _Fault(Code.INDEX_SHARD_NAME, placed_in(".."))
    INDEX_SHARD_EMPTY = _Fault(Code.INDEX_SHARD_NAME, placed_in(""))
    INDEX_SHARD_A_NUMBER = _Fault(Code.INDEX_SHARD_NAME, placed_in(1))
    INDEX_SHARD_NULL = _Fault(Code.INDEX_SHARD_NAME, placed_in(None))
    INDEX_SHARD_WITH_ESCAPES = _Fault(Code.INDEX_SHARD_NAME, placed_in("\x1b[2Jmodel.safetensors"))
    INDEX_TENSOR_IN_NO_SHARD = _Fault(
        Code.INDEX_TENSORS_MISSING,
        weight_map(lambda places, v: places.update({v.layer + "self_attn.x": v.shard.name})),
    )
    INDEX_TENSOR_IN_ANOTHER_SHARD = _Fault(
        Code.INDEX_TENSORS_MISSING,
        weight_map(lambda places, v: places.update({v.tensor: v.other_shard.name})),
    )

    NAMES_HALF_A_CHARACTER = _Fault(Code.HEADER_LONE_SURROGATE, named(r"\ud800"))
    NAMES_RENAMED = _Fault(Code.INDEX_TENSORS_MISSING, named("A_log"))
    NAMES_WITHOUT_LAYERS = _Fault(
        Code.LAYERS_NONE,
        tensors(lambda t, _: [t._replace(name=t.name.replace("layers.", "blocks."))]),
    )
    NAMES_OF_TWO_DECODERS = _Fault(
        Code.LAYERS_TWO_PREFIXES,
        kda_tensor("", lambda t: [t, t._replace(name="draft." + t.name)]),
    )
    NAMES_WITHOUT_A_LAYER = _Fault(Code.LAYERS_MISSING, last_kda_layer(lambda _: []))

    BLOCK_WITHOUT_A_TENSOR = _Fault(Code.BIND_REFUSED, kda_tensor("dt_bias", lambda _: []))
    BLOCK_TENSOR_MORE = _Fault(
        Code.BIND_REFUSED,
        kda_tensor("q_proj.weight", lambda t: [t, t._replace(name=t.name[:-6] + "bias")]),
    )
    BLOCK_QUANTISED = _Fault(
        Code.BIND_REFUSED, kda_tensor("q_proj.weight", lambda t: [t._replace(dtype="F8_E4M3")])
    )
    BLOCK_CONV_IN_F32 = _Fault(
        Code.BIND_REFUSED, kda_tensor("conv1d.weight", lambda t: [t._replace(dtype="F32")])
    )
    BLOCK_CONV_SQUEEZED = _Fault(
        Code.BIND_REFUSED,
        kda_tensor("conv1d.weight", lambda t: [t._replace(shape=(t.shape[0], t.shape[2]))]),
    )
    BLOCK_CONV_TRANSPOSED = _Fault(
        Code.BIND_REFUSED,
        kda_tensor("conv1d.weight", lambda t: [t._replace(shape=(t.shape[0], t.shape[2], 1))]),
    )
    BLOCK_A_LOG_IN_BF16 = _Fault(
        Code.BIND_REFUSED, kda_tensor("A_log", lambda t: [t._replace(dtype="BF16")])
    )
    BLOCK_A_LOG_OF_FOUR_AXES = _Fault(
        Code.BIND_REFUSED, kda_tensor("A_log", lambda t: [t._replace(shape=(1, 1, *t.shape, 1))])
    )
    BLOCK_DT_BIAS_A_HEAD = _Fault(
        Code.BIND_REFUSED, kda_tensor("dt_bias", lambda t: [t._replace(shape=(t.shape[0] // 2,))])
    )

    CONFIG_MISSING = _Fault(Code.CONFIG_MISSING, in_folder(lambda f: (f / CONFIG_NAME).unlink()))
    CONFIG_CUT = _Fault(Code.CONFIG_NOT_JSON, config_text(lambda text: text[: len(text) // 2]))
    CONFIG_A_LIST = _Fault(Code.CONFIG_NOT_JSON, config_text(lambda text: f"[{text}]"))
    CONFIG_WITHOUT_HIDDEN = _Fault(
        Code.CONFIG_KEY_MISSING, config(lambda text: text.pop("hidden_size"))
    )
    CONFIG_HEADS_A_STRING = _Fault(
        Code.CONFIG_VALUE, config(lambda text: text["linear_attn_config"].update(num_heads="4"))
    )
    CONFIG_WITH_TWO_HEAD_DIMS = _Fault(
        Code.CONFIG_CONTRADICTION,
        config(lambda t: t.update(linear_head_dim=t["linear_attn_config"]["head_dim"] + 1)),
    )
    CONFIG_OF_ANOTHER_GEOMETRY = _Fault(
        Code.BIND_REFUSED,
        config(lambda t: t.update(hidden_size=t["hidden_size"] + 1)),
    )

    @property
    def code(self) -> Code:
        """The code of the error that it must give."""
        return self.value.code

    @property
    def is_met_on_opening(self) -> bool:
        """Whether opening the checkpoint must refuse it; else asking for its layers must."""
        return self.code not in _LATER


def write_broken_checkpoint(
    directory: str | os.PathLike[str], broken: Broken, layout: Layout | None = None
) -> Path:
    """Write a checkpoint of that layout (by default `Layout()`) in which one thing is broken.

    What is broken concerns the first KDA layer, or the last one where a layer is to be missing.
    Makes the directory where it is not there yet, and returns its path. Raises `ArgumentError` when
    the directory is not empty, and for a layout in which not every kind can be told: it must have
    two shards, two KDA layers, a conv_kernel of 2, the contract's dtype for A_log, and a prefix of
    ASCII letters, digits, `_` and `.` that ends with `layers.`.

    Example: `write_broken_checkpoint(tmp_path, Broken.FILE_CUT_BY_A_BYTE)`.
    """
    layout = Layout() if layout is None else layout
    _require_breakable(layout)
    folder = Path(directory)
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(
            Code.ARGUMENT,
            "the directory is not empty",
            path=folder,
            hint="write each broken checkpoint into a directory of its own",
        )
    write_checkpoint(folder, layout)
    broken.value.act(Victim(folder, layout))
    return folder


def _require_breakable(layout: Layout) -> None:
    for is_met, wanted, got in (
        (layout.shards >= 2, "two shards", layout.shards),
        (len(layout.kda_layers) >= 2, "two KDA layers", len(layout.kda_layers)),
        (layout.config.conv_kernel >= 2, "a conv_kernel of 2", layout.config.conv_kernel),
        ("A_log" not in layout.dtypes, "the contract's dtype for A_log", layout.dtypes),
        (_PREFIX.fullmatch(layout.prefix), "a plain prefix, layers. at its end", layout.prefix),
    ):
        if not is_met:
            raise ArgumentError(
                Code.ARGUMENT,
                "the layout cannot be broken in every way",
                expected=f"at least {wanted}",
                got=got,
                hint="leave the layout out, or see write_broken_checkpoint",
            )


_PREFIX: Final = re.compile(r"([\w.]*\.)?layers\.", re.ASCII)
