/* kda_values.h: looks at the values of a tensor, as they are stored.
 *
 * What lies between the two "cffi" lines is also read by build_native.py, as it stands: it must
 * stay free of preprocessor lines.
 */
#ifndef KDA_VALUES_H
#define KDA_VALUES_H

#include <stdint.h>

/* cffi: begin */

/* What was seen of values so far; zeroed by the caller at first. */
typedef struct kda_seen {
    uint64_t not_finite; /* how many are NaN or an infinity */
    uint64_t not_zero;   /* how many are something else than 0 and -0 */
} kda_seen;

/* Looks at little-endian floating-point values and adds to what was seen.
 *
 * values             `bytes` bytes, at any address; may be null when bytes is 0.
 * width              2 for bfloat16, 4 for IEEE binary32: bytes of a value, which divide `bytes`.
 * seen               never null.
 *
 * Returns 0, or EINVAL for arguments outside these rules, and then nothing was looked at. Allocates
 * nothing and keeps no state; any number of threads may call it at once. */
int kda_values_look(const unsigned char *values, uint64_t bytes, unsigned width, kda_seen *seen);

/* cffi: end */

#endif
