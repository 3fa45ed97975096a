"""Every kind of fault, named, with what it means, its likely cause and what to do.

Behind each stands the class that is raised, or listed among the `problems` of one that is.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """The kinds of fault, by what is broken. The values are stable."""

    # the path and the file under it

    PATH_MISSING = "path-missing"
    """Nothing is under the path. Likely: it is misspelt, or its disk is not mounted. Do: check it.
    `PathMissingError`."""

    PATH_DANGLING_LINK = "path-dangling-link"
    """The path is a link to nothing. Likely: a hub's cache was cleaned, or a download stopped. Do:
    fetch the checkpoint again. `PathMissingError`."""

    PATH_NOT_REGULAR = "path-not-regular"
    """A directory, a pipe, a socket or a device is where a file must be. Likely: a folder has a
    shard's name. Do: see what stands under the name. `PathError`."""

    PATH_NOT_READABLE = "path-not-readable"
    """The system does not open or list the path. Likely: permissions, too many open files, or a
    disk that fails; `got` is its reason. Do: change that, or raise `ulimit -n`. `PathError`."""

    PATH_NOT_WRITABLE = "path-not-writable"
    """A manifest, a page or a test's shard cannot be written. Likely: a file of that name is there,
    or the folder is missing, full or read-only. Do: name another file. `PathError`."""

    FILE_TOO_LARGE = "file-too-large"
    """An index, a config or a manifest is longer than any real one. Likely: another file stands
    under its name. Do: see what it is. `PathError`."""

    FILE_CHANGED = "file-changed"
    """A shard is not the file any more whose header was checked: replaced, rewritten, cut, moved,
    or its owner, mode or links changed. Likely: a sync or a download runs. Do: let it end, and open
    the checkpoint again. `PayloadError`."""

    # a shard's header

    HEADER_FOREIGN_FILE = "header-foreign-file"
    """The file is of another kind, which is named. Likely: a Git LFS pointer or an error page was
    saved under a shard's name. Do: fetch the real file. `HeaderError`."""

    HEADER_FILE_TOO_SHORT = "header-file-too-short"
    """The file has fewer than the 8 bytes of a header's length. Likely: a download that did not
    begin. Do: fetch it again. `HeaderError`."""

    HEADER_LENGTH_ZERO = "header-length-zero"
    """The file begins with zeros. Likely: a download that reserved the room and wrote nothing. Do:
    fetch it again. `HeaderError`."""

    HEADER_LENGTH_OVER_FILE = "header-length-over-file"
    """The header would be longer than the file. Likely: a cut file, or no safetensors file. Do:
    fetch it again. `HeaderError`."""

    HEADER_LENGTH_OVER_CAP = "header-length-over-cap"
    """The header is longer than is read by default. Likely: a crafted file, or millions of tensors.
    Do: where the file is trusted, pass a larger `header_bytes_max`. `HeaderError`."""

    HEADER_NOT_UTF8 = "header-not-utf8"
    """The header is no UTF-8 text. Likely: a damaged file. Do: fetch it again. `HeaderError`."""

    HEADER_START = "header-start"
    """The header does not begin with `{`. Likely: a writer that put white space or a byte-order
    mark there. Do: write the file anew with the safetensors package. `HeaderError`."""

    HEADER_PADDING = "header-padding"
    """The header is filled up with something else than spaces. Likely: a writer of its own kind.
    Do: write the file anew with the safetensors package. `HeaderError`."""

    HEADER_NOT_JSON = "header-not-json"
    """The header is no valid JSON. Likely: a damaged file. Do: fetch it again. `HeaderError`."""

    HEADER_NESTING = "header-nesting"
    """The header is nested deeper than any real one. Likely: a crafted file. Do: do not use it.
    `HeaderError`."""

    HEADER_DUPLICATE_KEY = "header-duplicate-key"
    """The header gives one name twice, and readers disagree on which counts. Likely: a writer's
    mistake, or a crafted file. Do: write the file anew. `HeaderError`."""

    HEADER_LONE_SURROGATE = "header-lone-surrogate"
    """A string of the header is no Unicode text. Likely: a crafted or damaged file. Do: fetch it
    again. `HeaderError`."""

    HEADER_METADATA = "header-metadata"
    """`__metadata__` is no object of strings. Likely: a writer put a number there. Do: write the
    file anew with the safetensors package. `HeaderError`."""

    ENTRY_NOT_OBJECT = "entry-not-object"
    """A tensor's entry in the header is no JSON object. Likely: a writer's mistake. Do: write the
    file anew with the safetensors package. `HeaderError`."""

    ENTRY_KEYS = "entry-keys"
    """A tensor's entry has other keys than `dtype`, `shape` and `data_offsets`. Likely: a format
    that only resembles safetensors. Do: convert the file. `HeaderError`."""

    DTYPE_UNKNOWN = "dtype-unknown"
    """A dtype is none of the format's codes. Likely: a newer format, or a writer's mistake. Do:
    convert the tensor, or ask for a newer kda_stream. `HeaderError`."""

    SHAPE_INVALID = "shape-invalid"
    """A shape is no list of integers from 0 to 2^64 - 1. Likely: a writer's mistake. Do: write the
    file anew with the safetensors package. `HeaderError`."""

    SHAPE_OVERFLOW = "shape-overflow"
    """A tensor's bits are more than 64 bits can count. Likely: a crafted file. Do: do not use it.
    `HeaderError`."""

    SHAPE_PARTIAL_BYTE = "shape-partial-byte"
    """A tensor of 4 or 6 bits a value ends within a byte. Likely: a writer that does not pad. Do:
    pad its last extent. `HeaderError`."""

    OFFSETS_INVALID = "offsets-invalid"
    """`data_offsets` are no two counts, the first of them not larger. Likely: a writer's mistake.
    Do: write the file anew with the safetensors package. `HeaderError`."""

    OFFSETS_SIZE = "offsets-size"
    """A tensor's byte range is not the size of its dtype and shape. Likely: a header that was
    edited. Do: fetch the file again. `HeaderError`."""

    OFFSETS_OVERLAP = "offsets-overlap"
    """Two tensors lie over the same bytes. Likely: shared weights, written once by another writer,
    or a crafted file. Do: write the file anew. `HeaderError`."""

    OFFSETS_HOLE = "offsets-hole"
    """Bytes of the payload belong to no tensor. Likely: a writer that aligns tensors, or hides
    something. Do: write the file anew with the safetensors package. `HeaderError`."""

    FILE_SHORT = "file-short"
    """The file ends before its last tensor does. Likely: a download that was cut off. Do: fetch it
    again. `HeaderError`."""

    FILE_LONG = "file-long"
    """The file goes on after its last tensor. Likely: two downloads wrote into one file. Do: fetch
    it again. `HeaderError`."""

    # the index and the set of shards

    INDEX_NOT_JSON = "index-not-json"
    """The index is no valid JSON, or gives one name twice. Likely: a Git LFS pointer, an error
    page, or a damaged file. Do: fetch it again. `ShardIndexError`."""

    INDEX_WEIGHT_MAP = "index-weight-map"
    """The index has no `weight_map`, or an empty one. Likely: another JSON file. Do: pass the
    model.safetensors.index.json. `ShardIndexError`."""

    INDEX_SHARD_NAME = "index-shard-name"
    """The index names a shard by a path, or by no text at all. Likely: a crafted index. Do: do not
    use it. `ShardIndexError`."""

    INDEX_SHARDS_MISSING = "index-shards-missing"
    """Shards that the index names are not there; `missing` names them. Likely: a download that
    stopped. Do: fetch them. `ShardsMissingError`."""

    INDEX_TENSORS_MISSING = "index-tensors-missing"
    """A shard lacks tensors that the index places in it. Likely: index and shards of two saves. Do:
    fetch both again. `ShardIndexError`."""

    CHECKPOINT_NO_SHARDS = "checkpoint-no-shards"
    """The directory holds no safetensors file. Likely: the folder above it was meant, or only the
    config was fetched. Do: pass the folder with the weights. `CheckpointError`."""

    CHECKPOINT_NO_INDEX = "checkpoint-no-index"
    """The directory holds several shards, or one of several, and no index. Likely: the index was
    not fetched. Do: fetch it, or pass one shard. `CheckpointError`."""

    CHECKPOINT_TWO_INDEXES = "checkpoint-two-indexes"
    """The directory holds more than one index. Likely: two saves in one folder. Do: pass the path
    of the one to load. `CheckpointError`."""

    CHECKPOINT_PROBLEMS = "checkpoint-problems"
    """More than one shard is at fault; `problems` has an error for each. Likely: a broken download.
    Do: what they say. `CheckpointError`."""

    CHECKPOINT_CLOSED = "checkpoint-closed"
    """A checkpoint was used after `close()`. Likely: its `with` was left. Do: open it again, or
    copy what has to live longer. `ClosedError`."""

    TENSOR_UNKNOWN = "tensor-unknown"
    """The checkpoint has no tensor of that name. Likely: a name without its prefix. Do: see
    `keys()`. `NotFoundError`."""

    # layers, config, bind

    LAYERS_NONE = "layers-none"
    """No name shows a decoder layer, or no layer is a KDA layer. Likely: another model, or names
    that were rewritten. Do: see `kda-stream inspect`. `CheckpointError`."""

    LAYERS_TWO_PREFIXES = "layers-two-prefixes"
    """The names show two decoders. Likely: two models were saved into one checkpoint. Do: separate
    them. `CheckpointError`."""

    LAYER_UNKNOWN = "layer-unknown"
    """The checkpoint has no layer of that number. Likely: a list of another model's layers. Do: see
    `layers()`. `NotFoundError`."""

    LAYERS_MISSING = "layers-missing"
    """Layers that the config counts have no tensors. Likely: an incomplete download, or another
    checkpoint's config.json. Do: fetch them, or name the layers to load. `CheckpointError`."""

    LAYERS_STRAY = "layers-stray"
    """Layers lie behind all that the config counts. Likely: files of another checkpoint, or its
    config.json. Do: take them away; they are not loaded. `CheckpointError`."""

    LAYERS_GAP = "layers-gap"
    """The layers' numbers have a gap. Likely: an incomplete download. Do: fetch what is missing.
    `CheckpointError`."""

    CONFIG_NOT_JSON = "config-not-json"
    """config.json is no JSON object. Likely: a Git LFS pointer or an error page. Do: fetch it
    again. `ConfigError`."""

    CONFIG_MISSING = "config-missing"
    """No config.json lies beside the shards. Likely: it was not fetched. Do: fetch it, or pass
    `config=KdaConfig(...)`. `ConfigError`."""

    CONFIG_KEY_MISSING = "config-key-missing"
    """The config does not give an extent of the KDA layers. Likely: the config of a model without
    such layers. Do: fetch the right one. `ConfigError`."""

    CONFIG_VALUE = "config-value"
    """An extent, or the count of layers, is no positive integer. Likely: a config that was edited.
    Do: fetch it again. `ConfigError`."""

    CONFIG_CONTRADICTION = "config-contradiction"
    """The config gives an extent or the count of layers twice, with different values. Likely: it
    was edited in one place. Do: find out which one the weights were made with. `ConfigError`."""

    CONFIG_LAYERS = "config-layers"
    """The config lists other KDA layers than the names show; the names decide. Likely: another
    checkpoint's config.json. Do: fetch the right one. `ConfigError`."""

    MODEL_DIFFERS = "model-differs"
    """A model's parameters cannot take the bytes that are stored. Likely: another dtype or
    geometry, or the meta device. Do: build the model so, or pass `widen=True`. `BindError`."""

    BIND_REFUSED = "bind-refused"
    """A layer is not exactly a KDA block of its family; `problems` has every deviation. Likely:
    another family, a quantised or cast build, or the config of another model. Do: what `looks_like`
    says, or pass `family="auto"`. `BindError`."""

    # moving bytes

    SPAN_REFUSED = "span-refused"
    """A copy reaches outside of its source or destination; nothing was written. Likely: a plan that
    was made by hand. Do: correct it. `SpanError`."""

    SOURCE_BUFFER = "source-buffer"
    """A tensor's data is no C-contiguous buffer. Likely: a transposed array. Do: hand in a
    contiguous copy, viewed as bytes. `SpanError`."""

    PAYLOAD_FAULT = "payload-fault"
    """A page of a mapped shard cannot be read. Likely: the file was cut under the copy, or its disk
    fails. Do: fetch it again and open the checkpoint anew. `PayloadError`."""

    PAYLOAD_OPEN = "payload-open"
    """A shard cannot be opened now, and could when its header was checked. Likely: permissions, or
    the limit on open files. Do: change that; see `ulimit -n`. `PayloadError`."""

    PAYLOAD_END = "payload-end"
    """A shard ends before a tensor does. Likely: it was cut after it was opened. Do: fetch it again
    and open the checkpoint anew. `PayloadError`."""

    PAYLOAD_READ = "payload-read"
    """The system could not read a shard; `got` is its reason. Likely: a disk or a network that
    fails. Do: check it. `PayloadError`."""

    MAP_REFUSED = "map-refused"
    """A shard cannot be mapped. Likely: a limit on address space. Do: raise `ulimit -v`, or pass
    `read="positional"`. `PayloadError`."""

    POPULATE_UNSUPPORTED = "populate-unsupported"
    """Mapped pages cannot be checked before they are copied. Likely: Linux before 5.14, or another
    system. Do: pass `read="auto"` or `"positional"`. `PayloadError`."""

    GUARD_REFUSED = "guard-refused"
    """The handler of SIGBUS that mapped copies need cannot be set. Likely: a filter of system
    calls. Do: pass `read="positional"`. `PayloadError`."""

    DIRECT_REFUSED = "direct-refused"
    """The file system has no direct reads. Likely: `read="direct"` on a network file system or in
    memory. Do: pass `read="auto"`. `PayloadError`."""

    MEMORY_REFUSED = "memory-refused"
    """The system gives no memory. Likely: too many slots, or a limit on address
    space. Do: use fewer, or raise the limit. `MemoryRefusedError`."""

    LOCK_REFUSED = "lock-refused"
    """The slots cannot be page-locked, and `lock="require"` was asked for. Likely: the limit on
    locked memory. Do: raise `ulimit -l`, or pass `lock="prefer"`. `MemoryRefusedError`."""

    REGISTER_REFUSED = "register-refused"
    """A GPU driver does not register the slots, or there is none. Likely: torch without CUDA, no
    GPU, or too little memory to lock. Do: what the hint says for the driver's answer.
    `MemoryRefusedError`."""

    UNREGISTER_REFUSED = "unregister-refused"
    """A GPU driver did not unregister the slots; they were given back all the same. Likely: other
    code did, or reset the device. Do: start the process anew. `MemoryRefusedError`."""

    SLOT_TOO_SMALL = "slot-too-small"
    """A layer does not fit into the slot. Likely: an arena made for another geometry or family. Do:
    make it with `kda_slot_bytes(config, family)`. `SlotError`."""

    SLOT_NOT_FREE = "slot-not-free"
    """A slot is filled or lent, or the arena has none left. Likely: weights that were not released.
    Do: release them, or use more slots. `SlotError`."""

    SLOT_NOT_CLAIMED = "slot-not-claimed"
    """A slot was written or lent without having been claimed. Likely: a call too many. Do: `claim`
    it first. `SlotError`."""

    ARENA_CLOSED = "arena-closed"
    """An arena was used after `close()`. Likely: its `with` was left. Do: make a new one.
    `ClosedError`."""

    MEMORY_GIVEN_BACK = "memory-given-back"
    """A layer was used after its slot was given back, or a source after it was closed. Likely: the
    loop has moved on. Do: copy before, or `hold()` the layer. `ClosedError`."""

    MEMORY_IN_USE = "memory-in-use"
    """An array or a slice still points into memory that is to be given back. Likely: a variable
    that outlived the loop's body. Do: `del` it, or copy. `InUseError`."""

    STREAM_ROW_TOO_LARGE = "stream-row-too-large"
    """A tensor is to come in pieces, and one row does not fit a slot. Likely: small slots. Do: pass
    a larger `slot_bytes`, or `large="own"`. `StreamError`."""

    STREAM_MISUSE = "stream-misuse"
    """A stream was used in a way that would hand out overwritten weights, or that cannot go on.
    Likely: `list(stream)`, a second pass, a forked child, or every slot kept. Do: what the hint
    says. `StreamError`."""

    STREAM_STOPPED = "stream-stopped"
    """A copy or a pass was stopped before its end. Likely: its `CopyStop` was set, or the pass was
    interrupted. Do: begin it again. `ClosedError`."""

    STREAM_NO_THREAD = "stream-no-thread"
    """The system gives no thread for the stream. Likely: a limit on threads or on address space.
    Do: raise it. `StreamError`."""

    ARGUMENT = "argument"
    """An argument is none that the function takes. Likely: a typo, or a value of another type. Do:
    see `expected`. `ArgumentError`."""

    # what the payload holds

    PAYLOAD_DIGEST = "payload-digest"
    """Bytes are not those that a file's name or a manifest gives the sha256 of. Likely: a damaged
    or changed file. Do: delete it and fetch it again. `PayloadDigestError`."""

    PAYLOAD_NOT_FINITE = "payload-not-finite"
    """A KDA tensor holds NaN or infinity. Likely: a damaged file, or a training that diverged. Do:
    fetch it again; ask who made it. `PayloadValueError`."""

    PAYLOAD_ZEROS = "payload-zeros"
    """A KDA tensor holds only zeros. Likely: a download that reserved the room and wrote nothing
    there. Do: fetch it again. `PayloadValueError`."""

    PAYLOAD_PADDING = "payload-padding"
    """What pads a tensor is not zeros. Likely: a config that counts other heads, or a damaged file.
    Do: fetch both again. `PayloadValueError`."""

    MANIFEST_INVALID = "manifest-invalid"
    """A file is no manifest of this version. Likely: another file's name. Do: name the right one,
    or one that is not there, to have it written. `ManifestError`."""

    MANIFEST_TENSORS = "manifest-tensors"
    """A manifest's tensors, dtypes or shapes are not the checkpoint's. Likely: another checkpoint's
    manifest. Do: compare with the right one. `ManifestError`."""

    # two checkpoints

    DIFF = "diff"
    """The KDA layers of two checkpoints differ in a name, a dtype, a shape or in bytes. Likely: one
    was cast or trained further. Do: find out which one is wanted. `CheckpointError` or
    `PayloadDigestError`."""

    # the build and the machine

    NOT_BUILT = "not-built"
    """The compiled part of the library is missing. Likely: Python was started in a clone that was
    not installed in place. Do: start it elsewhere, or `pip install -e .`. `NotBuiltError`."""

    NOT_INSTALLED = "not-installed"
    """A package that was asked for by a call is not there. Likely: an extra was left out. Do: `pip
    install` what the hint names. `NotInstalledError`."""

    PLATFORM = "platform"
    """The machine is big-endian, and the format is little-endian. Likely: an s390x host. Do: use
    another one; bytes are never changed here. `NotBuiltError`."""
