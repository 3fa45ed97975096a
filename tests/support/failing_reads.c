/* failing_reads.c: preloaded into a test's process, it makes chosen reads fail, or wait: those of files
 * under one folder, by read, pread or preadv, and those that a map asks for by MADV_POPULATE_READ.
 * All others, and all that go before failing_reads_begin, are the C library's own. Linux. */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static char folder[PATH_MAX];
static int error_number; /* 0: the read is cut to bytes_max instead, */
static size_t bytes_max;
static long pause_ms;    /* after it has waited so long */
static long first;       /* reads before this one, counted from 1, succeed, */
static long times;       /* then so many fail, */
static long every;       /* and again after so many reads; 0: never again */
static atomic_long seen;
static atomic_long failed;

/* Begins to count anew. `under` ends in a slash; NULL: no read is counted or fails. */
void failing_reads_begin(const char *under, int error, size_t bytes, long pause, long from,
                         long count, long again)
{
    error_number = error;
    bytes_max = bytes;
    pause_ms = pause;
    first = from;
    times = count;
    every = again;
    atomic_store(&seen, 0);
    atomic_store(&failed, 0);
    snprintf(folder, sizeof folder, "%s", under == NULL ? "" : under);
}

/* How many reads were counted. */
long failing_reads_seen(void)
{
    return atomic_load(&seen);
}

/* How many of them failed, or were cut. */
long failing_reads_failed(void)
{
    return atomic_load(&failed);
}

static int is_counted(int fd)
{
    char link[64];
    char path[PATH_MAX];
    ssize_t length;

    if (folder[0] == '\0')
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path);
    return length > 0 && (size_t)length > strlen(folder) &&
           memcmp(path, folder, strlen(folder)) == 0;
}

/* Counts a read; whether it is one that fails. */
static int fails(void)
{
    long at = atomic_fetch_add(&seen, 1) + 1 - first;

    if (every > 0 && at >= 0)
        at %= every;
    if (at < 0 || at >= times)
        return 0;
    atomic_fetch_add(&failed, 1);
    return 1;
}

/* -1 and errno when the read is to fail; else how many bytes it may bring. */
static ssize_t allowed(int fd, size_t bytes)
{
    if (!is_counted(fd) || !fails())
        return (ssize_t)bytes;
    usleep((useconds_t)pause_ms * 1000);
    if (error_number != 0) {
        errno = error_number;
        return -1;
    }
    return (ssize_t)(bytes < bytes_max ? bytes : bytes_max);
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

ssize_t read(int fd, void *to, size_t bytes)
{
    ssize_t most = allowed(fd, bytes);

    return most < 0 ? -1 : NEXT(ssize_t(*)(int, void *, size_t), "read")(fd, to, (size_t)most);
}

ssize_t pread64(int fd, void *to, size_t bytes, off64_t at)
{
    ssize_t most = allowed(fd, bytes);

    if (most < 0)
        return -1;
    return NEXT(ssize_t(*)(int, void *, size_t, off64_t), "pread64")(fd, to, (size_t)most, at);
}

ssize_t pread(int fd, void *to, size_t bytes, off_t at)
{
    return pread64(fd, to, bytes, (off64_t)at);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at)
{
    if (count < 1)
        return NEXT(ssize_t(*)(int, const struct iovec *, int, off64_t), "preadv64")(fd, parts,
                                                                                    count, at);
    return pread64(fd, parts[0].iov_base, parts[0].iov_len, at); /* a short one, perhaps */
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at)
{
    return preadv64(fd, parts, count, (off64_t)at);
}

int madvise(void *start, size_t bytes, int advice)
{
    if (advice == MADV_POPULATE_READ && folder[0] != '\0' && error_number != 0 && fails()) {
        errno = error_number;
        return -1;
    }
    return NEXT(int (*)(void *, size_t, int), "madvise")(start, bytes, advice);
}
