/* selftest_copies.c: rows from every kind of source, cut, paused and resumed. See selftest.h. */
#include "selftest.h"

#include "kda_guard.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void test_joined_and_empty_spans(void)
{
    static const unsigned char q[] = "qqqq", k[] = "kkkk", v[] = "vvvv";
    target to = target_new(24);
    kda_means means = means_of(1, NO_LIMIT);
    kda_span spans[8];
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
    spans[6] = spans[5];
    spans[6].kind = KDA_DIRECT;
    spans[7] = memory_span(q, 4, 20);
    for (means.threads = 0; means.threads <= 2; means.threads++) {
        target_clear(&to);
        CHECK_STATUS(copy_all(spans, 8, &to, &means, &cursor, &calls), KDA_OK);
        CHECK(calls == 1 && cursor.span == 8 && cursor.done == 0 && cursor.error == 0);
        CHECK(memcmp(to.bytes, "qqqqkkkkvvvv", 12) == 0);
        CHECK(all_guard(to.bytes + 12, 8));
        CHECK(memcmp(to.bytes + 20, "qqqq", 4) == 0 && target_is_fenced(&to));
    }
    free(to.memory);
}

/* ---- every kind, in any number of threads ------------------------------------------------ */

static const unsigned thread_counts[] = {0, 1, 2, 5, 16, 100};
enum { THREAD_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };

/* One span in one way, with each number of threads, in one call and in many. */
static void expect_way(kda_span span, const target *expected, int calls_least, int line)
{
    static const uint64_t budgets[] = {0, 1, HOUR, NO_LIMIT};
    target to = target_new(expected->size);
    size_t b;
    size_t t;

    for (b = 0; b < 4; b++)
        for (t = b % 2; t < THREAD_COUNTS; t += 1 + b % 2) {
            kda_means means = means_of(thread_counts[t], budgets[b]);
            kda_cursor cursor;
            int calls;

            target_clear(&to);
            STATUS_AT(copy_all(&span, 1, &to, &means, &cursor, &calls), KDA_OK, "copy", line);
            CHECK_AT(cursor.span == 1 && cursor.done == 0 && cursor.error == 0, "cursor", line);
            CHECK_AT(memcmp(to.memory, expected->memory, to.size + 2 * GUARD_BYTES) == 0,
                     "bytes as expected", line);
            CHECK_AT(budgets[b] > 1 || calls >= calls_least, "paused often enough", line);
            CHECK_AT(budgets[b] < HOUR || calls == 1, "paused without need", line);
        }
    free(to.memory);
}

/* A span over from->memory, brought in by every way there is. */
static void expect_copied(const origin *from, kda_span span, int calls_least, int line)
{
    target expected = target_new((size_t)(span.rows * span.row_bytes));
    int way;

    copy_slowly(&span, 1, NULL, expected.bytes);
    for (way = 0; way < WAYS; way++)
        if (can_go(from, way, &span))
            expect_way(by_way(from, way, span), &expected, calls_least, line);
    free(expected.memory);
}

/* Pieces that go fast grow from call to call, up to 8 MiB, and a foolish length is none. */
static void test_pieces_go_on_as_long_as_they_were(void)
{
    origin from = origin_new((size_t)(40 * MIB));
    target to = target_new(from.size);
    kda_span span = memory_span(from.memory, from.size, 0);
    kda_means means = means_of(1, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    uint64_t longest = 0;
    int status = KDA_PAUSED;

    while (status == KDA_PAUSED) {
        uint64_t before = cursor.done;

        status = kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor);
        if (status == KDA_PAUSED && cursor.done - before > longest)
            longest = cursor.done - before;
    }
    CHECK_STATUS(status, KDA_OK);
    CHECK(longest > MIB && longest <= 8 * MIB);
    CHECK(memcmp(to.bytes, from.memory, from.size) == 0);
    memset(&cursor, 0, sizeof cursor);
    cursor.piece_bytes = UINT64_MAX;
    CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED);
    CHECK(cursor.done <= MIB);
    memset(&cursor, 0, sizeof cursor);
    cursor.piece_bytes = 1;
    CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED);
    CHECK(cursor.done > MIB / 2 && cursor.done <= MIB);
    free(to.memory);
    origin_free(&from);
}

static void test_rows_from_every_kind_of_source(void)
{
    origin from = origin_new((size_t)(6 * MIB));
    kda_span span = memory_span(from.memory + 3, from.size - 3, 0);

    if (from.direct < 0)
        leave_out("there is no O_DIRECT on this file system");
    expect_copied(&from, span, 6, __LINE__); /* several pieces, at an odd address */
    span.rows = 16; /* rows that adjoin are one run */
    span.row_bytes = span.row_stride = MIB / 8;
    expect_copied(&from, span, 2, __LINE__);
    span.rows = 5 * 1024; /* a column slice: short rows, short gaps, over several pieces */
    span.row_bytes = 300;
    span.row_stride = 1021;
    expect_copied(&from, span, 5, __LINE__);
    span.rows = 4; /* few bytes in rows far apart are one piece */
    span.row_bytes = 5000;
    span.row_stride = MIB + 17;
    expect_copied(&from, span, 1, __LINE__);
    span.rows = 20; /* rows far apart, a piece ends within one */
    span.row_bytes = 130000;
    span.row_stride = 130000 + 65537;
    expect_copied(&from, span, 2, __LINE__);
    span.row_stride--; /* the longest gap that is had along with the rows */
    expect_copied(&from, span, 2, __LINE__);
    span.rows = 2; /* rows longer than a piece, with a short gap */
    span.row_bytes = 2 * MIB + 5;
    span.row_stride = 2 * MIB + 99;
    expect_copied(&from, span, 5, __LINE__);
    span.row_stride = 3 * MIB + 99; /* and with a long one */
    expect_copied(&from, span, 5, __LINE__);
    span.rows = 1;
    span.row_bytes = 1;
    span.row_stride = 0; /* of no matter with one row */
    expect_copied(&from, span, 1, __LINE__);
    origin_free(&from);
}

/* Pieces that have grown to their longest, in every way. */
static void test_long_spans(void)
{
    origin from = origin_new((size_t)(64 * MIB + 4321));
    kda_span whole = memory_span(from.memory + 4097, from.size - 4097 - 77, 0);
    target to = target_new((size_t)whole.row_bytes);
    int way;

    for (way = 0; way < WAYS; way++) {
        kda_span span = by_way(&from, way, whole);
        kda_means means = means_of(way % 2 == 0 ? 5 : 1, NO_LIMIT);
        kda_cursor cursor;
        int calls;

        if (!can_go(&from, way, &whole))
            continue;
        target_clear(&to);
        CHECK_STATUS(copy_all(&span, 1, &to, &means, &cursor, &calls), KDA_OK);
        CHECK(memcmp(to.bytes, whole.source, to.size) == 0 && target_is_fenced(&to));
    }
    free(to.memory);
    origin_free(&from);
}

/* A span with random rows, in a random way, whose source is there. */
static kda_span random_span(const origin *from, uint64_t row_bytes_max, uint64_t gap_max)
{
    uint64_t start = random_below(from->size / 2);
    kda_span span = memory_span(from->memory + start, from->size - start, 0);
    uint64_t rows_max;
    int way;

    span.row_bytes = random_below(row_bytes_max);
    span.row_stride = span.row_bytes + random_below(2) * random_below(gap_max);
    rows_max = span.row_stride == 0 ? 20 : (from->size - start - span.row_bytes) / span.row_stride;
    span.rows = random_below(rows_max < 20 ? rows_max + 1 : 20);
    do
        way = (int)random_below(WAYS);
    while (!can_go(from, way, &span));
    return by_way(from, way, span);
}

/* Lists of random spans, of all kinds, resumed at random with any number of threads. */
static void expect_random_lists(int lists, size_t size, uint64_t row_bytes_max, uint64_t gap_max)
{
    enum { SPANS_MAX = 8 };
    origin from = origin_new(size);
    int list;

    for (list = 0; list < lists; list++) {
        kda_span spans[SPANS_MAX];
        size_t count = (size_t)random_below(SPANS_MAX + 1);
        kda_means means = means_of(1, random_below(2) == 0 ? 0 : NO_LIMIT);
        kda_cursor cursor = {0, 0, 0, 0};
        uint64_t used = 0;
        target to;
        target expected;
        size_t i;
        int status;

        for (i = 0; i < count; i++) {
            spans[i] = random_span(&from, row_bytes_max, gap_max);
            spans[i].destination = used + random_below(9) * random_below(600);
            used = spans[i].destination + spans[i].rows * spans[i].row_bytes;
        }
        to = target_new((size_t)used);
        expected = target_new((size_t)used);
        copy_slowly(spans, count, from.memory, expected.bytes);
        do {
            means.threads = thread_counts[random_below(THREAD_COUNTS)];
            status = kda_spans_copy(spans, count, to.bytes, to.size, &means, &cursor);
        } while (status == KDA_PAUSED);
        CHECK_STATUS(status, KDA_OK);
        CHECK(cursor.span == count && cursor.done == 0);
        CHECK(memcmp(to.memory, expected.memory, (size_t)used + 2 * GUARD_BYTES) == 0);
        free(to.memory);
        free(expected.memory);
    }
    origin_free(&from);
}

static void test_random_lists(void)
{
    expect_random_lists(400, 1 << 16, 700, 900);
    expect_random_lists(30, (size_t)(8 * MIB), 900000, 140000);
}

/* ---- pausing ----------------------------------------------------------------------------- */

static void test_stop_before_the_call(void)
{
    origin from = origin_new((size_t)(3 * MIB));
    kda_span span = memory_span(from.memory, from.size, 0);
    target to = target_new(from.size);
    size_t t;

    for (t = 0; t < THREAD_COUNTS; t++) {
        kda_means means = means_of(thread_counts[t], NO_LIMIT);
        kda_cursor cursor = {0, 5, 7, 0};
        int stop = 1;

        means.stop = &stop;
        target_clear(&to);
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED);
        CHECK(cursor.span == 0 && cursor.done == 5 && cursor.error == 0);
        CHECK(target_is_untouched(&to));
        CHECK_STATUS(kda_spans_copy(&span, 0, to.bytes, to.size, &means, &cursor),
                     KDA_BAD_ARGUMENT); /* what is checked is checked all the same */
        stop = 0;
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes + 5, from.memory + 5, from.size - 5) == 0 && all_guard(to.bytes, 5));
        stop = 1; /* a list that is done needs no piece */
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK);
    }
    free(to.memory);
    origin_free(&from);
}

typedef struct stopper {
    int stop;
    long nanoseconds;
} stopper;

/* Sets `stop` a little later. */
static void *stop_soon(void *argument)
{
    stopper *mine = argument;
    struct timespec wait = {0, 0};

    wait.tv_nsec = mine->nanoseconds;
    nanosleep(&wait, NULL);
    __atomic_store_n(&mine->stop, 1, __ATOMIC_RELAXED);
    return NULL;
}

/* Another thread sets `stop` in the midst of the copy, again and again; how often it paused. */
static int copy_with_stops(const kda_span *span, const target *to, unsigned threads)
{
    kda_cursor cursor = {0, 0, 0, 0};
    int paused = 0;
    int status = KDA_PAUSED;

    while (status == KDA_PAUSED) {
        kda_means means = means_of(threads, NO_LIMIT);
        stopper mine = {0, 0};
        pthread_t thread;

        mine.nanoseconds = (long)random_below(3000000);
        means.stop = &mine.stop;
        need(pthread_create(&thread, NULL, stop_soon, &mine) == 0, "pthread_create");
        status = kda_spans_copy(span, 1, to->bytes, to->size, &means, &cursor);
        need(pthread_join(thread, NULL) == 0, "pthread_join");
        paused += status == KDA_PAUSED;
        CHECK(status != KDA_PAUSED || (cursor.span == 0 && cursor.error == 0));
    }
    CHECK_STATUS(status, KDA_OK);
    return paused;
}

static void test_stop_during_the_call(void)
{
    origin from = origin_new((size_t)(24 * MIB));
    kda_span whole = memory_span(from.memory + 9, from.size - 9, 0);
    target to = target_new((size_t)whole.row_bytes);
    int paused = 0;
    int way;
    unsigned threads;

    for (way = 0; way < WAYS; way++)
        for (threads = 1; threads <= 4 && can_go(&from, way, &whole); threads += 3) {
            kda_span span = by_way(&from, way, whole);

            target_clear(&to);
            paused += copy_with_stops(&span, &to, threads);
            CHECK(memcmp(to.bytes, whole.source, to.size) == 0 && target_is_fenced(&to));
        }
    CHECK(paused > 0);
    free(to.memory);
    origin_free(&from);
}

/* No time at all is one piece a call, of a MiB at most, with however many threads. */
static void test_one_piece_a_call(void)
{
    origin from = origin_new((size_t)(5 * MIB + 11));
    target to = target_new(from.size);
    kda_span spans[2];
    size_t t;

    spans[0] = memory_span(from.memory, (size_t)(2 * MIB), 0);
    spans[1] = memory_span(from.memory + 2 * MIB, (size_t)(3 * MIB + 11), 2 * MIB);
    for (t = 0; t < THREAD_COUNTS; t++) {
        kda_means means = means_of(thread_counts[t], 0);
        kda_cursor cursor = {0, 0, 0, 0};
        uint64_t landed = 0;
        int status = KDA_PAUSED;

        target_clear(&to);
        while (status == KDA_PAUSED) {
            uint64_t now;

            cursor.piece_bytes = 0;
            status = kda_spans_copy(spans, 2, to.bytes, to.size, &means, &cursor);
            now = status == KDA_OK ? from.size : cursor.span * 2 * MIB + cursor.done;
            CHECK(now > landed && now - landed <= MIB);
            landed = now;
            CHECK(memcmp(to.bytes, from.memory, (size_t)landed) == 0);
            CHECK(all_guard(to.bytes + landed, from.size - (size_t)landed));
        }
        CHECK_STATUS(status, KDA_OK);
        CHECK(target_is_fenced(&to));
    }
    free(to.memory);
    origin_free(&from);
}

/* Pieces of one long row end at multiples of 64 KiB in the file or the memory. */
static void test_where_pieces_end(void)
{
    origin from = origin_new((size_t)(4 * MIB));
    kda_span whole = memory_span(from.memory + 12345, from.size - 12345, 0);
    target to = target_new((size_t)whole.row_bytes);
    int way;

    for (way = 0; way < WAYS; way++) {
        kda_span span = by_way(&from, way, whole);
        uint64_t start = span.source != NULL ? (uintptr_t)span.source : span.file_offset;
        kda_means means = means_of(1, 0);
        kda_cursor cursor = {0, 0, 0, 0};

        while (can_go(&from, way, &whole) &&
               kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor) == KDA_PAUSED &&
               cursor.done < span.row_bytes)
            CHECK((start + cursor.done) % BLOCK_BYTES_MAX == 0);
    }
    free(to.memory);
    origin_free(&from);
}

static int signals_met;

static void meet_signal(int number)
{
    (void)number;
    __atomic_add_fetch(&signals_met, 1, __ATOMIC_RELAXED);
}

/* The threads take no signal that the caller holds back, and the caller's mask stays. */
static void test_signals_are_left_to_the_caller(void)
{
    origin from = origin_new((size_t)(16 * MIB));
    kda_span span = memory_span(from.memory, from.size, 0);
    target to = target_new(from.size);
    kda_means means = means_of(8, NO_LIMIT);
    kda_cursor cursor = {0, 0, 0, 0};
    struct sigaction action;
    struct sigaction before;
    sigset_t held;
    sigset_t kept;
    sigset_t now;
    int number;
    int differ = 0;

    memset(&action, 0, sizeof action);
    action.sa_handler = meet_signal;
    need(sigaction(SIGUSR1, &action, &before) == 0, "sigaction");
    sigemptyset(&held);
    sigaddset(&held, SIGUSR1);
    need(pthread_sigmask(SIG_BLOCK, &held, &kept) == 0, "pthread_sigmask");
    CHECK(!sigismember(&kept, SIGUSR1)); /* no copy before this one has left it held back */
    need(kill(getpid(), SIGUSR1) == 0, "kill");
    CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK);
    CHECK(memcmp(to.bytes, from.memory, from.size) == 0);
    CHECK(__atomic_load_n(&signals_met, __ATOMIC_RELAXED) == 0);
    need(pthread_sigmask(SIG_UNBLOCK, &held, &now) == 0, "pthread_sigmask");
    CHECK(__atomic_load_n(&signals_met, __ATOMIC_RELAXED) == 1);
    for (number = 1; number < 32; number++)
        differ += sigismember(&now, number) != (number == SIGUSR1 || sigismember(&kept, number));
    CHECK(differ == 0);
    need(pthread_sigmask(SIG_SETMASK, &kept, NULL) == 0, "pthread_sigmask");
    need(sigaction(SIGUSR1, &before, NULL) == 0, "sigaction");
    free(to.memory);
    origin_free(&from);
}

/* ---- whole blocks ------------------------------------------------------------------------ */

/* 1 when the descriptor can be read in blocks of this size. */
static int reads_blocks(int fd, uint64_t block)
{
    kda_means means = means_of(1, NO_LIMIT);

    return pread(fd, means.bounce, (size_t)block, 0) == (ssize_t)block;
}

/* A span in blocks to an address that is `shift` past one: it lands, and nothing else does. */
static void expect_blocks(const origin *from, const kda_means *means, kda_span span,
                          unsigned char *room, uint64_t shift)
{
    unsigned char *bytes = room + BLOCK_BYTES_MAX + shift;
    size_t fence = (size_t)(2 * means->block_bytes);
    size_t size = (size_t)span.row_bytes;
    kda_cursor cursor = {0, 0, 0, 0};
    int status;

    fence = fence < BLOCK_BYTES_MAX ? fence : (size_t)BLOCK_BYTES_MAX;
    memset(bytes - fence, GUARD, size + 2 * fence);
    do
        status = kda_spans_copy(&span, 1, bytes, size, means, &cursor);
    while (status == KDA_PAUSED);
    CHECK_STATUS(status, KDA_OK);
    CHECK(memcmp(bytes, from->memory + span.file_offset, size) == 0);
    CHECK(all_guard(bytes - fence, fence) && all_guard(bytes + size, fence));
}

/* Spans that begin `begun` bytes into a block of the file and land `shift` bytes into one. */
static void expect_blocks_at(const origin *from, const kda_means *means, int way, uint64_t begun,
                             uint64_t shift, unsigned char *room)
{
    uint64_t block = means->block_bytes;
    uint64_t rest = block - begun;
    uint64_t left = from->size - (block + begun);
    uint64_t sizes[13];
    size_t i;

    sizes[0] = 1;
    sizes[1] = rest - 1; /* ends before its first block does */
    sizes[2] = rest;
    sizes[3] = rest + 1;
    sizes[4] = rest + block - 1;
    sizes[5] = rest + block;
    sizes[6] = rest + block + 1;
    sizes[7] = block - 1;
    sizes[8] = block;
    sizes[9] = block + 1;
    sizes[10] = left - 1;
    sizes[11] = left; /* to the end of the file, which is within a block */
    sizes[12] = left - from->size % block;
    for (i = 0; i < 13; i++) {
        kda_span span = memory_span(from->memory + block + begun, sizes[i], 0);

        if (sizes[i] == 0 || sizes[i] > left)
            continue;
        expect_blocks(from, means, by_way(from, way, span), room, shift);
    }
}

static void test_blocks_at_all_alignments(void)
{
    static const uint64_t blocks[] = {512, 4096, 65536};
    origin from = origin_new((size_t)(5 * BLOCK_BYTES_MAX + 1234));
    unsigned char *room = allocate_aligned(from.size + 4 * BLOCK_BYTES_MAX);
    kda_span any = memory_span(from.memory, 1, 0);
    size_t b;
    int way;
    int i;
    int j;

    for (way = BY_BLOCKS; way <= BY_DIRECT; way++)
        for (b = 0; b < 3; b++) {
            uint64_t block = blocks[b];
            uint64_t shifts[4];

            shifts[0] = 0;
            shifts[1] = 1;
            shifts[2] = block / 2;
            shifts[3] = block - 1;
            if (!can_go(&from, way, &any) ||
                !reads_blocks(way == BY_DIRECT ? from.direct : from.fd, block))
                continue;
            for (i = 0; i < 4; i++)
                for (j = 0; j < 4; j++) {
                    kda_means means = means_of((unsigned)(i + j) % 4, (uint64_t)(j % 2) * HOUR);

                    means.block_bytes = block; /* as little bounce memory as may be, or more */
                    means.bounce_bytes = block * (i % 2 == 0 ? 3 : 7) + block / 2;
                    expect_blocks_at(&from, &means, way, shifts[i], shifts[j], room);
                }
        }
    free(room);
    origin_free(&from);
}

/* Several pieces in several threads, all aligned and not, with gaps between the spans. */
static void test_lists_of_blocks(void)
{
    origin from = origin_new((size_t)(6 * MIB + 99));
    unsigned char *room = allocate_aligned(from.size + (size_t)MIB);
    unsigned char *expected = allocate(from.size + (size_t)MIB);
    size_t size = from.size + (size_t)MIB;
    unsigned threads;
    int way;

    for (way = BY_BLOCKS; way <= BY_DIRECT; way++)
        for (threads = 1; threads <= 5 && (way == BY_BLOCKS || from.direct >= 0); threads++) {
            kda_means means = means_of(threads, threads == 3 ? 0 : NO_LIMIT);
            kda_cursor cursor = {0, 0, 0, 0};
            kda_span spans[3];
            int status;

            spans[0] = memory_span(from.memory + 100, (size_t)(2 * MIB + 5), 100); /* agree */
            spans[1] = memory_span(from.memory + 8192, (size_t)(2 * MIB), 3 * MIB + 1);
            spans[2] = memory_span(from.memory + 6 * MIB, 99, 6 * MIB);
            spans[0] = by_way(&from, way, spans[0]);
            spans[1] = by_way(&from, way, spans[1]);
            spans[2] = by_way(&from, way, spans[2]);
            memset(room, GUARD, size);
            memset(expected, GUARD, size);
            copy_slowly(spans, 3, from.memory, expected);
            do
                status = kda_spans_copy(spans, 3, room, size, &means, &cursor);
            while (status == KDA_PAUSED);
            CHECK_STATUS(status, KDA_OK);
            CHECK(memcmp(room, expected, size) == 0);
        }
    free(expected);
    free(room);
    origin_free(&from);
}

/* ---- the copy itself --------------------------------------------------------------------- */

static void expect_plain_copy(const unsigned char *source, size_t bytes, size_t shift)
{
    target to = target_new(bytes + 128);

    kda_plain_copy(to.bytes + shift, source, bytes);
    CHECK(memcmp(to.bytes + shift, source, bytes) == 0);
    CHECK(all_guard(to.memory, GUARD_BYTES + shift));
    CHECK(all_guard(to.bytes + shift + bytes, 128 - shift + GUARD_BYTES));
    target_clear(&to);
    CHECK(kda_guarded_copy(to.bytes + shift, source, bytes) == 1);
    CHECK(memcmp(to.bytes + shift, source, bytes) == 0);
    CHECK(all_guard(to.memory, GUARD_BYTES + shift));
    CHECK(all_guard(to.bytes + shift + bytes, 128 - shift + GUARD_BYTES));
    free(to.memory);
}

static void test_copies_at_all_alignments(void)
{
    enum { LONG = 256 << 10 }; /* from here on past the caches */
    static const size_t sizes[] = {0, 1, 2, 63, 64, 65, LONG - 65, LONG - 1, LONG, LONG + 1,
                                   LONG + 63, LONG + 64, LONG + 65, (1 << 20) + 7};
    unsigned char *memory = allocate((1 << 20) + 256);
    size_t i;
    size_t a;

    fill_pattern(memory, (1 << 20) + 256);
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (a = 0; a <= 64; a++) {
            size_t step = sizes[i] < 100 ? 1 : 13 + a % 7; /* all pairs of the short ones */
            size_t b;

            for (b = (sizes[i] < 100 ? 0 : a % 13); b <= 64; b += step)
                expect_plain_copy(memory + a, sizes[i], b);
        }
    free(memory);
}

void test_copies(void)
{
    test_joined_and_empty_spans();
    test_rows_from_every_kind_of_source();
    test_pieces_go_on_as_long_as_they_were();
    test_long_spans();
    test_random_lists();
    test_stop_before_the_call();
    test_stop_during_the_call();
    test_one_piece_a_call();
    test_where_pieces_end();
    test_signals_are_left_to_the_caller();
    test_blocks_at_all_alignments();
    test_lists_of_blocks();
    test_copies_at_all_alignments();
}
