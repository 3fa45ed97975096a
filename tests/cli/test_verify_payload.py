"""`kda-stream verify --payload` and `--manifest`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli.running import COMMAND, ENVIRONMENT, SHARDS, Run

from kda_stream import KIMI_K3, KdaConfig, open_checkpoint
from kda_stream.testing import Layout, Replica, StoredTensor, write_replica

TENSORS = len(Layout().tensors())
KIMI = Replica(
    family=KIMI_K3,
    config=KdaConfig(hidden=24, heads=3, head_dim=70, conv_kernel=4),
    layers=4,
    kda_layers=(0, 1, 2),
    other=(StoredTensor("self_attn.g_proj.weight", "BF16", (3, 24)),),
    shards=3,
)


def damage(path: Path) -> None:
    """Change the last byte of a file by one bit that no exponent has."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_payload_is_read_only_when_it_is_asked_for(run: Run, small: Path) -> None:
    assert run("verify", small, "--json").json["payload"] is None
    found = run("verify", small, "--payload", "--json").json
    assert found["sound"] is True
    assert found["payload"]["bytes"] == sum(p.stat().st_size for p in small.glob("*.safetensors"))
    assert found["payload"]["kda_tensors"] == 90
    assert found["payload"]["manifest"] is None


def test_the_pass_is_told_in_a_line(run: Run, small: Path) -> None:
    ran = run("verify", small, "--payload")
    assert ran.status == 0
    assert "values of 90 KDA tensors looked at" in ran.stdout
    assert ran.stderr == ""


def test_padding_that_is_not_zeros_is_found_where_metadata_shows_nothing(
    run: Run, tmp_path: Path
) -> None:
    """It is a finding about values, so there is a manifest all the same, and diff compares on."""
    sound = write_replica(tmp_path / "sound", KIMI)
    folder = write_replica(tmp_path / "folder", KIMI)
    name = f"{KIMI.prefix}1.self_attn.A_log"
    with open_checkpoint(folder) as checkpoint:
        place = checkpoint.tensor(name).place
    assert place is not None
    with open(place.file.path, "r+b") as file:
        file.seek(place.end - 1)
        file.write(b"\1")
    assert run("verify", folder, "--family", "auto").status == 0
    assert run("verify", sound, "--family", "auto", "--payload").status == 0
    manifest = tmp_path / "sums.json"
    ran = run("verify", folder, "--family", "auto", "--write-manifest", manifest, "--json")
    assert (ran.status, ran.json["payload"]["manifest"]) == (1, "written")
    (problem,) = ran.json["problems"]
    assert (problem["code"], problem["tensor"]) == ("payload-padding", name)
    assert problem["expected"] == "125 zeros behind 3 values"
    (difference,) = run("diff", sound, folder, "--payload", "--json").json["problems"]
    assert (difference["code"], difference["tensor"]) == ("diff", name)


def test_a_manifest_is_written_and_then_compared(run: Run, copied: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "sums.json"
    wrote = run("verify", copied, "--write-manifest", manifest, "--json")
    assert (wrote.status, wrote.json["payload"]["manifest"]) == (0, "written")
    assert any("compared with nothing" in note for note in wrote.json["notes"])
    assert len(json.loads(manifest.read_text())["tensors"]) == TENSORS
    assert sorted(os.listdir(tmp_path)) == ["copied", "sums.json"]
    compared = run("verify", copied, "--payload", "--manifest", manifest, "--json")
    assert (compared.status, compared.json["payload"]["manifest"]) == (0, "compared")
    damage(copied / SHARDS[1])
    found = run("verify", copied, "--manifest", manifest, "--json")
    assert found.status == 1
    (problem,) = found.json["problems"]
    assert problem["code"] == "payload-digest"
    assert problem["path"] == str(copied / SHARDS[1])
    assert problem["tensor"].startswith("model.")


def test_a_manifest_of_another_checkpoint_is_a_finding(
    run: Run, small: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "sums.json"
    wrote = run("verify", small / SHARDS[0], "--write-manifest", manifest)
    assert wrote.status == 1  # not every layer
    ran = run("verify", small, "--manifest", manifest, "--json")
    assert {problem["code"] for problem in ran.json["problems"]} == {"manifest-tensors"}


def test_a_manifest_that_is_not_there_is_no_reason_to_pass(
    run: Run, small: Path, tmp_path: Path
) -> None:
    """A mistyped name would otherwise compare nothing, and nobody would know."""
    ran = run("verify", small, "--manifest", tmp_path / "trutsed.json", "--json")
    assert (ran.status, ran.json["problems"][0]["code"]) == (3, "path-missing")
    assert os.listdir(tmp_path) == []


def test_a_manifest_is_not_written_in_the_place_of_another_file(
    run: Run, small: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "sums.json"
    manifest.write_text("theirs")
    ran = run("verify", small, "--write-manifest", manifest)
    assert ran.status == 3
    assert ran.hints == ["hint: name a file that is not there yet, or take that one away first"]
    assert manifest.read_text() == "theirs"


def test_a_manifest_is_written_or_compared_and_not_both(run: Run, small: Path) -> None:
    ran = run("verify", small, "--manifest", "a", "--write-manifest", "b")
    assert (ran.status, len(ran.errors)) == (2, 1)


def test_what_is_no_manifest_is_refused_before_payload_is_read(
    run: Run, small: Path, tmp_path: Path
) -> None:
    for text, got in (
        ("", "a file that is empty"),
        ("{}", "another document"),
        ("no JSON", "Expecting value: line 1 column 1 (char 0)"),
    ):
        (tmp_path / "sums.json").write_text(text)
        ran = run("verify", small, "--manifest", tmp_path / "sums.json", "--json")
        assert ran.status == 3
        (problem,) = ran.json["problems"]
        assert (problem["code"], problem["got"]) == ("manifest-invalid", got)
        assert "payload" not in ran.json


@pytest.mark.parametrize(
    "where", ["no-such-folder/sums.json", "file/sums.json", "folder/", "link", "a" * 256]
)
def test_a_manifest_that_cannot_be_written_is_refused_before_payload_is_read(
    run: Run, small: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    ran = run("verify", small, "--write-manifest", f"{tmp_path}/{where}", "--json")
    assert ran.status == 3
    (problem,) = ran.json["problems"]
    assert problem["code"] == "path-not-writable"
    assert "payload" not in ran.json


def test_an_empty_name_for_a_manifest_is_refused(run: Run, small: Path) -> None:
    ran = run("verify", small, "--write-manifest", "", "--json")
    assert (ran.status, ran.json["problems"][0]["code"]) == (3, "path-not-writable")


def test_a_manifest_has_the_permissions_that_the_umask_leaves(
    run: Run, small: Path, tmp_path: Path
) -> None:
    run("verify", small, "--write-manifest", tmp_path / "s", before="import os; os.umask(0o027)")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o640


def test_the_pass_goes_on_when_nobody_reads_its_progress(small: Path) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    done = subprocess.run(
        [*COMMAND, "verify", str(small), "--payload", "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=writable,
    )
    os.close(writable)
    assert done.returncode == 0
    assert json.loads(done.stdout)["sound"] is True


def test_a_full_disk_leaves_no_half_of_a_manifest(run: Run, small: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    ran = run("verify", small, "--write-manifest", tmp_path / "sums.json", "--json", before=limit)
    assert ran.status == 3
    assert ran.json["problems"][0]["code"] == "path-not-writable"
    assert os.listdir(tmp_path) == []


def test_no_manifest_is_written_of_payload_that_is_not_what_its_name_says(
    run: Run, copied: Path, tmp_path: Path
) -> None:
    shard = copied / SHARDS[0]
    blob = copied / ("0" * 64)
    shard.rename(blob)
    shard.symlink_to(blob.name)
    ran = run("verify", copied, "--write-manifest", tmp_path / "sums.json", "--json")
    assert ran.status == 1
    assert ran.json["payload"]["files_named_by_digest"] == 1
    assert ran.json["payload"]["manifest"] == "not written"
    assert [problem["code"] for problem in ran.json["problems"]] == ["payload-digest"]
    assert not (tmp_path / "sums.json").exists()


def test_a_checkpoint_that_cannot_be_opened_is_not_read(
    run: Run, copied: Path, tmp_path: Path
) -> None:
    (copied / SHARDS[2]).unlink()
    ran = run("verify", copied, "--write-manifest", tmp_path / "sums.json", "--json")
    assert ran.status == 1
    assert "payload" not in ran.json
    assert not (tmp_path / "sums.json").exists()


def test_a_manifest_that_cannot_be_written_at_last_is_told_beside_what_was_found(
    run: Run, small: Path, tmp_path: Path
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    sums = tmp_path / "sums.json"
    ran = run("verify", small, "--write-manifest", sums, "--json", before=limit)
    assert (ran.status, ran.json["sound"]) == (3, True)
    assert ran.json["payload"]["manifest"] == "not written"
    (problem,) = ran.json["problems"]
    assert (problem["code"], problem["path"]) == ("path-not-writable", str(sums))
    text = run("verify", small, "--write-manifest", sums, before=limit)
    assert (text.status, len(text.errors)) == (3, 1)
    assert text.stdout.endswith("no problem\n")
    assert not sums.exists()


def test_what_was_found_counts_more_than_a_manifest_that_cannot_be_written(
    run: Run, copied: Path, tmp_path: Path
) -> None:
    (copied / "config.json").write_text("{}")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    ran = run("verify", copied, "--write-manifest", tmp_path / "sums.json", "--json", before=limit)
    assert ran.status == 1
    codes = {problem["code"] for problem in ran.json["problems"]}
    assert "path-not-writable" in codes
    assert len(codes) > 1
