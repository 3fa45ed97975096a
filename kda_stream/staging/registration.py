"""An arena's memory as a GPU driver knows it: registered at once, unregistered before it goes."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final, NamedTuple, Protocol

from ..closing import finish_first
from ..errors import ArgumentError, ErrorCode, MemoryRefusedError, shown
from ..limits import LINE_CHARS_MAX
from .native import extension
from .pages import Mapping


class Refusal(NamedTuple):
    """Why a driver refuses, and what to do about it."""

    reason: str
    hint: str


# By the numbers of cudaError_t.
_NOT_REGISTERED: Final = 713
_REFUSALS: Final = {
    1: Refusal(
        "invalid value",
        "the driver takes no such memory: see that it is as new as its runtime needs (nvidia-smi), "
        "and that no part of the memory is registered already",
    ),
    2: Refusal("out of memory", "so much cannot be locked: use fewer slots, or raise `ulimit -l`"),
    712: Refusal(
        "already registered",
        "what was at this address before was unmapped without being unregistered: have its owner "
        "unregister it first, or start the process anew",
    ),
    _NOT_REGISTERED: Refusal(
        "not registered",
        "other code unregistered it, or reset the device: leave both to the arena",
    ),
    801: Refusal(
        "not supported",
        "this system registers no memory of a process's own: copy by way of memory that the driver "
        "allocates, such as torch's pin_memory()",
    ),
}
_UNKNOWN: Final = Refusal("no reason is known", "look it up in the driver's list of errors")


class HostRegistrar(Protocol):
    """What registers memory with a GPU driver, such as `kda_stream.interop.cuda.CudaHost`.

    Both return 0, or the driver's number of the error (cudaError_t); both may be called by any
    thread. `address` and `nbytes` are those of whole pages.
    """

    def register(self, address: int, nbytes: int) -> int:
        """Make the memory known to the driver, which locks its pages."""
        ...

    def unregister(self, address: int) -> int:
        """Make the driver forget the memory that was registered at `address`."""
        ...


def require_registrar(registrar: object) -> None:
    """Raise `ArgumentError` when `registrar` is neither None nor a `HostRegistrar`."""
    methods = (getattr(registrar, name, None) for name in ("register", "unregister"))
    if registrar is None or (not isinstance(registrar, type) and all(map(callable, methods))):
        return
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "register is no HostRegistrar",
        expected="an object with register(address, nbytes) and unregister(address), or None",
        got=registrar.__name__ if isinstance(registrar, type) else type(registrar).__name__,
        hint="pass kda_stream.interop.cuda.CudaHost()",
    )


class Registration:
    """The pages of an arena in a driver's hands, from `begin` to `end`. Safe in threads.

    It holds the pages meanwhile, and the interpreter's list of what to do at its end holds it:
    whatever becomes of the arena, they are not unmapped before they are unregistered.
    """

    def __init__(self, registrar: HostRegistrar, mapping: Mapping) -> None:
        """Do nothing yet; `mapping` is of anonymous memory."""
        self._registrar = registrar
        self._pages: Any = mapping.pointer
        self._address = int(extension()[0].cast("uintptr_t", mapping.pointer))
        self._nbytes = mapping.nbytes
        self._process = os.getpid()
        self._lock = threading.RLock()  # of no use to a forked child, which ends it without
        self._ended = True
        self._certain = False  # that the driver has it: what is interrupted is not
        self._attempts = 0

    def begin(self) -> Refusal | None:
        """Register; why that was refused, or None. After anything else that is raised: `end`."""
        self._ended = False
        atexit.register(self.end)
        try:
            answer = int(self._registrar.register(self._address, self._nbytes))
        except Exception as error:
            refusal = _refusal(error)
            self.end()  # it may have been registered before that was raised
            return refusal
        if answer != 0:  # never registered here, so not unregistered either
            self._forget()
            return _refusal(answer)
        self._certain = True
        return None

    def end(self) -> None:
        """Unregister, and hold the pages no longer; again, or in a forked child: no call.

        Raises `MemoryRefusedError` when the driver refuses, once; what the registrar raises, when
        it was unregistered nevertheless.
        """
        finish_first(self._end)

    def _end(self) -> None:
        if os.getpid() != self._process:  # the registration is the parent's
            self._forget()
            return
        with self._lock:
            if self._ended:
                return
            failure = self._unregister()
            self._forget()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # else its traceback would keep this frame

    def _forget(self) -> None:
        self._ended = True
        atexit.unregister(self.end)
        self._pages = None

    def _unregister(self) -> Exception | None:
        """Have the driver forget the memory; what is to be raised for it."""
        raised: Exception | None = None
        answer: int | Exception = 0
        for _ in range(2):  # what is raised may be a signal handler's: ask again
            self._attempts += 1
            try:
                answer = self._ask_to_unregister()
            except Exception as error:
                raised = answer = error
                continue
            if answer == 0 or (answer == _NOT_REGISTERED and self._attempts > 1):
                return raised if self._certain else None
            break
        return _unregister_refused(answer) if self._certain else None

    def _ask_to_unregister(self) -> int:
        pages = self._pages  # a signal handler may `end` meanwhile, and let them go
        try:
            return int(self._registrar.unregister(self._address))
        finally:
            del pages


def register_refused(nbytes: int, refusal: Refusal) -> MemoryRefusedError:
    """The error under `lock="require"`, for what `Registration.begin` returned."""
    return MemoryRefusedError(
        ErrorCode.REGISTER_REFUSED,
        "the memory cannot be registered with the driver",
        expected=f"{nbytes} bytes registered",
        got=refusal.reason,
        hint=f'{refusal.hint}; or pass lock="prefer"',
    )


def _unregister_refused(answer: int | Exception) -> MemoryRefusedError:
    refusal = _refusal(answer)
    return MemoryRefusedError(
        ErrorCode.UNREGISTER_REFUSED,
        "the driver did not unregister the memory, which was given back all the same",
        expected="the answer 0",
        got=refusal.reason,
        hint=f"{refusal.hint}; start the process anew before more is registered",
    )


def _refusal(answer: int | Exception) -> Refusal:
    if isinstance(answer, Exception):
        told = f"{type(answer).__name__}: {shown(str(answer), LINE_CHARS_MAX)}"
        return Refusal(told, "see that the driver and its device work")
    refusal = _REFUSALS.get(answer, _UNKNOWN)
    return refusal._replace(reason=f"{refusal.reason} ({answer})")
