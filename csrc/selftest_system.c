/* selftest_system.c: every answer of the functions in kda_system.h. See selftest.h. */
#include "selftest.h"

#include "kda_system.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/statfs.h>
#endif

enum { NO_FD = 1 << 20 }; /* open nowhere */

static void test_arguments_of_the_system(void)
{
    unsigned char byte[2] = {GUARD, GUARD};
    uint64_t number = 7;

    CHECK(kda_cached_bytes(NO_FD, 0, 1, NULL) == EINVAL);
    CHECK(kda_cached_bytes(NO_FD, (uint64_t)INT64_MAX + 1, 0, &number) == EINVAL && number == 0);
    number = 7;
    CHECK(kda_cached_bytes(NO_FD, INT64_MAX, 1, &number) == EINVAL && number == 0);
    number = 7;
    CHECK(kda_cached_bytes(NO_FD, 1, UINT64_MAX, &number) == EINVAL && number == 0);
    number = 7; /* no bytes: no question, and none of them are cached */
    CHECK(kda_cached_bytes(NO_FD, INT64_MAX, 0, &number) == 0 && number == 0);
    CHECK(kda_cached_pages(NULL, 1, byte) == EINVAL);
    CHECK(kda_cached_pages(byte, 1, NULL) == EINVAL);
    CHECK(kda_file_system_type(NO_FD, NULL) == EINVAL);
    CHECK(kda_direct_alignment(NO_FD, NULL, &number) == EINVAL);
    CHECK(kda_direct_alignment(NO_FD, &number, NULL) == EINVAL);
    CHECK(byte[0] == GUARD && byte[1] == GUARD);
}

static void test_pages_in_memory(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    origin from = origin_new(4 * page + 1);
    unsigned char vector[6];
    int i;

    memset(vector, GUARD, sizeof vector);
    CHECK(kda_cached_pages(from.map, 2 * page + 1, vector) == 0);
    for (i = 0; i < 3; i++)
        CHECK((vector[i] & 1) == 1); /* just written */
    for (; i < 6; i++)
        CHECK(vector[i] == GUARD);
    CHECK(kda_cached_pages(from.map + 1, page, vector) == EINVAL);
    munmap(from.map + page, page);
    CHECK(kda_cached_pages(from.map, 3 * page, vector) == ENOMEM);
    origin_free(&from);
}

#if defined(__linux__)
static void test_the_file_system(void)
{
    origin from = origin_new(1);
    uint64_t type = 7;
    struct statfs found;

    need(fstatfs(from.fd, &found) == 0, "fstatfs");
    CHECK(kda_file_system_type(from.fd, &type) == 0 && type == (uint32_t)found.f_type);
    CHECK(kda_file_system_type(NO_FD, &type) == EBADF && type == 0);
    origin_free(&from);
}

static void test_the_alignment_of_direct_reads(void)
{
    origin from = origin_new(1);
    uint64_t memory = 7;
    uint64_t offset = 7;
    int error = kda_direct_alignment(from.fd, &memory, &offset);

    CHECK(error == 0 || error == ENOSYS || error == ENOTSUP);
    CHECK((memory & (memory - 1)) == 0 && (offset & (offset - 1)) == 0); /* 0, or a power of two */
    CHECK((memory == 0) == (offset == 0) && (error == 0 || memory == 0));
    memory = offset = 7;
    error = kda_direct_alignment(NO_FD, &memory, &offset);
    CHECK((error == EBADF || error == ENOSYS) && memory == 0 && offset == 0);
    origin_free(&from);
}

static void test_what_is_cached(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    origin from = origin_new((size_t)(3 * page + 5));
    uint64_t cached = 7;
    int error = kda_cached_bytes(from.fd, 1, 2 * page, &cached);

    if (error == 0) {
        CHECK(cached == 2 * page); /* just written */
        CHECK(kda_cached_bytes(from.fd, 7, 9, &cached) == 0 && cached == 9);
        CHECK(kda_cached_bytes(from.fd, 3 * page + 4, 5, &cached) == 0 && cached == 5);
        CHECK(kda_cached_bytes(from.fd, 4 * page, page, &cached) == 0 && cached == 0);
        CHECK(kda_cached_bytes(NO_FD, 0, 1, &cached) == EBADF && cached == 0);
    } else {
        CHECK((error == ENOSYS || error == EOPNOTSUPP || error == EPERM) && cached == 0);
        leave_out("the kernel does not count cached pages here");
    }
    origin_free(&from);
}
#else
static void test_the_file_system(void) {}
static void test_the_alignment_of_direct_reads(void) {}
static void test_what_is_cached(void) {}
#endif

#if defined(KDA_ANSWERS)

/* ---- answers that are told --------------------------------------------------------------- */

static uint64_t type_told;

static int fstatfs_as_told(int fd, struct statfs *found)
{
    (void)fd;
    memset(found, 0, sizeof *found);
    memcpy(&found->f_type, &type_told, sizeof found->f_type);
    return 0;
}

/* A page cache of 8 pages, a bit for each. */
static unsigned pages_cached;

static int cachestat_of_bits(int fd, const uint64_t *range, uint64_t *counts)
{
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t page;

    (void)fd;
    counts[0] = 0;
    for (page = range[0] / page_bytes; page <= (range[0] + range[1] - 1) / page_bytes; page++)
        counts[0] += pages_cached >> page & 1;
    return 0;
}

/* Every cache of 8 pages, and ranges that begin and end around the borders of pages. */
static void test_every_byte_is_counted_once(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t places[] = {0, 1, page - 1, page, page + 1, 3 * page, 8 * page - 2, 8 * page - 1, 0};
    size_t places_count = sizeof places / sizeof places[0];
    size_t b;
    size_t e;

    places[places_count - 1] = 8 * page;
    answers.cachestat = cachestat_of_bits;
    answers.fstatfs = fstatfs_as_told;
    for (pages_cached = 0; pages_cached < 256; pages_cached++)
        for (b = 0; b < places_count; b++)
            for (e = b + 1; e < places_count; e++) {
                uint64_t expected = 0;
                uint64_t cached = 7;
                uint64_t i;

                for (i = 0; i < 8; i++)
                    if ((pages_cached >> i & 1) != 0) {
                        uint64_t begin = i * page > places[b] ? i * page : places[b];
                        uint64_t end = (i + 1) * page < places[e] ? (i + 1) * page : places[e];
                        expected += end > begin ? end - begin : 0;
                    }
                CHECK(kda_cached_bytes(0, places[b], places[e] - places[b], &cached) == 0);
                CHECK(cached == expected);
            }
    answers = kernel;
}

/* Counts one after the other, for the range, its first byte's page and its last byte's; or an errno
 * below 0. */
static const int *counts_told;

static int cachestat_as_told(int fd, const uint64_t *range, uint64_t *counts)
{
    int told = *counts_told++;

    (void)fd;
    (void)range;
    if (told < 0) {
        errno = -told;
        return -1;
    }
    counts[0] = (uint64_t)told;
    return 0;
}

/* Of a range from byte 1 on over two pages but for the last byte. */
static void expect_count(const int *counts, int questions, int error, uint64_t expected, int line)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t cached = 7;

    counts_told = counts;
    answers.cachestat = cachestat_as_told;
    answers.fstatfs = fstatfs_as_told;
    CHECK_AT(kda_cached_bytes(0, 1, 2 * page - 2, &cached) == error, "error", line);
    CHECK_AT(cached == expected, "count", line);
    CHECK_AT(counts_told - counts == questions, "as many questions as need be", line);
    answers = kernel;
}

/* Pages come and go between the questions: the answer is within the range all the same. */
static void test_counts_that_change(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    static const int all[] = {2, 1, 1};
    static const int none[] = {0};
    static const int gone[] = {1, 0, 0};
    static const int more[] = {5, 1, 1};
    static const int refused[] = {-EPERM};
    static const int refused_later[] = {2, -EBADF};
    static const int refused_last[] = {2, 1, -EBADF};

    expect_count(all, 3, 0, 2 * page - 2, __LINE__);
    expect_count(none, 1, 0, 0, __LINE__);
    expect_count(gone, 3, 0, page, __LINE__);
    expect_count(more, 3, 0, 2 * page - 2, __LINE__);
    expect_count(refused, 1, EPERM, 0, __LINE__);
    expect_count(refused_later, 2, EBADF, 0, __LINE__);
    expect_count(refused_last, 3, EBADF, 0, __LINE__);
}

/* Of two pages one was there, and then both: less than nothing is none. */
static void test_counts_that_contradict_each_other(void)
{
    static const int counts[] = {1, 1, 1};
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t cached = 7;

    counts_told = counts;
    answers.cachestat = cachestat_as_told;
    answers.fstatfs = fstatfs_as_told;
    CHECK(kda_cached_bytes(0, page - 1, 2, &cached) == 0 && cached == 0);
    answers = kernel;
}

/* No count is taken for one where the kernel's is of something else. */
static void test_file_systems_without_a_count(void)
{
    uint64_t cached = 7;
    uint64_t type = 7;

    pages_cached = 255;
    answers.cachestat = cachestat_of_bits;
    answers.fstatfs = fstatfs_as_told;
    type_told = 0x794C7630; /* overlayfs */
    CHECK(kda_cached_bytes(0, 0, 1, &cached) == EOPNOTSUPP && cached == 0);
    type_told = 0xFFFFFFFF9123683E; /* btrfs, as a signed number of 32 bits */
    CHECK(kda_cached_bytes(0, 0, 1, &cached) == 0 && cached == 1);
    CHECK(kda_file_system_type(0, &type) == 0 && type == 0x9123683E);
    type_told = 0;
    answers = kernel;
}

static uint32_t mask_told;
static int statx_error;

static int statx_as_told(int fd, unsigned mask, uint32_t *found)
{
    (void)fd;
    CHECK(mask == 0x2000); /* STATX_DIOALIGN */
    errno = statx_error;
    found[0] = mask_told;
    found[0x98 / 4] = 4;
    found[0x9C / 4] = 512;
    return statx_error == 0 ? 0 : -1;
}

static void test_alignments_that_are_told(void)
{
    uint64_t memory = 7;
    uint64_t offset = 7;

    answers.statx = statx_as_told;
    mask_told = 0x27FF;
    CHECK(kda_direct_alignment(0, &memory, &offset) == 0 && memory == 4 && offset == 512);
    mask_told = 0x7FF; /* a kernel before 6.1, or a file system that does not say */
    CHECK(kda_direct_alignment(0, &memory, &offset) == ENOTSUP && memory == 0 && offset == 0);
    memory = offset = 7;
    mask_told = 0x27FF;
    statx_error = ENOSYS;
    CHECK(kda_direct_alignment(0, &memory, &offset) == ENOSYS && memory == 0 && offset == 0);
    answers = kernel;
}

static void test_answers_that_are_told(void)
{
    test_every_byte_is_counted_once();
    test_counts_that_change();
    test_counts_that_contradict_each_other();
    test_file_systems_without_a_count();
    test_alignments_that_are_told();
}
#else
static void test_answers_that_are_told(void)
{
    (void)can_answer();
}
#endif

void test_system(void)
{
    test_arguments_of_the_system();
    test_pages_in_memory();
    test_the_file_system();
    test_the_alignment_of_direct_reads();
    test_what_is_cached();
    test_answers_that_are_told();
}
