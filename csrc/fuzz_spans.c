/* fuzz_spans.c: LibFuzzer target. Any bytes are a list of spans; whatever kda_spans_check makes of
 * it, kda_spans_copy must agree, write nothing when it refuses, and else copy what a plain loop
 * copies, in one call as in many. Linux 5.14 or later.
 *
 *   CC=clang cmake -S csrc -B build -DKDA_EXTENSION=OFF -DKDA_FUZZ=ON -DKDA_SANITIZE=ON
 *   cmake --build build && build/kda_fuzz_spans -max_len=512 -max_total_time=60
 */
#define _DEFAULT_SOURCE
#define _FILE_OFFSET_BITS 64

#include "kda_copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SOURCE_BYTES = 20000, DESTINATION_BYTES = 12000, GUARD_BYTES = 64, SPANS_MAX = 16 };

static unsigned char memory[SOURCE_BYTES];
static const unsigned char *map;
static int fd = -1;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(int holds)
{
    if (!holds)
        abort();
}

static void set_up(void)
{
    static FILE *file; /* open as long as the process is */
    void *made;
    size_t i;

    file = tmpfile();
    need(file != NULL);
    for (i = 0; i < SOURCE_BYTES; i++)
        memory[i] = (unsigned char)((i * 31 + i / 4096 * 7) % 251);
    fd = fileno(file);
    need(pwrite(fd, memory, SOURCE_BYTES, 0) == SOURCE_BYTES);
    made = mmap(NULL, SOURCE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    need(made != MAP_FAILED);
    map = made;
}

/* The next number: one byte says how it is made, two or eight more what it is. */
static uint64_t take(const uint8_t **data, size_t *size)
{
    uint64_t number = 0;
    size_t width;

    if (*size == 0)
        return 0;
    width = (*data)[0] % 8 == 0 ? 8 : (*data)[0] % 8 < 4 ? 1 : 2;
    ++*data;
    --*size;
    width = width < *size ? width : *size;
    memcpy(&number, *data, width);
    *data += width;
    *size -= width;
    return number;
}

/* A span whose source is really there, whatever else it says. */
static kda_span take_span(const uint8_t **data, size_t *size, uint64_t *used)
{
    uint64_t start = take(data, size) % (SOURCE_BYTES + 1);
    kda_span span = {0, 0, NULL, 0, 0, 0, 0, 0, 0};

    span.kind = (int)(take(data, size) % 4);
    span.fd = fd;
    span.file_offset = start;
    span.source = (span.kind == KDA_MAPPED ? map : memory) + start;
    span.source_bytes = SOURCE_BYTES - start;
    span.rows = take(data, size);
    span.row_bytes = take(data, size);
    span.row_stride = span.row_bytes + take(data, size);
    span.destination = *used + take(data, size);
    if (take(data, size) % 16 == 1)
        span.row_stride = take(data, size);
    if (take(data, size) % 16 == 1)
        span.destination = take(data, size);
    *used = span.destination + span.rows * span.row_bytes;
    return span;
}

/* What a list must keep to, in plain arithmetic: a list that was let through has small numbers. */
static void need_good_list(const kda_span *spans, size_t count)
{
    uint64_t used = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        const kda_span *span = &spans[i];
        uint64_t bytes = span->row_bytes == 0 ? 0 : span->rows * span->row_bytes;

        need(span->kind >= KDA_MEMORY && span->kind <= KDA_FILE);
        need(span->destination >= used && span->destination <= DESTINATION_BYTES - bytes);
        need(bytes == 0 || bytes / span->rows == span->row_bytes);
        used = span->destination + bytes;
        if (bytes == 0)
            continue;
        need(span->rows == 1 || span->row_stride >= span->row_bytes);
        need(span->rows == 1 || span->row_stride <= SOURCE_BYTES);
        need((span->rows - 1) * span->row_stride + span->row_bytes <= span->source_bytes);
    }
}

static void copy_slowly(const kda_span *spans, size_t count, unsigned char *destination)
{
    size_t i;
    uint64_t row;

    for (i = 0; i < count; i++)
        for (row = 0; row < spans[i].rows && spans[i].row_bytes != 0; row++)
            memcpy(destination + spans[i].destination + row * spans[i].row_bytes,
                   memory + spans[i].file_offset + row * spans[i].row_stride,
                   (size_t)spans[i].row_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned char expected[DESTINATION_BYTES + 2 * GUARD_BYTES];
    static unsigned char actual[DESTINATION_BYTES + 2 * GUARD_BYTES];
    unsigned char *destination = actual + GUARD_BYTES;
    kda_span spans[SPANS_MAX];
    kda_cursor cursor = {0, 0, 0};
    uint64_t used = 0;
    uint64_t nanoseconds_max = size % 2 ? 0 : UINT64_MAX;
    size_t count = 0;
    size_t failed = 0;
    int checked;
    int status;

    if (map == NULL)
        set_up();
    while (size > 0 && count < SPANS_MAX)
        spans[count++] = take_span(&data, &size, &used);
    memset(expected, 0xA5, sizeof expected);
    memset(actual, 0xA5, sizeof actual);

    checked = kda_spans_check(spans, count, destination, DESTINATION_BYTES, &failed);
    if (checked == KDA_OK) {
        need_good_list(spans, count);
        copy_slowly(spans, count, expected + GUARD_BYTES);
    }
    do
        status = kda_spans_copy(spans, count, destination, DESTINATION_BYTES, nanoseconds_max,
                                &cursor);
    while (status == KDA_PAUSED);
    need(status == checked);
    need(cursor.span == failed);
    need(memcmp(actual, expected, sizeof actual) == 0);
    return 0;
}
