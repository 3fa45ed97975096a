"""Writes the C source of the extension module `kda_stream._native`: `build_native.py OUT.c`.

cffi in API mode: the compiler checks every declaration below against the real one. The copy
routine's declarations are not repeated here; they are the marked part of `kda_copy.h`.
"""

import sys
from pathlib import Path

import cffi

BEGIN, END = "/* cffi: begin */", "/* cffi: end */"

# What the arena needs from the C library. A call releases the GIL and leaves errno in `ffi.errno`.
LIBC = """
typedef int... off_t;

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int mlock(const void *address, size_t bytes);
int munlock(const void *address, size_t bytes);
int madvise(void *address, size_t bytes, int advice);
void kda_unmap(size_t bytes, void *address);

static void *const MAP_FAILED;
static const int PROT_READ, PROT_WRITE;
static const int MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS;
static const int MADV_DONTNEED;
"""

INCLUDES = """
#include <sys/mman.h>
#include <sys/types.h>

#include "kda_copy.h"

/* munmap with its arguments turned round, so that functools.partial(kda_unmap, bytes) is a
 * destructor without a line of Python, in which a KeyboardInterrupt would be lost. */
static void kda_unmap(size_t bytes, void *address) { (void)munmap(address, bytes); }
"""


def copy_declarations(header: str) -> str:
    """The part of `kda_copy.h` between the two marks."""
    _, begin, rest = header.partition(BEGIN)
    declarations, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"kda_copy.h: expected the marks {BEGIN!r} and {END!r}")
    return declarations


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: build_native.py OUT.c")
    header = Path(__file__).with_name("kda_copy.h").read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(copy_declarations(header) + LIBC)
    ffi.set_source("kda_stream._native", INCLUDES)
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
