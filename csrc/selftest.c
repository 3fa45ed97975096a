/* selftest.c: every status of every function in kda_copy.h and kda_system.h, without a framework.
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

uint64_t landing_of(const kda_span *span, uint64_t end)
{
    uint64_t row = end / span->row_stride;
    uint64_t within = end % span->row_stride;

    return row * span->row_bytes + (within < span->row_bytes ? within : span->row_bytes);
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

#if defined(KDA_COVERAGE) && defined(__clang__)
int __llvm_profile_write_file(void);
void __llvm_profile_reset_counters(void);

void keep_coverage(void)
{
    (void)__llvm_profile_write_file();
}

void forget_coverage(void)
{
    __llvm_profile_reset_counters();
}
#elif defined(KDA_COVERAGE)
void __gcov_dump(void);
void __gcov_reset(void);

void keep_coverage(void)
{
    __gcov_dump();
    __gcov_reset(); /* else it is the last time */
}

void forget_coverage(void)
{
    __gcov_reset();
}
#else
void keep_coverage(void) {}
void forget_coverage(void) {}
#endif

/* What waitpid says of a child that ran `body`. */
static int state_of_child(child_body *body, const void *given)
{
    int state = -1;
    pid_t child;

    fflush(stdout);
    child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        alarm(60);
        checks_failed = 0;
        body(given);
        fflush(stdout);
        keep_coverage();
        _exit(checks_failed != 0); /* leaks are looked for in the parent */
    }
    need(waitpid(child, &state, 0) == child, "waitpid");
    return state;
}

void expect_child(child_body *body, const void *given, const char *text, const char *file,
                  int line)
{
    int state = state_of_child(body, given);

    check(WIFEXITED(state) && WEXITSTATUS(state) == 0, text, file, line);
}

void expect_signal(child_body *body, const void *given, const char *text, const char *file,
                   int line)
{
    int state = state_of_child(body, given);

    check(WIFSIGNALED(state) && WTERMSIG(state) == SIGBUS, text, file, line);
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
    test_arguments();
    test_copies();
    test_blocks();
    test_faults();
    test_maps();
    test_guard();
    test_guard_threads();
    test_answers();
    test_system();
    test_values();
    free(means_of(1, 0).bounce);
    if (checks_failed != 0)
        printf("%d checks passed, %d failed\n", checks_passed, checks_failed);
    else
        printf("%d checks passed\n", checks_passed);
    return checks_failed != 0;
}

