/* kda_system.c: see kda_system.h, where the contracts are. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _GNU_SOURCE /* AT_EMPTY_PATH, mincore, syscall */
#endif
#define _FILE_OFFSET_BITS 64

#include "kda_system.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include <fcntl.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#endif

/* The number that Linux 6.5 gave the call, where older headers do not name it. Alpha, MIPS and x32
 * number theirs otherwise, and do without. */
#if defined(SYS_cachestat)
#define KDA_SYS_CACHESTAT SYS_cachestat
#elif defined(__linux__) && !defined(__alpha__) && !defined(__mips__) && \
    !(defined(__x86_64__) && defined(__ILP32__))
#define KDA_SYS_CACHESTAT 451
#endif

#ifdef KDA_SYS_CACHESTAT
#define KDA_OVERLAYFS_MAGIC 0x794C7630U /* OVERLAYFS_SUPER_MAGIC of linux/magic.h */

/* struct cachestat_range and struct cachestat of linux/mman.h, Linux 6.5. */
typedef struct kda_cachestat_range {
    uint64_t offset;
    uint64_t bytes; /* 0 means: to the end of the file */
} kda_cachestat_range;

typedef struct kda_cachestat {
    uint64_t cached_pages;
    uint64_t dirty_pages;
    uint64_t writeback_pages;
    uint64_t evicted_pages;
    uint64_t recently_evicted_pages;
} kda_cachestat;

/* Counts the cached pages that the range touches; `bytes` is not 0. */
static int kda_count_pages(int fd, uint64_t offset, uint64_t bytes, uint64_t *pages)
{
    kda_cachestat_range range = {offset, bytes};
    kda_cachestat counts;

    memset(&counts, 0, sizeof counts);
    if (syscall(KDA_SYS_CACHESTAT, fd, &range, &counts, 0U) != 0)
        return errno;
    *pages = counts.cached_pages;
    return 0;
}

int kda_cached_bytes(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes)
{
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t end = offset + bytes;
    uint64_t before = offset % page_bytes;
    uint64_t after = (page_bytes - end % page_bytes) % page_bytes;
    uint64_t pages = 0;
    uint64_t first = 0;
    uint64_t last = 0;
    uint64_t outside;
    uint64_t type;
    int error;

    if (cached_bytes == NULL)
        return EINVAL;
    *cached_bytes = 0;
    if (offset > INT64_MAX || bytes > INT64_MAX - offset)
        return EINVAL;
    if (bytes == 0)
        return 0;
    error = kda_file_system_type(fd, &type);
    if (error == 0 && type == KDA_OVERLAYFS_MAGIC)
        error = EOPNOTSUPP;
    if (error == 0)
        error = kda_count_pages(fd, offset, bytes, &pages);
    if (error == 0 && pages != 0 && before != 0)
        error = kda_count_pages(fd, offset, 1, &first);
    if (error == 0 && pages != 0 && after != 0)
        error = kda_count_pages(fd, end - 1, 1, &last);
    if (error != 0)
        return error;
    outside = first * before + last * after;
    pages *= page_bytes;
    if (pages > outside) /* pages may have come or gone between the questions */
        *cached_bytes = pages - outside < bytes ? pages - outside : bytes;
    return 0;
}
#else
int kda_cached_bytes(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached_bytes)
{
    (void)fd;
    if (cached_bytes == NULL)
        return EINVAL;
    *cached_bytes = 0;
    if (offset > INT64_MAX || bytes > INT64_MAX - offset)
        return EINVAL;
    return bytes == 0 ? 0 : ENOSYS;
}
#endif

int kda_cached_pages(const unsigned char *map, uint64_t bytes, unsigned char *vector)
{
    if (map == NULL || vector == NULL)
        return EINVAL;
#if SIZE_MAX < UINT64_MAX
    if (bytes > SIZE_MAX)
        return EINVAL;
#endif
#if defined(__linux__)
    return mincore((void *)(uintptr_t)map, (size_t)bytes, vector) == 0 ? 0 : errno;
#else
    return mincore((void *)(uintptr_t)map, (size_t)bytes, (char *)vector) == 0 ? 0 : errno;
#endif
}

int kda_file_system_type(int fd, uint64_t *type)
{
#if defined(__linux__)
    struct statfs found;
#endif

    if (type == NULL)
        return EINVAL;
    *type = 0;
#if defined(__linux__)
    if (fstatfs(fd, &found) != 0)
        return errno;
    *type = (uint32_t)found.f_type; /* a signed long, or an int, with some architectures */
    return 0;
#else
    (void)fd;
    return ENOTSUP;
#endif
}

#if defined(SYS_statx)
#define KDA_STATX_DIOALIGN 0x2000U /* STATX_DIOALIGN of linux/stat.h, Linux 6.1 */

/* struct statx of linux/stat.h, up to what is asked for here: 256 bytes, alike everywhere. */
typedef struct kda_statx {
    uint32_t mask; /* which of the fields that were asked for are there */
    uint32_t before[37];
    uint32_t direct_memory_bytes;
    uint32_t direct_offset_bytes;
    uint32_t after[24];
} kda_statx;

_Static_assert(sizeof(kda_statx) == 256, "struct statx has 256 bytes");
_Static_assert(offsetof(kda_statx, direct_memory_bytes) == 0x98, "as linux/stat.h says");

int kda_direct_alignment(int fd, uint64_t *memory_bytes, uint64_t *offset_bytes)
{
    kda_statx found;

    if (memory_bytes == NULL || offset_bytes == NULL)
        return EINVAL;
    *memory_bytes = *offset_bytes = 0;
    memset(&found, 0, sizeof found);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, KDA_STATX_DIOALIGN, &found) != 0)
        return errno;
    if ((found.mask & KDA_STATX_DIOALIGN) == 0)
        return ENOTSUP;
    *memory_bytes = found.direct_memory_bytes;
    *offset_bytes = found.direct_offset_bytes;
    return 0;
}
#else
int kda_direct_alignment(int fd, uint64_t *memory_bytes, uint64_t *offset_bytes)
{
    (void)fd;
    if (memory_bytes == NULL || offset_bytes == NULL)
        return EINVAL;
    *memory_bytes = *offset_bytes = 0;
    return ENOSYS;
}
#endif
