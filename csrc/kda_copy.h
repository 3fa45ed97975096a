/* kda_copy.h: the one copy routine of kda_stream.
 *
 * A load is a list of spans. A span takes equally long rows out of a source (memory, a mapped
 * file or an open file) and lays them densely into the destination, which one list shares.
 * Joining three tensors is three spans with adjacent destinations; a column slice is a span whose
 * stride is longer than its row. The routine allocates nothing and knows no Python. It keeps no
 * state; while a mapped file is copied there is a signal handler, see kda_guard.h.
 *
 * What lies between the two "cffi" lines is also read by build_native.py, as it stands: it must
 * stay free of preprocessor lines.
 */
#ifndef KDA_COPY_H
#define KDA_COPY_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/* What every function here returns. Only KDA_OK means that all was done. Where a span breaks
 * several rules, the one that stands first in this list is reported. */
enum kda_status {
    KDA_OK = 0,
    KDA_PAUSED,              /* not finished, nothing wrong: call again with the same cursor */
    KDA_BAD_ARGUMENT,        /* null pointer, unknown kind, negative fd, rows of KDA_DIRECT that lie
                                apart; means or a cursor outside their rules */
    KDA_SIZE_OVERFLOW,       /* a size or an end does not fit its type, file offsets in INT64_MAX */
    KDA_STRIDE_SHORT,        /* more than one row, and row_stride is less than row_bytes */
    KDA_SOURCE_SHORT,        /* the rows reach past source_bytes */
    KDA_DESTINATION_SHORT,   /* the rows reach past the end of the destination */
    KDA_DESTINATION_OVERLAP, /* a span starts before the end of the one that precedes it */
    KDA_SOURCE_OVERLAP,      /* the rows of a source in memory lie in the destination's memory */
    KDA_SOURCE_FAULT,        /* a page of a mapped source cannot be had; cursor->error = errno */
    KDA_FILE_END,            /* the file ends before the span does */
    KDA_READ_FAILED,         /* pread failed; cursor->error = errno */
    KDA_NO_POPULATE,         /* no MADV_POPULATE_READ here, or the mapping cannot be read */
    KDA_NO_GUARD             /* the handler of SIGBUS cannot be set; cursor->error = errno */
};

/* Where a span's bytes are. */
enum kda_kind {
    KDA_MEMORY = 0, /* memory that cannot fault */
    KDA_MAPPED,     /* a mapped file: each window is faulted in, copied, and unmapped again */
    KDA_FILE,       /* an open, seekable file: read with pread */
    KDA_DIRECT      /* a file opened with O_DIRECT: whole blocks are read with pread */
};

typedef struct kda_span {
    int kind;                    /* enum kda_kind */
    int fd;                      /* KDA_FILE, KDA_DIRECT: the descriptor; otherwise ignored */
    const unsigned char *source; /* KDA_MEMORY, KDA_MAPPED: first byte; otherwise ignored */
    uint64_t file_offset;        /* KDA_FILE, KDA_DIRECT: where in the file the source starts */
    uint64_t source_bytes;       /* how many bytes the source has */
    uint64_t rows;               /* no rows, or rows of no bytes, copy nothing */
    uint64_t row_bytes;
    uint64_t row_stride;         /* from one row's start to the next in the source */
    uint64_t destination;        /* offset of the first row in the destination; rows land densely */
} kda_span;

/* How a list is copied: the caller's choices, none of which changes a byte of the outcome. */
typedef struct kda_means {
    uint64_t nanoseconds_max; /* see kda_spans_copy; UINT64_MAX means no limit */
    const int *stop;          /* may be null; once it is not 0, no further piece is begun */
    unsigned threads;         /* how many copy at once, the caller's among them, at most 16; 0 is 1 */
    uint64_t block_bytes;     /* KDA_DIRECT: what file offsets, sizes and addresses of reads are
                                 multiples of: a power of two, 512 to 65,536; otherwise ignored */
    unsigned char *bounce;    /* KDA_DIRECT: scratch memory at a multiple of block_bytes, of */
    uint64_t bounce_bytes;    /* at least a block a thread; otherwise ignored */
} kda_means;

/* How far a list is. Zeroed by the caller before the first call, then left alone until KDA_OK. */
typedef struct kda_cursor {
    size_t span;          /* index of the span that is next, or at fault; the count at the end */
    uint64_t done;        /* bytes of that span which are in the destination */
    int error;            /* errno where the status says so, else 0 */
    uint64_t piece_bytes; /* how long the last pieces were, so that the next call goes on so */
} kda_cursor;

/* Checks a list against a destination, touching no byte of any source or of the destination.
 *
 * spans              `count` spans; may be null when count is 0. Their destinations ascend and do
 *                    not overlap (gaps are left as they are). An empty span is checked like any
 *                    other, except that its source may be null.
 * destination        `destination_bytes` bytes; may be null when destination_bytes is 0.
 * failed             never null.
 *
 * Returns KDA_OK; *failed is then `count`. Otherwise the status from KDA_BAD_ARGUMENT to
 * KDA_SOURCE_OVERLAP that the first faulty span earns, and *failed is its index (0 when the
 * arguments themselves are at fault). A null `failed` gives KDA_BAD_ARGUMENT and writes nothing.
 * Whether a file or a map has the bytes that a span says is found out by kda_spans_copy only.
 * Any number of threads may call this at once. */
int kda_spans_check(const kda_span *spans, size_t count, const unsigned char *destination,
                    uint64_t destination_bytes, size_t *failed);

/* Makes every check of kda_spans_check, on every call, and only then copies, from the cursor on,
 * until the list is done, or `means` asks to pause.
 *
 * spans, destination as for kda_spans_check, and the same ones on every call for one cursor. A
 *                    KDA_DIRECT span is one row, or rows that adjoin.
 * means              never null. Its time is looked at before each piece, of a MiB at first, of
 *                    256 KiB where they go slowly and 8 MiB where they go fast; one piece is always
 *                    copied, so that 0 means one piece and every call makes progress, but where the
 *                    kernel answers EINTR or a direct read ends within a block that has more.
 *                    *stop may be set by another thread.
 * cursor             never null. span <= count, done within that span.
 *
 * Returns
 *   KDA_OK             all rows of all spans are in the destination; cursor->span is `count`.
 *   KDA_PAUSED         time is up, *stop is set, or the kernel answered EINTR (or EAGAIN, for a
 *                      page). The cursor says how far the copy is. The caller looks at its signals
 *                      and calls again.
 *   KDA_BAD_ARGUMENT to KDA_SOURCE_OVERLAP
 *                      a check failed and this call has written no byte of the destination.
 *                      cursor->span is the span at fault and done 0; a cursor or means outside
 *                      their rules leave the cursor as it is.
 *   KDA_SOURCE_FAULT, KDA_FILE_END, KDA_READ_FAILED, KDA_NO_POPULATE, KDA_NO_GUARD
 *                      the source failed at cursor->span. Everything up to the cursor is in the
 *                      destination; after it, the spans' own bytes may hold anything. The same
 *                      cursor may be tried again.
 *
 * A page of a KDA_MAPPED source which cannot be read is an answer, not a signal, also when the
 * file is cut short while it is copied: see kda_guard.h. Its pages leave the process after the
 * copy and stay in the page cache.
 * Bytes of the destination that no span covers are left as they are, by KDA_DIRECT too: blocks
 * land in place where the destination's address and the file's offset agree modulo block_bytes,
 * but for the first and the last of a span; these, and all others, go through the bounce memory.
 * Gaps of up to 64 KiB between rows are had from the disk along with the rows, and may stay in the
 * page cache with them; longer gaps are not read.
 * A KDA_FILE must not be opened with O_DIRECT. Files' offsets are neither used nor moved.
 * The threads are begun and ended within the call, with every signal blocked; where the system
 * gives fewer than asked for, the copy goes on with these.
 * Threads may call this at once when no two share a cursor, a bounce memory or a part of a
 * destination. */
int kda_spans_copy(const kda_span *spans, size_t count, unsigned char *destination,
                   uint64_t destination_bytes, const kda_means *means, kda_cursor *cursor);

/* Returns 1 when the running kernel can fault in a KDA_MAPPED source, else 0: then KDA_MAPPED
 * gives KDA_NO_POPULATE, and KDA_FILE is the way. Asks the kernel each time; writes nothing.
 * Any number of threads may call this at once. */
int kda_can_populate(void);

/* cffi: end */

#endif
