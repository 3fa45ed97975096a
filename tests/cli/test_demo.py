"""`kda-stream demo`: a first look that needs nothing but the package."""

from __future__ import annotations

import os
from pathlib import Path

from cli.running import Run
from safetensors import safe_open

from kda_stream.testing import Layout


def test_the_demo_shows_every_subcommand_and_checks_each_byte(run: Run, tmp_path: Path) -> None:
    ran = run("demo", env={"TMPDIR": str(tmp_path)})
    assert ran.status == 0
    for fact in (
        "$ kda-stream inspect ",
        "9: 6 KDA, 2 DSA, 1 MTP",
        "$ kda-stream verify ",
        "3 shards, 6 KDA, 2 DSA, 1 MTP, no problem",
        "$ kda-stream stream ",
        "6 KDA layers, 259,872 bytes",
        "checked   259,872 streamed bytes of 6 layers, each as it was written",
        "removed again",
    ):
        assert fact in ran.stdout
    assert ran.stderr == ""


def test_the_demo_removes_what_it_wrote(run: Run, tmp_path: Path) -> None:
    ran = run("demo", "--json", env={"TMPDIR": str(tmp_path)})
    assert Path(ran.json["directory"]).parent == tmp_path
    assert ran.json["kept"] is False
    assert os.listdir(tmp_path) == []


def test_the_demo_keeps_what_it_wrote_into_a_directory_that_was_named(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "not/there/yet"):
        ran = run("demo", name)
        assert ran.status == 0
        assert f"  files     {name}\n            kept\n" in ran.stdout
        found = []
        for file in sorted((tmp_path / name).glob("*.safetensors")):
            with safe_open(file, framework="numpy") as opened:
                found += opened.keys()
        assert sorted(found) == [tensor.name for tensor in Layout().tensors()]


def test_the_files_of_the_demo_have_the_permissions_that_the_umask_leaves(
    run: Run, tmp_path: Path
) -> None:
    run("demo", "shared", before="import os; os.umask(0o027)")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "shared").iterdir()} == {0o640}


def test_the_demo_does_not_write_where_something_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("full", "full/mine", "link"):
        ran = run("demo", name)
        assert ran.status == 2
        assert "an empty directory" in ran.errors[0]
        assert ran.stdout == ""
    assert os.listdir(tmp_path / "full") == ["mine"]
    assert (tmp_path / "full" / "mine").read_text() == "mine"


def test_the_demo_as_json_holds_the_facts_of_each_subcommand(run: Run) -> None:
    found = run("demo", "--json").json
    assert (found["schema_version"], found["command"], found["exit_status"]) == (1, "demo", 0)
    assert found["bytes_checked"] == 259_872
    assert found["inspect"]["layers"] == {"KDA": 6, "DSA": 2, "UNKNOWN": 0, "MTP": 1}
    assert found["verify"]["sound"] is True
    assert found["stream"]["bytes"] == found["bytes_checked"]


def test_a_directory_that_cannot_be_made_cannot_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("demo", "file/inside")
    assert ran.status == 3
    assert len(ran.errors) == 1
    assert "file" in ran.errors[0]
