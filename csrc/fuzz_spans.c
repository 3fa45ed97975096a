/* fuzz_spans.c: LibFuzzer targets. Any bytes are a list of spans and the means to copy it; whatever
 * kda_spans_check makes of it, kda_spans_copy must agree, write nothing when it refuses, and else
 * copy what a plain loop copies, in one call as in many, in one thread as in four; where a file
 * ends too early, all that is before the cursor. Linux 5.14 or later. See tests/fuzz/README.md.
 *
 * kda_fuzz_spans has a small source in memory, for many runs a second; kda_fuzz_spans_large one on
 * a disk, long enough for several pieces and threads.
 */
#define _GNU_SOURCE /* O_DIRECT, memfd_create */
#define _FILE_OFFSET_BITS 64

#include "kda_copy.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* No multiple of a block. */
#ifdef KDA_FUZZ_LARGE
enum { SOURCE_BYTES = 2500001, DESTINATION_BYTES_MAX = 3000000 };
#else
enum { SOURCE_BYTES = 30011, DESTINATION_BYTES_MAX = 6000 };
#endif
enum { SPANS_MAX = 16, BLOCK_BYTES_MAX = 65536, THREADS_MAX = 4 };

/* The destination begins at a block, between guards. */
enum { GUARD_BYTES = 4096, ACTUAL_BYTES = BLOCK_BYTES_MAX + DESTINATION_BYTES_MAX + GUARD_BYTES };

static unsigned char memory[SOURCE_BYTES];
static unsigned char *expected; /* both past their guard */
static unsigned char *actual;
static unsigned char *bounce;
static const unsigned char *map;
static int fd = -1;
static int direct = -1; /* the same file with O_DIRECT, where that can be had */
static uint64_t runs;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(int holds)
{
    if (!holds)
        abort();
}

static unsigned char *allocate(size_t bytes)
{
    void *made = NULL;

    need(posix_memalign(&made, 2 * BLOCK_BYTES_MAX, bytes) == 0);
    return made;
}

static int make_file(void)
{
#ifdef KDA_FUZZ_LARGE
    static FILE *file; /* open as long as the process is */

    file = tmpfile();
    need(file != NULL);
    return fileno(file);
#else
    return memfd_create("kda_fuzz_spans", 0);
#endif
}

static void set_up(void)
{
    char name[64];
    void *made;
    size_t i;

    fd = make_file();
    need(fd >= 0);
    for (i = 0; i < SOURCE_BYTES; i++)
        memory[i] = (unsigned char)((i * 31 + i / 4096 * 7) % 251);
    need(pwrite(fd, memory, SOURCE_BYTES, 0) == SOURCE_BYTES);
    made = mmap(NULL, SOURCE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    need(made != MAP_FAILED);
    expected = allocate(ACTUAL_BYTES) + BLOCK_BYTES_MAX;
    actual = allocate(ACTUAL_BYTES) + BLOCK_BYTES_MAX;
    memset(expected - GUARD_BYTES, 0xA5, DESTINATION_BYTES_MAX + 2 * GUARD_BYTES);
    memset(actual - GUARD_BYTES, 0xA5, DESTINATION_BYTES_MAX + 2 * GUARD_BYTES);
    bounce = allocate(THREADS_MAX * BLOCK_BYTES_MAX);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    direct = open(name, O_RDONLY | O_DIRECT);
    if (direct >= 0 && pread(direct, bounce, 512, 512) != 512)
        direct = -1; /* blocks of 512 bytes are too short for it */
    map = made;
}

/* The next number: one byte says how it is made, one to eight more what it is. */
static uint64_t take(const uint8_t **data, size_t *size)
{
    uint64_t number = 0;
    size_t width;

    if (*size == 0)
        return 0;
    width = (*data)[0] % 8 == 0 ? 8 : (*data)[0] % 8 < 4 ? 1 : (*data)[0] % 8 < 7 ? 2 : 3;
    ++*data;
    --*size;
    width = width < *size ? width : *size;
    memcpy(&number, *data, width);
    *data += width;
    *size -= width;
    return number;
}

/* A span whose source is really there, but for a file that may be too short, whatever else it says. */
static kda_span take_span(const uint8_t **data, size_t *size, uint64_t *used)
{
    uint64_t start = take(data, size) % (SOURCE_BYTES + 1);
    kda_span span = {0, 0, NULL, 0, 0, 0, 0, 0, 0};

    span.kind = (int)(take(data, size) % 5);
    span.fd = span.kind == KDA_DIRECT && direct >= 0 && start % 4 != 0 ? direct : fd;
    span.file_offset = start;
    span.source = (span.kind == KDA_MAPPED ? map : memory) + start;
    span.source_bytes = SOURCE_BYTES - start;
    span.rows = take(data, size);
    span.row_bytes = take(data, size);
    span.row_stride = span.row_bytes + take(data, size);
    span.destination = *used + take(data, size);
    switch (take(data, size) % 16) {
    case 1:
        span.row_stride = take(data, size);
        break;
    case 2:
        span.destination = take(data, size);
        break;
    case 3:
        span.source = NULL;
        break;
    case 4:
        span.fd = -1;
        break;
    case 5:
        span.source_bytes = take(data, size) % (span.source_bytes + 1);
        break;
    case 6:
        if (span.kind == KDA_FILE || span.kind == KDA_DIRECT)
            span.source_bytes += take(data, size) % (DESTINATION_BYTES_MAX + 1);
        break;
    case 7:
        span.source = actual + start % (DESTINATION_BYTES_MAX / 4); /* in the destination */
        break;
    default:
        break;
    }
    *used = span.destination + span.rows * span.row_bytes;
    return span;
}

/* How to copy it: mostly as the rules are, though the sizes for whole blocks may break them. */
static kda_means take_means(const uint8_t **data, size_t *size)
{
    kda_means means = {0, NULL, 0, 0, NULL, 0};
    uint64_t bits = take(data, size);

    means.nanoseconds_max = bits % 2 == 0 ? UINT64_MAX : 0;
    means.threads = (unsigned)(bits / 2 % (THREADS_MAX + 1));
    means.block_bytes = (uint64_t)512 << bits / 16 % 9; /* the last is too long */
    means.bounce = bounce;
    means.bounce_bytes = THREADS_MAX * BLOCK_BYTES_MAX;
    if (bits % 16 >= 12)
        means.bounce_bytes = take(data, size) % (THREADS_MAX * BLOCK_BYTES_MAX + 1);
    if (bits % 16 == 14)
        means.block_bytes = take(data, size);
    if (bits % 16 == 15) {
        means.bounce += means.bounce_bytes / 2;
        means.bounce_bytes /= 2;
    }
    return means;
}

/* 1 when the means will do for the list. */
static int means_will_do(const kda_means *means, const kda_span *spans, size_t count)
{
    uint64_t threads = means->threads == 0 ? 1 : means->threads;
    uint64_t block = 512;
    size_t i;

    for (i = 0; i < count && spans[i].kind != KDA_DIRECT; i++)
        ;
    if (i == count)
        return 1;
    while (block < means->block_bytes && block < BLOCK_BYTES_MAX)
        block *= 2;
    return block == means->block_bytes && (uintptr_t)means->bounce % block == 0 &&
           means->bounce_bytes >= threads * block;
}

/* What a list must keep to, in plain arithmetic: a list that was let through has small numbers.
 * How many bytes it copies. */
static uint64_t need_good_list(const kda_span *spans, size_t count, uint64_t destination_bytes)
{
    uint64_t used = 0;
    uint64_t all = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        const kda_span *span = &spans[i];
        uint64_t bytes = span->row_bytes == 0 ? 0 : span->rows * span->row_bytes;

        need(span->kind >= KDA_MEMORY && span->kind <= KDA_DIRECT);
        need(span->kind >= KDA_FILE ? span->fd >= 0 : bytes == 0 || span->source != NULL);
        need(span->kind != KDA_DIRECT || span->rows <= 1 || span->row_stride == span->row_bytes);
        need(span->destination >= used && span->destination <= destination_bytes - bytes);
        need(bytes == 0 || bytes / span->rows == span->row_bytes);
        used = span->destination + bytes;
        all += bytes;
        if (bytes == 0)
            continue;
        need(span->kind >= KDA_FILE ||
             (uintptr_t)span->source - (uintptr_t)actual >= destination_bytes);
        need(span->rows == 1 || span->row_stride >= span->row_bytes);
        need(span->rows == 1 || span->row_stride <= span->source_bytes);
        need((span->rows - 1) * span->row_stride + span->row_bytes <= span->source_bytes);
    }
    return all;
}

/* Copies what the source has; returns the first span that wants more, or `count`. */
static size_t copy_slowly(const kda_span *spans, size_t count, unsigned char *destination)
{
    size_t failed = count;
    size_t i;
    uint64_t row;

    for (i = 0; i < count; i++)
        for (row = 0; row < spans[i].rows && spans[i].row_bytes != 0; row++) {
            uint64_t from = spans[i].file_offset + row * spans[i].row_stride;
            uint64_t there = from < SOURCE_BYTES ? SOURCE_BYTES - from : 0;

            if (there >= spans[i].row_bytes)
                there = spans[i].row_bytes;
            else if (failed == count)
                failed = i;
            if (there != 0)
                memcpy(destination + spans[i].destination + row * spans[i].row_bytes,
                       memory + from, (size_t)there);
        }
    return failed;
}

/* A cursor outside of the list is refused, and left as it is. */
static void need_good_cursor(const kda_span *spans, size_t count, uint64_t destination_bytes,
                             const kda_means *means, size_t which)
{
    kda_cursor wild = {which % (count + 2), 0, 0, 0};
    uint64_t done;
    int status;

    if (wild.span <= count)
        wild.done = 1;
    if (wild.span < count)
        wild.done += spans[wild.span].rows * spans[wild.span].row_bytes;
    done = wild.done;
    status = kda_spans_copy(spans, count, actual, destination_bytes, means, &wild);
    need(status == KDA_BAD_ARGUMENT && wild.span == which % (count + 2) && wild.done == done);
}

/* Makes the spans' own bytes behind the cursor, which may hold anything, what they should be. */
static void forgive(const kda_span *spans, size_t count, const kda_cursor *cursor)
{
    uint64_t done = cursor->done;
    size_t i;

    for (i = cursor->span; i < count; i++, done = 0) {
        uint64_t begin = spans[i].destination + done;
        uint64_t end = spans[i].destination + spans[i].rows * spans[i].row_bytes;

        need(begin <= end);
        memcpy(actual + begin, expected + begin, (size_t)(end - begin));
    }
}

/* How much of the destination the list can have written to; the rest is looked at now and then. */
static size_t reach_of(const kda_span *spans, size_t count, uint64_t destination_bytes)
{
    uint64_t reach = 0;
    size_t i;

    if (runs++ % 1024 == 0)
        return (size_t)destination_bytes;
    for (i = 0; i < count; i++) {
        uint64_t end = spans[i].destination + spans[i].rows * spans[i].row_bytes;
        reach = end > reach ? end : reach;
    }
    return (size_t)(reach < destination_bytes ? reach : destination_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t destination_bytes = size % 4 == 3 ? DESTINATION_BYTES_MAX : DESTINATION_BYTES_MAX / 4;
    static kda_span spans[SPANS_MAX];
    kda_cursor cursor = {0, 0, 0, 0};
    kda_means means;
    uint64_t used = 0;
    uint64_t bytes = 0;
    size_t count = 0;
    size_t failed = 0;
    size_t looked_at;
    int will_copy = 0;
    int stop;
    int checked;
    int status;

    if (map == NULL)
        set_up();
    means = take_means(&data, &size);
    stop = means.block_bytes == 1024;
    means.stop = &stop;
    while (size > 0 && count < SPANS_MAX)
        spans[count++] = take_span(&data, &size, &used);

    checked = kda_spans_check(spans, count, actual, destination_bytes, &failed);
    if (checked == KDA_OK) {
        bytes = need_good_list(spans, count, destination_bytes);
        will_copy = means_will_do(&means, spans, count);
        if (will_copy) {
            failed = copy_slowly(spans, count, expected);
            checked = failed == count ? KDA_OK : KDA_FILE_END;
        } else {
            checked = KDA_BAD_ARGUMENT;
            failed = 0; /* the cursor stays */
        }
    }
    if (will_copy)
        need_good_cursor(spans, count, destination_bytes, &means, (size_t)bytes);
    do {
        status = kda_spans_copy(spans, count, actual, destination_bytes, &means, &cursor);
        need(!stop || status == (will_copy && bytes != 0 ? KDA_PAUSED : checked));
        need(!stop || cursor.done == 0);
        stop = 0;
        means.threads -= means.threads > 1;
    } while (status == KDA_PAUSED);
    need(status == checked);
    need(cursor.span == failed);
    if (status == KDA_FILE_END)
        forgive(spans, count, &cursor);

    looked_at = GUARD_BYTES + reach_of(spans, count, destination_bytes) + GUARD_BYTES;
    need(memcmp(actual - GUARD_BYTES, expected - GUARD_BYTES, looked_at) == 0);
    memset(expected - GUARD_BYTES, 0xA5, looked_at);
    memset(actual - GUARD_BYTES, 0xA5, looked_at);
    return 0;
}
