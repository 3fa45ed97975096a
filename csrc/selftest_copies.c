/* selftest_copies.c: rows from every kind of source, cut, paused and resumed. See selftest.h. */
#include "selftest.h"

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

/* A length that no call has left there is none: the first piece is of a MiB. */
static void test_foolish_lengths_of_pieces(void)
{
    static const uint64_t foolish[] = {1, 4096, MIB / 4 - 1, 8 * MIB + 1, UINT64_MAX};
    origin from = origin_new((size_t)(2 * MIB));
    target to = target_new(from.size);
    kda_span span = memory_span(from.memory, from.size, 0);
    kda_means means = means_of(1, 0);
    size_t i;

    for (i = 0; i < sizeof foolish / sizeof foolish[0]; i++) {
        kda_cursor cursor = {0, 0, 0, 0};

        cursor.piece_bytes = foolish[i];
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED);
        CHECK(cursor.done > MIB - BLOCK_BYTES_MAX && cursor.done <= MIB);
    }
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

void test_copies(void)
{
    test_joined_and_empty_spans();
    test_rows_from_every_kind_of_source();
    test_foolish_lengths_of_pieces();
    test_long_spans();
    test_random_lists();
    test_stop_before_the_call();
    test_stop_during_the_call();
    test_one_piece_a_call();
    test_where_pieces_end();
    test_signals_are_left_to_the_caller();
}
