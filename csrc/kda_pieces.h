/* kda_pieces.h: one piece of a span, and the ways to bring it in; not for callers of kda_copy.h. */
#ifndef KDA_PIECES_H
#define KDA_PIECES_H

#include "kda_spans.h"

/* A part of a span that one thread brings in. */
typedef struct kda_piece {
    const kda_span *span;
    size_t index;    /* of the span in its list */
    kda_shape shape; /* of the span */
    uint64_t done;   /* where the piece begins; moved on with the bytes that have landed */
    uint64_t end;    /* where it ends; both count the span's bytes in the destination */
    int error;       /* errno where the status says so, else 0 */
} kda_piece;

/* Scratch memory that one thread has to itself. */
typedef struct kda_bounce {
    unsigned char *memory;
    uint64_t bytes;       /* a multiple of block_bytes, and not 0, where a KDA_DIRECT span is */
    uint64_t block_bytes;
} kda_bounce;

/* Cuts a piece of about `bytes_max` bytes of the source off at piece->done: at a multiple of 64 KiB
 * in the file or the map, so that no block or page is brought in by two pieces. */
void kda_piece_cut(kda_piece *piece, uint64_t bytes_max);

/* Brings the piece into its place. KDA_OK, KDA_PAUSED, or what kda_spans_copy says of a source.
 * piece->done has moved on by what is in the destination for good. */
int kda_piece_move(kda_piece *piece, unsigned char *destination, const kda_bounce *bounce);

#endif
