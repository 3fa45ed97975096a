"""A manifest: what each tensor of a checkpoint is, down to its bytes. Text in, entries out.

Pure: no file, no clock. The text is a JSON object: `format` is "kda_stream.manifest", `version` 1,
and `tensors` has for each name its `dtype`, `shape` and `sha256`, the digest of its bytes as stored
in lower-case hexadecimal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from .errors import ErrorCode, KdaStreamError, ManifestError, PayloadDigestError, listed, shown
from .foreign import not_json
from .jsontext import parse_json

FORMAT: Final = "kda_stream.manifest"
VERSION: Final = 1
SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One tensor: its format dtype code, its shape, and the sha256 of its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def manifest_text(tensors: Mapping[str, ManifestEntry]) -> str:
    """The manifest of these tensors, a line each, in the order of their names."""
    rows = (f"{_compact(name)}:{_compact(asdict(tensors[name]))}" for name in sorted(tensors))
    head = f'{{"format":{_compact(FORMAT)},"version":{VERSION},"tensors":{{\n'
    return head + ",\n".join(rows) + "\n}}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def parse_manifest(text: bytes, *, path: object = None) -> dict[str, ManifestEntry]:
    """The tensors of a manifest by name; raises `ManifestError` where the text is none."""
    try:
        document = parse_json(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        found = not_json(text, error)
        raise _invalid(path, got=found.got or f"a file that is {found.fault}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _invalid(path, got="another document")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise _invalid(path, got=f"version {shown(version)}")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise _invalid(path, got="no tensors")
    return {name: _entry(name, entry, path) for name, entry in tensors.items()}


def _entry(name: str, entry: Any, path: object) -> ManifestEntry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "sha256": str(sha256)} if (
            len(entry) == 3
            and all(type(dim) is int and dim >= 0 for dim in shape)
            and SHA256_HEX.fullmatch(sha256)
        ):
            return ManifestEntry(dtype, tuple(shape), sha256)
    raise _invalid(path, tensor=name, got=shown(entry))


def _invalid(path: object, *, got: str, tensor: str | None = None) -> ManifestError:
    return ManifestError(
        ErrorCode.MANIFEST_INVALID,
        "it is no manifest",
        path=path,
        tensor=tensor,
        expected=f'a JSON object of the format "{FORMAT}", version {VERSION}, with the dtype, '
        "shape and sha256 of each tensor",
        got=got,
        hint="fetch it again, or name a file that is not there yet to have one written",
    )


def manifest_problems(
    listed_tensors: Mapping[str, ManifestEntry],
    found: Mapping[str, ManifestEntry],
    names: Mapping[str, str],
    path: str,
) -> Iterator[KdaStreamError]:
    """An error for each way in which a checkpoint is not what its manifest at `path` says.

    `names` has the path of the shard of each tensor of the checkpoint; `found` holds those of them
    whose bytes could be read.
    """
    for what, lost in (
        ("tensors of the manifest are not in the checkpoint", listed_tensors.keys() - names.keys()),
        ("tensors of the checkpoint are not in the manifest", names.keys() - listed_tensors.keys()),
    ):
        if lost:
            yield ManifestError(
                ErrorCode.MANIFEST_TENSORS,
                what,
                path=path,
                expected=f"{len(listed_tensors)} tensors",
                got=f"{len(lost)}: {listed(sorted(lost))}",
                hint="the manifest is of another checkpoint, or one of them is incomplete",
            )
    for name in names:
        if name not in listed_tensors or name not in found:
            continue
        expected, got = listed_tensors[name], found[name]
        if str(expected) != str(got):
            yield ManifestError(
                ErrorCode.MANIFEST_TENSORS,
                "the tensor is not of the manifest's dtype and shape",
                path=names[name],
                tensor=name,
                expected=expected,
                got=got,
                hint="the shard was written anew: fetch it again",
            )
        elif expected.sha256 != got.sha256:
            yield PayloadDigestError(
                ErrorCode.PAYLOAD_DIGEST,
                "the tensor's bytes are not those of the manifest",
                path=names[name],
                tensor=name,
                expected=f"sha256 {expected.sha256}",
                got=f"sha256 {got.sha256}",
                hint="the shard is damaged or was changed: fetch it again",
            )
