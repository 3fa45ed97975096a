/* instructions.c: fixed jobs of the copy routine, for counting their instructions.
 *
 * usage: instructions JOB
 *
 * Does one job of kda_copy.h, inside the function counted_job, which is what is counted: the memory
 * is made and filled before. One thread, no time limit. Exits 0 when the bytes came out right, 1
 * when they did not, 2 when there is no such job.
 *
 *   conv-join       three [8192, 1, 4] BF16 tensors joined
 *   conv-join-x34   the same for 34 layers, one call each
 *   check-layer     kda_spans_check of a layer's 15 spans, of 16 bytes each; nothing is copied
 *   column-slice    one span of 1024 rows of 512 bytes, 4096 apart
 */
#include "kda_copy.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { TENSOR_BYTES = 8192 * 4 * 2, LAYER_SPANS = 15, LAYERS = 34 };
enum { ROWS = 1024, ROW_BYTES = 512, ROW_STRIDE = 4096 };

static unsigned char source[ROWS * ROW_STRIDE];
static unsigned char destination[ROWS * ROW_BYTES];
static kda_span spans[LAYER_SPANS];
static size_t span_count;

static void add_span(uint64_t from, uint64_t rows, uint64_t row_bytes, uint64_t stride)
{
    const kda_span *last = span_count ? &spans[span_count - 1] : NULL;
    kda_span *span = &spans[span_count++];
    span->kind = KDA_MEMORY;
    span->fd = -1;
    span->source = source + from;
    span->source_bytes = sizeof source - from;
    span->rows = rows;
    span->row_bytes = row_bytes;
    span->row_stride = stride;
    span->destination = last ? last->destination + last->rows * last->row_bytes : 0;
}

static int copy(void)
{
    kda_means means = {0};
    kda_cursor cursor = {0};
    means.nanoseconds_max = UINT64_MAX;
    means.threads = 1;
    return kda_spans_copy(spans, span_count, destination, sizeof destination, &means, &cursor);
}

/* What is counted. Its own function, never inlined, as callgrind finds it by its name. */
__attribute__((noinline)) int counted_job(int copies);
__attribute__((noinline)) int counted_job(int copies)
{
    size_t failed = 0;
    if (copies == 0)
        return kda_spans_check(spans, span_count, destination, sizeof destination, &failed);
    int status = KDA_OK;
    for (int i = 0; i < copies && status == KDA_OK; i++)
        status = copy();
    return status;
}

static int bytes_are_right(void)
{
    for (size_t i = 0; i < span_count; i++)
        for (uint64_t row = 0; row < spans[i].rows; row++)
            if (memcmp(destination + spans[i].destination + row * spans[i].row_bytes,
                       spans[i].source + row * spans[i].row_stride, spans[i].row_bytes) != 0)
                return 0;
    return 1;
}

int main(int argc, char **argv)
{
    const char *job = argc == 2 ? argv[1] : "";
    int copies = 1;
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (unsigned char)(i * 2654435761u >> 24);
    if (strncmp(job, "conv-join", 9) == 0) {
        copies = strcmp(job, "conv-join-x34") == 0 ? LAYERS : 1;
        for (uint64_t i = 0; i < 3; i++)
            add_span(i * 2 * TENSOR_BYTES, 1, TENSOR_BYTES, TENSOR_BYTES);
    } else if (strcmp(job, "check-layer") == 0) {
        copies = 0;
        for (uint64_t i = 0; i < LAYER_SPANS; i++)
            add_span(i * 64, 1, 16, 16);
    } else if (strcmp(job, "column-slice") == 0) {
        add_span(0, ROWS, ROW_BYTES, ROW_STRIDE);
    } else {
        fputs("usage: instructions JOB\n", stderr);
        return 2;
    }
    memset(destination, 0, sizeof destination); /* no page of it is new in the job */
    return counted_job(copies) == KDA_OK && (copies == 0 || bytes_are_right()) ? 0 : 1;
}
