"""`memory_room`: trees of files as each kind of control group writes them, and real groups."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kda_stream.staging.room import (
    GroupMemory,
    MachineMemory,
    MemoryRoom,
    are_huge_pages_at_hand,
    folders_of_group,
    group_memory,
    groups_of_process,
    huge_pages_at_hand,
    machine_memory,
    memory_mounts,
    memory_room,
)

MIB = 1024**2
V1_NO_LIMIT = 9223372036854771712
MEMINFO = (
    "MemTotal:       24684092 kB\nMemFree:  1000 kB\nMemAvailable:   8388608 kB\nCached: 5 kB\n"
)
MACHINE = MemoryRoom(8192 * MIB, None, "/proc/meminfo")
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
RunPython = Callable[..., Any]


class Tree:
    """A folder with the files that `memory_room` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("/proc/meminfo", MEMINFO)

    def write(self, path: str, text: object) -> None:
        file = self.folder / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if isinstance(text, int) else str(text))

    def process(self, groups: str, mounts: str) -> None:
        self.write("/proc/self/cgroup", groups)
        self.write("/proc/self/mountinfo", mounts)

    def v1(self, folder: str, limit: int, usage: int, inactive: int = 0, active: int = 0) -> None:
        """A group of version 1 as current kernels write it; what it holds itself is 1 byte."""
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(f"{folder}/memory.use_hierarchy", 1)
        self.write(
            f"{folder}/memory.stat",
            "cache 1\nrss 1\ninactive_file 1\nactive_file 1\n"
            f"total_cache 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n",
        )

    def v2(
        self,
        folder: str,
        usage: int,
        *,
        max_: object = "max\n",
        high: object = "max\n",
        inactive: int = 0,
        active: int = 0,
    ) -> None:
        self.write(f"{folder}/memory.max", max_)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", usage)
        stat = f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file {active}\n"
        self.write(f"{folder}/memory.stat", stat)

    def room(self) -> MemoryRoom:
        return memory_room(str(self.folder))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --- which level decides --------------------------------------------------------------------------


def test_without_groups_the_machine_decides(tree: Tree) -> None:
    assert tree.room() == MACHINE
    tree.process("0::/\n", "")
    assert tree.room() == MACHINE


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    assert memory_room(str(tmp_path)) == MemoryRoom(None, None, None)


def test_a_group_of_version_1_has_its_limit_less_what_it_cannot_give_back(tree: Tree) -> None:
    tree.process("9:name=systemd:/\n4:memory:/job\n0::/\n", V1_MOUNT)
    tree.v1("/sys/fs/cgroup/memory/job", 1000 * MIB, 700 * MIB, inactive=200 * MIB, active=50 * MIB)
    file = "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    assert tree.room() == MemoryRoom(550 * MIB, 1000 * MIB, file)


def test_a_group_of_version_2_has_its_limit_less_what_it_cannot_give_back(tree: Tree) -> None:
    tree.process("0::/job.slice\n", V2_MOUNT)
    folder = "/sys/fs/cgroup/job.slice"
    tree.v2(folder, 700 * MIB, max_=1000 * MIB, inactive=200 * MIB, active=50 * MIB)
    assert tree.room() == MemoryRoom(550 * MIB, 1000 * MIB, f"{folder}/memory.max")


def test_of_version_2_the_lower_of_max_and_high_decides(tree: Tree) -> None:
    tree.process("0::/job\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/job", 100 * MIB, max_=1000 * MIB, high=800 * MIB)
    expected = MemoryRoom(700 * MIB, 800 * MIB, "/sys/fs/cgroup/job/memory.high")
    assert tree.room() == expected
    tree.v2("/sys/fs/cgroup/job", 100 * MIB, high=800 * MIB)
    assert tree.room() == expected
    tree.v2("/sys/fs/cgroup/job", 100 * MIB, max_=300 * MIB, high=800 * MIB)
    assert tree.room() == MemoryRoom(200 * MIB, 300 * MIB, "/sys/fs/cgroup/job/memory.max")


@pytest.mark.parametrize("tight", ["/a", "/a/b", "/a/b/c"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_nested_groups_decides(tree: Tree, version: int, tight: str) -> None:
    mount = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}[version]
    tree.process(
        {1: "4:memory:/a/b/c\n", 2: "0::/a/b/c\n"}[version], {1: V1_MOUNT, 2: V2_MOUNT}[version]
    )
    for path in ("/a", "/a/b", "/a/b/c", "/other", "/a/b/c/below"):
        limit = 500 if path == tight else 2 if path in ("/other", "/a/b/c/below") else 900
        if version == 1:
            tree.v1(mount + path, limit * MIB, 1 * MIB)
        else:
            tree.v2(mount + path, 1 * MIB, max_=limit * MIB)
    file = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
    assert tree.room() == MemoryRoom(499 * MIB, 500 * MIB, f"{mount}{tight}/{file}")


def test_a_full_outer_group_leaves_nothing_to_one_that_is_empty(tree: Tree) -> None:
    tree.process("0::/a/b\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 1200 * MIB, max_=1000 * MIB)
    tree.v2("/sys/fs/cgroup/a/b", 0, max_=600 * MIB)
    assert tree.room() == MemoryRoom(0, 1000 * MIB, "/sys/fs/cgroup/a/memory.max")


def test_a_limit_above_what_the_machine_has_left_does_not_decide(tree: Tree) -> None:
    tree.process("0::/a\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 0, max_=9000 * MIB)
    assert tree.room() == MACHINE


@pytest.mark.parametrize("limit", [V1_NO_LIMIT, 2**63 - 1, 2**64 - 65536, 2**60])
def test_a_huge_limit_of_version_1_is_none(tree: Tree, limit: int) -> None:
    (tree.folder / "proc/meminfo").unlink()
    tree.process("4:memory:/job\n", V1_MOUNT)
    tree.v1("/sys/fs/cgroup/memory/job", limit, 0)
    assert tree.room() == MemoryRoom(None, None, None)


def test_more_file_pages_than_usage_leave_the_limit_and_no_more(tree: Tree) -> None:
    """The two files are read one after the other."""
    tree.process("0::/a\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 10 * MIB, max_=100 * MIB, inactive=50 * MIB)
    assert tree.room().available_bytes == 100 * MIB


def test_an_old_group_that_does_not_count_those_below_is_passed_over(tree: Tree) -> None:
    """Version 1 before Linux 5.11, `memory.use_hierarchy` 0: nor does what is above it limit."""
    tree.process("4:memory:/a/b/c\n", V1_MOUNT)
    for path in ("/a", "/a/b", "/a/b/c"):
        tree.v1(f"/sys/fs/cgroup/memory{path}", {"/a": 10, "/a/b": 20}.get(path, 30) * MIB, 0)
    assert tree.room().limit_bytes == 10 * MIB
    tree.write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", 0)
    assert tree.room().limit_bytes == 20 * MIB
    tree.write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", 1)
    tree.write("/sys/fs/cgroup/memory/a/b/memory.use_hierarchy", 0)
    assert tree.room().limit_bytes == 30 * MIB
    tree.write("/sys/fs/cgroup/memory/a/b/c/memory.use_hierarchy", 0)
    assert tree.room().limit_bytes == 30 * MIB  # its own pages it counts


def test_a_group_without_totals_tells_its_own_pages(tree: Tree) -> None:
    tree.process("4:memory:/a\n", V1_MOUNT)
    tree.v1("/sys/fs/cgroup/memory/a", 100 * MIB, 60 * MIB)
    tree.write("/sys/fs/cgroup/memory/a/memory.stat", f"inactive_file {20 * MIB}\nactive_file 0\n")
    assert tree.room().available_bytes == 60 * MIB


def test_of_a_hybrid_both_hierarchies_are_asked(tree: Tree) -> None:
    unified = V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    tree.process("4:cpu,memory:/v1\n0::/v2\n", V1_MOUNT + unified)
    tree.v1("/sys/fs/cgroup/memory/v1", 300 * MIB, 0)
    tree.write("/sys/fs/cgroup/unified/v2/cgroup.procs", "1\n")  # no memory controller there
    assert tree.room().source == "/sys/fs/cgroup/memory/v1/memory.limit_in_bytes"
    tree.v2("/sys/fs/cgroup/unified/v2", 0, max_=200 * MIB)
    assert tree.room().source == "/sys/fs/cgroup/unified/v2/memory.max"


# --- what is told of it ---------------------------------------------------------------------------


def test_the_memory_of_the_machine_is_told(tree: Tree) -> None:
    assert machine_memory(str(tree.folder)) == MachineMemory(24684092 * 1024, 8192 * MIB)


def test_where_the_machine_does_not_count_its_memory_is_not_known(tmp_path: Path) -> None:
    assert machine_memory(str(tmp_path)) == MachineMemory(None, None)
    assert group_memory(str(tmp_path)) == GroupMemory(None, None)


def test_the_limit_that_leaves_least_is_told_with_what_its_group_uses(tree: Tree) -> None:
    tree.process("0::/outer/inner\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/outer", 250 * MIB, max_=300 * MIB)
    tree.v2("/sys/fs/cgroup/outer/inner", 20 * MIB, max_=100 * MIB)
    assert group_memory(str(tree.folder)) == GroupMemory(300 * MIB, 250 * MIB)


def test_without_a_limit_the_use_of_the_process_s_own_group_is_told(tree: Tree) -> None:
    tree.process("0::/outer/inner\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/outer", 250 * MIB)
    tree.v2("/sys/fs/cgroup/outer/inner", 20 * MIB)
    assert group_memory(str(tree.folder)) == GroupMemory(None, 20 * MIB)


# --- containers -----------------------------------------------------------------------------------


def test_in_a_container_with_a_namespace_the_mount_is_its_own_group(tree: Tree) -> None:
    tree.process("0::/\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup", 100 * MIB, max_=400 * MIB)
    assert tree.room() == MemoryRoom(300 * MIB, 400 * MIB, "/sys/fs/cgroup/memory.max")


def test_in_a_container_without_one_the_root_of_the_mount_is_taken_off_the_path(
    tree: Tree,
) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/4f9a /sys")
    tree.process("4:memory:/docker/4f9a/inner\n", mount)
    tree.v1("/sys/fs/cgroup/memory", 300 * MIB, 0)
    assert tree.room().source == "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    tree.v1("/sys/fs/cgroup/memory/inner", 200 * MIB, 0)
    assert tree.room().source == "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes"


def test_a_mount_point_with_blanks_is_found(tree: Tree) -> None:
    tree.process("0::/a b\n", V2_MOUNT.replace("/sys/fs/cgroup", r"/my\040groups\134\011x"))
    tree.v2("/my groups\\\tx/a b", 0, max_=10 * MIB)
    assert tree.room() == MemoryRoom(10 * MIB, 10 * MIB, "/my groups\\\tx/a b/memory.max")


def test_a_name_that_is_no_utf_8_is_found(tree: Tree) -> None:
    group = os.fsdecode(b"/a\xff\xc2\x85b")
    for path, text in (("cgroup", f"0::{group}\n"), ("mountinfo", V2_MOUNT)):
        file = tree.folder / "proc/self" / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.fsencode(text))
    tree.v2(f"/sys/fs/cgroup{group}", 0, max_=10 * MIB)
    assert tree.room().limit_bytes == 10 * MIB


@pytest.mark.parametrize(
    ("group", "root", "expected"),
    [
        ("/", "/", ["/m"]),
        ("/a/b", "/", ["/m", "/m/a", "/m/a/b"]),
        ("/a/b", "/a", ["/m", "/m/b"]),
        ("/a/b", "/a/b", ["/m"]),
        ("/a/b", "/a/b/c", []),  # the mount shows a group below
        ("/ab", "/a", []),
        ("/a", "/b", []),
        ("/../x", "/", []),  # the process is outside the namespace, next to what is mounted
        ("/..", "/", []),
        ("/../x", "/..", ["/m", "/m/x"]),
        ("/../x/y", "/../x", ["/m", "/m/y"]),
        ("/../x", "/../y", []),
        ("/../../x", "/../..", ["/m", "/m/x"]),
        ("/", "/..", ["/m"]),  # the name of the namespace's root is not known inside
        ("/a", "/../..", ["/m"]),
        ("/a", "/../b", []),
        ("", "/", []),
        ("/a (deleted)", "/", ["/m", "/m/a (deleted)"]),
    ],
)
def test_the_folders_of_a_group_and_of_those_around_it(
    group: str, root: str, expected: list[str]
) -> None:
    assert folders_of_group(group, root, "/m") == expected


def test_a_hierarchy_mounted_at_the_root_of_all_files_is_found() -> None:
    assert folders_of_group("/a", "/", "/") == ["", "/a"]


def test_the_groups_of_a_process() -> None:
    text = "4:cpu,memory:/a:b\n0::/c\n9:name=memory:/no\n5:memory2:/no\n1:cpu:/no\nodd\n"
    assert groups_of_process(text) == {1: "/a:b", 2: "/c"}
    assert groups_of_process("") == {}


def test_the_mounts_of_memory_hierarchies() -> None:
    other = "34 31 0:31 / /cpu rw - cgroup cgroup rw,cpu\n25 24 0:23 / /m rw - tmpfs x rw,memory\n"
    named = "40 31 0:37 / /systemd rw - cgroup cgroup rw,name=memory\n"
    several = "1 2 3:4 /r /p rw shared:1 master:2 propagate_from:3 - cgroup2 none rw\n"
    text = other + V1_MOUNT + named + "odd\n - \n1 2 3 - cgroup2 x rw\n" + several
    assert memory_mounts(text) == [(1, "/", "/sys/fs/cgroup/memory"), (2, "/r", "/p")]


# --- odd files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["memory.max", "memory.current"])
@pytest.mark.parametrize(
    "text", ["", "none\n", "-5\n", "1e6\n", "12 13\n", "9" * 30, "²\n", "١٢\n", "0x10\n", "\0\n"]
)
def test_a_level_with_odd_contents_is_passed_over(tree: Tree, file: str, text: str) -> None:
    tree.process("0::/a/b\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 0, max_=500 * MIB)
    tree.v2("/sys/fs/cgroup/a/b", 0, max_=100 * MIB)
    assert tree.room().limit_bytes == 100 * MIB
    tree.write(f"/sys/fs/cgroup/a/b/{file}", text)
    assert tree.room().limit_bytes == 500 * MIB


@pytest.mark.parametrize("file", ["memory.max", "memory.current"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_level_whose_files_are_gone_or_cannot_be_read_is_passed_over(
    tree: Tree, file: str, is_folder: bool
) -> None:
    tree.process("0::/a/b\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 0, max_=500 * MIB)
    tree.v2("/sys/fs/cgroup/a/b", 0, max_=100 * MIB)
    path = tree.folder / "sys/fs/cgroup/a/b" / file
    path.unlink()
    if is_folder:
        path.mkdir()
    assert tree.room().limit_bytes == 500 * MIB


@pytest.mark.parametrize("text", [None, "", "inactive_file x\n", "\0", "inactive_file\n" * 3])
def test_where_the_statistics_are_odd_nothing_counts_as_reclaimable(
    tree: Tree, text: str | None
) -> None:
    tree.process("0::/a\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 60 * MIB, max_=100 * MIB, inactive=30 * MIB)
    stat = tree.folder / "sys/fs/cgroup/a/memory.stat"
    assert tree.room().available_bytes == 70 * MIB
    stat.unlink()
    if text is not None:
        stat.write_text(text)
    assert tree.room().available_bytes == 40 * MIB


@pytest.mark.parametrize("text", ["", "MemAvailable: x kB\n", "MemAvailable: 5 MB\n", "Mem\n"])
def test_an_odd_meminfo_leaves_the_decision_to_the_groups(tree: Tree, text: str) -> None:
    tree.write("/proc/meminfo", text)
    tree.process("0::/a\n", V2_MOUNT)
    tree.v2("/sys/fs/cgroup/a", 0, max_=900_000 * MIB)
    assert tree.room().limit_bytes == 900_000 * MIB


def test_a_path_with_a_null_byte_is_passed_over(tree: Tree) -> None:
    tree.process("0::/a\0b\n", V2_MOUNT)
    assert tree.room() == MACHINE


# --- this machine, and real groups ----------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_on_this_machine_there_is_room_and_it_says_where() -> None:
    room = memory_room()
    assert room.available_bytes is not None
    assert 0 < room.available_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert room.source is not None
    assert Path(room.source).is_file()


def real_mount() -> tuple[int, Path]:
    """(version, mount point) of a hierarchy here in which groups with a limit can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may make control groups")
    for version, root, mount_point in memory_mounts(Path("/proc/self/mountinfo").read_text()):
        controllers = Path(mount_point, "cgroup.subtree_control")
        has_memory = version == 1 or "memory" in controllers.read_text().split()
        if root == "/" and has_memory:
            return version, Path(mount_point)
    pytest.skip("no memory controller is mounted here from its root")


@pytest.fixture
def real_group() -> Iterator[tuple[int, Path]]:
    """(version, folder) of a group limited to 200 MiB, around one called `inner` without limit."""
    version, mount_point = real_mount()
    outer = mount_point / f"kda-stream-test-{os.getpid()}"
    made = []
    try:
        try:
            for folder in (outer, outer / "inner"):
                folder.mkdir()
                made.append(folder)
                if version == 2 and folder == outer:
                    (folder / "cgroup.subtree_control").write_text("+memory")
            limit = outer / ("memory.limit_in_bytes" if version == 1 else "memory.max")
            limit.write_text(str(200 * MIB))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield version, outer
    finally:
        for folder in reversed(made):
            folder.rmdir()


# Put before a script: this process goes into the group that is its first argument.
IN_GROUP = """
import dataclasses, json, os, subprocess, sys
from pathlib import Path
from kda_stream.staging.room import memory_room
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))

def room():
    return dataclasses.asdict(memory_room())
"""

WITH_PAGES = """
before = room()
memory = bytearray(50 * 1024**2)
with_memory = room()
path = Path(sys.argv[2])
with path.open("wb") as file:
    for _ in range(30):
        file.write(bytes(1024**2))
    os.fsync(file.fileno())
with_file = room()
path.unlink()
print(json.dumps([before, with_memory, with_file]))
"""

# In namespaces of its own: `mount` has the arguments after the first.
IN_NAMESPACE = """
import dataclasses, json, subprocess, sys
from kda_stream.staging.room import memory_room
groups = open("/proc/self/cgroup").read()
before = dataclasses.asdict(memory_room())
made = subprocess.run(["mount", *sys.argv[2:]], capture_output=True, text=True)
after = dataclasses.asdict(memory_room())
print(json.dumps([groups, before, made.stderr, after]))
"""
INTO_NAMESPACE = (
    IN_GROUP
    + f"inside = {IN_NAMESPACE!r}\n"
    + """
command = ["unshare", "--mount", "--cgroup", sys.executable, "-c", inside, *sys.argv[1:]]
sys.stdout.flush()
sys.exit(subprocess.run(command).returncode)
"""
)


def test_a_process_in_a_real_group_sees_its_limit_and_its_own_pages(
    real_group: tuple[int, Path], run_python: RunPython, tmp_path: Path
) -> None:
    """Of 200 MiB: 50 MiB of its memory are gone, 30 MiB of a file are not."""
    version, outer = real_group
    script = IN_GROUP + WITH_PAGES
    before, with_memory, with_file = run_python(script, outer / "inner", tmp_path / "file")
    limit = outer / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    for seen in (before, with_memory, with_file):
        assert (seen["limit_bytes"], seen["source"]) == (200 * MIB, str(limit))
    assert 190 * MIB < before["available_bytes"] <= 200 * MIB
    assert 49 * MIB < before["available_bytes"] - with_memory["available_bytes"] < 55 * MIB
    assert abs(with_memory["available_bytes"] - with_file["available_bytes"]) < 10 * MIB


def test_the_inner_limit_decides_where_it_is_the_lower(
    real_group: tuple[int, Path], run_python: RunPython
) -> None:
    version, outer = real_group
    limit = outer / "inner" / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    limit.write_text(str(100 * MIB))
    seen = run_python(IN_GROUP + "print(json.dumps(room()))", outer / "inner")
    assert (seen["limit_bytes"], seen["source"]) == (100 * MIB, str(limit))


def test_a_process_in_a_real_namespace_sees_the_limit_through_its_own_mount(
    real_group: tuple[int, Path], run_python: RunPython, tmp_path: Path
) -> None:
    """As in a container; before its mount is made, only the group around its own is visible."""
    version, outer = real_group
    needed = ["unshare", "--mount", "--cgroup", "true"]
    if subprocess.run(needed, capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespace for control groups can be made here")
    mount_point = tmp_path / "groups"
    mount_point.mkdir()
    file = "memory.limit_in_bytes" if version == 1 else "memory.max"
    (outer / "inner" / file).write_text(str(100 * MIB))
    kind = ["-t", "cgroup", "-o", "memory"] if version == 1 else ["-t", "cgroup2"]
    # `inner` becomes the namespace's root; what was mounted before then begins at "/../..".
    groups, before, refusal, after = run_python(
        INTO_NAMESPACE, outer / "inner", *kind, "none", mount_point
    )
    if refusal:
        pytest.skip(f"control groups cannot be mounted here: {refusal}")
    assert groups_of_process(groups)[version] == "/"
    assert before["source"] == "/proc/meminfo"
    assert (after["limit_bytes"], after["source"]) == (
        100 * MIB,
        str(mount_point / file),
    )


# --- huge pages -----------------------------------------------------------------------------------

BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone    DMA32     78    125     93     61     42     26     19     15      8     15    738
Node 1, zone   Normal   1588   3428   2012   2431   1133    392    228    621    583      2      0
"""


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="the text is of a machine with 4 KiB pages")
def test_huge_pages_at_hand_are_the_free_blocks_that_are_long_enough() -> None:
    assert huge_pages_at_hand(BUDDYINFO) == (1 + 2 * 3) + (15 + 2 * 738) + 2
    assert huge_pages_at_hand("") == 0
    assert huge_pages_at_hand("Node 0, zone\nsomething else\nNode 0, zone Normal 1 2 x\n") == 0


def test_huge_pages_are_at_hand_for_what_they_can_hold_and_not_for_a_byte_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buddyinfo"
    path.write_text(BUDDYINFO)
    held = huge_pages_at_hand(BUDDYINFO) * 2 * 1024**2
    assert are_huge_pages_at_hand(held, str(path))
    assert not are_huge_pages_at_hand(held + 1, str(path))
    assert not are_huge_pages_at_hand(1, str(tmp_path / "none"))
