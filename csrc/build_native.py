"""Writes the C source of the extension module `kda_stream._native`: `build_native.py OUT.c`.

cffi in API mode: the compiler checks every declaration below against the real one. Those of our
own C are not repeated here; they are the marked parts of the headers.
"""

import sys
from pathlib import Path

import cffi

HEADERS = ("kda_copy.h", "kda_header.h", "kda_system.h", "kda_values.h")
BEGIN, END = "/* cffi: begin */", "/* cffi: end */"

# What the arena needs from the C library. A call releases the GIL and leaves errno in `ffi.errno`.
LIBC = """
typedef int... off_t;

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int kda_lock_on_fault(const void *address, size_t bytes);
int munlock(const void *address, size_t bytes);
int munmap(void *address, size_t bytes);
int madvise(void *address, size_t bytes, int advice);
void kda_unmap(size_t bytes, void *address);

static void *const MAP_FAILED;
static const int PROT_READ, PROT_WRITE;
static const int MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS;
static const int MADV_DONTNEED;
static const int KDA_MADV_HUGEPAGE, KDA_MADV_COLLAPSE;
"""

INCLUDES = """
#include <errno.h>
#include <sys/mman.h>
#include <sys/types.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include "kda_copy.h"
#include "kda_header.h"
#include "kda_system.h"
#include "kda_values.h"

/* Advice that not every system or header knows; -1 is none, and refused. */
#if defined(__linux__)
enum { KDA_MADV_HUGEPAGE = 14, KDA_MADV_COLLAPSE = 25 };
#else
enum { KDA_MADV_HUGEPAGE = -1, KDA_MADV_COLLAPSE = -1 };
#endif

/* Locks pages from the moment on that each is made; all of them count against the limit at once.
 * 0, or -1 and errno. Where there is no such lock the pages are made here. */
static int kda_lock_on_fault(const void *address, size_t bytes)
{
#if defined(__linux__) && defined(SYS_mlock2)
    if (syscall(SYS_mlock2, address, bytes, 1 /* MLOCK_ONFAULT, Linux 4.4 */) == 0)
        return 0;
    if (errno != ENOSYS)
        return -1;
#endif
    return mlock(address, bytes);
}

/* munmap with its arguments turned round, so that functools.partial(kda_unmap, bytes) is a
 * destructor without a line of Python, in which a KeyboardInterrupt would be lost. */
static void kda_unmap(size_t bytes, void *address) { (void)munmap(address, bytes); }
"""


def declarations_of(name: str) -> str:
    """The part of a header between the two marks."""
    header = Path(__file__).with_name(name).read_text(encoding="utf-8")
    _, begin, rest = header.partition(BEGIN)
    declarations, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{name}: expected the marks {BEGIN!r} and {END!r}")
    return declarations


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: build_native.py OUT.c")
    ffi = cffi.FFI()
    ffi.cdef("".join(map(declarations_of, HEADERS)) + LIBC)
    ffi.set_source("kda_stream._native", INCLUDES)
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
