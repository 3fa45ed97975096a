/* ceiling.c: how fast this machine can bring given ranges of files into one buffer.
 *
 * usage: ceiling METHOD STORES THREADS BLOCK_KIB PAGES RANGES
 *
 *   METHOD     copy      memory to memory, as many bytes as the ranges have; no file is read
 *              pread     positional reads through the page cache
 *              map       MADV_POPULATE_READ of each block of a map, then a copy out of it
 *              map-drop  as map, then MADV_DONTNEED of the block
 *              direct    O_DIRECT reads, widened to whole 4 KiB blocks of the file
 *   STORES     plain     memcpy
 *              streaming non-temporal stores: AVX-512, AVX2 or SSE2, the widest that the processor
 *                        has; memcpy on other processors
 *              (copy, map and map-drop alone; with the others the kernel stores)
 *   THREADS    1 to 16, which take blocks of a layer in turn; they meet at the end of each layer
 *   BLOCK_KIB  bytes of a block / 1024, a multiple of 4
 *   PAGES      huge      the buffer is 2 MiB-aligned, with MADV_HUGEPAGE
 *              small     with MADV_NOHUGEPAGE
 *   RANGES     a file of lines "layer begin end path"; a layer's lines stand together
 *
 * The buffer has room for the largest layer, is locked where that is allowed and populated anyway;
 * each layer overwrites the one before. A run of bytes lies at an offset of the buffer that leaves
 * the same remainder by 4096 as its offset in the file, so that `direct` needs no second copy: what
 * is measured is the transport, not the placing of tensors.
 *
 * Prints one line of JSON and exits 0: payload_bytes; memory_seconds, which the buffer took; seconds,
 * from before the files are opened to the last byte; cpu_seconds of all threads in that time; stores,
 * which were used. Whatever fails is told on stderr, with exit status 1; usage with 2.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum { THREADS_MAX = 16, FILES_MAX = 256, RUNS_MAX = 65536 };
static const uint64_t PAGE = 4096;
static const uint64_t HUGE_PAGE = 2u << 20;

enum method { COPY, PREAD, MAP, MAP_DROP, DIRECT };
static const char *const METHODS[] = {"copy", "pread", "map", "map-drop", "direct"};

typedef struct source {
    char *path;
    int fd;
    unsigned char *map;
    uint64_t bytes;
} source;

typedef struct run {
    long layer;
    uint64_t begin, end; /* in the file */
    uint64_t place;      /* in the buffer */
    size_t source;
} run;

typedef void copy_function(unsigned char *to, const unsigned char *from, uint64_t bytes);

static enum method method;
static copy_function *copy;
static const char *stores_used = "memcpy";
static uint64_t block_bytes;
static long threads;
static bool huge_pages;

static source sources[FILES_MAX];
static size_t source_count;
static run *runs;
static size_t run_count;
static unsigned char *buffer, *copied_from;

/* The layer that is being brought in: its runs, and the next block of them, counted over all. */
static size_t layer_first, layer_end;
static _Atomic uint64_t next_block;

static void fail(const char *what, const char *which)
{
    fprintf(stderr, "ceiling: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

/* Copies ------------------------------------------------------------------------------------ */

static void copy_plain(unsigned char *to, const unsigned char *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}

#if defined(__x86_64__)
/* A function that streams 4 vectors of `WIDTH` bytes at a time; what does not fill them, and what
 * stands before a border of 64 bytes in the destination, is left to memcpy. */
#define STREAMING_COPY(NAME, TARGET, WIDTH, TYPE, LOAD, STREAM)                                    \
    __attribute__((target(TARGET))) static void NAME(unsigned char *to,                           \
                                                     const unsigned char *from, uint64_t bytes)   \
    {                                                                                              \
        uint64_t head = (uint64_t)(-(uintptr_t)to) & 63;                                           \
        head = head < bytes ? head : bytes;                                                        \
        memcpy(to, from, head);                                                                    \
        to += head, from += head, bytes -= head;                                                   \
        for (; bytes >= 4 * WIDTH; to += 4 * WIDTH, from += 4 * WIDTH, bytes -= 4 * WIDTH) {       \
            const TYPE a = LOAD((const void *)from);                                               \
            const TYPE b = LOAD((const void *)(from + WIDTH));                                     \
            const TYPE c = LOAD((const void *)(from + 2 * WIDTH));                                 \
            const TYPE d = LOAD((const void *)(from + 3 * WIDTH));                                 \
            STREAM((void *)to, a);                                                                 \
            STREAM((void *)(to + WIDTH), b);                                                       \
            STREAM((void *)(to + 2 * WIDTH), c);                                                   \
            STREAM((void *)(to + 3 * WIDTH), d);                                                   \
        }                                                                                          \
        _mm_sfence();                                                                              \
        memcpy(to, from, bytes);                                                                   \
    }

STREAMING_COPY(copy_avx512, "avx512f", 64, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
STREAMING_COPY(copy_avx2, "avx2", 32, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
STREAMING_COPY(copy_sse2, "sse2", 16, __m128i, _mm_loadu_si128, _mm_stream_si128)

static copy_function *streaming_copy(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return stores_used = "avx512", copy_avx512;
    if (__builtin_cpu_supports("avx2"))
        return stores_used = "avx2", copy_avx2;
    return stores_used = "sse2", copy_sse2;
}
#else
static copy_function *streaming_copy(void)
{
    return copy_plain;
}
#endif

/* The work ---------------------------------------------------------------------------------- */

/* Reads [begin, end) of a file to `to`; the file may end before it when all of `needed` is had. */
static void read_all(const source *from, unsigned char *to, uint64_t begin, uint64_t end,
                     uint64_t needed)
{
    uint64_t at = begin;
    while (at < end) {
        const ssize_t got = pread(from->fd, to + (at - begin), end - at, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0 && at >= needed)
            return;
        if (got <= 0)
            fail("read", from->path);
        at += (uint64_t)got;
    }
}

/* Brings in [begin, end) of a run. */
static void bring_in(const run *whole, uint64_t begin, uint64_t end)
{
    const source *from = &sources[whole->source];
    unsigned char *to = buffer + whole->place + (begin - whole->begin);
    if (method == COPY) {
        copy(to, copied_from + (to - buffer), end - begin);
    } else if (method == PREAD) {
        read_all(from, to, begin, end, end);
    } else if (method == DIRECT) {
        const uint64_t before = begin % PAGE;
        read_all(from, to - before, begin - before, (end + PAGE - 1) / PAGE * PAGE, end);
    } else {
        unsigned char *first = from->map + begin / PAGE * PAGE;
        const uint64_t bytes = end - begin / PAGE * PAGE;
        if (madvise(first, bytes, MADV_POPULATE_READ))
            fail("populate", from->path);
        copy(to, from->map + begin, end - begin);
        if (method == MAP_DROP)
            madvise(first, bytes, MADV_DONTNEED);
    }
}

/* Takes blocks of the current layer until there are none. A block ends at multiples of block_bytes
 * in the file, so that direct reads of two threads never overlap in the buffer. */
static void *work(void *unused)
{
    for (;;) {
        uint64_t number = atomic_fetch_add(&next_block, 1);
        size_t at = layer_first;
        for (; at < layer_end; at++) {
            const uint64_t first = runs[at].begin / block_bytes;
            const uint64_t blocks = (runs[at].end - 1) / block_bytes - first + 1;
            if (number < blocks) {
                const uint64_t begin = (first + number) * block_bytes, end = begin + block_bytes;
                bring_in(&runs[at], begin > runs[at].begin ? begin : runs[at].begin,
                         end < runs[at].end ? end : runs[at].end);
                break;
            }
            number -= blocks;
        }
        if (at == layer_end)
            return unused;
    }
}

static void bring_in_layers(void)
{
    for (layer_first = 0; layer_first < run_count; layer_first = layer_end) {
        layer_end = layer_first;
        while (layer_end < run_count && runs[layer_end].layer == runs[layer_first].layer)
            layer_end++;
        atomic_store(&next_block, 0);
        pthread_t others[THREADS_MAX];
        for (long i = 1; i < threads; i++)
            if ((errno = pthread_create(&others[i], NULL, work, NULL)))
                fail("start", "thread");
        work(NULL);
        for (long i = 1; i < threads; i++)
            pthread_join(others[i], NULL);
    }
}

/* Setting up -------------------------------------------------------------------------------- */

static size_t source_of(const char *path)
{
    for (size_t i = 0; i < source_count; i++)
        if (strcmp(sources[i].path, path) == 0)
            return i;
    if (source_count == FILES_MAX)
        errno = E2BIG, fail("take", path);
    sources[source_count].path = strdup(path);
    return source_count++;
}

/* Reads the ranges and places them; the bytes that the buffer needs. */
static uint64_t read_ranges(const char *path)
{
    FILE *file = fopen(path, "r");
    runs = calloc(RUNS_MAX, sizeof *runs);
    if (!file || !runs)
        fail("read", path);
    uint64_t place = 0, room = 0;
    char name[4096];
    run next;
    while (fscanf(file, "%ld %lu %lu %4095[^\n]", &next.layer, &next.begin, &next.end, name) == 4) {
        if (run_count == RUNS_MAX || next.end <= next.begin)
            errno = EINVAL, fail("take a line of", path);
        if (run_count && runs[run_count - 1].layer != next.layer)
            place = 0;
        next.place = place + next.begin % PAGE;
        next.source = source_of(name);
        place = (next.place + (next.end - next.begin) + PAGE - 1) / PAGE * PAGE;
        room = place > room ? place : room;
        runs[run_count++] = next;
    }
    fclose(file);
    if (!run_count)
        errno = EINVAL, fail("find ranges in", path);
    return room;
}

/* Memory at a border of a huge page: populated, and locked where that is allowed. */
static unsigned char *make_memory(uint64_t bytes)
{
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    unsigned char *memory = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("map", "memory");
    memory += (uint64_t)(-(uintptr_t)memory) % HUGE_PAGE;
    madvise(memory, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (mlock(memory, bytes))
        memset(memory, 0, bytes);
    return memory;
}

static void open_sources(void)
{
    for (size_t i = 0; i < source_count; i++) {
        source *file = &sources[i];
        struct stat status;
        file->fd = open(file->path, O_RDONLY | (method == DIRECT ? O_DIRECT : 0));
        if (file->fd < 0 || fstat(file->fd, &status))
            fail("open", file->path);
        file->bytes = (uint64_t)status.st_size;
        if (method == MAP || method == MAP_DROP) {
            file->map = mmap(NULL, file->bytes, PROT_READ, MAP_SHARED, file->fd, 0);
            if (file->map == MAP_FAILED)
                fail("map", file->path);
        }
    }
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double cpu_seconds(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

int main(int argc, char **argv)
{
    const size_t methods = sizeof METHODS / sizeof *METHODS;
    size_t chosen = methods;
    for (size_t i = 0; argc == 7 && i < methods; i++)
        if (strcmp(argv[1], METHODS[i]) == 0)
            chosen = i;
    if (chosen < methods) {
        method = (enum method)chosen;
        copy = strcmp(argv[2], "streaming") == 0 ? streaming_copy() : copy_plain;
        threads = strtol(argv[3], NULL, 10);
        block_bytes = strtoul(argv[4], NULL, 10) * 1024;
        huge_pages = strcmp(argv[5], "huge") == 0;
    }
    if (threads < 1 || threads > THREADS_MAX || block_bytes == 0 || block_bytes % PAGE) {
        fputs("usage: ceiling METHOD STORES THREADS BLOCK_KIB PAGES RANGES\n", stderr);
        return 2;
    }
    const uint64_t room = read_ranges(argv[6]);
    const double memory_began = seconds_now();
    buffer = make_memory(room);
    const double memory_seconds = seconds_now() - memory_began;
    if (method == COPY) {
        copied_from = make_memory(room);
        memset(copied_from, 1, room);
    }
    const double began = seconds_now(), cpu_before = cpu_seconds();
    open_sources();
    bring_in_layers();
    const double seconds = seconds_now() - began, cpu = cpu_seconds() - cpu_before;
    uint64_t payload = 0;
    for (size_t i = 0; i < run_count; i++)
        payload += runs[i].end - runs[i].begin;
    printf("{\"payload_bytes\": %lu, \"memory_seconds\": %.6f, \"seconds\": %.6f, "
           "\"cpu_seconds\": %.6f, \"stores\": \"%s\"}\n",
           payload, memory_seconds, seconds, cpu, stores_used);
    return 0;
}
