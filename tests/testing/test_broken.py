"""Every `Broken` checkpoint at every door: whatever reads a file refuses it with its code."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from kda_stream import (
    ArgumentError,
    Checkpoint,
    KdaConfig,
    KdaStreamError,
    bind_kda_weights,
    check_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.cli import main
from kda_stream.errors import ErrorCode as Code
from kda_stream.stream import config_of
from kda_stream.testing import (
    DSA,
    KDA,
    Broken,
    Layout,
    write_broken_checkpoint,
    write_checkpoint,
)
from kda_stream.testing.breaking import Victim

every_kind = pytest.mark.parametrize("broken", Broken, ids=lambda broken: broken.name)

AREAS = {"BLOCK", "CONFIG", "INDEX", "NAMES"}
IN_ONE_SHARD = ("FILE", "HEADER", "METADATA", "ENTRY", "DTYPE", "SHAPE", "OFFSETS")
FIRST = Layout().kda_layers[0]

# What the safetensors package opens, and the format's own description forbids.
LET_THROUGH = {
    Broken.HEADER_SPACE_BEFORE,
    Broken.HEADER_PADDED_WITH_A_LINE_BREAK,
    Broken.METADATA_KEY_TWICE,
    Broken.METADATA_NULL,
    Broken.ENTRY_A_LIST,
    Broken.ENTRY_KEY_MORE,
}


def area(broken: Broken) -> str:
    return broken.name.partition("_")[0]


def bind_first(checkpoint: Checkpoint) -> None:
    config = KdaConfig.from_json(Path(checkpoint.directory) / "config.json")
    weights, _ = bind_kda_weights(config, FIRST, checkpoint.layer(FIRST))
    weights.release()


def check_every(checkpoint: Checkpoint) -> None:
    checkpoint.require_every_layer()
    config = config_of(checkpoint)
    for layer in Layout().kda_layers:
        check_kda_weights(config, layer, checkpoint.layer(layer))


def stream_every(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint, slots=1, lock="off") as stream:
        for _ in stream:
            pass


def opened(path: Path, use: Callable[[Checkpoint], None], **options: Any) -> None:
    with open_checkpoint(path, **options) as checkpoint:
        use(checkpoint)


def nothing(_: Checkpoint) -> None:
    pass


DOORS: dict[str, Callable[[Path], None]] = {
    "open": lambda folder: opened(folder, nothing),
    "check": lambda folder: opened(folder, check_every),
    "stream": lambda folder: opened(folder, stream_every),
    "stream what is needed": lambda folder: opened(folder, stream_every, verify="needed"),
}


def refused(door: Callable[[Path], None], path: Path) -> KdaStreamError | None:
    """The error that a door gives, if it gives one; any other exception fails the test."""
    try:
        door(path)
    except KdaStreamError as error:
        return error
    return None


def test_the_kinds_cover_every_area_and_each_has_a_name_of_its_own() -> None:
    counts = Counter(map(area, Broken))
    assert counts.keys() == AREAS.union(IN_ONE_SHARD)
    assert min(counts.values()) >= 5
    assert len(Broken) == len(Broken.__members__) >= 90


def test_a_sound_checkpoint_goes_through_every_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "sound")
    assert [name for name, door in DOORS.items() if refused(door, folder)] == []
    for command in ("inspect", "verify", "stream"):
        assert main([command, os.fspath(folder), "--json"]) == 0, capsys.readouterr()


@every_kind
def test_the_library_refuses_it_with_its_code_wherever_it_is_met(
    broken: Broken, tmp_path: Path
) -> None:
    folder = write_broken_checkpoint(tmp_path / "broken", broken)
    for name, door in DOORS.items():
        error = refused(door, folder)
        if name == "open" and not broken.is_met_on_opening:
            assert error is None
            continue
        assert error is not None, name
        assert error.code is broken.code, f"{name}: {error}"
        assert error.hint, name
        assert error.path is not None, name
        assert error.path.startswith(os.fspath(folder)), name
        assert str(error).isprintable(), name
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.code) == (type(error), str(error), error.code)


@every_kind
def test_the_first_layer_is_never_bound_out_of_it(broken: Broken, tmp_path: Path) -> None:
    folder = write_broken_checkpoint(tmp_path / "broken", broken)
    concerns_other_layers = broken in (Broken.NAMES_WITHOUT_A_LAYER, Broken.CONFIG_MISSING)
    error = refused(lambda path: opened(path, bind_first, verify="needed"), folder)
    if broken is Broken.NAMES_WITHOUT_A_LAYER:  # it concerns another layer
        assert error is None
    else:
        assert error is not None
        assert error.code is (Code.PATH_MISSING if concerns_other_layers else broken.code)


@every_kind
def test_every_command_refuses_it_with_its_code(
    broken: Broken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = os.fspath(write_broken_checkpoint(tmp_path / "broken", broken))

    def ran(command: str) -> tuple[int, set[str]]:
        status = main([command, folder, "--json"])
        printed = json.loads(capsys.readouterr().out)
        assert printed["exit_status"] == status
        return status, {problem["code"] for problem in printed["problems"]}

    kept_back = broken.code is Code.PATH_NOT_READABLE
    assert ran("verify") == (3 if kept_back else 1, {broken.code.value})
    assert ran("stream") == (3 if broken.is_met_on_opening else 1, {broken.code.value})
    assert ran("inspect") == ((3, {broken.code.value}) if broken.is_met_on_opening else (0, set()))


@pytest.mark.parametrize(
    "broken", [b for b in Broken if area(b) in IN_ONE_SHARD], ids=lambda broken: broken.name
)
def test_its_shard_alone_is_refused_as_strictly_as_by_the_safetensors_package(
    broken: Broken, tmp_path: Path
) -> None:
    folder = write_broken_checkpoint(tmp_path / "broken", broken)
    shard = Victim(folder, Layout()).shard
    error = refused(lambda path: opened(path, nothing), shard)
    if broken is Broken.FILE_OF_ANOTHER_SHARD:
        assert error is None
        return
    another_code = {
        Broken.FILE_MISSING: Code.PATH_MISSING,
        Broken.FILE_DIRECTORY: Code.CHECKPOINT_NO_SHARDS,
    }
    assert error is not None
    assert error.code is another_code.get(broken, broken.code)
    if shard.is_file():
        try:
            with safe_open(shard, "np"):
                is_let_through = True
        except SafetensorError:
            is_let_through = False
        assert is_let_through == (broken in LET_THROUGH)


@pytest.mark.parametrize(
    "broken", [b for b in Broken if area(b) == "CONFIG"], ids=lambda broken: broken.name
)
def test_its_config_alone_is_refused_where_it_is_what_is_broken(
    broken: Broken, tmp_path: Path
) -> None:
    config = write_broken_checkpoint(tmp_path / "broken", broken) / "config.json"
    error = refused(lambda path: KdaConfig.from_json(path) and None, config)
    if broken is Broken.CONFIG_OF_ANOTHER_GEOMETRY:
        assert error is None
        return
    assert error is not None
    assert error.code is (Code.PATH_MISSING if broken is Broken.CONFIG_MISSING else broken.code)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Broken.ENTRY_EMPTY, "expected data_offsets, dtype, shape, got no key"),
        (Broken.DTYPE_EMPTY, ', U64, got ""'),
        (Broken.HEADER_A_LIST, "the header must be an object"),
        (Broken.HEADER_SPACE_BEFORE, "the format forbids white space"),
        (Broken.INDEX_EMPTY, "the index is empty ("),
        (Broken.INDEX_NESTED_DEEPLY, "the index is nested too deeply ("),
        (Broken.CONFIG_WITHOUT_HIDDEN, "does not give the hidden size of its KDA layers"),
        (Broken.NAMES_OF_TWO_DECODERS, "layers.N. (9 layers) and "),
        (Broken.NAMES_OF_TWO_DECODERS, "layers.N. (1 layer)"),
        (Broken.FILE_LINK_TO_ITSELF, "the link points to itself"),
    ],
)
def test_its_error_says_in_words_what_is_wrong(broken: Broken, words: str, tmp_path: Path) -> None:
    error = refused(DOORS["stream"], write_broken_checkpoint(tmp_path / "broken", broken))
    assert error is not None
    assert words in str(error)


@every_kind
def test_one_file_is_broken_and_all_else_is_as_in_the_sound_checkpoint(
    broken: Broken, tmp_path: Path
) -> None:
    layout = Layout(prefix="model.layers.", shards=4)
    sound = write_checkpoint(tmp_path / "sound", layout)
    folder = write_broken_checkpoint(tmp_path / "broken", broken, layout)

    def read(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    names = {path.name for path in (*sound.iterdir(), *folder.iterdir())}
    changed = {name for name in names if read(sound / name) != read(folder / name)}
    assert changed
    if area(broken) in IN_ONE_SHARD or broken in (
        Broken.NAMES_HALF_A_CHARACTER,
        Broken.NAMES_RENAMED,
    ):
        assert changed == {Victim(folder, layout).shard.name}
    elif area(broken) == "CONFIG":
        assert changed == {"config.json"}
    else:
        assert "config.json" not in changed


LAYOUTS = {
    "two shards": Layout(shards=2),
    "many shards": Layout(shards=9),
    "no MTP layer": Layout(mtp=0),
    "KDA layers alone": Layout(kinds=(KDA, KDA), mtp=0, shards=2),
    "another prefix": Layout(prefix="layers."),
    "an uneven geometry": Layout(config=KdaConfig(hidden=24, heads=3, head_dim=7, conv_kernel=2)),
    "one head": Layout(config=KdaConfig(hidden=8, heads=1, head_dim=7, conv_kernel=3)),
    "F32 conv": Layout(dtypes={"q_conv1d.weight": "F32"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_gives_its_code_in_other_layouts_too(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for broken in Broken:
        folder = write_broken_checkpoint(tmp_path / broken.name, broken, layout)
        error = refused(DOORS["stream"], folder)
        assert error is not None, broken
        assert error.code is broken.code, f"{broken}: {error}"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shards=1),
        Layout(kinds=(KDA, DSA)),
        Layout(kinds=()),
        Layout(config=KdaConfig(hidden=8, heads=2, head_dim=4, conv_kernel=1)),
        Layout(dtypes={"A_log": "BF16"}),
        Layout(prefix=""),
        Layout(prefix='a"layers.'),
        Layout(prefix="caf\u00e9.layers."),
        Layout(prefix="model.blocks."),
    ],
)
def test_a_layout_in_which_a_kind_could_not_be_told_is_refused(
    layout: Layout, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError):
        write_broken_checkpoint(tmp_path / "broken", Broken.FILE_EMPTY, layout)
    assert not (tmp_path / "broken").exists()


def test_a_broken_checkpoint_is_not_written_where_something_is(tmp_path: Path) -> None:
    write_broken_checkpoint(tmp_path, Broken.FILE_NAMED_PIPE)
    with pytest.raises(ArgumentError, match="not empty"):
        write_broken_checkpoint(tmp_path, Broken.FILE_EMPTY)
