/* selftest_maps.c: copies of maps whose pages leave, or cannot be had. See selftest.h. */
#include "selftest.h"

#include "kda_guard.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void test_a_map_that_may_not_be_read(void)
{
    int fd = file_of_pattern(4096);
    unsigned char *map = map_of(fd, 4096, PROT_NONE);
    target to = target_new(4096);
    kda_span span = memory_span(map, 4096, 0);
    kda_cursor cursor = {0, 0, 0, 0};

    span.kind = KDA_MAPPED;
    CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_NO_POPULATE);
    CHECK(cursor.error != 0 && target_is_untouched(&to));
    munmap(map, 4096);
    close(fd);
    free(to.memory);
}

#if defined(__linux__)
/* KiB of the map that this process has in memory. */
static long resident_of(const unsigned char *map)
{
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    unsigned long start = 0;
    long resident = -1;

    need(maps != NULL, "/proc/self/smaps");
    while (resident < 0 && fgets(line, sizeof line, maps) != NULL) {
        unsigned long from;
        unsigned long end;

        if (sscanf(line, "%lx-%lx ", &from, &end) == 2)
            start = from;
        else if (start == (unsigned long)(uintptr_t)map && strncmp(line, "Rss:", 4) == 0)
            resident = strtol(line + 4, NULL, 10);
    }
    fclose(maps);
    return resident;
}

static void test_the_pages_of_a_map_leave(void)
{
    origin from = origin_new((size_t)(16 * MIB));
    target to = target_new(from.size);
    kda_span spans[4];
    unsigned threads;
    size_t i;

    for (i = 0; i < 4; i++)
        spans[i] = memory_span(from.map, from.size, 0);
    spans[1].source += 5 * MIB + 40001;
    spans[1].source_bytes = spans[1].row_bytes = 3 * MIB;
    spans[2].rows = 1000;
    spans[2].row_bytes = 3000;
    spans[2].row_stride = 16001;
    spans[3].rows = 160;
    spans[3].row_bytes = 4096;
    spans[3].row_stride = 100001;
    for (threads = 1; threads <= 4 && kda_can_populate(); threads += 3)
        for (i = 0; i < 4; i++) {
            kda_means means = means_of(threads, NO_LIMIT);
            kda_cursor cursor = {0, 0, 0, 0};
            size_t page;
            unsigned sum = 0;

            spans[i].kind = KDA_MAPPED;
            for (page = 0; page < 64; page++) /* as far as these, it is seen that they count */
                sum += ((volatile unsigned char *)from.map)[page * 4096];
            CHECK(sum != 0 && resident_of(from.map) >= 256);
            madvise(from.map, from.size, MADV_DONTNEED);
            CHECK(resident_of(from.map) == 0);
            CHECK_STATUS(kda_spans_copy(&spans[i], 1, to.bytes, to.size, &means, &cursor), KDA_OK);
            CHECK(resident_of(from.map) <= 64); /* the kernel may map a few around the rows */
        }
    free(to.memory);
    origin_free(&from);
}
#else
static void test_the_pages_of_a_map_leave(void) {}
#endif

/* A busy machine may let the one thread or the other have its way for long: then more copies are
 * made, up to so many times as many, until both outcomes were seen. */
#define MANY 50

typedef struct cutter {
    const origin *of;
    int is_over;
} cutter;

/* Cuts the file and mends it, again and again. What is read of it is right or cannot be read. */
static void *cut_and_mend(void *argument)
{
    cutter *mine = argument;
    uint64_t state = 1;

    while (!__atomic_load_n(&mine->is_over, __ATOMIC_ACQUIRE)) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        origin_cut(mine->of, (size_t)((state >> 40) % (mine->of->size / 4096)) * 4096);
        origin_mend(mine->of);
    }
    return NULL;
}

/* Copies of a map whose file is cut and mended meanwhile; `*good` and `*bad` count the outcomes. */
static void expect_copies_of_a_changing_map(size_t size, int copies, int *good, int *bad)
{
    origin from = origin_new(size);
    target to = target_new(size);
    cutter mine = {NULL, 0};
    pthread_t thread;
    int before = *good + *bad;
    int i;

    mine.of = &from;
    need(pthread_create(&thread, NULL, cut_and_mend, &mine) == 0, "pthread_create");
    for (i = 0; i < copies || (i < MANY * copies && (*good == 0 || *bad == 0)); i++) {
        kda_span span = memory_span(from.map + 5, size - 5, 0);
        kda_means means = means_of((unsigned)i % 4, NO_LIMIT);
        kda_cursor cursor = {0, 0, 0, 0};
        int status;

        if (i % 3 == 1) { /* a column slice */
            span.rows = size / 1000;
            span.row_bytes = 900;
            span.row_stride = 999;
        }
        span.kind = KDA_MAPPED;
        status = kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor);
        *good += status == KDA_OK && cursor.span == 1;
        *bad += status == KDA_SOURCE_FAULT && cursor.error == EFAULT && cursor.span == 0;
        if (status == KDA_OK) {
            span.source += from.memory - from.map;
            cursor.done = span.rows * span.row_bytes;
        }
        if (span.rows == 1)
            CHECK(memcmp(to.bytes, from.memory + 5, (size_t)cursor.done) == 0);
        if (i % 64 == 0)
            CHECK(target_is_fenced(&to));
    }
    __atomic_store_n(&mine.is_over, 1, __ATOMIC_RELEASE);
    need(pthread_join(thread, NULL) == 0, "pthread_join");
    CHECK(*good + *bad - before == i);
    free(to.memory);
    origin_free(&from);
}

/* The same with the guarded copy alone, which meets the missing pages itself. */
static void expect_guarded_copies_of_a_changing_map(size_t size, int copies)
{
    origin from = origin_new(size);
    target to = target_new(size);
    cutter mine = {NULL, 0};
    pthread_t thread;
    int good = 0;
    int i;

    CHECK(kda_guard_enter() == 0);
    mine.of = &from;
    need(pthread_create(&thread, NULL, cut_and_mend, &mine) == 0, "pthread_create");
    for (i = 0; i < copies || (i < MANY * copies && (good == 0 || good == i)); i++)
        if (kda_guarded_copy(to.bytes, from.map, size)) {
            good++;
            CHECK(memcmp(to.bytes, from.memory, size) == 0);
        }
    __atomic_store_n(&mine.is_over, 1, __ATOMIC_RELEASE);
    need(pthread_join(thread, NULL) == 0, "pthread_join");
    kda_guard_leave();
    CHECK(good > 0 && good < i && target_is_fenced(&to));
    free(to.memory);
    origin_free(&from);
}

static void test_maps_that_change(void)
{
    int good = 0;
    int bad = 0;

    expect_guarded_copies_of_a_changing_map(1 << 18, 4000);
    if (!kda_can_populate())
        return;
    expect_copies_of_a_changing_map(1 << 17, 3000, &good, &bad);
    expect_copies_of_a_changing_map((size_t)(4 * MIB), 150, &good, &bad);
    CHECK(good > 0 && bad > 0);
}

/* ---- cut when the pages have come -------------------------------------------------------- */

static const origin *cut_then;

static int madvise_and_cut(void *start, size_t bytes, int advice)
{
    int answer = kernel.madvise(start, bytes, advice);

    if (advice != MADV_DONTNEED)
        origin_cut(cut_then, (size_t)BLOCK_BYTES_MAX);
    return answer;
}

/* What is copied of the window by then stays; of one run it is nothing. */
static void test_a_source_that_is_lost_under_the_copy(void)
{
    origin from = origin_new((size_t)(3 * MIB));
    target to = target_new(from.size);
    target expected = target_new(from.size);
    size_t rows;

    cut_then = &from;
    for (rows = 1; rows <= 3000; rows += 2999) {
        kda_span span = memory_span(from.map, from.size, 0);
        kda_cursor cursor = {0, 0, 0, 0};
        uint64_t lands = 0;

        if (rows > 1) {
            span.rows = rows;
            span.row_bytes = 900;
            span.row_stride = 1000;
            lands = landing_of(&span, BLOCK_BYTES_MAX);
        }
        copy_slowly(&span, 1, NULL, expected.bytes);
        span.kind = KDA_MAPPED;
        answers.madvise = madvise_and_cut;
        CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_SOURCE_FAULT);
        answers = kernel;
        CHECK(cursor.span == 0 && cursor.error == EFAULT);
        CHECK(cursor.done <= lands && lands - cursor.done <= 900);
        CHECK(memcmp(to.bytes, expected.bytes, (size_t)cursor.done) == 0);
        origin_mend(&from);
        CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes, expected.bytes, (size_t)(span.rows * span.row_bytes)) == 0);
        CHECK(target_is_fenced(&to));
    }
    free(expected.memory);
    free(to.memory);
    origin_free(&from);
}

/* ---- faults that are not the copy's ------------------------------------------------------ */

/* Meets no fault of the copies, and is below the guard again after each. */
static void child_with_a_handler_before_a_copy(const void *given)
{
    unsigned char bytes[64];
    kda_span span = memory_span(faulty->map + 8000, sizeof bytes, 0);
    int round;

    (void)given;
    span.kind = KDA_MAPPED;
    for (round = 0; round < 3; round++) {
        kda_cursor cursor = {0, 0, 0, 0};

        set_handler(mend_it, NULL, 0);
        origin_mend(faulty);
        CHECK_STATUS(copy_once(&span, 1, bytes, sizeof bytes, NO_LIMIT, &cursor), KDA_OK);
        CHECK(kda_guard_enter() == 0);
        expect_foreign_faults_met();
        kda_guard_leave();
    }
}

/* A shared map is a destination like another: its missing pages are met by the handler that there
 * is, in whichever thread. */
static void child_with_a_destination_that_is_missing(const void *given)
{
    origin to = origin_new((size_t)(8 * MIB));
    kda_span span = memory_span(to.memory, to.size, 0);
    kda_means means = means_of(5, NO_LIMIT);
    int repeat;

    (void)given;
    faulty = &to;
    set_handler(mend_it, NULL, 0);
    for (repeat = 0; repeat < 10; repeat++) {
        kda_cursor cursor = {0, 0, 0, 0};

        memset(to.map, 0, to.size);
        origin_cut(&to, 4096);
        faults_met = 0;
        CHECK_STATUS(kda_spans_copy(&span, 1, to.map, to.size, &means, &cursor), KDA_OK);
        CHECK(faults_met > 0 && memcmp(to.map, to.memory, to.size) == 0);
    }
    origin_free(&to);
    free(means.bounce);
}

void test_maps(void)
{
    origin of_two_pages = origin_new(8192);

    test_a_map_that_may_not_be_read();
    test_the_pages_of_a_map_leave();
    test_maps_that_change();
    faulty = &of_two_pages;
    if (kda_can_populate())
        EXPECT_CHILD(child_with_a_handler_before_a_copy, NULL);
    if (kda_can_populate() && can_answer())
        test_a_source_that_is_lost_under_the_copy();
    EXPECT_CHILD(child_with_a_destination_that_is_missing, NULL);
    origin_free(&of_two_pages);
}
