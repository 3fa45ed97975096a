"""System calls that the kernel refuses, in one thread of this process and in those that it starts.

By a filter of the kernel (seccomp): what runs is the library and the kernel, no stand-in. Linux.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import pytest

T = TypeVar("T")

_NUMBERS: Final[Mapping[str, Mapping[str, int]]] = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "fstatfs": 138,
        "getdents64": 217,
        "madvise": 28,
        "mlock2": 325,
        "mmap": 9,
        "openat": 257,
        "pread64": 17,
        "rt_sigaction": 13,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "fstatfs": 44,
        "getdents64": 61,
        "madvise": 233,
        "mlock2": 284,
        "mmap": 222,
        "openat": 56,
        "pread64": 67,
        "rt_sigaction": 134,
    },
}
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # linux/bpf_common.h
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Refused:
    """A system call by its name, and the errno that answers it.

    With `arguments`, only a call of which each argument named by its place has these bits, of
    those in the mask: {place: (mask, bits)}.
    """

    call: str
    errno: int
    arguments: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def where_refused(work: Callable[[], T], *refused: Refused) -> T:
    """What `work` returns or raises in a thread of its own, where these system calls are refused.

    Skips the test where no call can be refused.
    """
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        pytest.skip("the numbers of the system calls are not known here")
    code = b"".join(_lines(numbers[one.call], one) for one in refused)
    code += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    memory = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.addressof(memory))
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for step in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, program_at, 0, 0)):
                if _libc.prctl(*step) != 0:
                    pytest.skip("system calls cannot be refused here")
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    program_at = ctypes.byref(program)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure.pop()
    return outcome.pop()


def _lines(number: int, refused: Refused) -> bytes:
    """Answer with the errno if the call and its arguments are these, else go to what is behind."""
    tests = [(_LOAD, 0, 0, 0), (_EQUAL, 0, None, number)]
    for place, (mask, bits) in refused.arguments.items():
        tests += [
            (_LOAD, 0, 0, 16 + 8 * place),  # the lower half of it
            (_AND, 0, 0, mask),
            (_EQUAL, 0, None, bits),
        ]
    tests.append((_RETURN, 0, 0, _ERRNO | refused.errno))
    lines = [
        (code, true, len(tests) - at - 1 if false is None else false, value)
        for at, (code, true, false, value) in enumerate(tests)
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
