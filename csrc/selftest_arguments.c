/* selftest_arguments.c: what spans, means and cursors may be, and what is said of others. */
#include "selftest.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Both functions give `expected`, name span `index`, and leave the destination alone. */
static void expect_refusal(const kda_span *spans, size_t count, int expected, size_t index,
                           int line)
{
    target to = target_new(64);
    kda_cursor cursor = {0, 5, 7, 0};
    size_t failed = 99;

    STATUS_AT(kda_spans_check(spans, count, to.bytes, to.size, &failed), expected, "check", line);
    CHECK_AT(failed == index, "check names the span", line);
    STATUS_AT(copy_once(spans, count, to.bytes, to.size, NO_LIMIT, &cursor), expected, "copy",
              line);
    CHECK_AT(cursor.span == index && cursor.done == 0, "copy names the span", line);
    CHECK_AT(cursor.error == 0, "copy clears the error", line);
    CHECK_AT(target_is_untouched(&to), "nothing is written", line);
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
    kda_cursor cursor = {0, 0, 0, 0};
    size_t failed = 99;

    CHECK_STATUS(kda_spans_check(&span, 1, &byte, 1, NULL), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_check(NULL, 1, &byte, 1, &failed), KDA_BAD_ARGUMENT);
    CHECK(failed == 0);
    CHECK_STATUS(kda_spans_check(&span, 1, NULL, 1, &failed), KDA_BAD_ARGUMENT);
    CHECK_STATUS(copy_once(&span, 1, &byte, 1, 0, NULL), KDA_BAD_ARGUMENT);
    CHECK_STATUS(copy_once(NULL, 1, &byte, 1, 0, &cursor), KDA_BAD_ARGUMENT);
    CHECK_STATUS(copy_once(&span, 1, NULL, 1, 0, &cursor), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_copy(&span, 1, &byte, 1, NULL, &cursor), KDA_BAD_ARGUMENT);
    CHECK_STATUS(kda_spans_copy(&span, 1, &byte, 1, NULL, NULL), KDA_BAD_ARGUMENT);
    CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == 0);
    CHECK(byte == 1);

    CHECK_STATUS(kda_spans_check(NULL, 0, NULL, 0, &failed), KDA_OK);
    CHECK_STATUS(copy_once(NULL, 0, NULL, 0, 0, &cursor), KDA_OK);
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
    span.kind = KDA_DIRECT + 1;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_FILE; /* fd is -1 */
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.kind = KDA_DIRECT;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.fd = 0;
    span.rows = 4; /* rows that lie apart are not for whole blocks */
    span.row_bytes = 4;
    span.row_stride = 5;
    expect_span_refused(span, KDA_BAD_ARGUMENT, __LINE__);
    span.row_stride = 3;
    expect_span_refused(span, KDA_STRIDE_SHORT, __LINE__);
    span = memory_span(source, 32, 16);
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
    file.kind = KDA_DIRECT;
    expect_span_refused(file, KDA_SOURCE_SHORT, __LINE__);
    file.file_offset++;
    expect_span_refused(file, KDA_SIZE_OVERFLOW, __LINE__);
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
    kda_cursor cursor = {0, 0, 0, 0};
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
    CHECK_STATUS(copy_once(&span, 1, memory + 32, 32, NO_LIMIT, &cursor), KDA_SOURCE_OVERLAP);
    CHECK(all_guard(memory, sizeof memory));
    span.row_bytes = 0; /* nothing is read, so nothing overlaps */
    CHECK_STATUS(kda_spans_check(&span, 1, memory + 32, 32, &failed), KDA_OK);
    span = file_span(fd, 0, 16);
    span.source = memory + 40; /* not looked at */
    CHECK_STATUS(copy_once(&span, 1, memory + 32, 32, NO_LIMIT, &cursor), KDA_OK);
    CHECK(!all_guard(memory + 32, 16) && all_guard(memory + 48, 16));
    span.kind = KDA_DIRECT;
    CHECK_STATUS(kda_spans_check(&span, 1, memory + 32, 32, &failed), KDA_OK);
    close(fd);
}

static void test_cursor_outside_the_list(void)
{
    static const unsigned char source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    target to = target_new(16);
    kda_span spans[2];
    kda_cursor cursor = {3, 0, 0, 0};

    spans[0] = memory_span(source, 8, 0);
    spans[1] = memory_span(source, 8, 8);
    CHECK_STATUS(copy_once(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    CHECK(cursor.span == 3);
    cursor.span = 2;
    cursor.done = 1;
    CHECK_STATUS(copy_once(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    cursor.span = 1;
    cursor.done = 9;
    CHECK_STATUS(copy_once(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_BAD_ARGUMENT);
    CHECK(cursor.span == 1 && cursor.done == 9);
    CHECK(target_is_untouched(&to));
    cursor.span = 2;
    cursor.done = 0;
    CHECK_STATUS(copy_once(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
    CHECK(target_is_untouched(&to));
    cursor.span = 0;
    cursor.done = 8; /* all of span 0 is there: go on with span 1 */
    CHECK_STATUS(copy_once(spans, 2, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
    CHECK(all_guard(to.bytes, 8) && memcmp(to.bytes + 8, source, 8) == 0);
    CHECK(cursor.span == 2 && cursor.done == 0 && target_is_fenced(&to));
    free(to.memory);
}

/* A list with one KDA_DIRECT span, and means that are refused for it and leave the cursor. */
static void expect_means_refused(const kda_span *spans, const kda_means *means, int line)
{
    target to = target_new(64);
    kda_cursor cursor = {1, 2, 7, 0};

    STATUS_AT(kda_spans_copy(spans, 2, to.bytes, to.size, means, &cursor), KDA_BAD_ARGUMENT,
              "copy", line);
    CHECK_AT(cursor.span == 1 && cursor.done == 2, "the cursor stays", line);
    CHECK_AT(target_is_untouched(&to), "nothing is written", line);
    free(to.memory);
}

static void test_means_of_whole_blocks(void)
{
    static const uint64_t bad[] = {0, 1, 3, 256, 511, 4095, 4097, 12288, 131072, UINT64_MAX};
    static const unsigned char byte[8] = {1};
    origin from = origin_new(8192);
    target to = target_new(64);
    kda_means good = means_of(1, NO_LIMIT);
    kda_means means = good;
    kda_cursor cursor = {0, 0, 0, 0};
    kda_span spans[2];
    size_t i;

    spans[0] = by_way(&from, BY_BLOCKS, memory_span(from.memory + 5, 32, 0));
    spans[1] = memory_span(byte, 8, 32);
    means.bounce += (131072 - (uintptr_t)good.bounce % 131072) % 131072;
    means.bounce_bytes = 8 * BLOCK_BYTES_MAX;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        means.block_bytes = bad[i];
        expect_means_refused(spans, &means, __LINE__);
    }
    means = good;
    means.bounce = NULL;
    expect_means_refused(spans, &means, __LINE__);
    means = good;
    means.bounce += 512; /* at no block */
    expect_means_refused(spans, &means, __LINE__);
    means.block_bytes = 512;
    means.bounce += 1;
    expect_means_refused(spans, &means, __LINE__);
    means = good;
    means.bounce_bytes = 4095;
    expect_means_refused(spans, &means, __LINE__);
    means.bounce_bytes = 0;
    expect_means_refused(spans, &means, __LINE__);
    means.threads = 3;
    means.bounce_bytes = 3 * 4096 - 1;
    expect_means_refused(spans, &means, __LINE__);
    means.threads = 100;
    means.bounce_bytes = THREADS_MAX * 4096 - 1;
    expect_means_refused(spans, &means, __LINE__);
    spans[0].rows = 0; /* the rule holds for a span without a byte, too */
    expect_means_refused(spans, &means, __LINE__);
    spans[0].rows = 1;
    means.bounce_bytes = 100 * 4096;
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, &means, &cursor), KDA_OK);
    CHECK(memcmp(to.bytes, from.memory + 5, 32) == 0 && target_is_fenced(&to));

    memset(&means, 0, sizeof means); /* of no matter to the other kinds */
    means.nanoseconds_max = NO_LIMIT;
    means.block_bytes = 3;
    means.bounce_bytes = 1;
    memset(&cursor, 0, sizeof cursor);
    spans[0].kind = KDA_FILE;
    target_clear(&to);
    CHECK_STATUS(kda_spans_copy(spans, 2, to.bytes, to.size, &means, &cursor), KDA_OK);
    CHECK(memcmp(to.bytes, from.memory + 5, 32) == 0 && target_is_fenced(&to));
    free(to.memory);
    origin_free(&from);
}

void test_arguments(void)
{
    test_null_arguments();
    test_bad_span_fields();
    test_sizes_that_wrap();
    test_bounds();
    test_order_of_the_checks();
    test_source_in_the_destination();
    test_cursor_outside_the_list();
    test_means_of_whole_blocks();
}
