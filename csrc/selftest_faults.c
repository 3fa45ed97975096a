/* selftest_faults.c: files that end, fail or cannot be read. See selftest.h. */
#include "selftest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const unsigned thread_counts[] = {1, 2, 5, 16};
enum { THREAD_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };

/* The file of `from` ends at `kept`, short of the span: the copy fails there or, by as much as
 * `early` bytes, before. When the file is whole again, the same cursor goes on. */
static void expect_cut(const origin *from, int way, kda_span whole, size_t kept, uint64_t early,
                       int line)
{
    kda_span span = by_way(from, way, whole);
    target to = target_new((size_t)(whole.rows * whole.row_bytes));
    target expected = target_new(to.size);
    uint64_t limit = landing_of(&whole, kept - (uint64_t)(whole.source - from->memory));
    size_t t;

    copy_slowly(&whole, 1, NULL, expected.bytes);
    for (t = 0; t < 2 * THREAD_COUNTS; t++) {
        kda_means means = means_of(thread_counts[t / 2], t % 2 == 0 ? NO_LIMIT : 0);
        kda_cursor cursor;
        int calls;

        target_clear(&to);
        origin_cut(from, kept);
        STATUS_AT(copy_all(&span, 1, &to, &means, &cursor, &calls),
                  way == BY_MAP ? KDA_SOURCE_FAULT : KDA_FILE_END, "copy", line);
        CHECK_AT(cursor.span == 0 && cursor.error == (way == BY_MAP ? EFAULT : 0), "fault", line);
        CHECK_AT(cursor.done <= limit && limit - cursor.done <= early, "cursor", line);
        CHECK_AT(memcmp(to.bytes, expected.bytes, (size_t)cursor.done) == 0, "what landed", line);
        CHECK_AT(target_is_fenced(&to), "guards stand", line);
        origin_mend(from);
        means.threads = 3;
        means.nanoseconds_max = NO_LIMIT;
        STATUS_AT(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK, "go on",
                  line);
        CHECK_AT(cursor.span == 1 && cursor.done == 0 && cursor.error == 0, "done", line);
        CHECK_AT(memcmp(to.memory, expected.memory, to.size + 2 * GUARD_BYTES) == 0, "all", line);
    }
    free(expected.memory);
    free(to.memory);
}

static void test_files_cut_short(void)
{
    origin from = origin_new((size_t)(6 * MIB + 17));
    kda_span span = memory_span(from.memory + 3, from.size - 3, 0);
    static const size_t kept[] = {1, 4095, 4096, (1 << 20) - 1, 1 << 20, (5 << 20) + 99,
                                  (6 << 20) + 16};
    size_t i;
    int way;

    for (i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        if (kept[i] > 3)
            expect_cut(&from, BY_FILE, span, kept[i], 0, __LINE__);
        for (way = BY_BLOCKS; way <= BY_DIRECT && kept[i] > 3; way++)
            if (can_go(&from, way, &span))
                expect_cut(&from, way, span, kept[i], 4095, __LINE__);
        if (can_go(&from, BY_MAP, &span) && kept[i] % 4096 == 0)
            expect_cut(&from, BY_MAP, span, kept[i], 8 * MIB, __LINE__);
    }
    span.rows = 1500; /* a column slice: none is copied from pages that were not asked for */
    span.row_bytes = 3000;
    span.row_stride = 4097;
    expect_cut(&from, BY_FILE, span, (size_t)(3 * MIB), 0, __LINE__);
    if (can_go(&from, BY_MAP, &span))
        expect_cut(&from, BY_MAP, span, (size_t)(3 * MIB), 8 * MIB, __LINE__);
    span.rows = 30; /* rows far apart: windows of their own */
    span.row_stride = 200000;
    expect_cut(&from, BY_FILE, span, (size_t)(3 * MIB), 0, __LINE__);
    if (can_go(&from, BY_MAP, &span))
        expect_cut(&from, BY_MAP, span, (size_t)(3 * MIB), 3000, __LINE__);
    origin_free(&from);
}

/* In a list whose fourth span fails, all before it is there, however many threads there are. */
static void test_the_first_failure_counts(void)
{
    origin from = origin_new((size_t)(8 * MIB));
    target to = target_new(from.size);
    kda_span spans[8];
    unsigned threads;
    size_t i;

    for (i = 0; i < 8; i++) {
        spans[i] = memory_span(from.memory + i * MIB, MIB, i * MIB);
        spans[i] = by_way(&from, i % 2 == 0 ? BY_FILE : BY_BLOCKS, spans[i]);
    }
    for (i = 2; i <= 6 && from.direct >= 0; i += 2) /* waits for the disk, and others go on */
        spans[i] = by_way(&from, BY_DIRECT, memory_span(from.memory + i * MIB, MIB, i * MIB));
    spans[3].fd = spans[6].fd = 1 << 20; /* open nowhere */
    spans[4].file_offset = 7 * MIB + BLOCK_BYTES_MAX;
    for (threads = 0; threads < 60; threads++) {
        kda_means means = means_of(threads % 17, NO_LIMIT);
        kda_cursor cursor = {4, 0, 0, 0};

        target_clear(&to);
        spans[6].file_offset = spans[4].file_offset;
        spans[6].fd = spans[4].fd; /* the fifth and the seventh fail when they have read */
        CHECK_STATUS(kda_spans_copy(spans, 8, to.bytes, to.size, &means, &cursor), KDA_FILE_END);
        CHECK(cursor.span == 4 && MIB - BLOCK_BYTES_MAX - cursor.done < 4096 && cursor.error == 0);
        memset(&cursor, 0, sizeof cursor);
        spans[6].fd = spans[3].fd;
        spans[2].file_offset = 7 * MIB + BLOCK_BYTES_MAX; /* fails late, after the next */
        CHECK_STATUS(kda_spans_copy(spans, 8, to.bytes, to.size, &means, &cursor), KDA_FILE_END);
        CHECK(cursor.span == 2 && MIB - BLOCK_BYTES_MAX - cursor.done < 4096 && cursor.error == 0);
        CHECK(memcmp(to.bytes, from.memory, (size_t)(2 * MIB)) == 0 && target_is_fenced(&to));
        spans[2].file_offset = 2 * MIB;
        memset(&cursor, 0, sizeof cursor);
        CHECK_STATUS(kda_spans_copy(spans, 8, to.bytes, to.size, &means, &cursor), KDA_READ_FAILED);
        CHECK(cursor.span == 3 && cursor.done == 0 && cursor.error == EBADF);
        CHECK(memcmp(to.bytes, from.memory, (size_t)(3 * MIB)) == 0 && target_is_fenced(&to));
    }
    free(to.memory);
    origin_free(&from);
}

/* Where all pieces fail at once, the first of the list is named. */
static void test_all_pieces_fail(void)
{
    target to = target_new((size_t)(16 * MIB));
    kda_means means = means_of(THREADS_MAX, NO_LIMIT);
    kda_span spans[16];
    kda_span whole = file_span(1 << 20, 0, 16 * MIB); /* a descriptor that is not open */
    int repeat;
    size_t i;

    for (i = 0; i < 16; i++) {
        spans[i] = file_span(1 << 20, 0, MIB);
        spans[i].destination = i * MIB;
    }
    for (repeat = 0; repeat < 200; repeat++) {
        kda_cursor cursor = {0, 0, 0, 0};

        CHECK_STATUS(kda_spans_copy(repeat % 2 == 0 ? spans : &whole, repeat % 2 == 0 ? 16 : 1,
                                    to.bytes, to.size, &means, &cursor),
                     KDA_READ_FAILED);
        CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == EBADF);
    }
    CHECK(target_is_untouched(&to));
    free(to.memory);
}

/* Two blocks, in place or through the bounce memory. */
static void expect_read_failed(int kind, int fd, int error, int line)
{
    size_t size = (size_t)BLOCK_BYTES_MAX;
    unsigned char *to = allocate_aligned(size);
    kda_span span = file_span(fd, 0, 8192);
    size_t shift;

    span.kind = kind;
    memset(to, GUARD, size);
    for (shift = 0; shift < 2; shift++) {
        kda_cursor cursor = {0, 0, 0, 0};

        STATUS_AT(copy_once(&span, 1, to + shift, 8192, NO_LIMIT, &cursor), KDA_READ_FAILED,
                  "copy", line);
        CHECK_AT(cursor.error == error && cursor.done == 0, "errno is kept", line);
        CHECK_AT(all_guard(to, size), "nothing is written", line);
    }
    free(to);
}

static void test_files_that_cannot_be_read(void)
{
    int ends[2];
    int directory = open("/", O_RDONLY);
    int kind;

    need(pipe(ends) == 0, "pipe");
    need(directory >= 0, "open /");
    for (kind = KDA_FILE; kind <= KDA_DIRECT; kind++) {
        expect_read_failed(kind, ends[0], ESPIPE, __LINE__);
        expect_read_failed(kind, directory, EISDIR, __LINE__);
        expect_read_failed(kind, 1 << 20, EBADF, __LINE__);
    }
    close(directory);
    close(ends[0]);
    close(ends[1]);
}

static void test_offsets_past_4_gib(void)
{
    off_t far = ((off_t)5 << 30) + 3;
    int kind;

    for (kind = KDA_FILE; kind <= KDA_DIRECT; kind++) {
        int fd = file_of_pattern(1);
        target to = target_new(4);
        kda_span span = file_span(fd, (uint64_t)far, 4);
        kda_cursor cursor = {0, 0, 0, 0};

        span.kind = kind;
        need(pwrite(fd, "far.", 4, far) == 4, "pwrite at 5 GiB");
        CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes, "far.", 4) == 0 && target_is_fenced(&to));
        CHECK(lseek(fd, 0, SEEK_CUR) == 0); /* the file's own position is not moved */
        close(fd);
        free(to.memory);
    }
}

#if defined(__linux__)
/* Reads this process's own memory as a file, in which a page is missing: the read before it is
 * short, and the one at it fails. */
static void test_reads_that_are_short(void)
{
    unsigned char *region = mmap(NULL, (size_t)(4 * BLOCK_BYTES_MAX), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t skip = (size_t)(BLOCK_BYTES_MAX - (uintptr_t)region % BLOCK_BYTES_MAX);
    unsigned char *to = allocate_aligned((size_t)(2 * BLOCK_BYTES_MAX));
    int fd = open("/proc/self/mem", O_RDONLY);
    uint64_t shift;
    uint64_t start;
    int kind;

    need(region != MAP_FAILED, "mmap");
    fill_pattern(region, (size_t)(4 * BLOCK_BYTES_MAX));
    for (kind = KDA_FILE; kind <= KDA_DIRECT && fd >= 0; kind++)
        for (shift = 0; shift < 2; shift++)
            for (start = 0; start <= 20000; start += 20000) {
                unsigned char *source = region + skip + start;
                kda_span span = file_span(fd, (uint64_t)(uintptr_t)source, 66000);
                kda_means means = means_of(1, NO_LIMIT);
                kda_cursor cursor = {0, 0, 0, 0};
                uint64_t good = start == 0 ? 16384 : 480;

                need(munmap(region + skip + 16384 + (start != 0) * 4096, 4096) == 0, "munmap");
                means.block_bytes = BLOCK_BYTES_MAX;
                span.kind = kind;
                CHECK_STATUS(kda_spans_copy(&span, 1, to + shift, 66000, &means, &cursor),
                             KDA_READ_FAILED);
                CHECK(cursor.error == EIO && cursor.done <= good);
                CHECK(memcmp(to + shift, source, (size_t)cursor.done) == 0);
                need(mmap(region + skip + 16384 + (start != 0) * 4096, 4096, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED,
                     "mmap");
            }
    if (fd >= 0)
        close(fd);
    free(to);
    munmap(region, (size_t)(4 * BLOCK_BYTES_MAX));
}
#else
static void test_reads_that_are_short(void) {}
#endif

void test_faults(void)
{
    test_files_cut_short();
    test_the_first_failure_counts();
    test_all_pieces_fail();
    test_files_that_cannot_be_read();
    test_offsets_past_4_gib();
    test_reads_that_are_short();
}
