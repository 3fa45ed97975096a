/* kda_spans.h: what the parts of the copy routine share; not for callers of kda_copy.h. */
#ifndef KDA_SPANS_H
#define KDA_SPANS_H

#include "kda_copy.h"

/* Rows with no more than this between them are had from the disk together with what is between:
 * that is faster than to seek past it. Rows that are further apart are had one by one. */
#define KDA_GAP_BYTES ((uint64_t)64 << 10)

/* A span with its sizes worked out. Rows that adjoin in the source are one long row here. */
typedef struct kda_shape {
    uint64_t row_bytes;
    uint64_t row_stride;
    uint64_t bytes;  /* all rows, as they land in the destination */
    uint64_t extent; /* from the first row's first byte to the last row's last, in the source */
} kda_shape;

/* Fills `shape`, which is all zero for an empty span. KDA_OK or KDA_SIZE_OVERFLOW. */
int kda_shape_of(const kda_span *span, kda_shape *shape);

/* 1 when the rows lie apart in the source, but so little that the gaps are read along. */
int kda_has_short_gaps(const kda_shape *shape);

/* The smaller of two. */
uint64_t kda_least(uint64_t a, uint64_t b);

#endif
