"""How much memory is left for new pages: on the machine, and in the process's control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ..limits import HUGE_PAGE_BYTES
from .pages import PAGE_BYTES

_NO_LIMIT_BYTES: Final = 2**60
"""From here on a limit is none: version 1 writes 2**63 less a page where no limit is set."""

_NEVER: Final = "max"
"""What version 2 writes where no limit is set."""

Read = Callable[[str], "str | None"]
"""A file's text by its path; None when it cannot be read."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory that new pages can have, in bytes.

    `available_bytes` is the least over the machine and the process's control groups, and `source`
    the file that decided: /proc/meminfo, or the one that holds the limit `limit_bytes` of a group.
    `limit_bytes` is None when the machine decided, and all are None where the system has neither.
    """

    available_bytes: int | None
    limit_bytes: int | None
    source: str | None


@dataclass(frozen=True, slots=True)
class _Version:
    """The names that a version of control groups gives to its files; sizes are in bytes.

    Sources: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[tuple[str, ...], ...]  # lines of memory.stat; the first set that is there


_V1: Final = _Version(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    # the usage counts the groups below; without `total_`, a line counts the group alone
    reclaimable=(("total_inactive_file", "total_active_file"), ("inactive_file", "active_file")),
)
_V2: Final = _Version(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    reclaimable=(("inactive_file", "active_file"),),
)


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The machine's memory in bytes, and what new pages can have of it; None where not counted."""

    total_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The limit, in bytes, of the control group that leaves least room, and what that group uses.

    The limit is None where no group has one: the use is that of the process's own group then, and
    None where none is visible.
    """

    limit_bytes: int | None
    used_bytes: int | None


def memory_room(root: str = "") -> MemoryRoom:
    """The memory left for new pages now; `root` is put before each path, for tests.

    What is left of a group's limit is the limit less the usage, plus the file pages that the kernel
    would drop first; swap is not counted. A group that is not visible, or whose files cannot be
    read or understood, does not count.
    """
    read = _reader(root)
    rooms = [*_machine(read), *(room for group in _groups(read) for room in group.rooms)]
    return min(rooms, key=lambda room: room.available_bytes or 0, default=_UNKNOWN)


def machine_memory(root: str = "") -> MachineMemory:
    """The memory of the machine now; `root` as for `memory_room`."""
    read = _reader(root)
    return MachineMemory(_meminfo(read, "MemTotal"), _meminfo(read, "MemAvailable"))


def group_memory(root: str = "") -> GroupMemory:
    """The memory of the process's control groups now; `root` as for `memory_room`."""
    groups = list(_groups(_reader(root)))
    limits = [
        (room.available_bytes or 0, room.limit_bytes, group.used_bytes)
        for group in groups
        for room in group.rooms
    ]
    if limits:
        _, limit_bytes, used_bytes = min(limits, key=lambda limit: limit[0])
        return GroupMemory(limit_bytes, used_bytes)
    return GroupMemory(None, groups[0].used_bytes if groups else None)


def _reader(root: str) -> Read:
    def read(path: str) -> str | None:
        try:
            with open(root + path, "rb") as file:
                return os.fsdecode(file.read())
        except (OSError, ValueError):  # ValueError: a path that cannot be one
            return None

    return read


_UNKNOWN: Final = MemoryRoom(None, None, None)
_MEMINFO: Final = "/proc/meminfo"


def _machine(read: Read) -> Iterator[MemoryRoom]:
    """What the machine has left."""
    available_bytes = _meminfo(read, "MemAvailable")
    if available_bytes is not None:
        yield MemoryRoom(available_bytes, None, _MEMINFO)


def _meminfo(read: Read, name: str) -> int | None:
    """A line of meminfo, which is in kB; source: proc(5)."""
    line = rf"^{name}:\s+(\d{{1,18}}) kB$"
    found = re.search(line, read(_MEMINFO) or "", re.ASCII | re.MULTILINE)
    return int(found[1]) * 1024 if found else None


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group: what it uses, and what each of its limits leaves."""

    used_bytes: int
    rooms: tuple[MemoryRoom, ...]


def _groups(read: Read) -> Iterator[_Group]:
    """Each visible control group that holds the process, the innermost of a hierarchy first."""
    of_process = groups_of_process(read("/proc/self/cgroup") or "")
    for version, mount_root, mount_point in memory_mounts(read("/proc/self/mountinfo") or ""):
        folders = folders_of_group(of_process.get(version, ""), mount_root, mount_point)
        for folder in reversed(folders):
            is_outer = folder != folders[-1]
            flag = read(f"{folder}/memory.use_hierarchy")
            if is_outer and flag is not None and flag.strip() == "0":
                break  # version 1: this group does not count those below, nor do those above it
            yield from _group(read, folder, _V1 if version == 1 else _V2)


def _group(read: Read, folder: str, version: _Version) -> Iterator[_Group]:
    usage = _size(read(f"{folder}/{version.usage}"))
    if usage is None:
        return
    counts = _counts(read(f"{folder}/memory.stat") or "")
    names = next((set_ for set_ in version.reclaimable if set_[0] in counts), ())
    kept = max(0, usage - sum(counts.get(name, 0) for name in names))
    limits = {f"{folder}/{file}": _size(read(f"{folder}/{file}")) for file in version.limits}
    rooms = (
        MemoryRoom(max(0, limit - kept), limit, file)
        for file, limit in limits.items()
        if limit is not None
    )
    yield _Group(usage, tuple(rooms))


def _size(text: str | None) -> int | None:
    """A file that holds one size; None when it holds no size, or no limit."""
    text = (text or "").strip()
    if text == _NEVER or not re.fullmatch(r"\d{1,20}", text, re.ASCII):
        return None
    size = int(text)
    return None if size >= _NO_LIMIT_BYTES else size


def _counts(text: str) -> dict[str, int]:
    """The lines of memory.stat: a name, a space and a number."""
    lines = re.findall(r"^(\w+) (\d{1,20})$", text, re.ASCII | re.MULTILINE)
    return {name: int(number) for name, number in lines}


# --- where the groups are -------------------------------------------------------------------------


def groups_of_process(text: str) -> dict[int, str]:
    """The process's group in version 1's memory hierarchy and in version 2's, as paths there.

    `text` is that of /proc/self/cgroup: "4:memory:/path" and "0::/path"; source: cgroups(7).
    """
    groups = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            groups[1] = path
        elif number == "0":
            groups[2] = path
    return groups


def memory_mounts(text: str) -> list[tuple[int, str, str]]:
    """(version, root, mount point) of each mount of a hierarchy that may limit memory.

    `text` is that of /proc/self/mountinfo; source: proc_pid_mountinfo(5). The root is the group
    that the mount point shows.
    """
    mounts = []
    for line in text.split("\n"):
        before, separator, after = line.partition(" - ")
        fields, what = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(what) < 3:
            continue
        root, mount_point = _unescaped(fields[3]), _unescaped(fields[4])
        if what[0] == "cgroup" and "memory" in what[2].split(","):
            mounts.append((1, root, mount_point))
        elif what[0] == "cgroup2":
            mounts.append((2, root, mount_point))
    return mounts


def _unescaped(path: str) -> str:
    """Blanks and backslashes stand in mountinfo as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def folders_of_group(group: str, mount_root: str, mount_point: str) -> list[str]:
    """The folders under a mount point of a group and of all that hold it, outermost first.

    Both `group` and `mount_root` are seen from the process's namespace, where "/.." is the group
    around its root. Empty when the mount does not show the group; when the mount begins further
    out, by a step whose name cannot be known from inside, it shows its own root alone.
    """
    if not group.startswith("/"):
        return []
    group_ups, group_names = _steps(group)
    root_ups, root_names = _steps(mount_root)
    if root_ups > group_ups and not root_names:
        group_names = []
    elif root_ups != group_ups or group_names[: len(root_names)] != root_names:
        return []
    folders = [mount_point.rstrip("/")]
    for name in group_names[len(root_names) :]:
        folders.append(f"{folders[-1]}/{name}")
    return folders


def _steps(path: str) -> tuple[int, list[str]]:
    """How many steps a path goes up at its start, and the names after them."""
    names = [name for name in path.split("/") if name]
    ups = next((at for at, name in enumerate(names) if name != ".."), len(names))
    return ups, names[ups:]


def huge_pages_at_hand(text: str) -> int:
    """How many huge pages the kernel has ready, from the text of /proc/buddyinfo.

    That many can be had at once; for more it has to move what is in the way. A line has the number
    of free blocks of 1, 2, 4, ... pages.
    """
    order = (HUGE_PAGE_BYTES // PAGE_BYTES).bit_length() - 1
    found = 0
    for line in text.splitlines():
        _, _, counts = line.partition(" zone ")
        blocks = [int(word) for word in counts.split()[1:] if word.isdecimal()]
        found += sum(count << at for at, count in enumerate(blocks[order:]))
    return found


def are_huge_pages_at_hand(nbytes: int, path: str = "/proc/buddyinfo") -> bool:
    """Whether the kernel has huge pages ready for `nbytes` bytes; False where it does not say."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return huge_pages_at_hand(file.read()) * HUGE_PAGE_BYTES >= nbytes
    except OSError:
        return False
