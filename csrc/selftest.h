/* selftest.h: what the parts of the self-test share. The parts are
 *
 *   selftest.c                this header's functions, and main
 *   selftest_arguments.c      what the arguments of kda_copy.h may be
 *   selftest_copies.c         every kind of source, cut, paused, resumed, in several threads
 *   selftest_blocks.c         whole blocks, and the copy of bytes itself, at all alignments
 *   selftest_faults.c         files that end or cannot be read
 *   selftest_maps.c           maps whose pages leave, or cannot be had
 *   selftest_guard.c          the handler of SIGBUS
 *   selftest_guard_threads.c  the same amid threads and forks
 *   selftest_kernel.c         how the system's answers are told
 *   selftest_answers.c        copies for which they are told, since they are seldom
 *   selftest_system.c         kda_system.h
 *   selftest_values.c         kda_values.h
 */
#ifndef KDA_SELFTEST_H
#define KDA_SELFTEST_H

#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _GNU_SOURCE /* O_DIRECT */
#endif
#define _FILE_OFFSET_BITS 64

#include "kda_copy.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define MIB ((uint64_t)1 << 20)
#define NO_LIMIT UINT64_MAX
#define HOUR ((uint64_t)3600 * 1000000000)
#define GUARD_BYTES 64
#define GUARD 0xA5
#define BLOCK_BYTES_MAX ((uint64_t)64 << 10)
#define THREADS_MAX 16 /* as many as kda_spans_copy begins */

/* Counts a check, and prints its place when it does not hold. For the first thread alone. */
#define CHECK(condition) CHECK_AT(condition, #condition, __LINE__)
#define CHECK_STATUS(call, expected) STATUS_AT(call, expected, #call, __LINE__)
#define CHECK_AT(condition, text, line) check((condition) != 0, text, __FILE__, line)
#define STATUS_AT(call, expected, text, line) check_status(call, expected, text, __FILE__, line)
void check(int holds, const char *text, const char *file, int line);
void check_status(int status, int expected, const char *text, const char *file, int line);

/* Says that a check is left out, once for each reason. */
void leave_out(const char *what);

/* Ends the program: the machine cannot run the test at all. */
void need(int holds, const char *what);

unsigned char *allocate(size_t bytes);
unsigned char *allocate_aligned(size_t bytes); /* at a multiple of BLOCK_BYTES_MAX */

/* A small generator, so that every run sees the same numbers. */
uint64_t random_below(uint64_t limit);

/* A destination between guard bytes, which fills itself with them too. */
typedef struct target {
    unsigned char *memory;
    unsigned char *bytes;
    size_t size;
} target;

target target_new(size_t size);
void target_clear(const target *of);
int all_guard(const unsigned char *bytes, size_t size);
int target_is_fenced(const target *of);
int target_is_untouched(const target *of);

/* The same bytes, to be had in every way. They differ from their neighbours, from those a page and
 * a block away, and from the guard. */
typedef struct origin {
    size_t size;
    unsigned char *memory;
    unsigned char *map; /* shared, to be read and written */
    int fd;
    int direct; /* the same file opened with O_DIRECT, or -1 */
} origin;

/* A file without a name, in the folder that the self-test lies in or else among temporary files. */
origin origin_new(size_t size);
void origin_free(const origin *of);
void origin_cut(const origin *of, size_t size);
void origin_mend(const origin *of);
int new_file(int *direct);
int file_of_pattern(size_t size);
void fill_pattern(unsigned char *bytes, size_t size);
unsigned char *map_of(int fd, size_t size, int protection);

enum way {
    BY_MEMORY,
    BY_MAP,
    BY_FILE,
    BY_BLOCKS, /* KDA_DIRECT of a descriptor without O_DIRECT */
    BY_DIRECT, /* KDA_DIRECT */
    WAYS
};

/* 1 when this machine can bring in rows like these in this way. */
int can_go(const origin *from, int way, const kda_span *span);

/* The same rows as `span`, whose source is in from->memory, in another way. */
kda_span by_way(const origin *from, int way, kda_span span);

kda_span memory_span(const unsigned char *source, uint64_t bytes, uint64_t destination);
kda_span file_span(int fd, uint64_t file_offset, uint64_t bytes);

/* What a copy has to do, said the slow way. `file` is what the files hold. */
void copy_slowly(const kda_span *spans, size_t count, const unsigned char *file,
                 unsigned char *destination);

/* Bytes that a copy of `span` lands before it comes to byte `end` of the source. */
uint64_t landing_of(const kda_span *span, uint64_t end);

/* Blocks of 4,096 bytes, and bounce memory for 16 threads that all calls share. */
kda_means means_of(unsigned threads, uint64_t nanoseconds_max);

/* kda_spans_copy in this thread alone. */
int copy_once(const kda_span *spans, size_t count, unsigned char *destination,
              uint64_t destination_bytes, uint64_t nanoseconds_max, kda_cursor *cursor);

/* Calls kda_spans_copy until it is not paused; `*calls` says how often. Each call gets further. */
int copy_all(const kda_span *spans, size_t count, const target *to, const kda_means *means,
             kda_cursor *cursor, int *calls);

/* Runs `body` in a process of its own, for at most a few seconds: it ends well when `body` returns
 * and its checks hold, or it is ended by SIGBUS. */
typedef void child_body(const void *given);
#define EXPECT_CHILD(body, given) expect_child(body, given, #body, __FILE__, __LINE__)
#define EXPECT_SIGNAL(body, given) expect_signal(body, given, #body, __FILE__, __LINE__)
void expect_child(child_body *body, const void *given, const char *text, const char *file,
                  int line);
void expect_signal(child_body *body, const void *given, const char *text, const char *file,
                   int line);

/* Where coverage is measured: notes what was run so far, for a process that will not end by exit();
 * or has it forgotten, where threads have disturbed the counts. */
void keep_coverage(void);
void forget_coverage(void);

/* ---- handlers of SIGBUS, in a child ------------------------------------------------------ */

extern const origin *volatile faulty;    /* what mend_it makes whole again */
extern volatile sig_atomic_t faults_met; /* by the handlers of the self-test */

void mend_it(int number);
void set_handler(void (*plain)(int), void (*informed)(int, siginfo_t *, void *), int flags);

/* Sends SIGBUS to this process; where that can be, it says that a fault at `address` was the cause,
 * but not that the kernel sent it. */
void send_bus_error(const void *address);

/* A fault outside of every guarded copy. */
unsigned touch_missing_page(void);

/* A guarded copy that fails: it is not handed on. */
void expect_guarded(void);

/* A foreign fault, a fault in the destination of a guarded copy, and one sent: all are met by
 * mend_it, which is set. */
void expect_foreign_faults_met(void);

/* ---- answers of the system --------------------------------------------------------------- */

struct statfs;

/* What the library calls. The linker (--wrap) has it call what stands in `answers`: a test puts a
 * function of its own there, and afterwards the kernel's again. */
typedef struct system_calls {
    ssize_t (*pread)(int fd, void *to, size_t bytes, off_t at);
    int (*madvise)(void *start, size_t bytes, int advice);
    int (*sigaction)(int number, const struct sigaction *action, struct sigaction *before);
    int (*pthread_attr_init)(pthread_attr_t *attributes);
    int (*pthread_create)(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *argument);
    int (*clock_gettime)(clockid_t clock, struct timespec *now);
    int (*fstatfs)(int fd, struct statfs *found);
    int (*cachestat)(int fd, const uint64_t *range, uint64_t *counts); /* 0 or -1, and errno */
    int (*statx)(int fd, unsigned mask, uint32_t *found);              /* as 64 numbers */
} system_calls;

extern const system_calls kernel;
extern system_calls answers;

/* 1 when `answers` are heard; otherwise says that their tests are left out. */
int can_answer(void);

/* ---- the parts --------------------------------------------------------------------------- */

void test_arguments(void);
void test_copies(void);
void test_blocks(void);
void test_faults(void);
void test_maps(void);
void test_guard(void);
void test_guard_threads(void);
void test_answers(void);
void test_system(void);
void test_values(void);

#endif
