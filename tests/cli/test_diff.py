"""`kda-stream diff`: the KDA layers of two checkpoints, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from cli.running import Rewrite, Run

from kda_stream import open_checkpoint
from kda_stream.testing import Layout


def flip_a_bit(folder: Path, name: str) -> None:
    with open_checkpoint(folder) as checkpoint:
        shard = checkpoint.shard_of(name)
        path, at = Path(shard.path), shard.header.payload_begin + checkpoint.info(name).begin
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_no_different_from_itself_and_from_a_copy(
    run: Run, small: Path, copied: Path
) -> None:
    for options in ([], ["--payload"]):
        ran = run("diff", small, copied, *options, "--json")
        assert (ran.status, ran.json["same"], ran.json["tensors"]) == (0, True, 90)
        assert ran.json["layers_a"] == ran.json["layers_b"] == list(Layout().kda_layers)
    assert run("diff", small, copied).stdout.splitlines()[-1] == "no difference"


def test_a_bit_that_differs_is_found_with_payload_alone(
    run: Run, small: Path, copied: Path
) -> None:
    name = "model.language_model.layers.4.self_attn.o_proj.weight"
    flip_a_bit(copied, name)
    assert run("diff", small, copied).status == 0
    ran = run("diff", small, copied, "--payload", "--json")
    assert ran.status == 1
    (problem,) = ran.json["problems"]
    assert (problem["code"], problem["tensor"]) == ("diff", name)
    assert problem["expected"] != problem["got"]


def test_tensors_of_one_side_and_other_dtypes_are_each_told(
    run: Run, small: Path, rewritten: Rewrite
) -> None:
    lost = "model.language_model.layers.0.self_attn.dt_bias"
    cast = "model.language_model.layers.1.self_attn.A_log"
    other = rewritten(
        lambda t: None if t.name == lost else t._replace(dtype="BF16") if t.name == cast else t
    )
    ran = run("diff", small, other, "--json")
    assert [problem["tensor"] for problem in ran.json["problems"]] == [lost, cast]


def test_what_cannot_be_read_is_refused(run: Run, small: Path, tmp_path: Path) -> None:
    assert run("diff", small, tmp_path / "gone", "--json").status == 3
    assert run("diff", small, "--json").status == 2
