"""Page-locking an arena's memory: what is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..errors import ErrorCode, MemoryRefusedError
from .pages import Mapping, lock_refusal
from .residency import lock_limit_bytes, memory_use

LockPolicy = Literal["require", "prefer", "off"]
LOCK_POLICIES: Final = ("require", "prefer", "off")

_RAISE_THE_LIMIT: Final = (
    "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, "
    "`--ulimit memlock=-1` for a container"
)


@dataclass(frozen=True, slots=True)
class LockReport:
    """Whether an arena's memory is page-locked, and known to a GPU driver; sizes in bytes.

    `policy` is what was asked for, `wanted_bytes` the arena's size, `locked_bytes` what is locked
    of it (all or nothing), `locked_before_bytes` what the process had locked already, `limit_bytes`
    the limit, RLIMIT_MEMLOCK (None: no limit), which does not hold for a process with the
    capability CAP_IPC_LOCK; `refusal` is why locking was refused, or None. `registered` tells
    whether a driver has all of it, `registration_refusal` why not; None where it was not asked for.
    """

    policy: str
    wanted_bytes: int
    locked_bytes: int
    locked_before_bytes: int | None
    limit_bytes: int | None
    refusal: str | None
    registered: bool = False
    registration_refusal: str | None = None

    @property
    def locked(self) -> bool:
        """Whether all of the memory is locked."""
        return self.locked_bytes == self.wanted_bytes


def lock_pages(mapping: Mapping, policy: str) -> LockReport:
    """Lock the pages as `policy` says; raises `MemoryRefusedError` where it requires that."""
    wanted = mapping.nbytes
    before = memory_use().locked_bytes
    limit = lock_limit_bytes()
    if policy == "off":
        return LockReport(policy, wanted, 0, before, limit, None)
    refused = mapping.lock()
    if not refused:
        return LockReport(policy, wanted, wanted, before, limit, None)
    if policy == "require":
        raise MemoryRefusedError(
            ErrorCode.LOCK_REFUSED,
            f"the memory cannot be page-locked: {lock_refusal(refused)}",
            expected=f"{wanted} bytes",
            got=f"a limit of {limit} bytes with {before} bytes locked already",
            hint=_RAISE_THE_LIMIT + ', or pass lock="prefer"',
        )
    refusal = f"{lock_refusal(refused)}; {_RAISE_THE_LIMIT}"
    return LockReport(policy, wanted, 0, before, limit, refusal)
