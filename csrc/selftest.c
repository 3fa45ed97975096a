/* selftest.c: every status of every function in kda_copy.h, without a framework.
 *
 * Prints the place of each check that fails, and at the end one line, "N checks passed" or
 * "N checks passed, M failed". Exit status 0 or 1. See selftest.h. */
#include "selftest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static int checks_passed;
static int checks_failed;
static char folder[4096]; /* that this program lies in, with a slash; empty for the present one */

void check(int holds, const char *text, const char *file, int line)
{
    const char *slash = strrchr(file, '/');

    if (holds) {
        checks_passed++;
    } else {
        checks_failed++;
        printf("%s:%d: does not hold: %s\n", slash != NULL ? slash + 1 : file, line, text);
    }
}

void check_status(int status, int expected, const char *text, const char *file, int line)
{
    check(status == expected, text, file, line);
    if (status != expected)
        printf("  expected status %d, got %d\n", expected, status);
}

void leave_out(const char *what)
{
    enum { SAID_MAX = 32 };
    static const char *said[SAID_MAX];
    int i;

    for (i = 0; i < SAID_MAX && said[i] != NULL; i++)
        if (strcmp(said[i], what) == 0)
            return;
    if (i < SAID_MAX)
        said[i] = what;
    printf("left out: %s\n", what);
}

void need(int holds, const char *what)
{
    if (!holds) {
        printf("selftest: cannot set up: %s: %s\n", what, strerror(errno));
        exit(3);
    }
}

unsigned char *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes != 0 ? bytes : 1);

    need(memory != NULL, "malloc");
    return memory;
}

unsigned char *allocate_aligned(size_t bytes)
{
    void *memory = NULL;

    need(posix_memalign(&memory, (size_t)BLOCK_BYTES_MAX, bytes) == 0, "posix_memalign");
    return memory;
}

uint64_t random_below(uint64_t limit)
{
    static uint64_t state = 1;

    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % limit;
}

target target_new(size_t size)
{
    target made;

    made.memory = allocate(size + 2 * GUARD_BYTES);
    made.bytes = made.memory + GUARD_BYTES;
    made.size = size;
    target_clear(&made);
    return made;
}

void target_clear(const target *of)
{
    memset(of->memory, GUARD, of->size + 2 * GUARD_BYTES);
}

int all_guard(const unsigned char *bytes, size_t size)
{
    return size == 0 || (bytes[0] == GUARD && memcmp(bytes, bytes + 1, size - 1) == 0);
}

int target_is_fenced(const target *of)
{
    return all_guard(of->memory, GUARD_BYTES) && all_guard(of->bytes + of->size, GUARD_BYTES);
}

int target_is_untouched(const target *of)
{
    return all_guard(of->memory, of->size + 2 * GUARD_BYTES);
}

void fill_pattern(unsigned char *bytes, size_t size)
{
    size_t i;

    for (i = 0; i < size; i++)
        bytes[i] = (unsigned char)((i * 31 + i / 4096 * 7) % 163);
}

/* The same file once more, with O_DIRECT; -1 where that is refused. */
static int open_direct(const char *name)
{
#ifdef O_DIRECT
    return open(name, O_RDONLY | O_DIRECT);
#else
    (void)name;
    return -1;
#endif
}

int new_file(int *direct)
{
    char name[sizeof folder + 32];
    FILE *file;
    int fd;

    snprintf(name, sizeof name, "%skda_selftest_XXXXXX", folder);
    fd = mkstemp(name);
    if (fd >= 0) {
        *direct = open_direct(name);
        unlink(name);
        return fd;
    }
    *direct = -1;
    file = tmpfile();
    need(file != NULL, "tmpfile");
    fd = dup(fileno(file));
    need(fd >= 0, "dup");
    fclose(file);
    return fd;
}

unsigned char *map_of(int fd, size_t size, int protection)
{
    void *map = mmap(NULL, size, protection, MAP_SHARED, fd, 0);

    need(map != MAP_FAILED, "mmap");
    return map;
}

origin origin_new(size_t size)
{
    origin made;

    made.size = size;
    made.memory = allocate(size);
    fill_pattern(made.memory, size);
    made.fd = new_file(&made.direct);
    origin_mend(&made);
    made.map = map_of(made.fd, size, PROT_READ | PROT_WRITE);
    return made;
}

void origin_free(const origin *of)
{
    munmap(of->map, of->size);
    close(of->fd);
    if (of->direct >= 0)
        close(of->direct);
    free(of->memory);
}

void origin_cut(const origin *of, size_t size)
{
    need(ftruncate(of->fd, (off_t)size) == 0, "ftruncate");
}

void origin_mend(const origin *of)
{
    need(pwrite(of->fd, of->memory, of->size, 0) == (ssize_t)of->size, "pwrite");
}

int file_of_pattern(size_t size)
{
    origin made = origin_new(size);
    int fd = dup(made.fd);

    need(fd >= 0, "dup");
    origin_free(&made);
    return fd;
}

int can_go(const origin *from, int way, const kda_span *span)
{
    if (way == BY_MAP)
        return kda_can_populate();
    if (way == BY_DIRECT && from->direct < 0)
        return 0;
    if (way == BY_DIRECT || way == BY_BLOCKS)
        return span->rows <= 1 || span->row_stride == span->row_bytes;
    return 1;
}

kda_span by_way(const origin *from, int way, kda_span span)
{
    static const int kinds[WAYS] = {KDA_MEMORY, KDA_MAPPED, KDA_FILE, KDA_DIRECT, KDA_DIRECT};

    span.kind = kinds[way];
    if (way == BY_MEMORY)
        return span;
    span.file_offset = span.source == NULL ? 0 : (uint64_t)(span.source - from->memory);
    span.source = way == BY_MAP ? from->map + span.file_offset : NULL;
    span.fd = way == BY_DIRECT ? from->direct : from->fd;
    return span;
}

kda_span memory_span(const unsigned char *source, uint64_t bytes, uint64_t destination)
{
    kda_span made = {KDA_MEMORY, -1, NULL, 0, 0, 1, 0, 0, 0};

    made.source = source;
    made.source_bytes = bytes;
    made.row_bytes = bytes;
    made.row_stride = bytes;
    made.destination = destination;
    return made;
}

kda_span file_span(int fd, uint64_t file_offset, uint64_t bytes)
{
    kda_span made = memory_span(NULL, bytes, 0);

    made.kind = KDA_FILE;
    made.fd = fd;
    made.file_offset = file_offset;
    return made;
}

void copy_slowly(const kda_span *spans, size_t count, const unsigned char *file,
                 unsigned char *destination)
{
    size_t i;
    uint64_t row;

    for (i = 0; i < count; i++) {
        const kda_span *span = &spans[i];
        int is_file = span->kind == KDA_FILE || span->kind == KDA_DIRECT;
        const unsigned char *source = is_file ? file + span->file_offset : span->source;

        for (row = 0; row < span->rows && span->row_bytes != 0; row++)
            memcpy(destination + span->destination + row * span->row_bytes,
                   source + row * span->row_stride, (size_t)span->row_bytes);
    }
}

kda_means means_of(unsigned threads, uint64_t nanoseconds_max)
{
    static unsigned char *bounce;
    kda_means means = {0, NULL, 0, 4096, NULL, THREADS_MAX * BLOCK_BYTES_MAX};

    if (bounce == NULL)
        bounce = allocate_aligned((size_t)(THREADS_MAX * BLOCK_BYTES_MAX));
    means.nanoseconds_max = nanoseconds_max;
    means.threads = threads;
    means.bounce = bounce;
    return means;
}

int copy_once(const kda_span *spans, size_t count, unsigned char *destination,
              uint64_t destination_bytes, uint64_t nanoseconds_max, kda_cursor *cursor)
{
    kda_means means = means_of(1, nanoseconds_max);

    return kda_spans_copy(spans, count, destination, destination_bytes, &means, cursor);
}

int copy_all(const kda_span *spans, size_t count, const target *to, const kda_means *means,
             kda_cursor *cursor, int *calls)
{
    int stalls = 0;
    int status;

    memset(cursor, 0, sizeof *cursor);
    *calls = 0;
    do {
        kda_cursor before = *cursor;

        cursor->piece_bytes = 0; /* pieces of a MiB, as in a first call */
        status = kda_spans_copy(spans, count, to->bytes, to->size, means, cursor);
        ++*calls;
        if (status == KDA_PAUSED && cursor->span == before.span && cursor->done <= before.done)
            stalls++;
    } while (status == KDA_PAUSED);
    CHECK(stalls == 0);
    return status;
}

int state_of_child(int (*body)(const void *), const void *given)
{
    int state = -1;
    pid_t child;

    fflush(stdout);
    child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        int status;

        alarm(10);
        checks_failed = 0;
        status = body(given);
        fflush(stdout);
        _exit(checks_failed != 0 ? 1 : status); /* leaks are looked for in the parent */
    }
    need(waitpid(child, &state, 0) == child, "waitpid");
    return state;
}

/* ---- the checks -------------------------------------------------------------------------- */

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

#if defined(__SANITIZE_ADDRESS__)
/* What the tests of signals expect of a process that nobody watches. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "handle_sigbus=0";
}
#endif

int main(int count, char **arguments)
{
    const char *slash = count > 0 ? strrchr(arguments[0], '/') : NULL;

    if (slash != NULL && (size_t)(slash - arguments[0]) + 1 < sizeof folder)
        memcpy(folder, arguments[0], (size_t)(slash - arguments[0]) + 1);
    test_null_arguments();
    test_bad_span_fields();
    test_sizes_that_wrap();
    test_bounds();
    test_order_of_the_checks();
    test_source_in_the_destination();
    test_cursor_outside_the_list();
    test_means_of_whole_blocks();
    test_copies();
    test_faults();
    free(means_of(1, 0).bounce);
    if (checks_failed != 0)
        printf("%d checks passed, %d failed\n", checks_passed, checks_failed);
    else
        printf("%d checks passed\n", checks_passed);
    return checks_failed != 0;
}
