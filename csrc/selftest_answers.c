/* selftest_answers.c: copies for which the system's answers are told, since they are seldom. */
#include "selftest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifndef EHWPOISON
#define EHWPOISON EIO
#endif

/* ---- reads ------------------------------------------------------------------------------- */

/* What the next reads come to: at most so many bytes, or an errno below 0. Then, the kernel's. */
static const long *told;
static const long *told_end;

static ssize_t pread_as_told(int fd, void *to, size_t bytes, off_t at)
{
    long answer = told < told_end ? *told++ : (long)bytes;

    if (answer < 0) {
        errno = (int)-answer;
        return -1;
    }
    return kernel.pread(fd, to, (size_t)answer < bytes ? (size_t)answer : bytes, at);
}

/* Two blocks and a half in one way, in place or through the bounce memory. */
static void expect_reads(int kind, size_t shift, const long *reads, size_t count, int expected,
                         int error, uint64_t done, int line)
{
    origin from = origin_new((size_t)(2 * BLOCK_BYTES_MAX));
    unsigned char *to = allocate_aligned(from.size);
    kda_span span = file_span(from.fd, 4096, 10240);
    kda_cursor cursor = {0, 0, 7, 0};
    int calls = 1;

    span.kind = kind;
    memset(to, GUARD, from.size);
    told = reads;
    told_end = reads + count;
    answers.pread = pread_as_told;
    STATUS_AT(copy_once(&span, 1, to + shift, 10240, NO_LIMIT, &cursor), expected, "copy", line);
    CHECK_AT(cursor.span == (expected == KDA_OK) && cursor.done == done, "cursor", line);
    CHECK_AT(cursor.error == error, "errno", line);
    CHECK_AT(told == told_end, "no read that was foreseen is left out", line);
    CHECK_AT(expected == KDA_OK || memcmp(to + shift, from.memory + 4096, (size_t)done) == 0,
             "what landed", line);
    answers = kernel;
    while (copy_once(&span, 1, to + shift, 10240, NO_LIMIT, &cursor) == KDA_PAUSED && calls < 9)
        calls++; /* the same cursor goes on */
    CHECK_AT(cursor.span == 1 && cursor.done == 0 && cursor.error == 0, "done", line);
    CHECK_AT(memcmp(to + shift, from.memory + 4096, 10240) == 0, "all of it", line);
    CHECK_AT(all_guard(to, shift) && all_guard(to + shift + 10240, 4096), "nothing else", line);
    free(to);
    origin_free(&from);
}

#define EXPECT_READS(kind, shift, expected, error, done, ...)                                      \
    do {                                                                                           \
        static const long reads[] = {__VA_ARGS__};                                                 \
        expect_reads(kind, shift, reads, sizeof reads / sizeof reads[0], expected, error, done,    \
                     __LINE__);                                                                    \
    } while (0)

static void test_reads_of_a_file(void)
{
    EXPECT_READS(KDA_FILE, 0, KDA_PAUSED, 0, 0, -EINTR);
    EXPECT_READS(KDA_FILE, 0, KDA_PAUSED, 0, 1001, 1000, 1, -EINTR);
    EXPECT_READS(KDA_FILE, 1, KDA_READ_FAILED, EIO, 4097, 4097, -EIO);
    EXPECT_READS(KDA_FILE, 1, KDA_FILE_END, 0, 3, 3, 0);
    EXPECT_READS(KDA_FILE, 1, KDA_OK, 0, 0, 1, 2, 4096, 5000);
}

/* Less than a block is kept for nothing, and the next read says why there was no more. */
static void test_reads_of_blocks(void)
{
    size_t shift;

    for (shift = 0; shift <= 1; shift++) {
        EXPECT_READS(KDA_DIRECT, shift, KDA_PAUSED, 0, 0, -EINTR);
        EXPECT_READS(KDA_DIRECT, shift, KDA_READ_FAILED, EINVAL, 0, -EINVAL);
        EXPECT_READS(KDA_DIRECT, shift, KDA_FILE_END, 0, 0, 0);
    }
    EXPECT_READS(KDA_DIRECT, 0, KDA_PAUSED, 0, 0, 512, 512);
    EXPECT_READS(KDA_DIRECT, 0, KDA_PAUSED, 0, 0, 512, -EINTR);
    EXPECT_READS(KDA_DIRECT, 0, KDA_FILE_END, 0, 0, 512, 0);
    EXPECT_READS(KDA_DIRECT, 0, KDA_FILE_END, 0, 0, 512, -EINVAL); /* no read within a block */
    EXPECT_READS(KDA_DIRECT, 0, KDA_READ_FAILED, EIO, 0, 512, -EIO);
    EXPECT_READS(KDA_DIRECT, 0, KDA_FILE_END, 0, 0, 511); /* no disk stops there, but a file does */
    EXPECT_READS(KDA_DIRECT, 0, KDA_PAUSED, 0, 4096, 4096 + 512, -EINTR);
    EXPECT_READS(KDA_DIRECT, 0, KDA_OK, 0, 0, 4096 + 511, 4096);
    EXPECT_READS(KDA_DIRECT, 1, KDA_PAUSED, 0, 512, 512, -EINTR); /* bounced: all that came */
    EXPECT_READS(KDA_DIRECT, 1, KDA_OK, 0, 0, 4096, 511 + 4096);
}

/* ---- pages of a map ---------------------------------------------------------------------- */

static int error_told;

static int no_page(void *start, size_t bytes, int advice)
{
    if (advice == MADV_DONTNEED)
        return kernel.madvise(start, bytes, advice);
    errno = error_told;
    return -1;
}

static void expect_no_page(int error, int expected, int can_populate, int line)
{
    origin from = origin_new(8192);
    target to = target_new(8192);
    kda_span span = memory_span(from.map, from.size, 0);
    kda_cursor cursor = {0, 0, 7, 0};

    span.kind = KDA_MAPPED;
    error_told = error;
    answers.madvise = no_page;
    STATUS_AT(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), expected, "copy", line);
    CHECK_AT(cursor.span == 0 && cursor.done == 0, "cursor", line);
    CHECK_AT(cursor.error == (expected == KDA_PAUSED ? 0 : error), "errno", line);
    CHECK_AT(target_is_untouched(&to), "nothing is written", line);
    CHECK_AT(kda_can_populate() == can_populate, "what the kernel can do", line);
    answers = kernel;
    if (kda_can_populate()) {
        STATUS_AT(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK, "copy", line);
        CHECK_AT(memcmp(to.bytes, from.memory, from.size) == 0 && target_is_fenced(&to), "all",
                 line);
    }
    free(to.memory);
    origin_free(&from);
}

static void test_pages_that_do_not_come(void)
{
    expect_no_page(EINTR, KDA_PAUSED, 1, __LINE__);
    expect_no_page(EAGAIN, KDA_PAUSED, 1, __LINE__);
    expect_no_page(EFAULT, KDA_SOURCE_FAULT, 1, __LINE__);
    expect_no_page(EHWPOISON, KDA_SOURCE_FAULT, 1, __LINE__);
    expect_no_page(ENOMEM, KDA_SOURCE_FAULT, 1, __LINE__);
    expect_no_page(EINVAL, KDA_NO_POPULATE, 0, __LINE__); /* a kernel before 5.14 */
    expect_no_page(ENOSYS, KDA_NO_POPULATE, 1, __LINE__); /* a filter of system calls */
    expect_no_page(EPERM, KDA_NO_POPULATE, 1, __LINE__);
}

/* ---- the handler of SIGBUS --------------------------------------------------------------- */

static int sigactions_passed;

static int sigaction_fails(int number, const struct sigaction *action, struct sigaction *before)
{
    if (sigactions_passed-- > 0)
        return kernel.sigaction(number, action, before);
    errno = EPERM;
    return -1;
}

static void meet_nothing(int number)
{
    (void)number;
}

static int is_met_by(void (*handler)(int))
{
    struct sigaction now;

    return kernel.sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == handler;
}

/* The guard cannot be asked for, or not be set: copies of maps are refused, others are not. */
static void test_no_guard(void)
{
    origin from = origin_new(4096);
    target to = target_new(12288);
    kda_span spans[3];
    int passed;

    spans[0] = memory_span(from.memory, 4096, 0);
    spans[1] = memory_span(from.map, 4096, 4096);
    spans[1].kind = KDA_MAPPED;
    spans[2] = memory_span(from.memory, 4096, 8192);
    set_handler(meet_nothing, NULL, 0);
    for (passed = 0; passed <= 1; passed++) {
        kda_cursor cursor = {0, 0, 7, 0};

        target_clear(&to);
        answers.sigaction = sigaction_fails;
        sigactions_passed = passed;
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_NO_GUARD);
        CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == EPERM);
        CHECK(target_is_untouched(&to));
        cursor.span = 1;
        sigactions_passed = passed;
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_NO_GUARD);
        CHECK(cursor.span == 1 && cursor.done == 0 && cursor.error == EPERM);
        cursor.span = 2; /* the map is behind: no guard is needed */
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes + 8192, from.memory, 4096) == 0 && cursor.error == 0);
        answers = kernel;
        CHECK(is_met_by(meet_nothing));
        memset(&cursor, 0, sizeof cursor);
        if (kda_can_populate())
            CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(is_met_by(meet_nothing)); /* whoever was refused is owed nothing */
    }
    set_handler(SIG_DFL, NULL, 0);
    free(to.memory);
    origin_free(&from);
}

/* The copy is done, and the handler cannot be asked for: it stays until the next one leaves. */
static void test_a_guard_that_cannot_leave(void)
{
    origin from = origin_new(4096);
    target to = target_new(4096);
    kda_span span = memory_span(from.map, 4096, 0);
    kda_cursor cursor = {0, 0, 0, 0};

    span.kind = KDA_MAPPED;
    set_handler(meet_nothing, NULL, 0);
    answers.sigaction = sigaction_fails;
    sigactions_passed = 2; /* of kda_guard_enter */
    CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor),
                 kda_can_populate() ? KDA_OK : KDA_NO_POPULATE);
    answers = kernel;
    CHECK(!is_met_by(meet_nothing));
    memset(&cursor, 0, sizeof cursor);
    CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor),
                 kda_can_populate() ? KDA_OK : KDA_NO_POPULATE);
    CHECK(is_met_by(meet_nothing));
    set_handler(SIG_DFL, NULL, 0);
    free(to.memory);
    origin_free(&from);
}

/* ---- threads ----------------------------------------------------------------------------- */

static int threads_left;

static int no_more_threads(pthread_t *thread, const pthread_attr_t *attributes,
                           void *(*body)(void *), void *argument)
{
    return threads_left-- > 0 ? kernel.pthread_create(thread, attributes, body, argument) : EAGAIN;
}

static int no_attributes(pthread_attr_t *attributes)
{
    (void)attributes;
    return ENOMEM;
}

/* Those that begin, and the caller's, do it all. */
static void test_fewer_threads_than_asked_for(void)
{
    origin from = origin_new((size_t)(20 * MIB));
    target to = target_new(from.size);
    kda_span span = memory_span(from.memory, from.size, 0);
    int begun;

    for (begun = -1; begun <= 3; begun++) {
        kda_means means = means_of(8, NO_LIMIT);
        kda_cursor cursor = {0, 0, 0, 0};

        target_clear(&to);
        answers.pthread_create = no_more_threads;
        threads_left = begun;
        if (begun < 0)
            answers.pthread_attr_init = no_attributes;
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK);
        CHECK(threads_left == -1); /* one refusal is enough */
        answers = kernel;
        CHECK(memcmp(to.bytes, from.memory, from.size) == 0 && target_is_fenced(&to));
    }
    free(to.memory);
    origin_free(&from);
}

/* Of three pieces the second fails first, then the third, then the first, each in a thread. */
static void *(*body_of_thread)(void *);
static int is_first_begun;
static int is_third_begun;
static int threads_ended;

static void wait_for(const int *what, int least)
{
    static const struct timespec nap = {0, 100000};

    while (__atomic_load_n(what, __ATOMIC_ACQUIRE) < least)
        nanosleep(&nap, NULL);
}

static void *begin_after_the_first(void *argument)
{
    wait_for(&is_first_begun, 1);
    body_of_thread(argument);
    __atomic_add_fetch(&threads_ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

static int thread_after_the_first(pthread_t *thread, const pthread_attr_t *attributes,
                                  void *(*body)(void *), void *argument)
{
    body_of_thread = body;
    return kernel.pthread_create(thread, attributes, begin_after_the_first, argument);
}

static ssize_t pread_fails_in_turn(int fd, void *to, size_t bytes, off_t at)
{
    (void)fd;
    (void)to;
    (void)bytes;
    if (at == 0) {
        __atomic_store_n(&is_first_begun, 1, __ATOMIC_RELEASE);
        wait_for(&threads_ended, 2);
        errno = EIO;
    } else if (at == (off_t)MIB) {
        wait_for(&is_third_begun, 1);
        errno = EBADF;
    } else {
        __atomic_store_n(&is_third_begun, 1, __ATOMIC_RELEASE);
        wait_for(&threads_ended, 1);
        errno = EISDIR;
    }
    return -1;
}

static void child_whose_first_failure_comes_last(const void *given)
{
    target to = target_new((size_t)(3 * MIB));
    kda_means means = means_of(3, NO_LIMIT);
    kda_span spans[3];
    size_t count;
    size_t i;

    (void)given;
    for (count = 1; count <= 3; count += 2) { /* the pieces of one span, and of three */
        kda_cursor cursor = {0, 0, 0, 0};

        for (i = 0; i < count; i++) {
            spans[i] = file_span(0, i * MIB, 3 * MIB / count);
            spans[i].destination = i * MIB;
        }
        is_first_begun = is_third_begun = threads_ended = 0;
        answers.pread = pread_fails_in_turn;
        answers.pthread_create = thread_after_the_first;
        CHECK_STATUS(kda_spans_copy(spans, count, to.bytes, to.size, &means, &cursor),
                     KDA_READ_FAILED);
        answers = kernel;
        CHECK(threads_ended == 2);
        CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == EIO);
        CHECK(target_is_untouched(&to));
    }
    free(to.memory);
}

/* ---- time -------------------------------------------------------------------------------- */

/* A clock that goes on by `tick` nanoseconds with each look at it: so long a piece takes. */
static uint64_t time_told;
static uint64_t tick;

static int clock_that_ticks(clockid_t clock, struct timespec *now)
{
    CHECK(clock == CLOCK_MONOTONIC);
    time_told += tick;
    now->tv_sec = (time_t)(time_told / 1000000000);
    now->tv_nsec = (long)(time_told % 1000000000);
    return 0;
}

/* Copies piece by piece, each of which takes as long; how long they are, in KiB. */
static void expect_pieces(uint64_t nanoseconds, const uint64_t *kib, size_t count, int line)
{
    unsigned char *memory = allocate_aligned((size_t)(40 * MIB)); /* pieces end where blocks do */
    target to = target_new((size_t)(40 * MIB));
    kda_span span = memory_span(memory, to.size, 0);
    kda_means means = means_of(1, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    size_t i;

    fill_pattern(memory, to.size);
    answers.clock_gettime = clock_that_ticks;
    tick = nanoseconds;
    for (i = 0; i < count; i++) {
        uint64_t before = cursor.done;

        STATUS_AT(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED, "copy",
                  line);
        CHECK_AT(cursor.done - before == kib[i] << 10, "as long as expected", line);
        CHECK_AT(memcmp(to.bytes, memory, (size_t)cursor.done) == 0, "what landed", line);
        CHECK_AT(all_guard(to.bytes + cursor.done, to.size - (size_t)cursor.done), "no more", line);
    }
    answers = kernel;
    free(memory);
    free(to.memory);
}

static void test_pieces_are_as_long_as_they_are_fast(void)
{
    static const uint64_t quick[] = {1024, 2048, 4096, 8192, 8192};
    static const uint64_t middling[] = {1024, 1024, 1024};
    static const uint64_t slow[] = {1024, 512, 256, 256};

    expect_pieces(1000, quick, 5, __LINE__);
    expect_pieces(3999999, quick, 5, __LINE__);
    expect_pieces(4000000, middling, 3, __LINE__);
    expect_pieces(20000000, middling, 3, __LINE__);
    expect_pieces(20000001, slow, 4, __LINE__);
    expect_pieces(5000000000, slow, 4, __LINE__);
}

/* The clock is looked at twice for a piece, and once before each piece but the first. */
static void test_a_call_takes_no_longer_than_it_may(void)
{
    unsigned char *memory = allocate_aligned((size_t)(4 * MIB));
    target to = target_new((size_t)(4 * MIB));
    kda_span span = memory_span(memory, to.size, 0);
    static const struct {
        uint64_t nanoseconds_max;
        uint64_t pieces;
    } expected[] = {{0, 1}, {1, 1}, {30000000, 1}, {30000001, 2}, {60000000, 2}, {60000001, 3}};
    size_t i;

    fill_pattern(memory, to.size);
    for (i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        kda_means means = means_of(1, expected[i].nanoseconds_max);
        kda_cursor cursor = {0, 0, 0, 0};

        answers.clock_gettime = clock_that_ticks;
        tick = 10000000;
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_PAUSED);
        CHECK(cursor.span == 0 && cursor.done == expected[i].pieces * MIB);
        answers = kernel;
    }
    free(memory);
    free(to.memory);
}

void test_answers(void)
{
    if (!can_answer())
        return;
    test_reads_of_a_file();
    test_reads_of_blocks();
    test_pages_that_do_not_come();
    test_no_guard();
    test_a_guard_that_cannot_leave();
    test_fewer_threads_than_asked_for();
    EXPECT_CHILD(child_whose_first_failure_comes_last, NULL);
    test_pieces_are_as_long_as_they_are_fast();
    test_a_call_takes_no_longer_than_it_may();
}
