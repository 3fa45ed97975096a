/* kda_pieces.c: the ways to bring in a piece of a span. See kda_pieces.h and kda_copy.h. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _DEFAULT_SOURCE /* madvise */
#endif
#define _FILE_OFFSET_BITS 64

#include "kda_pieces.h"

#include "kda_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22 /* Linux 5.14; older headers do not name it */
#endif

/* Where pieces are cut: a multiple of every page and block size that is met. */
#define KDA_CUT_BYTES ((uint64_t)64 << 10)

/* What every disk's blocks are multiples of. */
#define KDA_SECTOR_BYTES ((uint64_t)512)

/* What a row costs that lies by itself: a page. */
#define KDA_ROW_BYTES ((uint64_t)4 << 10)

/* How far ahead of a read the kernel is told of the next one, where it cannot guess it. */
#define KDA_AHEAD_BYTES ((uint64_t)3 << 20)

/* Some whole rows and parts of rows that follow each other in a piece, one at a time. */
typedef struct kda_run {
    uint64_t from;  /* offset in the source */
    uint64_t bytes; /* adjoining bytes from there */
} kda_run;

/* The bytes at piece->done that adjoin in the source. */
static kda_run kda_next_run(const kda_piece *piece)
{
    uint64_t within = piece->done % piece->shape.row_bytes;
    kda_run run;

    run.from = piece->done / piece->shape.row_bytes * piece->shape.row_stride + within;
    run.bytes = kda_least(piece->shape.row_bytes - within, piece->end - piece->done);
    return run;
}

/* Offset in the source of the last byte of the piece, plus one. */
static uint64_t kda_source_end(const kda_piece *piece)
{
    uint64_t last = piece->end - 1;

    return last / piece->shape.row_bytes * piece->shape.row_stride +
           last % piece->shape.row_bytes + 1;
}

void kda_piece_cut(kda_piece *piece, uint64_t bytes_max)
{
    const kda_span *span = piece->span;
    const kda_shape *shape = &piece->shape;
    uint64_t left = shape->bytes - piece->done;
    uint64_t bytes = bytes_max;

    if (shape->row_stride > shape->row_bytes) { /* whole rows; what is brought in with them counts */
        uint64_t row = shape->row_bytes < KDA_ROW_BYTES ? KDA_ROW_BYTES : shape->row_bytes;

        bytes = bytes_max / (kda_has_short_gaps(shape) ? shape->row_stride : row) *
                shape->row_bytes;
        if (bytes == 0)
            bytes = kda_least(bytes_max, shape->row_bytes - piece->done % shape->row_bytes);
    } else {
        uint64_t base = span->kind == KDA_FILE || span->kind == KDA_DIRECT
                            ? span->file_offset
                            : (uint64_t)(uintptr_t)span->source;
        bytes = bytes_max - (base + piece->done) % KDA_CUT_BYTES;
    }
    piece->end = piece->done + kda_least(left, bytes);
}

/* Answers with `status` and leaves errno where the caller finds it. */
static int kda_fail(kda_piece *piece, int status)
{
    piece->error = errno;
    return status;
}

static unsigned char *kda_landing(const kda_piece *piece, unsigned char *destination)
{
    return destination + piece->span->destination + piece->done;
}

static int kda_move_memory(kda_piece *piece, unsigned char *destination)
{
    while (piece->done < piece->end) {
        kda_run run = kda_next_run(piece);

        kda_plain_copy(kda_landing(piece, destination), piece->span->source + run.from,
                       (size_t)run.bytes);
        piece->done += run.bytes;
    }
    return KDA_OK;
}

/* Advises the kernel of the pages that hold these bytes; 0, or -1 and errno. */
static int kda_advise(const unsigned char *start, uint64_t bytes, int advice)
{
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t page = (uintptr_t)start & ~(page_bytes - 1);

    return madvise((void *)page, (uintptr_t)start - page + (size_t)bytes, advice);
}

/* Has the kernel map the pages of these bytes, reading them from the disk where it must. */
static int kda_fault_in(kda_piece *piece, const unsigned char *start, uint64_t bytes)
{
#ifdef MADV_POPULATE_READ
    if (kda_advise(start, bytes, MADV_POPULATE_READ) == 0)
        return KDA_OK;
    if (errno == EINTR || errno == EAGAIN)
        return KDA_PAUSED;
    if (errno == EINVAL || errno == ENOSYS || errno == EPERM) /* unknown, or filtered */
        return kda_fail(piece, KDA_NO_POPULATE);
    return kda_fail(piece, KDA_SOURCE_FAULT);
#else
    (void)start;
    (void)bytes;
    errno = ENOSYS;
    return kda_fail(piece, KDA_NO_POPULATE);
#endif
}

/* Copies [from, end) of a mapped source, where the rows lie, and lets go of the pages. */
static int kda_move_window(kda_piece *piece, unsigned char *destination, uint64_t from,
                           uint64_t end)
{
    const unsigned char *source = piece->span->source;
    int status = kda_fault_in(piece, source + from, end - from);

    while (status == KDA_OK && piece->done < piece->end) {
        kda_run run = kda_next_run(piece);

        if (run.from >= end)
            break;
        if (!kda_guarded_copy(kda_landing(piece, destination), source + run.from,
                              (size_t)run.bytes)) {
            errno = EFAULT;
            status = kda_fail(piece, KDA_SOURCE_FAULT);
        } else {
            piece->done += run.bytes;
        }
    }
    (void)kda_advise(source + from, end - from, MADV_DONTNEED);
    return status;
}

static int kda_move_mapped(kda_piece *piece, unsigned char *destination)
{
    int status = KDA_OK;

    while (status == KDA_OK && piece->done < piece->end) {
        kda_run run = kda_next_run(piece);
        uint64_t end = run.from + run.bytes;

        if (kda_has_short_gaps(&piece->shape))
            end = kda_source_end(piece);
        status = kda_move_window(piece, destination, run.from, end);
    }
    return status;
}

/* Tells the kernel that rows with short gaps will be read along with their gaps. Left alone, it
 * takes that for random access and has them from the disk one at a time. */
static void kda_expect_rows(const kda_piece *piece)
{
#ifdef POSIX_FADV_WILLNEED
    uint64_t from = piece->done == 0 ? 0 : kda_next_run(piece).from + KDA_AHEAD_BYTES;
    uint64_t end = kda_least(kda_source_end(piece) + KDA_AHEAD_BYTES, piece->shape.extent);

    if (kda_has_short_gaps(&piece->shape) && from < end)
        (void)posix_fadvise(piece->span->fd, (off_t)(piece->span->file_offset + from),
                            (off_t)(end - from), POSIX_FADV_WILLNEED);
#else
    (void)piece;
#endif
}

/* One pread of `bytes` bytes at `at` of the span's file; KDA_OK with `*got` of them, 1 or more. */
static int kda_read(kda_piece *piece, unsigned char *to, uint64_t bytes, uint64_t at, uint64_t *got)
{
    ssize_t count = pread(piece->span->fd, to, (size_t)bytes, (off_t)at);

    if (count < 0)
        return errno == EINTR ? KDA_PAUSED : kda_fail(piece, KDA_READ_FAILED);
    *got = (uint64_t)count;
    return count == 0 ? KDA_FILE_END : KDA_OK;
}

static int kda_move_file(kda_piece *piece, unsigned char *destination)
{
    int status = KDA_OK;

    kda_expect_rows(piece);
    while (status == KDA_OK && piece->done < piece->end) {
        kda_run run = kda_next_run(piece);
        uint64_t got = 0;

        status = kda_read(piece, kda_landing(piece, destination), run.bytes,
                          piece->span->file_offset + run.from, &got);
        piece->done += got;
    }
    return status;
}

/* Why a direct read of `bytes` bytes came to `got`, less than a block: what the next read says, where
 * a disk can have one. */
static int kda_cut_off(kda_piece *piece, unsigned char *to, uint64_t bytes, uint64_t at,
                       uint64_t got)
{
    uint64_t more = 0;
    int status = KDA_FILE_END;

    if (got % KDA_SECTOR_BYTES == 0)
        status = kda_read(piece, to + got, bytes - got, at + got, &more);
    if (status == KDA_READ_FAILED && piece->error == EINVAL) {
        piece->error = 0;
        return KDA_FILE_END;
    }
    return status == KDA_OK ? KDA_PAUSED : status;
}

/* Reads the blocks around [at, at + bytes) into the bounce memory, as many as it holds, and copies
 * what is wanted of them out. */
static int kda_read_bounced(kda_piece *piece, unsigned char *to, uint64_t bytes, uint64_t at,
                            const kda_bounce *bounce)
{
    uint64_t skipped = at % bounce->block_bytes;
    uint64_t blocks = (skipped + bytes + bounce->block_bytes - 1) / bounce->block_bytes;
    uint64_t wanted = kda_least(blocks * bounce->block_bytes, bounce->bytes);
    uint64_t got = 0;
    int status = kda_read(piece, bounce->memory, wanted, at - skipped, &got);

    if (status == KDA_OK && got <= skipped)
        return kda_cut_off(piece, bounce->memory, wanted, at - skipped, got);
    if (status == KDA_OK) {
        got = kda_least(got - skipped, bytes);
        kda_plain_copy(to, bounce->memory + skipped, (size_t)got);
        piece->done += got;
    }
    return status;
}

/* Reads whole blocks to where they belong. The file may end within the last of them only. */
static int kda_read_in_place(kda_piece *piece, unsigned char *to, uint64_t bytes, uint64_t at,
                             const kda_bounce *bounce)
{
    uint64_t got = 0;
    int status = kda_read(piece, to, bytes, at, &got);

    if (status != KDA_OK)
        return status;
    if (got < bounce->block_bytes)
        return kda_cut_off(piece, to, bytes, at, got);
    piece->done += got - got % bounce->block_bytes;
    return KDA_OK;
}

static int kda_move_direct(kda_piece *piece, unsigned char *destination, const kda_bounce *bounce)
{
    uint64_t block = bounce->block_bytes;
    int status = KDA_OK;

    while (status == KDA_OK && piece->done < piece->end) {
        unsigned char *to = kda_landing(piece, destination);
        uint64_t at = piece->span->file_offset + piece->done;
        uint64_t bytes = piece->end - piece->done;
        uint64_t begun = at % block; /* bytes of the first block that are not wanted */

        if ((uintptr_t)to % block != begun)
            status = kda_read_bounced(piece, to, bytes, at, bounce);
        else if (begun != 0 || bytes < block)
            status = kda_read_bounced(piece, to, kda_least(bytes, block - begun), at, bounce);
        else
            status = kda_read_in_place(piece, to, bytes - bytes % block, at, bounce);
    }
    return status;
}

int kda_piece_move(kda_piece *piece, unsigned char *destination, const kda_bounce *bounce)
{
    switch (piece->span->kind) {
    case KDA_MAPPED:
        return kda_move_mapped(piece, destination);
    case KDA_FILE:
        return kda_move_file(piece, destination);
    case KDA_DIRECT:
        return kda_move_direct(piece, destination, bounce);
    default:
        return kda_move_memory(piece, destination);
    }
}

int kda_can_populate(void)
{
#ifdef MADV_POPULATE_READ
    static const unsigned char probe[1] = {0};

    return kda_advise(probe, 1, MADV_POPULATE_READ) == 0 || errno != EINVAL;
#else
    return 0;
#endif
}
