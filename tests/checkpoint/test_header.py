"""One shard's header: broken files by what is broken in them, and odd ones that must open."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors import SafetensorError, deserialize, safe_open
from support.files import shard_bytes, shard_of, u8
from support.headers import BROKEN, FOREIGN, GOOD, LET_THROUGH, ODD, Odd, entry, one, raw, span

from kda_stream import HeaderError, TensorInfo, open_checkpoint
from kda_stream.checkpoint.header import header_length, parse_header
from kda_stream.errors import ErrorCode as Code
from kda_stream.limits import HEADER_BYTES_MAX

BROKEN_ROWS = [
    pytest.param(code, name, data, id=f"{code.value}: {name}")
    for code, files in BROKEN.items()
    for name, data in files.items()
]
ODD_ROWS = [pytest.param(odd, id=name) for name, odd in ODD.items()]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(path: Path, *, header_bytes_max: int = HEADER_BYTES_MAX) -> HeaderError:
    with pytest.raises(HeaderError) as caught:
        open_checkpoint(path, header_bytes_max=header_bytes_max)
    return caught.value


# Broken files ------------------------------------------------------------------------------------


def test_no_two_broken_files_have_one_name() -> None:
    names = [name for files in BROKEN.values() for name in files]
    assert len(names) == len(set(names)) >= 60
    assert set(names) >= LET_THROUGH


@pytest.mark.parametrize(("code", "name", "data"), BROKEN_ROWS)
def test_a_broken_file_is_refused(code: Code, name: str, data: bytes, shard: Path) -> None:
    shard.write_bytes(data)
    error = refusal(shard)
    assert error.code is code, f"{name}: {error}"
    assert isinstance(error, ValueError)
    assert error.path == str(shard)
    assert error.hint


@pytest.mark.parametrize(("code", "name", "data"), BROKEN_ROWS)
def test_its_error_is_one_line_that_begins_with_the_path(
    code: Code, name: str, data: bytes, shard: Path
) -> None:
    shard.write_bytes(data)
    line = str(refusal(shard))
    assert line.startswith(f"{shard}: "), (code, name)
    assert line.isprintable()
    assert len(line) < 6000


@pytest.mark.parametrize(("code", "name", "data"), BROKEN_ROWS)
def test_the_safetensors_package_refuses_it_unless_the_table_says_otherwise(
    code: Code, name: str, data: bytes, shard: Path
) -> None:
    if name in LET_THROUGH:
        deserialize(data)  # if this raises, the package has become as strict: take the name out
        return
    shard.write_bytes(data)
    with pytest.raises(SafetensorError):
        deserialize(data)
    with pytest.raises((SafetensorError, OSError)), safe_open(shard, "np"):
        pytest.fail(f"safe_open opens {name} ({code})")


@pytest.mark.parametrize(
    ("word", "data"), [(word, data) for word, files in FOREIGN.items() for data in files.values()]
)
def test_a_foreign_file_is_called_what_it_is(word: str, data: bytes, shard: Path) -> None:
    shard.write_bytes(data)
    assert word in str(refusal(shard))


def test_a_gguf_that_is_longer_than_its_magic_read_as_a_length_is_called_what_it_is(
    shard: Path,
) -> None:
    magic = b"GGUF\x03\x00\x00\x00"
    shard.write_bytes(magic + bytes(64))
    os.truncate(shard, int.from_bytes(magic, "little") + 4096)  # 14 GB, and a page on the disk
    error = refusal(shard)
    assert error.code is Code.HEADER_FOREIGN_FILE, str(error)
    assert "GGUF" in str(error)


def test_a_gzip_without_a_time_is_called_what_it_is(shard: Path) -> None:
    data = gzip.compress(os.urandom(1 << 20), mtime=0)
    assert 0 < int.from_bytes(data[:8], "little") < len(data)  # the magic is a likely length
    shard.write_bytes(data)
    error = refusal(shard)
    assert error.code is Code.HEADER_FOREIGN_FILE, str(error)
    assert "gzip" in str(error)


def test_a_shard_that_is_cut_in_its_header_is_not_called_a_foreign_file(shard: Path) -> None:
    """Some lengths begin as other files do: 640 is 80 02 in bytes, as a pickle of protocol 2."""
    for length in (*range(8, 4096, 8), 0x5B20, 0x7B20, 0x8B20):
        text = f'{{"model.layers.0.self_attn.A_log":{GOOD}}}'.ljust(length)[:length]
        shard.write_bytes(shard_bytes(text, length=length)[:-1])
        assert refusal(shard).code is Code.HEADER_LENGTH_OVER_FILE, length


@pytest.mark.parametrize(
    "broken",
    [
        entry('"F128"', "[-2]"),
        entry('"F128"', "2"),
        entry('"F128"', f"[{2**62},4]"),
        entry('"F128"', "[true]"),
        entry('"F128"', offsets="[2,0]"),
        entry('"F128"', offsets="[0]"),
        entry('"F128"', offsets="[1,3]"),
        entry('"F128"', offsets="[0,1]"),
        entry('"F128"')[:-1] + ',"x":0}',
    ],
)
def test_an_unknown_dtype_relaxes_no_other_check(broken: str, shard: Path) -> None:
    shard.write_bytes(one(broken))
    refusal(shard)


def test_utf_16_without_its_mark_is_refused(shard: Path) -> None:
    """Little end first it begins with a brace; its NULs may pass for padding or for bad JSON."""
    shard.write_bytes(raw(f'{{"a":{GOOD}}}'.encode("utf-16-le"), 2))
    assert refusal(shard).code in (Code.HEADER_NOT_JSON, Code.HEADER_PADDING)


def test_a_fault_in_an_entry_is_told_with_the_tensors_name(shard: Path) -> None:
    broken = {
        "keys": '{"dtype":"U8","shape":[2]}',
        "dtype": entry('"F128"', offsets="[2,4]"),
        "shape": entry(shape="[-2]", offsets="[2,4]"),
        "offsets": entry(offsets="[2]"),
        "size": entry(shape="[3]", offsets="[2,4]"),
        "hole": span(3, 5),
        "overlap": span(1, 3),
    }
    for what, text in broken.items():
        shard.write_bytes(raw(f'{{"good":{GOOD},"model.layers.7.bad":{text}}}', 4))
        error = refusal(shard)
        assert error.tensor == "model.layers.7.bad", what
        assert "model.layers.7.bad" in str(error)


def test_a_size_error_says_what_was_expected_and_what_was_found(shard: Path) -> None:
    shard.write_bytes(one(entry('"BF16"', "[3,5]", "[0,28]"), 28))
    error = refusal(shard)
    assert "30" in (error.expected or "")
    assert "28" in (error.got or "")
    assert "BF16" in str(error)
    assert "[3, 5]" in str(error)


def test_a_file_that_is_cut_short_is_told_with_both_sizes(shard: Path) -> None:
    whole = shard_of({"a": u8(bytes(1000))})
    shard.write_bytes(whole[:-123])
    error = refusal(shard)
    assert str(len(whole)) in (error.expected or "")
    assert str(len(whole) - 123) in (error.got or "")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\u202egnp.exe", "\u2028", "\x7f", "\u200b"])
def test_a_name_from_the_file_is_printed_escaped(name: str, shard: Path) -> None:
    shard.write_bytes(
        shard_bytes({name: {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}, b"ab")
    )
    error = refusal(shard)
    assert error.tensor == name
    assert str(error).isprintable()
    assert name not in str(error)


def test_a_name_of_a_megabyte_is_not_printed_whole(shard: Path) -> None:
    shard.write_bytes(
        shard_bytes({"a" * 10**6: {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}, b"ab")
    )
    assert len(str(refusal(shard))) < 1000


def test_as_many_shapes_as_tensors_take_no_longer_than_one_shape() -> None:
    """A header of 100 MB can hold a million shapes: what is done for each may not look at all."""
    count = 10_000

    def header_of(shapes: Iterable[list[int]]) -> bytes:
        entries = {
            f"t{n}": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
            for n, shape in enumerate(shapes)
        }
        return json.dumps(entries, separators=(",", ":")).encode()

    def seconds_for(text: bytes) -> float:
        begin = time.perf_counter()
        assert len(parse_header(text, 8 + len(text))) == count
        return time.perf_counter() - begin

    many = header_of([0, n] for n in range(count))
    few = header_of([0, 1] for n in range(count))
    assert min(seconds_for(many) for _ in range(3)) < 30 * min(seconds_for(few) for _ in range(3))


# The cap -----------------------------------------------------------------------------------------


def test_a_header_over_the_cap_is_refused_and_a_larger_cap_admits_it(shard: Path) -> None:
    shard.write_bytes(shard_bytes(f'{{"a":{GOOD}}}'.ljust(1000), b"ab"))
    error = refusal(shard, header_bytes_max=999)
    assert error.code is Code.HEADER_LENGTH_OVER_CAP
    assert "999" in str(error)
    assert "1000" in str(error)
    assert "header_bytes_max" in str(error)
    with open_checkpoint(shard, header_bytes_max=1000) as checkpoint:
        assert checkpoint.keys() == ["a"]


def test_the_cap_is_that_of_the_safetensors_package(shard: Path) -> None:
    cap = 100_000_000
    start = (cap + 1).to_bytes(8, "little") + b"{}"
    shard.write_bytes(start)
    os.truncate(shard, 8 + cap + 1)
    assert refusal(shard).code is Code.HEADER_LENGTH_OVER_CAP
    with pytest.raises(SafetensorError, match="too large"), safe_open(shard, "np"):
        pytest.fail("it opens")
    assert header_length(cap.to_bytes(8, "little") + b"{}", 8 + cap) == cap


def test_a_length_over_the_file_is_not_a_length_over_the_cap(shard: Path) -> None:
    shard.write_bytes(shard_bytes("{}".ljust(100), length=200))
    assert refusal(shard, header_bytes_max=10).code is Code.HEADER_LENGTH_OVER_FILE


def test_a_length_over_the_file_is_never_allocated(shard: Path) -> None:
    shard.write_bytes(shard_bytes("{}", length=2**40))
    assert refusal(shard, header_bytes_max=2**63).code is Code.HEADER_LENGTH_OVER_FILE


# Odd but legal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_an_odd_but_legal_file_opens(odd: Odd, shard: Path) -> None:
    shard.write_bytes(odd.data)
    with open_checkpoint(shard) as checkpoint:
        assert checkpoint.keys() == list(odd.tensors)
        assert {n: checkpoint.info(n) for n in odd.tensors} == {
            name: TensorInfo(*info) for name, info in odd.tensors.items()
        }
        header = checkpoint.shards[shard.name].header
        assert dict(header.metadata) == dict(odd.metadata)


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_the_safetensors_package_sees_the_same_in_it(odd: Odd, shard: Path) -> None:
    shard.write_bytes(odd.data)
    with safe_open(shard, "np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        seen = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
        assert seen == {name: (dtype, shape) for name, (dtype, shape, _, _) in odd.tensors.items()}
        assert (opened.metadata() or {}) == dict(odd.metadata)


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_its_bytes_are_those_at_its_offsets(odd: Odd, shard: Path) -> None:
    payload_begin = 8 + int.from_bytes(odd.data[:8], "little")
    payload = bytes(n % 251 for n in range(len(odd.data) - payload_begin))
    shard.write_bytes(odd.data[:payload_begin] + payload)
    with open_checkpoint(shard) as checkpoint:
        for name, (dtype, shape, begin, end) in odd.tensors.items():
            tensor = checkpoint.tensor(name)
            assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, shape, end - begin)
            assert tensor.data == payload[begin:end]


def test_a_header_knows_where_its_payload_is() -> None:
    text = f'{{"b":{span(2, 5)},"a":{GOOD}}}'.encode()
    header = parse_header(text, 8 + len(text) + 5)
    assert (header.payload_begin, header.payload_bytes) == (8 + len(text), 5)
    assert list(header) == ["b", "a"]
    assert len(header) == 2
    assert "a" in header
    assert "c" not in header
    assert header.info("b") == TensorInfo("U8", (3,), 2, 5)
    assert header.info("b").nbytes == 3
    with pytest.raises(KeyError):
        header.info("c")
