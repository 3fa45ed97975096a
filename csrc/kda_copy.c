/* kda_copy.c: see kda_copy.h, where the contracts are. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _DEFAULT_SOURCE /* madvise */
#endif
#define _FILE_OFFSET_BITS 64

#include "kda_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22 /* Linux 5.14; older headers do not name it */
#endif

/* One piece: what is faulted in, read or copied between two looks at the clock. Large enough that
 * the system call and the clock cost nothing against it, small enough that a slow disk
 * (20 MB/s) still lets the caller answer a signal within a tenth of a second. */
#define KDA_PIECE_BYTES ((uint64_t)1 << 20)

/* How far ahead of a read the kernel is told of the next one, where it cannot guess it. */
#define KDA_AHEAD_BYTES (3 * KDA_PIECE_BYTES)

/* Rows with no more than this between them are had from the disk together with what is between:
 * that is faster than to seek past it. Rows that are further apart are had one by one. */
#define KDA_GAP_BYTES ((uint64_t)64 << 10)

/* A span with its sizes worked out. Rows that adjoin in the source are one long row here. */
typedef struct kda_shape {
    uint64_t row_bytes;
    uint64_t row_stride;
    uint64_t bytes;  /* all rows, as they land in the destination */
    uint64_t extent; /* from the first row's first byte to the last row's last, in the source */
} kda_shape;

static int kda_multiply(uint64_t a, uint64_t b, uint64_t *product)
{
    if (b != 0 && a > UINT64_MAX / b)
        return KDA_SIZE_OVERFLOW;
    *product = a * b;
    return KDA_OK;
}

static uint64_t kda_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* 1 when `bytes` from `start` on cannot all have an address. */
static int kda_wraps(uintptr_t start, uint64_t bytes)
{
    return bytes > UINTPTR_MAX - start;
}

/* Fills `shape`, which is all zero for an empty span. */
static int kda_shape_of(const kda_span *span, kda_shape *shape)
{
    uint64_t gaps;

    memset(shape, 0, sizeof *shape);
    if (span->rows == 0 || span->row_bytes == 0)
        return KDA_OK;
    if (kda_multiply(span->rows, span->row_bytes, &shape->bytes) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (span->rows == 1 || span->row_stride == span->row_bytes) {
        shape->row_bytes = shape->row_stride = shape->extent = shape->bytes;
        return KDA_OK;
    }
    if (kda_multiply(span->rows - 1, span->row_stride, &gaps) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (gaps > UINT64_MAX - span->row_bytes)
        return KDA_SIZE_OVERFLOW;
    shape->row_bytes = span->row_bytes;
    shape->row_stride = span->row_stride;
    shape->extent = gaps + span->row_bytes;
    return KDA_OK;
}

/* 1 when the rows lie apart in the source, but so little that the gaps are read along. */
static int kda_has_short_gaps(const kda_shape *shape)
{
    uint64_t gap = shape->row_stride - shape->row_bytes;

    return gap != 0 && gap <= KDA_GAP_BYTES;
}

/* Checks the fields that say what the source is, and that its rows can have addresses. */
static int kda_check_source(const kda_span *span, kda_shape *shape)
{
    int is_empty = span->rows == 0 || span->row_bytes == 0;

    if (span->kind != KDA_MEMORY && span->kind != KDA_MAPPED && span->kind != KDA_FILE)
        return KDA_BAD_ARGUMENT;
    if (span->kind == KDA_FILE && span->fd < 0)
        return KDA_BAD_ARGUMENT;
    if (span->kind != KDA_FILE && span->source == NULL && !is_empty)
        return KDA_BAD_ARGUMENT;
    if (kda_shape_of(span, shape) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (span->kind != KDA_FILE)
        return kda_wraps((uintptr_t)span->source, shape->extent) ? KDA_SIZE_OVERFLOW : KDA_OK;
    if (span->file_offset > INT64_MAX || shape->extent > INT64_MAX - span->file_offset)
        return KDA_SIZE_OVERFLOW;
    return KDA_OK;
}

/* 1 when the rows of a source in memory lie, in whole or in part, in the destination. */
static int kda_overlaps(const kda_span *span, uint64_t extent, const unsigned char *destination,
                        uint64_t destination_bytes)
{
    uintptr_t from = (uintptr_t)span->source;
    uintptr_t to = (uintptr_t)destination;

    if (span->kind == KDA_FILE || extent == 0)
        return 0;
    return from < to ? extent > to - from : destination_bytes > from - to;
}

/* Checks one span. `*used` is where the one before it ends; moved to where this one ends. */
static int kda_check_span(const kda_span *span, const unsigned char *destination,
                          uint64_t destination_bytes, uint64_t *used)
{
    kda_shape shape;
    int status = kda_check_source(span, &shape);

    if (status != KDA_OK)
        return status;
    if (span->destination > UINT64_MAX - shape.bytes)
        return KDA_SIZE_OVERFLOW;
    if (span->rows > 1 && span->row_stride < span->row_bytes)
        return KDA_STRIDE_SHORT;
    if (shape.extent > span->source_bytes)
        return KDA_SOURCE_SHORT;
    if (span->destination + shape.bytes > destination_bytes)
        return KDA_DESTINATION_SHORT;
    if (span->destination < *used)
        return KDA_DESTINATION_OVERLAP;
    if (kda_overlaps(span, shape.extent, destination, destination_bytes))
        return KDA_SOURCE_OVERLAP;
    *used = span->destination + shape.bytes;
    return KDA_OK;
}

int kda_spans_check(const kda_span *spans, size_t count, const unsigned char *destination,
                    uint64_t destination_bytes, size_t *failed)
{
    uint64_t used = 0;

    if (failed == NULL)
        return KDA_BAD_ARGUMENT;
    *failed = 0;
    if (spans == NULL && count != 0)
        return KDA_BAD_ARGUMENT;
    if (destination == NULL && destination_bytes != 0)
        return KDA_BAD_ARGUMENT;
    if (kda_wraps((uintptr_t)destination, destination_bytes))
        return KDA_SIZE_OVERFLOW;
    for (; *failed < count; ++*failed) {
        int status = kda_check_span(&spans[*failed], destination, destination_bytes, &used);
        if (status != KDA_OK)
            return status;
    }
    return KDA_OK;
}

/* Answers with `status` and leaves errno where the caller finds it. */
static int kda_fail(kda_cursor *cursor, int status)
{
    cursor->error = errno;
    return status;
}

#ifdef MADV_POPULATE_READ
/* Where the page that holds `start` begins. */
static uintptr_t kda_page_of(const unsigned char *start)
{
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);

    return (uintptr_t)start & ~(page_bytes - 1);
}
#endif

/* Has the kernel map the pages of these bytes, reading them from the disk where it must. */
static int kda_fault_in(const unsigned char *start, size_t bytes, kda_cursor *cursor)
{
#ifdef MADV_POPULATE_READ
    uintptr_t page = kda_page_of(start);

    if (madvise((void *)page, (uintptr_t)start - page + bytes, MADV_POPULATE_READ) == 0)
        return KDA_OK;
    if (errno == EINTR || errno == EAGAIN)
        return KDA_PAUSED;
    return kda_fail(cursor, errno == EINVAL ? KDA_NO_POPULATE : KDA_SOURCE_FAULT);
#else
    (void)start;
    (void)bytes;
    errno = ENOSYS;
    return kda_fail(cursor, KDA_NO_POPULATE);
#endif
}

/* Copies one piece of a source in memory: at most KDA_PIECE_BYTES of it, gaps included. */
static int kda_copy_memory(const kda_span *span, const kda_shape *shape, unsigned char *destination,
                           kda_cursor *cursor)
{
    uint64_t within = cursor->done % shape->row_bytes;
    uint64_t from = cursor->done / shape->row_bytes * shape->row_stride + within;
    uint64_t bytes = kda_least(shape->row_bytes - within, KDA_PIECE_BYTES);
    uint64_t end = from + bytes;

    if (kda_has_short_gaps(shape))
        end = from + kda_least(shape->extent - from, KDA_PIECE_BYTES);
    if (span->kind == KDA_MAPPED) {
        int status = kda_fault_in(span->source + from, (size_t)(end - from), cursor);
        if (status != KDA_OK)
            return status;
    }
    while (from < end) {
        bytes = kda_least(shape->row_bytes - within, end - from);
        memcpy(destination + span->destination + cursor->done, span->source + from, (size_t)bytes);
        cursor->done += bytes;
        from += shape->row_stride - within;
        within = 0;
    }
    return KDA_OK;
}

/* Tells the kernel, once a piece, that rows with short gaps will be read along with their gaps.
 * Left alone, it takes that for random access and has them from the disk one at a time. */
static void kda_expect_rows(const kda_span *span, const kda_shape *shape, uint64_t from)
{
#ifdef POSIX_FADV_WILLNEED
    uint64_t before = from - kda_least(from, shape->row_stride); /* where the last read began */
    uint64_t start = from == 0 ? 0 : from + KDA_AHEAD_BYTES;
    uint64_t bytes = from == 0 ? KDA_AHEAD_BYTES + KDA_PIECE_BYTES : KDA_PIECE_BYTES;

    if (!kda_has_short_gaps(shape) || start >= shape->extent)
        return;
    if (from == 0 || from / KDA_PIECE_BYTES != before / KDA_PIECE_BYTES)
        (void)posix_fadvise(span->fd, (off_t)(span->file_offset + start),
                            (off_t)kda_least(bytes, shape->extent - start), POSIX_FADV_WILLNEED);
#else
    (void)span;
    (void)shape;
    (void)from;
#endif
}

/* Reads one piece of a file: at most KDA_PIECE_BYTES of one row. */
static int kda_read_file(const kda_span *span, const kda_shape *shape, unsigned char *destination,
                         kda_cursor *cursor)
{
    uint64_t within = cursor->done % shape->row_bytes;
    uint64_t from = cursor->done / shape->row_bytes * shape->row_stride + within;
    uint64_t bytes = kda_least(shape->row_bytes - within, KDA_PIECE_BYTES);
    ssize_t got;

    kda_expect_rows(span, shape, from);
    got = pread(span->fd, destination + span->destination + cursor->done, (size_t)bytes,
                (off_t)(span->file_offset + from));
    if (got < 0)
        return errno == EINTR ? KDA_PAUSED : kda_fail(cursor, KDA_READ_FAILED);
    if (got == 0)
        return KDA_FILE_END;
    cursor->done += (uint64_t)got;
    return KDA_OK;
}

/* Nanoseconds on a clock that only moves forward. */
static uint64_t kda_now(void)
{
    struct timespec now = {0, 0};

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

/* Checks the arguments of a copy, and that the cursor lies in the list. */
static int kda_check_copy(const kda_span *spans, size_t count, const unsigned char *destination,
                          uint64_t destination_bytes, kda_cursor *cursor)
{
    kda_shape shape;
    size_t failed;
    int status = kda_spans_check(spans, count, destination, destination_bytes, &failed);

    if (status != KDA_OK) {
        cursor->span = failed;
        cursor->done = 0;
        return status;
    }
    if (cursor->span > count)
        return KDA_BAD_ARGUMENT;
    memset(&shape, 0, sizeof shape);
    if (cursor->span < count)
        kda_shape_of(&spans[cursor->span], &shape);
    return cursor->done > shape.bytes ? KDA_BAD_ARGUMENT : KDA_OK;
}

int kda_spans_copy(const kda_span *spans, size_t count, unsigned char *destination,
                   uint64_t destination_bytes, uint64_t nanoseconds_max, kda_cursor *cursor)
{
    uint64_t start = kda_now();
    int pieces = 0;
    int status;

    if (cursor == NULL)
        return KDA_BAD_ARGUMENT;
    cursor->error = 0;
    status = kda_check_copy(spans, count, destination, destination_bytes, cursor);
    while (status == KDA_OK && cursor->span < count) {
        const kda_span *span = &spans[cursor->span];
        kda_shape shape;

        kda_shape_of(span, &shape);
        if (cursor->done == shape.bytes) {
            cursor->span++;
            cursor->done = 0;
        } else if (pieces++ > 0 && kda_now() - start >= nanoseconds_max) {
            status = KDA_PAUSED;
        } else if (span->kind == KDA_FILE) {
            status = kda_read_file(span, &shape, destination, cursor);
        } else {
            status = kda_copy_memory(span, &shape, destination, cursor);
        }
    }
    return status;
}

int kda_can_populate(void)
{
#ifdef MADV_POPULATE_READ
    static const unsigned char probe[1] = {0};

    return madvise((void *)kda_page_of(probe), 1, MADV_POPULATE_READ) == 0 || errno != EINVAL;
#else
    return 0;
#endif
}
