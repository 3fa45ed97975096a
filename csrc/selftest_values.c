/* selftest_values.c: kda_values.h, every bfloat16 there is and the borders of binary32. */
#include "selftest.h"

#include "kda_values.h"

#include <errno.h>
#include <string.h>

static kda_seen looked_at(const void *values, uint64_t bytes, unsigned width)
{
    kda_seen seen = {0, 0};

    CHECK(kda_values_look(values, bytes, width, &seen) == 0);
    return seen;
}

static void test_every_bf16(void)
{
    unsigned bits;

    for (bits = 0; bits <= 0xFFFF; bits++) {
        unsigned char value[3] = {0, (unsigned char)(bits & 0xFF), (unsigned char)(bits >> 8)};
        kda_seen seen = looked_at(value + 1, 2, 2); /* at an odd address */

        CHECK(seen.not_finite == (((bits >> 7) & 0xFF) == 0xFF));
        CHECK(seen.not_zero == (bits != 0 && bits != 0x8000));
    }
}

static void test_borders_of_f32(void)
{
    static const uint32_t bits[] = {0,          0x80000000, 1,          0x80000001, 0x7F7FFFFF,
                                    0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF};
    kda_seen all = looked_at(bits, sizeof bits, 4);
    size_t i;

    for (i = 0; i < sizeof bits / sizeof *bits; i++) {
        kda_seen seen = looked_at(&bits[i], 4, 4);

        CHECK(seen.not_finite == (i >= 6));
        CHECK(seen.not_zero == (i >= 2));
    }
    CHECK(all.not_finite == 4 && all.not_zero == 8);
}

static void test_that_what_is_seen_adds_up(void)
{
    static const uint16_t values[] = {0x3F80, 0x7F80, 0, 0xFFFF};
    kda_seen seen = {10, 20};

    CHECK(kda_values_look((const unsigned char *)values, sizeof values, 2, &seen) == 0);
    CHECK(seen.not_finite == 12 && seen.not_zero == 23);
    CHECK(kda_values_look(NULL, 0, 4, &seen) == 0);
    CHECK(seen.not_finite == 12 && seen.not_zero == 23);
}

static void test_what_is_refused(void)
{
    unsigned char values[8] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
    kda_seen seen = {0, 0};

    CHECK(kda_values_look(values, 8, 2, NULL) == EINVAL);
    CHECK(kda_values_look(NULL, 2, 2, &seen) == EINVAL);
    CHECK(kda_values_look(values, 8, 0, &seen) == EINVAL);
    CHECK(kda_values_look(values, 8, 1, &seen) == EINVAL);
    CHECK(kda_values_look(values, 8, 8, &seen) == EINVAL);
    CHECK(kda_values_look(values, 7, 2, &seen) == EINVAL);
    CHECK(kda_values_look(values, 6, 4, &seen) == EINVAL);
    CHECK(seen.not_finite == 0 && seen.not_zero == 0);
}

void test_values(void)
{
    test_every_bf16();
    test_borders_of_f32();
    test_that_what_is_seen_adds_up();
    test_what_is_refused();
}
