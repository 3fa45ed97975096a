/* selftest_blocks.c: whole blocks, and the copy of bytes itself, at all alignments. */
#include "selftest.h"

#include "kda_guard.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

void test_blocks(void)
{
    test_blocks_at_all_alignments();
    test_lists_of_blocks();
    test_copies_at_all_alignments();
}
