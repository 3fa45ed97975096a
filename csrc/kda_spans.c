/* kda_spans.c: the sizes of spans, and every check of them. See kda_copy.h for the contract. */
#include "kda_spans.h"

#include <string.h>

static int kda_multiply(uint64_t a, uint64_t b, uint64_t *product)
{
    if (b != 0 && a > UINT64_MAX / b)
        return KDA_SIZE_OVERFLOW;
    *product = a * b;
    return KDA_OK;
}

uint64_t kda_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* 1 when `bytes` from `start` on cannot all have an address. */
static int kda_wraps(uintptr_t start, uint64_t bytes)
{
    return bytes > UINTPTR_MAX - start;
}

int kda_shape_of(const kda_span *span, kda_shape *shape)
{
    uint64_t gaps;

    memset(shape, 0, sizeof *shape);
    if (span->rows == 0 || span->row_bytes == 0)
        return KDA_OK;
    if (kda_multiply(span->rows, span->row_bytes, &shape->bytes) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (span->rows == 1 || span->row_stride == span->row_bytes) {
        shape->row_bytes = shape->row_stride = shape->extent = shape->bytes;
        return KDA_OK;
    }
    if (kda_multiply(span->rows - 1, span->row_stride, &gaps) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (gaps > UINT64_MAX - span->row_bytes)
        return KDA_SIZE_OVERFLOW;
    shape->row_bytes = span->row_bytes;
    shape->row_stride = span->row_stride;
    shape->extent = gaps + span->row_bytes;
    return KDA_OK;
}

int kda_has_short_gaps(const kda_shape *shape)
{
    uint64_t gap = shape->row_stride - shape->row_bytes;

    return gap != 0 && gap <= KDA_GAP_BYTES;
}

/* Checks the fields that say what the source is, and that its rows can have addresses. */
static int kda_check_source(const kda_span *span, kda_shape *shape)
{
    int is_empty = span->rows == 0 || span->row_bytes == 0;
    int is_memory = span->kind == KDA_MEMORY || span->kind == KDA_MAPPED;

    if (!is_memory && span->kind != KDA_FILE && span->kind != KDA_DIRECT)
        return KDA_BAD_ARGUMENT;
    if (!is_memory && span->fd < 0)
        return KDA_BAD_ARGUMENT;
    if (is_memory && span->source == NULL && !is_empty)
        return KDA_BAD_ARGUMENT;
    if (span->kind == KDA_DIRECT && span->rows > 1 && span->row_stride > span->row_bytes)
        return KDA_BAD_ARGUMENT;
    if (kda_shape_of(span, shape) != KDA_OK)
        return KDA_SIZE_OVERFLOW;
    if (is_memory)
        return kda_wraps((uintptr_t)span->source, shape->extent) ? KDA_SIZE_OVERFLOW : KDA_OK;
    if (span->file_offset > INT64_MAX || shape->extent > INT64_MAX - span->file_offset)
        return KDA_SIZE_OVERFLOW;
    return KDA_OK;
}

/* 1 when the rows of a source in memory lie, in whole or in part, in the destination. */
static int kda_overlaps(const kda_span *span, uint64_t extent, const unsigned char *destination,
                        uint64_t destination_bytes)
{
    uintptr_t from = (uintptr_t)span->source;
    uintptr_t to = (uintptr_t)destination;

    if (span->kind == KDA_FILE || span->kind == KDA_DIRECT || extent == 0)
        return 0;
    return from < to ? extent > to - from : destination_bytes > from - to;
}

/* Checks one span. `*used` is where the one before it ends; moved to where this one ends. */
static int kda_check_span(const kda_span *span, const unsigned char *destination,
                          uint64_t destination_bytes, uint64_t *used)
{
    kda_shape shape;
    int status = kda_check_source(span, &shape);

    if (status != KDA_OK)
        return status;
    if (span->destination > UINT64_MAX - shape.bytes)
        return KDA_SIZE_OVERFLOW;
    if (span->rows > 1 && span->row_stride < span->row_bytes)
        return KDA_STRIDE_SHORT;
    if (shape.extent > span->source_bytes)
        return KDA_SOURCE_SHORT;
    if (span->destination + shape.bytes > destination_bytes)
        return KDA_DESTINATION_SHORT;
    if (span->destination < *used)
        return KDA_DESTINATION_OVERLAP;
    if (kda_overlaps(span, shape.extent, destination, destination_bytes))
        return KDA_SOURCE_OVERLAP;
    *used = span->destination + shape.bytes;
    return KDA_OK;
}

int kda_spans_check(const kda_span *spans, size_t count, const unsigned char *destination,
                    uint64_t destination_bytes, size_t *failed)
{
    uint64_t used = 0;

    if (failed == NULL)
        return KDA_BAD_ARGUMENT;
    *failed = 0;
    if (spans == NULL && count != 0)
        return KDA_BAD_ARGUMENT;
    if (destination == NULL && destination_bytes != 0)
        return KDA_BAD_ARGUMENT;
    if (kda_wraps((uintptr_t)destination, destination_bytes))
        return KDA_SIZE_OVERFLOW;
    for (; *failed < count; ++*failed) {
        int status = kda_check_span(&spans[*failed], destination, destination_bytes, &used);
        if (status != KDA_OK)
            return status;
    }
    return KDA_OK;
}
