/* selftest.c: every status of every function in kda_copy.h, without a framework.
 *
 * Prints the place of each check that fails, and at the end one line, "N checks passed" or
 * "N checks passed, M failed". Exit status 0 or 1. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _DEFAULT_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#include "kda_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#define MIB ((uint64_t)1 << 20)
#define NO_LIMIT UINT64_MAX
#define HOUR ((uint64_t)3600 * 1000000000)
#define GUARD_BYTES 64
#define GUARD 0xA5

static int checks_passed;
static int checks_failed;

#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define CHECK_STATUS(call, expected) check_status((call), (expected), #call, __LINE__)

static void check(int holds, const char *text, int line)
{
    if (holds) {
        checks_passed++;
    } else {
        checks_failed++;
        printf("selftest.c:%d: does not hold: %s\n", line, text);
    }
}

static void check_status(int status, int expected, const char *text, int line)
{
    check(status == expected, text, line);
    if (status != expected)
        printf("selftest.c:%d: expected status %d, got %d\n", line, expected, status);
}

/* Ends the program: the machine cannot run the test at all. */
static void need(int holds, const char *what)
{
    if (!holds) {
        printf("selftest: cannot set up: %s: %s\n", what, strerror(errno));
        exit(2);
    }
}

static unsigned char *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes != 0 ? bytes : 1);
    need(memory != NULL, "malloc");
    return memory;
}

/* A small generator, so that every run sees the same numbers. */
static uint64_t random_state = 1;
static uint64_t random_below(uint64_t limit)
{
    random_state = random_state * 6364136223846793005U + 1442695040888963407U;
    return (random_state >> 33) % limit;
}

/* A destination between guard bytes. */
typedef struct target {
    unsigned char *memory;
    unsigned char *bytes;
    size_t size;
} target;

static target target_new(size_t size)
{
    target made;
    made.memory = allocate(size + 2 * GUARD_BYTES);
    made.bytes = made.memory + GUARD_BYTES;
    made.size = size;
    memset(made.memory, GUARD, size + 2 * GUARD_BYTES);
    return made;
}

static int all_guard(const unsigned char *bytes, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++)
        if (bytes[i] != GUARD)
            return 0;
    return 1;
}

static int target_is_fenced(const target *of)
{
    return all_guard(of->memory, GUARD_BYTES) && all_guard(of->bytes + of->size, GUARD_BYTES);
}

static int target_is_untouched(const target *of)
{
    return all_guard(of->memory, of->size + 2 * GUARD_BYTES);
}

/* Source bytes that differ from their neighbours, from those a page away, and from the guard. */
static void fill_pattern(unsigned char *bytes, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++)
        bytes[i] = (unsigned char)((i * 31 + i / 4096 * 7) % 163);
}

static kda_span memory_span(const unsigned char *source, uint64_t bytes, uint64_t destination)
{
    kda_span made = {KDA_MEMORY, -1, NULL, 0, 0, 1, 0, 0, 0};
    made.source = source;
    made.source_bytes = bytes;
    made.row_bytes = bytes;
    made.row_stride = bytes;
    made.destination = destination;
    return made;
}

static kda_span file_span(int fd, uint64_t file_offset, uint64_t bytes)
{
    kda_span made = memory_span(NULL, bytes, 0);
    made.kind = KDA_FILE;
    made.fd = fd;
    made.file_offset = file_offset;
    return made;
}

/* An unnamed file that holds `size` bytes of the pattern. */
static int file_of_pattern(size_t size)
{
    unsigned char *bytes = allocate(size);
    FILE *file = tmpfile();
    int fd;

    need(file != NULL, "tmpfile");
    fill_pattern(bytes, size);
    fd = dup(fileno(file));
    need(fd >= 0, "dup");
    need(pwrite(fd, bytes, size, 0) == (ssize_t)size, "pwrite");
    fclose(file);
    free(bytes);
    return fd;
}

static unsigned char *map_of(int fd, size_t size, int protection)
{
    void *map = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    need(map != MAP_FAILED, "mmap");
    return map;
}

/* What a copy has to do, said the slow way. */
static void copy_slowly(const kda_span *spans, size_t count, const unsigned char *file,
                        unsigned char *destination)
{
    size_t i;
    uint64_t row;

    for (i = 0; i < count; i++) {
        const kda_span *span = &spans[i];
        const unsigned char *source =
            span->kind == KDA_FILE ? file + span->file_offset : span->source;
        for (row = 0; row < span->rows && span->row_bytes != 0; row++)
            memcpy(destination + span->destination + row * span->row_bytes,
                   source + row * span->row_stride, (size_t)span->row_bytes);
    }
}

/* Calls kda_spans_copy until it is not paused; `*calls` says how often. Each call gets further. */
static int copy_all(const kda_span *spans, size_t count, const target *to, uint64_t nanoseconds_max,
                    kda_cursor *cursor, int *calls)
{
    int stalls = 0;
    int status;

    memset(cursor, 0, sizeof *cursor);
    *calls = 0;
    do {
        kda_cursor before = *cursor;
        status = kda_spans_copy(spans, count, to->bytes, to->size, nanoseconds_max, cursor);
        ++*calls;
        if (status == KDA_PAUSED && cursor->span == before.span && cursor->done <= before.done)
            stalls++;
    } while (status == KDA_PAUSED);
    CHECK(stalls == 0);
    return status;
}

/* ---- the checks -------------------------------------------------------------------------- */

/* Both functions give `expected`, name span `index`, and leave the destination alone. */
static void expect_refusal(const kda_span *spans, size_t count, int expected, size_t index, int line)
{
    target to = target_new(64);
    kda_cursor cursor = {0, 5, 7};
    size_t failed = 99;

    check_status(kda_spans_check(spans, count, to.bytes, to.size, &failed), expected, "check", line);
    check(failed == index, "check names the span", line);
    check_status(kda_spans_copy(spans, count, to.bytes, to.size, NO_LIMIT, &cursor), expected,
                 "copy", line);
    check(cursor.span == index && cursor.done == 0, "copy names the span", line);
    check(cursor.error == 0, "copy clears the error", line);
    check(target_is_untouched(&to), "nothing is written", line);
    free(to.memory);
}

/* A good span, the given one, and another good span, whose destinations leave it 16..47. */
static void expect_span_refused(kda_span middle, int expected, int line)
{
    static const unsigned char good[16] = {1};
    kda_span spans[3];

    spans[0] = memory_span(good, 16, 0);
    spans[1] = middle;
    spans[2] = memory_span(good, 16, 48);
    expect_refusal(spans, 3, expected, 1, line);
}

static void test_null_arguments(void)
{
    unsigned char byte = 1;
    unsigned char source = 2;
    kda_span span = memory_span(&source, 1, 0);
    kda_cursor cursor = {0, 0, 0};
    size_t failed = 99;

    CHECK_STATUS(kda_spans_check(&span, 1, &byte, 1, NULL), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_check(NULL, 1, &byte, 1, &failed), KDA_BAD_ARGUMENT);
    CHECK(failed == 0);
    CHECK_STATUS(kda_spans_check(&span, 1, NULL, 1, &failed), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_copy(&span, 1, &byte, 1, 0, NULL), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_copy(NULL, 1, &byte, 1, 0, &cursor), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_copy(&span, 1, NULL, 1, 0, &cursor), KDA_BAD_ARGUMENT);
    CHECK(byte == 1);

    CHECK_STATUS(kda_spans_check(NULL, 0, NULL, 0, &failed), KDA_OK);
    CHECK_STATUS(kda_spans_copy(NULL, 0, NULL, 0, 0, &cursor), KDA_OK);
    CHECK_STATUS(kda_spans_check(&span, 1, NULL, 0, &failed), KDA_DESTINATION_SHORT);
    CHECK_STATUS(kda_spans_check(&span, 1, &byte, UINT64_MAX, &failed), KDA_SIZE_OVERFLOW);
    CHECK(failed == 0);
}

static void test_bad_span_fields(void)
{
    unsigned char source[32] = {0};
    kda_span span = memory_span(source, 32, 16);

    span.kind = -1;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_FILE + 1;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_FILE; /* fd is -1 */
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_MEMORY;
    span.source = NULL;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_MAPPED;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
}

static void test_sizes_that_wrap(void)
{
    unsigned char source[32] = {0};
    kda_span span = memory_span(source, 32, 16);
    kda_span file = file_span(0, 0, 32);

    span.rows = UINT64_MAX / 2 + 1; /* rows * row_bytes is 2^64 */
    span.row_bytes = 2;
    span.row_stride = 2;
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);

    span.rows = 3; /* (rows - 1) * row_stride is 2^64 */
    span.row_stride = UINT64_MAX / 2 + 1;
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);

    span.rows = 2; /* (rows - 1) * row_stride + row_bytes is 2^64 */
    span.row_stride = UINT64_MAX - 1;
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);

    span.row_stride = UINT64_MAX - 2; /* fits 64 bits, but no such address */
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);

    span = memory_span(source, UINTPTR_MAX - (uintptr_t)source + 1, 16); /* the same, by one byte */
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);
    span.row_bytes--; /* the last that has addresses: the next check speaks */
    span.source_bytes = 32;
    expect_span_refused(span, KDA_SOURCE_SHORT, __LINE__);

    span = memory_span(source, 2, 16);
    span.destination = UINT64_MAX - 1; /* destination + size is 2^64 */
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);
    span.destination = UINT64_MAX - 2; /* fits, but is past the end */
    expect_span_refused(span, KDA_DESTINATION_SHORT, __LINE__);

    file.destination = 16;
    file.file_offset = (uint64_t)INT64_MAX + 1;
    expect_span_refused(file, KDA_SIZE_OVERFLOW, __LINE__);
    file.file_offset = (uint64_t)INT64_MAX - 31;
    expect_span_refused(file, KDA_SIZE_OVERFLOW, __LINE__);
    file.file_offset = (uint64_t)INT64_MAX - 32; /* the last that fits: the next check speaks */
    file.source_bytes = 31;
    expect_span_refused(file, KDA_SOURCE_SHORT, __LINE__);
}

static void test_bounds(void)
{
    unsigned char source[32] = {0};
    kda_span span = memory_span(source, 32, 16);

    span.rows = 2;
    span.row_bytes = 8;
    span.row_stride = 7;
    expect_span_refused(span, KDA_STRIDE_SHORT, __LINE__);
    span.row_stride = 0;
    expect_span_refused(span, KDA_STRIDE_SHORT, __LINE__);
    span.row_stride = 25; /* 25 + 8 = 33 of 32 */
    expect_span_refused(span, KDA_SOURCE_SHORT, __LINE__);
    span = memory_span(source, 32, 16);
    span.source_bytes = 31;
    expect_span_refused(span, KDA_SOURCE_SHORT, __LINE__);
    span = memory_span(source, 32, 33); /* 33 + 32 = 65 of 64 */
    expect_span_refused(span, KDA_DESTINATION_SHORT, __LINE__);
    span = memory_span(source, 0, 65); /* an empty span, too, lies within the destination */
    expect_span_refused(span, KDA_DESTINATION_SHORT, __LINE__);
    span = memory_span(source, 32, 15);
    expect_span_refused(span, KDA_DESTINATION_OVERLAP, __LINE__);
    span = memory_span(source, 0, 15);
    expect_span_refused(span, KDA_DESTINATION_OVERLAP, __LINE__);
}

/* A span that breaks every rule, then one rule less at a time. */
static void test_order_of_the_checks(void)
{
    unsigned char source[32] = {0};
    kda_span span = {9, -1, source, 0, 8, UINT64_MAX, 8, 7, 8};

    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_MEMORY;
    expect_span_refused(span, KDA_SIZE_OVERFLOW, __LINE__);
    span.rows = 16;
    expect_span_refused(span, KDA_STRIDE_SHORT, __LINE__);
    span.row_stride = 8;
    expect_span_refused(span, KDA_SOURCE_SHORT, __LINE__);
    span.source_bytes = 128;
    expect_span_refused(span, KDA_DESTINATION_SHORT, __LINE__);
    span.rows = 4;
    expect_span_refused(span, KDA_DESTINATION_OVERLAP, __LINE__);
}

static void test_source_in_the_destination(void)
{
    unsigned char memory[96] = {0};
    kda_span span = memory_span(memory, 16, 0);
    kda_cursor cursor = {0, 0, 0};
    size_t failed = 99;
    size_t start;
    int fd = file_of_pattern(16);

    memset(memory, GUARD, sizeof memory);
    for (start = 0; start <= 80; start++) { /* the destination is 32..63 */
        int expected = start <= 16 || start >= 64 ? KDA_OK : KDA_SOURCE_OVERLAP;
        span.source = memory + start;
        span.kind = start % 2 ? KDA_MEMORY : KDA_MAPPED;
        CHECK_STATUS(kda_spans_check(&span, 1, memory + 32, 32, &failed), expected);
        CHECK(failed == (expected == KDA_OK ? 1 : 0));
    }
    span.source = memory + 40;
    CHECK_STATUS(kda_spans_copy(&span, 1, memory + 32, 32, NO_LIMIT, &cursor), KDA_SOURCE_OVERLAP);
    CHECK(all_guard(memory, sizeof memory));
    span.row_bytes = 0; /* nothing is read, so nothing overlaps */
    CHECK_STATUS(kda_spans_check(&span, 1, memory + 32, 32, &failed), KDA_OK);
    span = file_span(fd, 0, 16);
    span.source = memory + 40; /* not looked at */
    CHECK_STATUS(kda_spans_copy(&span, 1, memory + 32, 32, NO_LIMIT, &cursor), KDA_OK);
    CHECK(!all_guard(memory + 32, 16) && all_guard(memory + 48, 16));
    close(fd);
}

static void test_cursor_outside_the_list(void)
{
    static const unsigned char source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    target to = target_new(16);
    kda_span spans[2];
    kda_cursor cursor = {3, 0, 0};

    spans[0] = memory_span(source, 8, 0);
    spans[1] = memory_span(source, 8, 8);
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    CHECK(cursor.span == 3);
    cursor.span = 2;
    cursor.done = 1;
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    cursor.span = 1;
    cursor.done = 9;
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    CHECK(cursor.span == 1 && cursor.done == 9);
    CHECK(target_is_untouched(&to));
    cursor.span = 2;
    cursor.done = 0;
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
    CHECK(target_is_untouched(&to));
    cursor.span = 0;
    cursor.done = 8; /* all of span 0 is there: go on with span 1 */
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
    CHECK(all_guard(to.bytes, 8) && memcmp(to.bytes + 8, source, 8) == 0);
    CHECK(cursor.span == 2 && cursor.done == 0 && target_is_fenced(&to));
    free(to.memory);
}

/* ---- the copies -------------------------------------------------------------------------- */

static void test_joined_and_empty_spans(void)
{
    static const unsigned char q[] = "qqqq", k[] = "kkkk", v[] = "vvvv";
    target to = target_new(24);
    kda_span spans[7];
    kda_cursor cursor;
    int calls;

    spans[0] = memory_span(q, 4, 0);
    spans[1] = memory_span(k, 4, 4);
    spans[2] = memory_span(v, 4, 8);
    spans[3] = memory_span(NULL, 0, 12); /* no bytes, no source */
    spans[4] = memory_span(q, 4, 16);
    spans[4].rows = 0;
    spans[4].row_bytes = UINT64_MAX; /* no rows, so of no matter */
    spans[5] = file_span(0, INT64_MAX, 0); /* as far into a file as can be */
    spans[5].destination = 20;
    spans[6] = memory_span(q, 4, 20);
    CHECK_STATUS(copy_all(spans, 7, &to, NO_LIMIT, &cursor, &calls), KDA_OK);
    CHECK(calls == 1 && cursor.span == 7 && cursor.done == 0 && cursor.error == 0);
    CHECK(memcmp(to.bytes, "qqqqkkkkvvvv", 12) == 0);
    CHECK(all_guard(to.bytes + 12, 8));
    CHECK(memcmp(to.bytes + 20, "qqqq", 4) == 0 && target_is_fenced(&to));
    free(to.memory);
}

/* One span over the pattern, from memory, map and file, in one call and in many. */
static void expect_copied(kda_span span, const unsigned char *pattern, const unsigned char *map,
                          int fd, int calls_least, int line)
{
    static const int kinds[] = {KDA_MEMORY, KDA_MAPPED, KDA_FILE};
    static const uint64_t budgets[] = {0, 1, HOUR, NO_LIMIT};
    size_t bytes = (size_t)(span.rows * span.row_bytes);
    unsigned char *expected = allocate(bytes);
    size_t k;
    size_t b;

    copy_slowly(&span, 1, pattern, expected);
    for (k = 0; k < 3; k++) {
        for (b = 0; b < 4; b++) {
            target to = target_new(bytes);
            kda_span now = span;
            kda_cursor cursor;
            int calls;
            int can = kinds[k] != KDA_MAPPED || kda_can_populate();

            now.kind = kinds[k];
            now.fd = fd;
            now.file_offset = (uint64_t)(span.source - pattern);
            if (now.kind == KDA_MAPPED)
                now.source = map + now.file_offset;
            check_status(copy_all(&now, 1, &to, budgets[b], &cursor, &calls),
                         can ? KDA_OK : KDA_NO_POPULATE, "copy", line);
            check(!can || memcmp(to.bytes, expected, bytes) == 0, "bytes as expected", line);
            check(!can || budgets[b] > 1 || calls >= calls_least, "paused often enough", line);
            check(budgets[b] < HOUR || calls == 1, "paused without need", line);
            check(target_is_fenced(&to), "guards stand", line);
            free(to.memory);
        }
    }
    free(expected);
}

static void test_rows_from_every_kind_of_source(void)
{
    size_t size = (size_t)(6 * MIB);
    unsigned char *pattern = allocate(size);
    int fd = file_of_pattern(size);
    unsigned char *map = map_of(fd, size, PROT_READ);
    kda_span span;

    fill_pattern(pattern, size);
    span = memory_span(pattern + 3, size - 3, 0); /* several pieces, at an odd address */
    expect_copied(span, pattern, map, fd, 6, __LINE__);
    span.rows = 16; /* rows that adjoin are one run */
    span.row_bytes = span.row_stride = MIB / 8;
    expect_copied(span, pattern, map, fd, 2, __LINE__);
    span.rows = 5 * 1024; /* a column slice: short rows, short gaps, over several pieces */
    span.row_bytes = 300;
    span.row_stride = 1021; /* pieces end within a row */
    expect_copied(span, pattern, map, fd, 5, __LINE__);
    span.rows = 4; /* rows far apart */
    span.row_bytes = 5000;
    span.row_stride = MIB + 17;
    expect_copied(span, pattern, map, fd, 4, __LINE__);
    span.rows = 2; /* rows longer than a piece, with a short gap */
    span.row_bytes = 2 * MIB + 5;
    span.row_stride = 2 * MIB + 99;
    expect_copied(span, pattern, map, fd, 5, __LINE__);
    span.row_stride = 3 * MIB + 99; /* and with a long one */
    expect_copied(span, pattern, map, fd, 6, __LINE__);
    span.rows = 1;
    span.row_bytes = 1;
    span.row_stride = 0; /* of no matter with one row */
    expect_copied(span, pattern, map, fd, 1, __LINE__);

    munmap(map, size);
    close(fd);
    free(pattern);
}

/* Lists of random spans, of all kinds, resumed at random. */
static void test_random_lists(void)
{
    enum { SIZE = 1 << 16, LISTS = 400, SPANS_MAX = 8 };
    unsigned char *pattern = allocate(SIZE);
    int fd = file_of_pattern(SIZE);
    unsigned char *map = map_of(fd, SIZE, PROT_READ);
    uint64_t kinds = kda_can_populate() ? 3 : 1;
    int list;

    fill_pattern(pattern, SIZE);
    for (list = 0; list < LISTS; list++) {
        kda_span spans[SPANS_MAX];
        size_t count = (size_t)random_below(SPANS_MAX + 1);
        uint64_t used = 0;
        target to;
        target expected;
        kda_cursor cursor;
        int calls;
        size_t i;

        for (i = 0; i < count; i++) {
            uint64_t start = random_below(SIZE / 2);
            kda_span span = memory_span(pattern + start, SIZE - start, used + random_below(9));
            span.rows = random_below(20);
            span.row_bytes = random_below(700);
            span.row_stride = span.row_bytes + random_below(2) * random_below(900);
            span.kind = kinds == 3 ? (int)random_below(3) : (int)random_below(2) * KDA_FILE;
            span.fd = fd;
            span.file_offset = start;
            if (span.kind == KDA_MAPPED)
                span.source = map + start;
            used = span.destination + span.rows * span.row_bytes;
            spans[i] = span;
        }
        to = target_new((size_t)used);
        expected = target_new((size_t)used);
        copy_slowly(spans, count, pattern, expected.bytes);
        CHECK_STATUS(copy_all(spans, count, &to, random_below(2) * 3000, &cursor, &calls), KDA_OK);
        CHECK(memcmp(to.memory, expected.memory, (size_t)used + 2 * GUARD_BYTES) == 0);
        free(to.memory);
        free(expected.memory);
    }
    munmap(map, SIZE);
    close(fd);
    free(pattern);
}

/* ---- sources that fail ------------------------------------------------------------------- */

static void test_a_map_cut_short(void)
{
    size_t size = (size_t)(4 * MIB);
    size_t kept = (size_t)(2 * MIB);
    int fd = file_of_pattern(size);
    unsigned char *map = map_of(fd, size, PROT_READ);
    target to = target_new(size);
    kda_span span = memory_span(map, size, 0);
    kda_cursor cursor;
    int calls;

    span.kind = KDA_MAPPED;
    need(ftruncate(fd, (off_t)kept) == 0, "ftruncate");
    if (kda_can_populate()) {
        CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_SOURCE_FAULT);
        CHECK(cursor.span == 0 && cursor.done == kept && cursor.error == EFAULT);
        CHECK(memcmp(to.bytes, map, kept) == 0 && all_guard(to.bytes + kept, size - kept));
        need(ftruncate(fd, (off_t)size) == 0, "ftruncate"); /* mended: the same cursor goes on */
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes, map, size) == 0 && cursor.error == 0);
    } else {
        CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_NO_POPULATE);
        CHECK(target_is_untouched(&to));
    }
    munmap(map, size);
    close(fd);
    free(to.memory);
}

/* Rows that do not end where a piece does: none is copied from pages that were not asked for. */
static void test_a_column_slice_of_a_map_cut_short(void)
{
    size_t size = (size_t)(4 * MIB);
    int fd = file_of_pattern(size);
    unsigned char *map = map_of(fd, size, PROT_READ);
    kda_span span = memory_span(map, size, 0);
    target to;
    kda_cursor cursor;
    int calls;

    span.kind = KDA_MAPPED;
    span.rows = 1000;
    span.row_bytes = 3000;
    span.row_stride = 3001;
    to = target_new((size_t)(span.rows * span.row_bytes));
    need(ftruncate(fd, (off_t)MIB) == 0, "ftruncate");
    CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls),
                 kda_can_populate() ? KDA_SOURCE_FAULT : KDA_NO_POPULATE);
    CHECK(!kda_can_populate() || cursor.done == MIB - MIB / 3001); /* one byte a row is left out */
    CHECK(all_guard(to.bytes + cursor.done, to.size - (size_t)cursor.done));
    munmap(map, size);
    close(fd);
    free(to.memory);
}

static void test_a_map_that_may_not_be_read(void)
{
    int fd = file_of_pattern(4096);
    unsigned char *map = map_of(fd, 4096, PROT_NONE);
    target to = target_new(4096);
    kda_span span = memory_span(map, 4096, 0);
    kda_cursor cursor;
    int calls;

    span.kind = KDA_MAPPED;
    CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_NO_POPULATE);
    CHECK(cursor.error != 0 && target_is_untouched(&to));
    munmap(map, 4096);
    close(fd);
    free(to.memory);
}

static void test_a_file_that_is_short(void)
{
    int fd = file_of_pattern(1000);
    target to = target_new(2000);
    kda_span span = file_span(fd, 0, 1500);
    kda_cursor cursor;
    int calls;

    CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_FILE_END);
    CHECK(cursor.span == 0 && cursor.done == 1000 && cursor.error == 0);
    CHECK(!all_guard(to.bytes, 1000) && all_guard(to.bytes + 1000, 1000) && target_is_fenced(&to));
    CHECK(lseek(fd, 0, SEEK_CUR) == 0); /* the file's own position is not moved */
    close(fd);
    free(to.memory);
}

static void expect_read_failed(int fd, int error, int line)
{
    target to = target_new(16);
    kda_span span = file_span(fd, 0, 16);
    kda_cursor cursor;
    int calls;

    check_status(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_READ_FAILED, "copy", line);
    check(cursor.error == error && cursor.done == 0, "errno is kept", line);
    check(target_is_untouched(&to), "nothing is written", line);
    free(to.memory);
}

static void test_files_that_cannot_be_read(void)
{
    int ends[2];
    int directory = open("/", O_RDONLY);

    need(pipe(ends) == 0, "pipe");
    need(directory >= 0, "open /");
    expect_read_failed(ends[0], ESPIPE, __LINE__);
    expect_read_failed(directory, EISDIR, __LINE__);
    close(directory);
    expect_read_failed(directory, EBADF, __LINE__);
    close(ends[0]);
    close(ends[1]);
}

static void test_offsets_past_4_gib(void)
{
    off_t far = (off_t)5 << 30;
    int fd = file_of_pattern(1);
    target to = target_new(4);
    kda_span span = file_span(fd, (uint64_t)far, 4);
    kda_cursor cursor;
    int calls;

    need(pwrite(fd, "far.", 4, far) == 4, "pwrite at 5 GiB");
    CHECK_STATUS(copy_all(&span, 1, &to, NO_LIMIT, &cursor, &calls), KDA_OK);
    CHECK(memcmp(to.bytes, "far.", 4) == 0 && target_is_fenced(&to));
    close(fd);
    free(to.memory);
}

/* ---- what the kernel may answer, and seldom does ------------------------------------------ */

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MADV_POPULATE_READ_NUMBER 22

/* From here on this process gets `error` for the system call when its argument has the value. */
static int deny(long call, size_t argument, unsigned int value, int error)
{
    unsigned int at = (unsigned int)(offsetof(struct seccomp_data, args) + argument * 8);
    unsigned int answer = SECCOMP_RET_ERRNO | ((unsigned int)error & SECCOMP_RET_DATA);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, answer),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return 0;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* Copies one span for which its system call gives `error`. Exit status 0 when all is as it should
 * be, 1 when not, 2 where calls cannot be denied. */
static int child_copies(int kind, int error, int expected)
{
    unsigned int file_number;
    int fd = file_of_pattern(4096);
    unsigned char *map = map_of(fd, 4096, PROT_READ);
    target to = target_new(4096);
    kda_span span = file_span(fd, 0, 4096);
    kda_cursor cursor = {0, 0, 7};
    int kept_error = expected == KDA_PAUSED ? 0 : error;
    int denied;

    span.kind = kind;
    span.source = map;
    file_number = (unsigned int)fd;
    denied = kind == KDA_FILE ? deny(SYS_pread64, 0, file_number, error)
                              : deny(SYS_madvise, 2, MADV_POPULATE_READ_NUMBER, error);
    if (!denied)
        return 2;
    checks_failed = 0;
    CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), expected);
    CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == kept_error);
    CHECK(target_is_untouched(&to));
    if (kind == KDA_MAPPED)
        CHECK(kda_can_populate() == (error != EINVAL));
    munmap(map, 4096);
    close(fd);
    free(to.memory);
    return checks_failed != 0;
}

static void expect_answer(int kind, int error, int expected, int line)
{
    int state = -1;
    pid_t child;

    fflush(stdout);
    child = fork();
    need(child >= 0, "fork");
    if (child == 0)
        exit(child_copies(kind, error, expected));
    need(waitpid(child, &state, 0) == child, "waitpid");
    if (WIFEXITED(state) && WEXITSTATUS(state) == 2)
        printf("selftest.c:%d: left out: system calls cannot be denied here\n", line);
    else
        check(WIFEXITED(state) && WEXITSTATUS(state) == 0, "answer to a denied call", line);
}

static void test_answers_of_the_kernel(void)
{
    expect_answer(KDA_FILE, EINTR, KDA_PAUSED, __LINE__);
    expect_answer(KDA_FILE, EIO, KDA_READ_FAILED, __LINE__);
    expect_answer(KDA_MAPPED, EINTR, KDA_PAUSED, __LINE__);
    expect_answer(KDA_MAPPED, EAGAIN, KDA_PAUSED, __LINE__);
    expect_answer(KDA_MAPPED, EHWPOISON, KDA_SOURCE_FAULT, __LINE__);
    expect_answer(KDA_MAPPED, EINVAL, KDA_NO_POPULATE, __LINE__); /* a kernel before 5.14 */
}
#else
static void test_answers_of_the_kernel(void)
{
    printf("selftest: left out: the answers of the kernel are tested on Linux alone\n");
}
#endif

int main(void)
{
    test_null_arguments();
    test_bad_span_fields();
    test_sizes_that_wrap();
    test_bounds();
    test_order_of_the_checks();
    test_source_in_the_destination();
    test_cursor_outside_the_list();
    test_joined_and_empty_spans();
    test_rows_from_every_kind_of_source();
    test_random_lists();
    test_a_map_cut_short();
    test_a_column_slice_of_a_map_cut_short();
    test_a_map_that_may_not_be_read();
    test_a_file_that_is_short();
    test_files_that_cannot_be_read();
    test_offsets_past_4_gib();
    test_answers_of_the_kernel();
    if (checks_failed != 0)
        printf("%d checks passed, %d failed\n", checks_passed, checks_failed);
    else
        printf("%d checks passed\n", checks_passed);
    return checks_failed != 0;
}
