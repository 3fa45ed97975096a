"""`kda-stream env`: what a bug report needs, and how a checkpoint would be read now."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from cli.running import COMMAND, ENVIRONMENT, INDEX, SHARDS, Run
from support.checkpoints import MEDIUM, Written, write_checkpoint
from support.file_systems import fuse, mounted
from support.groups import MIB, memory_group
from support.page_cache import cached_pages, cool, has_a_page_cache, warm
from support.terminals import spying, without_modules

import kda_stream
from kda_stream.cli.machine import machine_facts, machine_lines
from kda_stream.testing import DSA, KDA, Broken, Layout, write_broken_checkpoint
from kda_stream.testing import write_checkpoint as write_small

PACKAGES = (
    *("numpy", "cffi", "safetensors", "torch", "ml_dtypes", "rich"),
    *("transformers", "vllm", "sglang"),
)
FACTS = {
    *("schema_version", "command", "exit_status", "problems"),
    *(
        "path",
        "versions",
        "system",
        "native",
        "native_refusal",
        "page_bytes",
        "processors",
        "memory",
        "limits",
    ),
    *("may_lock_all", "groups", "disk", "read"),
}
SPY = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=open(F, 'w')))"


@pytest.fixture
def medium(tmp_path: Path) -> Written:
    """A checkpoint of 300 kB a layer; its pages may be put away."""
    return write_checkpoint(tmp_path / "medium", geometry=MEDIUM)


@pytest.fixture
def cached(tmp_path: Path) -> None:
    """Skips where files have no page cache that can be emptied."""
    if not has_a_page_cache(tmp_path):
        pytest.skip("there is no page cache here that can be emptied")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def first_layer(run: Run, folder: Path, *options: object) -> dict[str, int]:
    """By which path a bind takes the first KDA layer now."""
    ran = run("stream", folder, "--layers", "0", "--lock", "off", "--json", *options)
    found: dict[str, int] = ran.json["reads"]
    return found


# The machine -------------------------------------------------------------------------------------


def test_the_facts_as_json(run: Run, tmp_path: Path) -> None:
    ran = run("env", "--json")
    found = ran.json
    assert (ran.status, ran.stderr) == (0, "")
    assert set(found) == FACTS
    assert (found["command"], found["problems"]) == ("env", [])
    assert os.path.realpath(tmp_path / found["path"]) == os.path.realpath(tmp_path)
    assert set(found["system"]) == {"kernel", "machine", "libc", "python"}
    assert set(found["memory"]) == {"total_bytes", "available_bytes"}
    assert set(found["limits"]) == {"memlock_bytes", "descriptors", "address_space_bytes"}
    for limit in found["limits"].values():
        assert set(limit) == {"soft", "hard"}
    assert found["groups"] is None or set(found["groups"]) == {"limit_bytes", "used_bytes"}
    assert set(found["disk"]) == {
        *("file_system", "is_remote", "free_bytes", "direct_alignment_bytes")
    }
    assert found["read"] is None


def test_what_the_machine_is_comes_from_the_machine(run: Run) -> None:
    found = run("env", "--json").json
    assert platform.release() in found["system"]["kernel"]
    assert found["system"]["machine"] == platform.machine()
    assert platform.python_version() in found["system"]["python"]
    libc, version = platform.libc_ver()
    assert version in found["system"]["libc"]
    assert libc in found["system"]["libc"]
    assert found["native"] is True
    assert found["page_bytes"] == resource.getpagesize()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found["memory"]["total_bytes"] == pytest.approx(total, rel=0.01)
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


def test_versions_are_those_that_are_installed(run: Run) -> None:
    versions = run("env", "--json").json["versions"]
    assert versions["kda_stream"] == kda_stream.__version__
    for name in PACKAGES:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            assert versions.get(name) is None
        else:
            assert versions[name] == installed
    assert set(versions) <= {"kda_stream", *PACKAGES}
    assert versions["numpy"] == metadata.version("numpy")


def test_nothing_is_imported_to_know_its_version(run: Run, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    env = spying(tmp_path / "spy", f"F = {str(modules)!r}\n{SPY}")
    assert run("env", env=env).status == 0
    loaded = set(modules.read_text().split())
    assert "kda_stream" in loaded
    assert not loaded & {*PACKAGES} - {"cffi"}


def test_processors_are_those_that_the_process_may_use(run: Run) -> None:
    may_use = len(os.sched_getaffinity(0))
    assert run("env", "--json").json["processors"] == may_use
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert run("env", "--json", before=pinned).json["processors"] == 1


def test_limits_are_those_of_the_process(run: Run) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 131072))
resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, 16 * 1024**3))
"""
    limits = run("env", "--json", before=script).json["limits"]
    assert limits["descriptors"] == {"soft": 300, "hard": 400}
    assert limits["memlock_bytes"] == {"soft": 65536, "hard": 131072}
    assert limits["address_space_bytes"] == {"soft": 8 * 1024**3, "hard": 16 * 1024**3}


def test_no_limit_is_null(run: Run) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("there is a limit on address space here")
    script = "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    limits = run("env", "--json", before=script).json["limits"]
    assert limits["address_space_bytes"] == {"soft": None, "hard": None}


def test_the_limit_of_a_control_group_is_told_with_its_use(tmp_path: Path) -> None:
    with memory_group(512 * MIB) as group:
        done = subprocess.run(
            group.command(*COMMAND, "env", "--json"),
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            check=True,
        )
    found = json.loads(done.stdout)["groups"]
    assert found["limit_bytes"] == 512 * MIB
    assert 0 < found["used_bytes"] < 512 * MIB


def test_without_the_compiled_part_all_else_is_told(run: Run, small: Path, tmp_path: Path) -> None:
    env = without_modules(tmp_path / "without", "kda_stream._native")
    ran = run("env", "--json", env=env)
    found = ran.json
    assert found["native"] is False
    assert found["native_refusal"] == "kda_stream._native was taken away"
    assert found["versions"]["kda_stream"] == kda_stream.__version__
    assert found["page_bytes"] == resource.getpagesize()
    assert found["limits"]["descriptors"]["soft"] > 0
    assert found["disk"]["free_bytes"] > 0
    text = run("env", env=env)
    assert "kernel" in text.stdout
    assert "its compiled part does not load: kda_stream._native was taken away" in text.stdout
    at_checkpoint = run("env", small, "--json", env=env).json
    assert at_checkpoint["native"] is False
    assert at_checkpoint["memory"]["total_bytes"] > 0
    assert at_checkpoint["read"] is None


# Nothing of whose machine it is ------------------------------------------------------------------


def test_no_name_of_user_or_host_and_no_variable_is_told(run: Run, tmp_path: Path) -> None:
    """So that the text may be pasted into a public page."""
    secret = {
        "USER": "user-zqx",
        "LOGNAME": "login-zqx",
        "HOSTNAME": "host-zqx",
        "HF_TOKEN": "token-zqx",
        "HOME": "/home/home-zqx",
        "LD_LIBRARY_PATH": "/path-zqx",
    }
    renamed = """
import ctypes
libc = ctypes.CDLL(None)
CLONE_NEWUTS = 0x04000000
if libc.unshare(CLONE_NEWUTS) == 0:
    libc.sethostname(b"node-zqx", 8)
"""
    for extra in ((), ("--json",)):
        ran = run("env", *extra, env=secret, before=renamed)
        assert ran.status == 0
        assert "zqx" not in ran.stdout + ran.stderr
        host = socket.gethostname()
        if len(host) > 3 and host not in str(tmp_path):
            assert host not in ran.stdout.split()


# The disk ----------------------------------------------------------------------------------------


def test_the_disk_is_that_of_the_path(run: Run, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "other", options="size=8m") as other:
        disk = run("env", other, "--json").json["disk"]
    assert disk["file_system"] == "tmpfs"
    assert disk["is_remote"] is False
    assert 7 * MIB < disk["free_bytes"] <= 8 * MIB
    found = os.statvfs(tmp_path)
    here = run("env", tmp_path, "--json").json["disk"]
    assert here["free_bytes"] == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)
    assert here["file_system"] != "tmpfs" or str(tmp_path).startswith("/dev/shm")


def test_a_file_system_that_may_go_away_is_remote(run: Run, small: Path, tmp_path: Path) -> None:
    with fuse(tmp_path / "far", small) as far:
        found = run("env", far, "--json").json
        assert found["disk"]["is_remote"] is True
        assert "fuse" in found["disk"]["file_system"].lower()
        assert found["disk"]["direct_alignment_bytes"] is None
        assert found["read"]["path"] == "positional"
        assert first_layer(run, far) == {"positional": 1}


def test_direct_alignment_is_that_with_which_direct_reads_work(run: Run, medium: Written) -> None:
    alignment = run("env", medium.folder, "--json").json["disk"]["direct_alignment_bytes"]
    cool(*shards(medium.folder))
    if alignment is None:
        ran = run("stream", medium.folder, "--layers", "0", "--read", "direct", "--json")
        assert ran.status == 3
    else:
        assert alignment & (alignment - 1) == 0
        assert 1 <= alignment <= 65536
        assert first_layer(run, medium.folder, "--read", "direct") == {"direct": 1}


def test_the_path_may_be_a_file_or_a_folder_of_anything(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    for path in (tmp_path / "notes",):
        ran = run("env", path, "--json")
        assert (ran.status, ran.json["problems"], ran.json["read"]) == (0, [], None)
        assert ran.json["disk"]["free_bytes"] > 0


# A checkpoint ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cached")
def test_the_way_of_a_cold_and_of_a_warm_layer_is_that_of_a_bind(run: Run, medium: Written) -> None:
    nbytes = sum(map(len, medium.expected(0).values()))
    cool(*shards(medium.folder))
    cold = run("env", medium.folder, "--json").json["read"]
    assert (cold["layer"], cold["bytes"]) == (0, nbytes)
    assert cold["cached_bytes"] < nbytes / 10
    cool(*shards(medium.folder))
    assert first_layer(run, medium.folder) == {cold["path"]: 1}
    for shard in shards(medium.folder):
        warm(shard)
    hot = run("env", medium.folder, "--json").json["read"]
    assert (hot["cached_bytes"], hot["bytes"]) == (nbytes, nbytes)
    assert first_layer(run, medium.folder) == {hot["path"]: 1}
    assert cold["path"] != hot["path"]
    assert "page cache" in cold["reason"]
    assert cold["reason"] != hot["reason"]


@pytest.mark.usefixtures("cached")
def test_no_payload_is_read_to_know_it(run: Run, medium: Written) -> None:
    cool(*shards(medium.folder))
    assert run("env", medium.folder).status == 0
    for shard in shards(medium.folder):
        pages = -(-shard.stat().st_size // resource.getpagesize())
        assert len(cached_pages(shard)) < pages / 4  # its header, and what is read ahead of it


@pytest.mark.parametrize("where", ["the folder", "its index", "a shard"])
def test_the_path_may_be_named_as_for_the_other_commands(run: Run, small: Path, where: str) -> None:
    path = {"the folder": small, "its index": small / INDEX, "a shard": small / SHARDS[0]}[where]
    ran = run("env", path, "--json")
    assert (ran.status, ran.json["problems"]) == (0, [])
    layers = run("inspect", path, "--json").json["layer_details"]
    first = next(layer for layer in layers if layer["kind"] == "KDA")
    assert ran.json["read"]["layer"] == first["index"]
    assert ran.json["read"]["bytes"] == first["kda_bytes"]
    assert ran.json["read"]["path"] in ("mapped", "positional", "direct")


def test_the_first_kda_layer_need_not_be_the_first_layer(run: Run, tmp_path: Path) -> None:
    folder = write_small(tmp_path / "late", Layout(kinds=(DSA, DSA, KDA)))
    assert run("env", folder, "--json").json["read"]["layer"] == 2


def test_a_checkpoint_without_kda_layers_says_that_nothing_would_be_read(
    run: Run, tmp_path: Path
) -> None:
    folder = write_small(tmp_path / "none", Layout(kinds=(DSA, DSA)))
    ran = run("env", folder, "--json")
    found = ran.json
    assert (ran.status, found["problems"]) == (0, [])
    assert found["read"] is None
    assert found["disk"]["free_bytes"] > 0


def _cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[2], 5000)


def _lost(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def _html(folder: Path) -> None:
    (folder / INDEX).write_text("<html>")


@pytest.mark.parametrize("damage", [_cut, _lost, _html], ids=["cut", "lost", "html"])
def test_a_checkpoint_that_cannot_be_opened_is_a_problem_beside_all_the_rest(
    run: Run, copied: Path, damage: Callable[[Path], None]
) -> None:
    damage(copied)
    inspected = run("inspect", copied, "--json")
    ran = run("env", copied, "--json")
    assert ran.status == inspected.status == 3
    assert ran.json["problems"] == inspected.json["problems"]
    assert ran.json["read"] is None
    assert set(ran.json) == FACTS
    assert ran.json["disk"]["free_bytes"] > 0
    text = run("env", copied)
    assert text.status == 3
    assert (len(text.errors), len(text.hints)) == (1, 1)
    assert kda_stream.__version__ in text.stdout


def test_a_path_where_nothing_is_is_a_problem_beside_all_the_rest(run: Run, tmp_path: Path) -> None:
    ran = run("env", tmp_path / "nowhere", "--json")
    assert ran.status == 3
    (problem,) = ran.json["problems"]
    assert problem["code"] == "path-missing"
    assert ran.json["versions"]["kda_stream"] == kda_stream.__version__
    assert ran.json["memory"]["total_bytes"] > 0
    assert ran.json["read"] is None


# Text --------------------------------------------------------------------------------------------


def test_the_text_has_what_the_json_has(run: Run, small: Path) -> None:
    text = run("env", small)
    found = run("env", small, "--json").json
    assert (text.status, text.stderr) == (0, "")
    words = " ".join(text.stdout.split())
    for name, version in found["versions"].items():
        if version is not None:
            assert version in words, name
    for fact in (
        *found["system"].values(),
        found["disk"]["file_system"],
        found["read"]["path"],
        found["read"]["reason"],
        str(small),
    ):
        assert fact in words, fact
    for number in (found["page_bytes"], found["limits"]["descriptors"]["soft"]):
        assert f"{number:,}" in words or str(number) in words, number


def test_two_paths_are_wrong_usage(run: Run) -> None:
    assert run("env", "a", "b").status == 2


def test_the_script_that_takes_the_compiled_part_away_does_so(
    run: Run, small: Path, tmp_path: Path
) -> None:
    env = without_modules(tmp_path / "without", "kda_stream._native")
    ran = run("stream", small, "--json", env=env)
    assert ran.status != 0
    assert ran.json["problems"][0]["code"] == "not-built"


WITHOUT_LOCK_RIGHTS = """
import ctypes
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("drops", [True, False])
def test_whether_the_limit_on_locked_memory_holds_is_told(run: Run, drops: bool) -> None:
    """It does not for a process with CAP_IPC_LOCK."""
    effective = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
    )
    may = bool(int(effective.split()[1], 16) >> 14 & 1)
    ran = run("env", before=WITHOUT_LOCK_RIGHTS if drops else None)
    told = "which does not count: with CAP_IPC_LOCK it may lock all" in " ".join(ran.stdout.split())
    found = run("env", "--json", before=WITHOUT_LOCK_RIGHTS if drops else None).json
    assert (found["may_lock_all"], told) == (may and not drops,) * 2


def test_a_layer_is_judged_by_the_config_s_geometry(run: Run, tmp_path: Path) -> None:
    folder = write_broken_checkpoint(tmp_path / "broken", Broken.BLOCK_CONV_TRANSPOSED)
    found = run("env", folder, "--json").json
    assert "expected BF16 [64, 1, 4]" in found["read"]["reason"]


def test_a_package_whose_version_cannot_be_told_is_named_all_the_same(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text("")
    ran = run("env", "--json", env={"PYTHONPATH": str(tmp_path)})
    assert (ran.status, ran.json["versions"]["torch"]) == (0, "an unknown version")


@pytest.mark.parametrize(
    ("raised", "code"),
    [("MemoryError", "memory-refused"), ("OSError(5, 'EIO', 'shard')", "path-not-readable")],
)
def test_what_fails_while_the_checkpoint_is_looked_at_is_a_problem_beside_all_the_rest(
    run: Run, small: Path, tmp_path: Path, raised: str, code: str
) -> None:
    env = spying(
        tmp_path / "spy",
        f"import kda_stream.cli.env as env\ndef fails(_): raise {raised}\nenv.kda_layers = fails\n",
    )
    ran = run("env", small, "--json", env=env)
    assert ran.status == 3
    assert [problem["code"] for problem in ran.json["problems"]] == [code]
    assert set(ran.json) == FACTS
    text = " ".join(run("env", small, env=env).stdout.split())
    assert text.endswith("read not known: see the error")


def test_a_long_path_is_on_one_line_as_it_is(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / ("with two  blanks " * 10)
    folder.mkdir()
    assert f"  path      {folder}\n" in run("env", folder).stdout


def test_where_no_group_is_visible_no_limit_is_said_to_be_visible() -> None:
    facts = {**machine_facts(), "groups": {"limit_bytes": None, "used_bytes": None}}
    assert "  groups    no limit on memory is visible" in machine_lines(facts)
