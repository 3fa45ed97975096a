/* kda_system.h: what kda_stream asks the operating system about an open file.
 *
 * What of it is in the page cache, what file system it lies on, how direct I/O must be aligned.
 * Each function asks the kernel once or a few times, and returns 0 or an errno. Nothing is read
 * from the file, nothing is allocated and no state is kept; any number of threads may call them
 * at once. Where the system has no such question the answer is ENOSYS or ENOTSUP, never a guess.
 *
 * What lies between the two "cffi" lines is also read by build_native.py, as it stands: it must
 * stay free of preprocessor lines.
 */
#ifndef KDA_SYSTEM_H
#define KDA_SYSTEM_H

#include <stdint.h>

/* cffi: begin */

/* Counts the bytes of a file range that are in the page cache, by cachestat (Linux 6.5).
 *
 * fd                 an open file.
 * offset, bytes      the range; its end must fit INT64_MAX. The kernel caches pages: of the pages
 *                    at both ends only the bytes in the range are counted. The page that holds the
 *                    end of the file counts like any other, with its bytes past the end.
 * cached_bytes       never null; 0 unless all went well.
 *
 * Returns 0, or
 *   EINVAL             cached_bytes is null, or the range ends past INT64_MAX.
 *   ENOSYS             there is no such system call here.
 *   EOPNOTSUPP         the kernel's count is none: the file is on hugetlbfs, or on overlayfs, whose
 *                      own cache is always empty (the pages are in that of the file underneath).
 *   EPERM              the caller neither owns the file nor may write to it (kernels from 2025 on).
 *   EBADF and others   as the kernel says.
 * A range of no bytes has none, and gives 0 without a question. Takes some 30 ns for each cached
 * folio: 2 ms for 256 MiB in single pages, and 50 us as they are read ahead. Pages may come and go
 * meanwhile. */
int kda_cached_bytes(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes);

/* Says for each page of a map whether it is in memory, by mincore.
 *
 * map                the start of a page in this process's memory.
 * bytes              how many bytes from there; a part of a page counts as a page.
 * vector             one byte a page; bit 0 is set when the page is in memory, and the other bits
 *                    mean nothing. Holds anything when the call fails.
 *
 * Returns 0, or EINVAL for a null pointer or a `map` within a page, ENOMEM where nothing is mapped,
 * or another errno. For a file that the caller neither owns nor may write to, Linux (5.2) says of
 * every page that it is there. */
int kda_cached_pages(const unsigned char *map, uint64_t bytes, unsigned char *vector);

/* Says what file system a file is on: f_type of fstatfs, as in linux/magic.h.
 *
 * type               never null; 0 unless all went well. The numbers have 32 bits.
 *
 * Returns 0, EINVAL when `type` is null, ENOTSUP off Linux, or the errno of fstatfs. */
int kda_file_system_type(int fd, uint64_t *type);

/* Says how direct I/O (O_DIRECT) on a file must be aligned, by statx (Linux 6.1).
 *
 * memory_bytes       never null; the alignment of the memory.
 * offset_bytes       never null; the alignment of the offset in the file and of the length.
 *                    Both are 0 when direct I/O is not supported on this file.
 *
 * Returns 0; EINVAL when a pointer is null; ENOSYS or ENOTSUP when the kernel or the file system
 * cannot say, and both are then 0; or another errno. */
int kda_direct_alignment(int fd, uint64_t *memory_bytes, uint64_t *offset_bytes);

/* cffi: end */

#endif
