"""What a machine, its system and its packages are, as far as a load depends on it.

No name of the host or of a user, and nothing of the environment.
"""

from __future__ import annotations

import os
import platform
import resource
from typing import Any, Final

from .. import __version__
from ..errors import NotBuiltError, shown
from ..staging.native import extension
from ..staging.pages import PAGE_BYTES
from ..staging.reading import usable_processors
from ..staging.room import group_memory, machine_memory
from .output import plural, row, size

_PACKAGES: Final = (
    "numpy",
    "cffi",
    "safetensors",
    "torch",
    "ml_dtypes",
    "rich",
    "transformers",
    "vllm",
    "sglang",
)
_CAP_IPC_LOCK: Final = 14  # linux/capability.h
_LIMITS: Final = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "descriptors": resource.RLIMIT_NOFILE,
    "address_space_bytes": resource.RLIMIT_AS,
}


def machine_facts() -> dict[str, Any]:
    """What `env` tells of the machine.

    `versions`, `system`, `native`, `native_refusal` (why the compiled part cannot be loaded; null
    where it can), `page_bytes`, `processors`, `memory`, `limits`, `may_lock_all`
    (whether the process has CAP_IPC_LOCK, for which the limit on locked memory does not count; null
    where the system does not tell) and `groups`.
    """
    memory, group, native_refusal = machine_memory(), group_memory(), _native_refusal()
    return {
        "versions": _versions(),
        "system": {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "libc": _libc(),
            "python": platform.python_version(),
        },
        "native": native_refusal is None,
        "native_refusal": native_refusal,
        "page_bytes": PAGE_BYTES,
        "processors": usable_processors(),
        "memory": {
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
        },
        "limits": {name: _limit(number) for name, number in _LIMITS.items()},
        "may_lock_all": _may_lock_all(),
        "groups": {"limit_bytes": group.limit_bytes, "used_bytes": group.used_bytes},
    }


def _native_refusal() -> str | None:
    try:
        extension()
    except NotBuiltError as error:
        return error.got
    return None


def _versions() -> dict[str, str]:
    """The package's own version and those of what is installed beside it; nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, for this alone

    found = {"kda_stream": __version__}
    for name in _PACKAGES:
        try:
            text: str | None = version(name)
        except PackageNotFoundError:
            continue
        except (KeyError, OSError, ValueError):  # what describes it is broken, or not to be read
            text = None
        found[name] = "an unknown version" if text is None else shown(text)
    return found


def _libc() -> str | None:
    """Name and version of the C library, such as "glibc 2.36"; None where it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):  # another C library
        return " ".join(filter(None, platform.libc_ver())) or None


def _limit(number: int) -> dict[str, int | None]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(number)
    )
    return {"soft": soft, "hard": hard}


def _may_lock_all() -> bool | None:
    """Source: CapEff of /proc/self/status, in hexadecimal."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            effective = next(line for line in status if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return None
    return bool(int(effective.split()[1], 16) >> _CAP_IPC_LOCK & 1)


# Text --------------------------------------------------------------------------------------------


def machine_lines(facts: dict[str, Any]) -> list[str]:
    """What `machine_facts` tells, for people."""
    own, *others = (f"{name} {number}" for name, number in facts["versions"].items())
    compiled = "its compiled part loads"
    if not facts["native"]:
        compiled = f"its compiled part does not load: {shown(facts['native_refusal'])}"
    system, memory, group = facts["system"], facts["memory"], facts["groups"]
    limits = facts["limits"]
    return [
        f"{own}: {compiled}",
        *row("packages", ", ".join(others) or "none of those that are looked for"),
        *row(
            "system",
            f"Python {system['python']}, {system['libc'] or 'a C library that does not tell'}, "
            f"kernel {system['kernel']}, {system['machine']}",
        ),
        *row(
            "machine",
            f"{plural(facts['processors'], 'processor')} may be used, "
            f"pages of {facts['page_bytes']:,} bytes",
        ),
        *row(
            "memory",
            f"{_known_size(memory['total_bytes'])}, "
            f"of which {_known_size(memory['available_bytes'])} available",
        ),
        *row(
            "groups",
            "no limit on memory is visible"
            if group["limit_bytes"] is None
            else f"a limit of {size(group['limit_bytes'])} on memory, "
            f"{_known_size(group['used_bytes'])} used",
        ),
        *row(
            "limits",
            f"locked memory {_limit_text(limits['memlock_bytes'], size)}"
            + (
                ", which does not count: with CAP_IPC_LOCK it may lock all"
                if facts["may_lock_all"]
                else ""
            ),
        ),
        *row("", f"descriptors {_limit_text(limits['descriptors'], _number)}"),
        *row("", f"address space {_limit_text(limits['address_space_bytes'], size)}"),
    ]


def _known_size(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else size(nbytes)


def _number(count: float) -> str:
    return f"{count:,}"


def _limit_text(limit: dict[str, int | None], in_words: Any) -> str:
    soft, hard = ("no limit" if at is None else in_words(at) for at in limit.values())
    return f"{soft} (hard: {hard})"
