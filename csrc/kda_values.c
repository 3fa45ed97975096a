/* kda_values.c: see kda_values.h. */
#include "kda_values.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

/* Of a value's bits: those without the sign, and the first that is an infinity. NaN is beyond it. */
enum { KDA_BF16_MAGNITUDE = 0x7FFF, KDA_BF16_INFINITY = 0x7F80 };
static const uint32_t kda_f32_magnitude = UINT32_C(0x7FFFFFFF);
static const uint32_t kda_f32_infinity = UINT32_C(0x7F800000);

static void kda_look_at_bf16(const unsigned char *values, uint64_t count, kda_seen *seen)
{
    uint64_t i;

    for (i = 0; i < count; i++) {
        uint16_t bits;

        memcpy(&bits, values + i * sizeof bits, sizeof bits);
        bits &= KDA_BF16_MAGNITUDE;
        seen->not_finite += bits >= KDA_BF16_INFINITY;
        seen->not_zero += bits != 0;
    }
}

static void kda_look_at_f32(const unsigned char *values, uint64_t count, kda_seen *seen)
{
    uint64_t i;

    for (i = 0; i < count; i++) {
        uint32_t bits;

        memcpy(&bits, values + i * sizeof bits, sizeof bits);
        bits &= kda_f32_magnitude;
        seen->not_finite += bits >= kda_f32_infinity;
        seen->not_zero += bits != 0;
    }
}

int kda_values_look(const unsigned char *values, uint64_t bytes, unsigned width, kda_seen *seen)
{
    kda_seen found = {0, 0};

    if (seen == NULL || (values == NULL && bytes != 0))
        return EINVAL;
    if ((width != 2 && width != 4) || bytes % width != 0)
        return EINVAL;
    if (width == 2)
        kda_look_at_bf16(values, bytes / 2, &found);
    else
        kda_look_at_f32(values, bytes / 4, &found);
    seen->not_finite += found.not_finite;
    seen->not_zero += found.not_zero;
    return 0;
}
