/* selftest_faults.c: sources that fail, the handler of SIGBUS, and what the kernel may answer but
 * seldom does. What ends a process, or changes it for good, is done in a child. See selftest.h. */
#include "selftest.h"

#include "kda_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

static const unsigned thread_counts[] = {1, 2, 5, 16};
enum { THREAD_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };

/* Checks that the child ended well, or leaves it out. */
static void expect_child(int (*body)(const void *), const void *given, int line)
{
    int state = state_of_child(body, given);

    if (WIFEXITED(state) && WEXITSTATUS(state) == LEFT_OUT)
        leave_out("system calls cannot be denied here");
    else
        CHECK_AT(WIFEXITED(state) && WEXITSTATUS(state) == 0, "in a child", line);
}

/* ---- sources that fail ------------------------------------------------------------------- */

/* Bytes of the source [0, extent) that a copy of `span` lands before it comes to `end`. */
static uint64_t landing_of(const kda_span *span, uint64_t end)
{
    uint64_t row = end / span->row_stride;
    uint64_t within = end % span->row_stride;

    return row * span->row_bytes + (within < span->row_bytes ? within : span->row_bytes);
}

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
static void test_reads_that_are_short(void) {}
static void test_the_pages_of_a_map_leave(void) {}
#endif

/* ---- the handler of SIGBUS --------------------------------------------------------------- */

/* Copies out of a map that ends within, by the guarded copy itself. */
static void test_a_guarded_copy_of_missing_pages(void)
{
    static const size_t sizes[] = {1, 100, 4096, 70000, 300000, 1000000};
    origin from = origin_new((size_t)(2 * MIB));
    target to = target_new((size_t)MIB);
    size_t i;
    int repeat;

    CHECK(kda_guard_enter() == 0);
    for (repeat = 0; repeat < 20; repeat++)
        for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            size_t kept = (size_t)(MIB - (uint64_t)repeat % 2 * 4096);
            const unsigned char *source = from.map + kept - sizes[i] + 1 + (size_t)repeat;

            origin_cut(&from, kept);
            target_clear(&to);
            CHECK(kda_guarded_copy(to.bytes, source, sizes[i]) == 0);
            CHECK(target_is_fenced(&to));
            origin_mend(&from);
            CHECK(kda_guarded_copy(to.bytes, source, sizes[i]) == 1);
            CHECK(memcmp(to.bytes, source, sizes[i]) == 0);
        }
    CHECK(kda_guard_enter() == 0); /* it is on top already */
    free(to.memory);
    origin_free(&from);
}

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

/* Copies of a map whose file is cut and mended meanwhile. */
static void expect_copies_of_a_changing_map(size_t size, int copies)
{
    origin from = origin_new(size);
    target to = target_new(size);
    cutter mine = {NULL, 0};
    pthread_t thread;
    int good = 0;
    int bad = 0;
    int i;

    mine.of = &from;
    need(pthread_create(&thread, NULL, cut_and_mend, &mine) == 0, "pthread_create");
    for (i = 0; i < copies || (i < MANY * copies && (good == 0 || bad == 0)); i++) {
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
        good += status == KDA_OK && cursor.span == 1;
        bad += status == KDA_SOURCE_FAULT && cursor.error == EFAULT && cursor.span == 0;
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
    CHECK(good + bad == i);
    CHECK(good > 0 && bad > 0);
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
    CHECK(good > 0 && good < i && target_is_fenced(&to));
    free(to.memory);
    origin_free(&from);
}

static void test_maps_that_change(void)
{
    expect_guarded_copies_of_a_changing_map(1 << 18, 4000);
    if (!kda_can_populate())
        return;
    expect_copies_of_a_changing_map(1 << 17, 3000);
    expect_copies_of_a_changing_map((size_t)(4 * MIB), 150);
}

/* What the handlers below do with a fault that is not the guard's. */
static const origin *faulty;
static volatile sig_atomic_t faults_met;
static struct sigaction handed_down;

static void mend_it(int number)
{
    (void)number;
    ++faults_met;
    if (ftruncate(faulty->fd, (off_t)faulty->size) != 0)
        _exit(1);
}

static void mend_it_with_info(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (number == SIGBUS && info != NULL && info->si_signo == SIGBUS)
        mend_it(number);
}

/* Hands every fault down to the handler that was there before. */
static void hand_down(int number, siginfo_t *info, void *context)
{
    if (++faults_met > 100)
        _exit(1);
    if (handed_down.sa_flags & SA_SIGINFO)
        handed_down.sa_sigaction(number, info, context);
    else if (handed_down.sa_handler != SIG_DFL)
        handed_down.sa_handler(number);
    else
        _exit(0);
}

static void set_handler(void (*plain)(int), void (*informed)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action;

    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_flags = flags;
    if (informed != NULL) {
        action.sa_flags |= SA_SIGINFO;
        action.sa_sigaction = informed;
    } else {
        action.sa_handler = plain;
    }
    need(sigaction(SIGBUS, &action, &handed_down) == 0, "sigaction");
}

/* A fault outside of every guarded copy. */
static unsigned touch_missing_page(void)
{
    origin_cut(faulty, 4096);
    return ((volatile unsigned char *)faulty->map)[8000];
}

/* A guarded copy that fails: it is not handed on. */
static void expect_guarded(void)
{
    unsigned char bytes[64];
    int before = faults_met;

    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(bytes, faulty->map + 8000, sizeof bytes) == 0);
    CHECK(faults_met == before);
}

/* A foreign fault, a fault in the destination of a guarded copy, and one sent: all are met by the
 * handler that is set. */
static void expect_foreign_faults_met(void)
{
    static const unsigned char above_or_below[64] = {1};
    unsigned char bytes[64] = {2};
    int before = faults_met;

    touch_missing_page();
    CHECK(faults_met == before + 1);
    expect_guarded();
    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(faulty->map + 8000, bytes, sizeof bytes) == 1);
    CHECK(faults_met == before + 2 && faulty->map[8000] == 2);
    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(faulty->map + 8000, above_or_below, sizeof bytes) == 1);
    CHECK(faults_met == before + 3 && faulty->map[8000] == 1);
    CHECK(raise(SIGBUS) == 0 && faults_met == before + 4);
    CHECK(kill(getpid(), SIGBUS) == 0 && faults_met == before + 5);
    expect_guarded();
    touch_missing_page(); /* at a place that a guarded copy which failed has left */
    CHECK(faults_met == before + 6);
    CHECK(kda_guarded_copy(bytes, faulty->map + 8000, sizeof bytes) == 1 && bytes[0] == 0);
    touch_missing_page(); /* and one that went well */
    CHECK(faults_met == before + 7);
}

static int child_with_a_plain_handler(const void *given)
{
    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
    return 0;
}

static int child_with_an_informed_handler(const void *given)
{
    (void)given;
    set_handler(NULL, mend_it_with_info, 0);
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
    return 0;
}

/* A handler that is set later, in each form, is put below at the next copy. */
static int child_with_later_handlers(const void *given)
{
    int i;

    (void)given;
    CHECK(kda_guard_enter() == 0);
    for (i = 0; i < 6; i++) {
        set_handler(mend_it, i % 2 == 0 ? NULL : mend_it_with_info, i < 3 ? 0 : SA_NODEFER);
        touch_missing_page(); /* met by it alone, so far */
        CHECK(kda_guard_enter() == 0);
        expect_foreign_faults_met();
    }
    return 0;
}

/* As above, but the next copy is one of kda_spans_copy. */
static int child_with_a_handler_before_a_copy(const void *given)
{
    unsigned char bytes[64];
    kda_span span = memory_span(faulty->map + 8000, sizeof bytes, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    int round;

    (void)given;
    span.kind = KDA_MAPPED;
    for (round = 0; round < 3; round++) {
        set_handler(mend_it, NULL, 0);
        origin_mend(faulty);
        memset(&cursor, 0, sizeof cursor);
        CHECK_STATUS(copy_once(&span, 1, bytes, sizeof bytes, NO_LIMIT, &cursor), KDA_OK);
        CHECK(kda_guard_enter() == 0);
        expect_foreign_faults_met();
        kda_guard_leave();
    }
    return 0;
}

/* The source is cut when its pages have been had, by the handler that mends the destination. */
static const origin *cut_then;

static void mend_it_and_cut(int number)
{
    mend_it(number);
    if (ftruncate(cut_then->fd, (off_t)BLOCK_BYTES_MAX) != 0)
        _exit(1);
}

static int child_that_loses_its_source(const void *given)
{
    origin from = origin_new((size_t)(3 * MIB));
    origin to = origin_new((size_t)(4 * MIB)); /* a shared map is a destination like another */
    size_t rows;

    (void)given;
    cut_then = &from;
    faulty = &to;
    set_handler(mend_it_and_cut, NULL, 0);
    for (rows = 1; rows <= 3000; rows += 2999) {
        kda_span span = memory_span(from.map, from.size, 0);
        kda_cursor cursor = {0, 0, 0, 0};
        uint64_t lands = 0; /* nothing: the window is one run */

        if (rows > 1) {
            span.rows = rows;
            span.row_bytes = 900;
            span.row_stride = 1000;
            lands = landing_of(&span, BLOCK_BYTES_MAX);
        }
        span.kind = KDA_MAPPED;
        origin_mend(&from);
        origin_cut(&to, 4096);
        faults_met = 0;
        CHECK_STATUS(copy_once(&span, 1, to.map, to.size, NO_LIMIT, &cursor), KDA_SOURCE_FAULT);
        CHECK(faults_met == 1 && cursor.span == 0 && cursor.error == EFAULT);
        CHECK(cursor.done <= lands && lands - cursor.done <= 900);
        CHECK(rows == 1 || memcmp(to.map, from.memory, 900) == 0);
        origin_mend(&from);
        CHECK_STATUS(copy_once(&span, 1, to.map, to.size, NO_LIMIT, &cursor), KDA_OK);
        copy_slowly(&span, 1, NULL, to.memory);
        CHECK(memcmp(to.map, to.memory, (size_t)(span.rows * span.row_bytes)) == 0);
    }
    origin_free(&to);
    origin_free(&from);
    free(means_of(1, 0).bounce);
    return 0;
}

/* A destination that is slow for a while: pieces become shorter, and all lands. */
static void mend_it_slowly(int number)
{
    struct timespec wait = {0, 30000000};

    nanosleep(&wait, NULL);
    mend_it(number);
}

static int child_with_a_slow_destination(const void *given)
{
    origin to = origin_new((size_t)(8 * MIB));
    kda_span span = memory_span(to.memory, to.size, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    int repeat;

    (void)given;
    faulty = &to;
    set_handler(mend_it_slowly, NULL, 0);
    origin_cut(&to, (size_t)(3 * MIB / 2));
    CHECK_STATUS(copy_once(&span, 1, to.map, to.size, NO_LIMIT, &cursor), KDA_OK);
    CHECK(faults_met == 1 && memcmp(to.map, to.memory, to.size) == 0);
    for (repeat = 0; repeat < 10; repeat++) { /* in whichever thread */
        kda_means means = means_of(5, NO_LIMIT);

        memset(to.map, 0, to.size);
        memset(&cursor, 0, sizeof cursor);
        origin_cut(&to, 4096);
        CHECK_STATUS(kda_spans_copy(&span, 1, to.map, to.size, &means, &cursor), KDA_OK);
        CHECK(memcmp(to.map, to.memory, to.size) == 0);
    }
    origin_free(&to);
    free(means_of(1, 0).bounce);
    return 0;
}

/* A later handler that hands faults down to the guard's: each is met once by each, and then ends
 * the process, as the default below them does. */
static int child_with_handlers_in_turn(const void *given)
{
    set_handler(SIG_DFL, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    set_handler(NULL, hand_down, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    if (given != NULL)
        raise(SIGBUS);
    else
        touch_missing_page();
    return 1;
}

/* A handler that asked to be called once: the second time ends the process. */
static void count_and_go_on(int number)
{
    (void)number;
    if (++faults_met > 100)
        _exit(1);
}

static int child_with_a_handler_for_once(const void *given)
{
    (void)given;
    set_handler(count_and_go_on, NULL, (int)SA_RESETHAND);
    CHECK(kda_guard_enter() == 0);
    touch_missing_page();
    return 1;
}

/* A caller that lets no signal through is guarded all the same, and lets none through after. */
static int child_that_blocks_signals(const void *given)
{
    unsigned char bytes[64];
    kda_span span = memory_span(faulty->memory, sizeof bytes, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    sigset_t all;
    sigset_t during;
    sigset_t after;

    (void)given;
    sigfillset(&all);
    CHECK(kda_guard_enter() == 0);
    need(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0, "pthread_sigmask");
    CHECK(kda_guard_unblock() == 1);
    expect_guarded();
    CHECK(kda_guard_unblock() == 0);
    need(pthread_sigmask(SIG_SETMASK, NULL, &during) == 0, "pthread_sigmask");
    CHECK(!sigismember(&during, SIGBUS) && sigismember(&during, SIGINT));
    kda_guard_block();
    CHECK_STATUS(copy_once(&span, 1, bytes, sizeof bytes, NO_LIMIT, &cursor), KDA_OK);
    need(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0, "pthread_sigmask");
    CHECK(sigismember(&after, SIGBUS) && sigismember(&after, SIGINT));
    return 0;
}

/* The signal is given back when the last one leaves, and not taken from who took it since. */
static int child_that_leaves(const void *given)
{
    struct sigaction now;

    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    CHECK(kda_guard_enter() == 0);
    kda_guard_leave();
    expect_guarded();
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == mend_it);
    kda_guard_leave(); /* owed to nobody */
    CHECK(kda_guard_enter() == 0);
    set_handler(SIG_IGN, NULL, 0);
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == SIG_IGN);
    return 0;
}

/* Ignored where it is sent, and the guard stays. */
static int child_that_ignores(const void *given)
{
    set_handler(SIG_IGN, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    CHECK(raise(SIGBUS) == 0);
    CHECK(kill(getpid(), SIGBUS) == 0);
    if (given != NULL)
        expect_guarded();
    return 0;
}

/* The three ways in which a signal that nobody handles ends a process. */
static int child_by_default(const void *given)
{
    const int *how = given;

    set_handler(SIG_DFL, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    if (*how == 0)
        touch_missing_page();
    else if (*how == 1)
        raise(SIGBUS);
    else
        kill(getpid(), SIGBUS);
    return 1;
}

/* Copies in one thread, and foreign faults in another: each is met where it belongs. */
static void *guarded_again_and_again(void *argument)
{
    static unsigned char bytes[8192];
    const unsigned char *map = argument;
    long guarded = 0;
    int i;

    for (i = 0; i < 20000; i++)
        guarded += kda_guarded_copy(bytes, map, sizeof bytes) == 0;
    return (void *)guarded;
}

static int child_with_two_threads(const void *given)
{
    origin cut = origin_new(8192);
    pthread_t thread;
    void *guarded = NULL;
    int i;

    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    origin_cut(&cut, 4096);
    need(pthread_create(&thread, NULL, guarded_again_and_again, cut.map) == 0, "pthread_create");
    for (i = 0; i < 2000; i++) {
        touch_missing_page();
        expect_guarded();
    }
    need(pthread_join(thread, &guarded) == 0, "pthread_join");
    CHECK(faults_met == 2000 && (long)guarded == 20000);
    origin_free(&cut);
    return 0;
}

/* Many threads install the guard while others set handlers, and processes are forked meanwhile. */
static int installers_are_over;

static void *install_again_and_again(void *argument)
{
    while (!__atomic_load_n(&installers_are_over, __ATOMIC_ACQUIRE)) {
        if (argument != NULL)
            set_handler(mend_it, NULL, 0);
        if (kda_guard_enter() != 0)
            abort();
    }
    return NULL;
}

static int child_of_installers(const void *given)
{
    (void)given;
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    return 0;
}

static int child_with_installers(const void *given)
{
    pthread_t threads[3];
    int i;

    for (i = 0; i < 3; i++)
        need(pthread_create(&threads[i], NULL, install_again_and_again,
                            i == 0 ? &installers_are_over : NULL) == 0,
             "pthread_create");
    for (i = 0; i < 30; i++)
        expect_child(child_of_installers, given, __LINE__);
    __atomic_store_n(&installers_are_over, 1, __ATOMIC_RELEASE);
    for (i = 0; i < 3; i++)
        need(pthread_join(threads[i], NULL) == 0, "pthread_join");
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
    return 0;
}

static void expect_signal(int (*body)(const void *), const void *given, int line)
{
    int state = state_of_child(body, given);

    CHECK_AT(WIFSIGNALED(state) && WTERMSIG(state) == SIGBUS, "ended by SIGBUS", line);
}

static void test_handlers(void)
{
    static const int yes = 1;
    origin from = origin_new(8192);
    int how;

    faulty = &from;
    expect_child(child_with_a_plain_handler, NULL, __LINE__);
    expect_child(child_with_an_informed_handler, NULL, __LINE__);
    expect_child(child_with_later_handlers, NULL, __LINE__);
    if (kda_can_populate())
        expect_child(child_with_a_handler_before_a_copy, NULL, __LINE__);
    if (kda_can_populate())
        expect_child(child_that_loses_its_source, NULL, __LINE__);
    expect_child(child_with_a_slow_destination, NULL, __LINE__);
    for (how = 0; how < 3; how++)
        expect_signal(child_by_default, &how, __LINE__);
    expect_child(child_that_leaves, NULL, __LINE__);
    expect_child(child_that_ignores, NULL, __LINE__);
    expect_child(child_that_ignores, &yes, __LINE__);
    expect_child(child_with_two_threads, NULL, __LINE__);
    expect_child(child_with_installers, NULL, __LINE__);
    expect_child(child_that_blocks_signals, NULL, __LINE__);
    expect_signal(child_with_a_handler_for_once, NULL, __LINE__);
    expect_signal(child_with_handlers_in_turn, NULL, __LINE__);
    expect_signal(child_with_handlers_in_turn, &yes, __LINE__);
    origin_free(&from);
}

/* ---- what the kernel may answer, and seldom does ------------------------------------------ */

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MADV_POPULATE_READ_NUMBER 22
#define ANY 6 /* an argument that no call has */

/* From here on this process gets `error` for the system call when its argument has the value, or
 * has any other, or without a look at it. */
typedef struct denial {
    long call;
    size_t argument;
    unsigned int value;
    int is_other;
    int error;
} denial;

static int deny(denial what)
{
    size_t argument = what.argument == ANY ? 0 : what.argument;
    unsigned int at = (unsigned int)(offsetof(struct seccomp_data, args) + argument * 8);
    unsigned int answer = SECCOMP_RET_ERRNO | ((unsigned int)what.error & SECCOMP_RET_DATA);
    unsigned char equal = what.is_other && what.argument != ANY;
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)what.call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, what.value, equal, !equal),
        BPF_STMT(BPF_RET | BPF_K, answer),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};

    if (what.argument == ANY) /* on to the answer whatever it is */
        code[3].jf = 0;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return 0;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

typedef struct answer {
    int kind;
    int error;
    int expected;
} answer;

/* Copies one span for which its system call gives an error. */
static int child_copies(const void *given)
{
    const answer *asked = given;
    origin from = origin_new(4096);
    target to = target_new(4096);
    kda_span span = memory_span(from.map, 4096, 0);
    kda_cursor cursor = {0, 0, 7, 0};
    denial madvise_denied = {SYS_madvise, 2, MADV_POPULATE_READ_NUMBER, 0, 0};
    denial pread_denied = {SYS_pread64, 0, 0, 0, 0};
    int denied;

    span.kind = asked->kind;
    span.fd = from.fd;
    madvise_denied.error = pread_denied.error = asked->error;
    pread_denied.value = (unsigned int)from.fd;
    denied = deny(asked->kind == KDA_MAPPED ? madvise_denied : pread_denied);
    if (denied) {
        CHECK_STATUS(copy_once(&span, 1, to.bytes, to.size, NO_LIMIT, &cursor), asked->expected);
        CHECK(cursor.span == 0 && cursor.done == 0);
        CHECK(cursor.error == (asked->expected == KDA_PAUSED ? 0 : asked->error));
        CHECK(target_is_untouched(&to));
        if (asked->kind == KDA_MAPPED)
            CHECK(kda_can_populate() == (asked->error != EINVAL));
    }
    free(to.memory);
    free(means_of(1, 0).bounce);
    origin_free(&from);
    return denied ? 0 : LEFT_OUT;
}

/* The guard cannot be set, or not even asked for: copies of maps are refused, others are not. */
static int child_without_a_guard(const void *given)
{
    denial denied = {SYS_rt_sigaction, 0, SIGBUS, 0, EPERM};
    origin from = origin_new(4096);
    target to = target_new(12288);
    kda_span spans[3];
    kda_cursor cursor = {0, 0, 7, 0};
    int status;

    if (given != NULL) {
        denied.argument = 1; /* the new handler: other than null */
        denied.value = 0;
        denied.is_other = 1;
    }
    spans[0] = memory_span(from.memory, 4096, 0);
    spans[1] = memory_span(from.map, 4096, 4096);
    spans[1].kind = KDA_MAPPED;
    spans[2] = memory_span(from.memory, 4096, 8192);
    set_handler(SIG_DFL, NULL, 0);
    status = deny(denied) ? 0 : LEFT_OUT;
    if (status == 0) {
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_NO_GUARD);
        CHECK(cursor.span == 0 && cursor.done == 0 && cursor.error == EPERM);
        CHECK(target_is_untouched(&to));
        cursor.span = 1;
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_NO_GUARD);
        CHECK(cursor.span == 1 && cursor.done == 0 && cursor.error == EPERM);
        cursor.span = 2; /* the map is behind: no guard is needed */
        CHECK_STATUS(copy_once(spans, 3, to.bytes, to.size, NO_LIMIT, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes + 8192, from.memory, 4096) == 0 && cursor.error == 0);
    }
    free(to.memory);
    free(means_of(1, 0).bounce);
    origin_free(&from);
    return status;
}

static void *do_nothing(void *argument)
{
    return argument;
}

/* No thread can be begun: the caller's does it all. */
static int child_without_threads(const void *given)
{
    denial clone3_denied = {SYS_clone3, ANY, 0, 0, EAGAIN};
    denial clone_denied = {SYS_clone, ANY, 0, 0, EAGAIN};
    origin from = origin_new((size_t)(5 * MIB));
    target to = target_new(from.size);
    kda_span span = memory_span(from.memory, from.size, 0);
    kda_means means = means_of(8, NO_LIMIT);
    kda_cursor cursor = {0, 0, 0, 0};
    pthread_t thread;
    int status = deny(clone3_denied) && deny(clone_denied) ? 0 : LEFT_OUT;

    (void)given;
    if (status == 0) {
        CHECK(pthread_create(&thread, NULL, do_nothing, NULL) != 0);
        CHECK_STATUS(kda_spans_copy(&span, 1, to.bytes, to.size, &means, &cursor), KDA_OK);
        CHECK(memcmp(to.bytes, from.memory, from.size) == 0 && target_is_fenced(&to));
    }
    free(to.memory);
    free(means.bounce);
    origin_free(&from);
    return status;
}

static void expect_answer(int kind, int error, int expected, int line)
{
    answer asked = {0, 0, 0};

    asked.kind = kind;
    asked.error = error;
    asked.expected = expected;
    expect_child(child_copies, &asked, line);
}

static void test_answers_of_the_kernel(void)
{
    static const int yes = 1;

    expect_answer(KDA_FILE, EINTR, KDA_PAUSED, __LINE__);
    expect_answer(KDA_FILE, EIO, KDA_READ_FAILED, __LINE__);
    expect_answer(KDA_DIRECT, EINTR, KDA_PAUSED, __LINE__);
    expect_answer(KDA_DIRECT, EINVAL, KDA_READ_FAILED, __LINE__);
    expect_answer(KDA_MAPPED, EINTR, KDA_PAUSED, __LINE__);
    expect_answer(KDA_MAPPED, EAGAIN, KDA_PAUSED, __LINE__);
    expect_answer(KDA_MAPPED, EHWPOISON, KDA_SOURCE_FAULT, __LINE__);
    expect_answer(KDA_MAPPED, EINVAL, KDA_NO_POPULATE, __LINE__); /* a kernel before 5.14 */
    expect_child(child_without_a_guard, NULL, __LINE__);
    expect_child(child_without_a_guard, &yes, __LINE__);
    expect_child(child_without_threads, NULL, __LINE__);
}
#else
static void test_answers_of_the_kernel(void)
{
    leave_out("the answers of the kernel are tested on Linux alone");
}
#endif

void test_faults(void)
{
    test_files_cut_short();
    test_the_first_failure_counts();
    test_all_pieces_fail();
    test_a_map_that_may_not_be_read();
    test_files_that_cannot_be_read();
    test_offsets_past_4_gib();
    test_reads_that_are_short();
    test_the_pages_of_a_map_leave();
    test_a_guarded_copy_of_missing_pages();
    test_maps_that_change();
    test_handlers();
    test_answers_of_the_kernel();
}
