/* selftest_header.c: every answer of the functions in kda_header.h, without a framework.
 *
 * Each text and each room is a block of exactly its size, so that a sanitizer sees the first byte
 * beside one. Prints the place of each check that fails, and at the end one line, "N checks passed"
 * or "N checks passed, M failed". Exit status 0 or 1. */
#include "kda_header.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int checks_passed;
static int checks_failed;

#define CHECK(condition) check((condition) != 0, #condition, __LINE__)

static void check(int holds, const char *text, int line)
{
    if (holds) {
        checks_passed++;
    } else {
        checks_failed++;
        printf("selftest_header.c:%d: does not hold: %s\n", line, text);
    }
}

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes != 0 ? bytes : 1);

    if (memory == NULL) {
        printf("selftest_header: out of memory\n");
        exit(2);
    }
    return memory;
}

static kda_columns columns_for(size_t text_bytes, size_t rows_max, size_t words_max,
                               size_t slots_max)
{
    kda_columns columns;

    memset(&columns, 0, sizeof columns);
    columns.names = allocate(text_bytes);
    columns.row_words = allocate(rows_max * sizeof *columns.row_words);
    columns.begins = allocate(rows_max * sizeof *columns.begins);
    columns.ends = allocate(rows_max * sizeof *columns.ends);
    columns.word_begins = allocate(words_max * sizeof *columns.word_begins);
    columns.word_ends = allocate(words_max * sizeof *columns.word_ends);
    columns.word_rows = allocate(words_max * sizeof *columns.word_rows);
    columns.slots = allocate(slots_max * sizeof *columns.slots);
    columns.rows_max = rows_max;
    columns.words_max = words_max;
    columns.slots_max = slots_max;
    return columns;
}

static void release(kda_columns *columns)
{
    free(columns->names);
    free(columns->row_words);
    free(columns->begins);
    free(columns->ends);
    free(columns->word_begins);
    free(columns->word_ends);
    free(columns->word_rows);
    free(columns->slots);
}

typedef int kda_splitter(const char *text, size_t text_bytes, kda_columns *columns);

/* The answer for `bytes` bytes of `text`, in a block of their own. */
static int split(kda_splitter *splitter, const char *text, size_t bytes, kda_columns *columns)
{
    char *own = allocate(bytes);
    int form;

    memcpy(own, text, bytes);
    form = splitter(own, bytes, columns);
    free(own);
    return form;
}

static int form_of(kda_splitter *splitter, const char *text, size_t bytes)
{
    kda_columns columns = columns_for(bytes, 4, 4, 8);
    int form = split(splitter, text, bytes, &columns);

    release(&columns);
    return form;
}

static const char header[] =
    "\"model.a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
    "\"\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]},"
    "\"model.layers.1.b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[16,28]}}";

static const char weight_map[] = " \"model.a\" : \"one.safetensors\",\n\t\"\":\"two\","
                                 "\"model.layers.1.b\": \"one.safetensors\"\r\n}, \"more\": 1}";

static void test_a_header(void)
{
    size_t bytes = sizeof header - 1;
    kda_columns columns = columns_for(bytes, 3, 2, 4);

    CHECK(split(kda_header_split, header, bytes, &columns) == KDA_FORM_PLAIN);
    CHECK(columns.rows == 3 && columns.words == 2 && columns.used == bytes);
    CHECK(columns.names_bytes == 26);
    CHECK(memcmp(columns.names, "model.a\n\nmodel.layers.1.b\n", 26) == 0);
    CHECK(columns.row_words[0] == 0 && columns.row_words[1] == 1 && columns.row_words[2] == 0);
    CHECK(columns.word_rows[0] == 2 && columns.word_rows[1] == 1);
    CHECK(columns.begins[2] == 16 && columns.ends[2] == 28);
    CHECK(strncmp(header + columns.word_begins[0], "BF16\",\"shape\":[2,3]", 19) == 0);
    CHECK(columns.word_ends[0] - columns.word_begins[0] == 18);
    release(&columns);
}

static void test_a_weight_map(void)
{
    size_t bytes = sizeof weight_map - 1;
    kda_columns columns = columns_for(bytes, 3, 2, 4);

    free(columns.begins);
    free(columns.ends);
    columns.begins = columns.ends = NULL;
    CHECK(split(kda_weight_map_split, weight_map, bytes, &columns) == KDA_FORM_PLAIN);
    CHECK(columns.rows == 3 && columns.words == 2);
    CHECK(strcmp(weight_map + columns.used, ", \"more\": 1}") == 0);
    CHECK(memcmp(columns.names, "model.a\n\nmodel.layers.1.b\n", 26) == 0);
    CHECK(columns.word_ends[1] - columns.word_begins[1] == 3);
    release(&columns);
}

static void test_too_little_room(void)
{
    size_t rows, words;

    for (rows = 0; rows <= 3; rows++) {
        for (words = 0; words <= 2; words++) {
            kda_columns columns = columns_for(sizeof header, rows, words, 4);
            int fits = rows == 3 && words == 2;

            CHECK((split(kda_header_split, header, sizeof header - 1, &columns) ==
                   KDA_FORM_PLAIN) == fits);
            CHECK((split(kda_weight_map_split, weight_map, sizeof weight_map - 1, &columns) ==
                   KDA_FORM_PLAIN) == fits);
            release(&columns);
        }
    }
}

/* As many words as slots are all found; one more ends the search and not the program. */
static void test_full_slots(void)
{
    char text[80 * 8];
    int words;

    for (words = 63; words <= 66; words++) {
        size_t bytes = 0;
        kda_columns columns;
        int n;

        for (n = 0; n < words; n++)
            bytes += (size_t)snprintf(text + bytes, sizeof text - bytes, "\"\":\"%02d\"%c", n,
                                      n + 1 < words ? ',' : '}');
        columns = columns_for(bytes, 80, 80, 64);
        CHECK((split(kda_weight_map_split, text, bytes, &columns) == KDA_FORM_PLAIN) ==
              (words <= 64));
        release(&columns);
    }
}

static void test_arguments(void)
{
    kda_columns columns = columns_for(sizeof header, 4, 4, 8);
    kda_columns changed;

    CHECK(kda_header_split(NULL, 0, &columns) == KDA_FORM_OTHER);
    CHECK(kda_header_split(header, sizeof header - 1, NULL) == KDA_FORM_OTHER);
    CHECK(kda_weight_map_split(NULL, 0, &columns) == KDA_FORM_OTHER);
    CHECK(kda_weight_map_split(weight_map, sizeof weight_map - 1, NULL) == KDA_FORM_OTHER);
    CHECK(kda_header_split(header, 0, &columns) == KDA_FORM_OTHER);
    CHECK(kda_weight_map_split(weight_map, 0, &columns) == KDA_FORM_OTHER);
#define REFUSED_WITH(field, value)                                                             \
    do {                                                                                       \
        changed = columns;                                                                     \
        changed.field = (value);                                                               \
        CHECK(kda_header_split(header, sizeof header - 1, &changed) == KDA_FORM_OTHER);        \
    } while (0)
    REFUSED_WITH(names, NULL);
    REFUSED_WITH(row_words, NULL);
    REFUSED_WITH(begins, NULL);
    REFUSED_WITH(ends, NULL);
    REFUSED_WITH(word_begins, NULL);
    REFUSED_WITH(word_ends, NULL);
    REFUSED_WITH(word_rows, NULL);
    REFUSED_WITH(slots, NULL);
    REFUSED_WITH(slots_max, 0);
    REFUSED_WITH(slots_max, 6);
    REFUSED_WITH(words_max, (size_t)UINT32_MAX);
    release(&columns);
}

/* No beginning of a text is plain, and nothing is read behind it. */
static void test_every_cut(void)
{
    size_t end, map_end = sizeof weight_map - sizeof ", \"more\": 1}";

    for (end = 0; end < sizeof header - 1; end++)
        CHECK(form_of(kda_header_split, header, end) == KDA_FORM_OTHER);
    for (end = 0; end < sizeof weight_map; end++)
        CHECK((form_of(kda_weight_map_split, weight_map, end) == KDA_FORM_PLAIN) ==
              (end >= map_end));
}

/* Each byte of a text as each other byte: whatever the answer, all within the rooms. */
static void test_every_byte(void)
{
    char text[sizeof header > sizeof weight_map ? sizeof header : sizeof weight_map];
    size_t at;
    int byte;

    for (at = 0; at < sizeof header - 1; at++) {
        for (byte = 0; byte < 256; byte++) {
            memcpy(text, header, sizeof header);
            text[at] = (char)byte;
            (void)form_of(kda_header_split, text, sizeof header - 1);
            memcpy(text, weight_map, sizeof weight_map);
            if (at < sizeof weight_map - 1)
                text[at] = (char)byte;
            (void)form_of(kda_weight_map_split, text, sizeof weight_map - 1);
        }
    }
    CHECK(1);
}

/* Any byte within a name, however far from its ends: taken as it is, or not at all. */
static void test_every_byte_of_a_name(void)
{
    enum { QUOTE = 1, LONGEST = 20 };
    static const char behind[] = "\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}";
    static const char file_behind[] = "\":\"f\"}";
    size_t length, at;
    int byte;

    for (length = 1; length <= LONGEST; length++)
        for (at = 0; at < length; at++)
            for (byte = 0; byte < 256; byte++) {
                char text[QUOTE + LONGEST + sizeof behind];
                int is_plain = byte >= 0x20 && byte != '"' && byte != '\\';
                kda_columns columns = columns_for(sizeof text, 1, 1, 2);

                text[0] = '"';
                memset(text + QUOTE, 'n', length);
                text[QUOTE + at] = (char)byte;
                memcpy(text + QUOTE + length, behind, sizeof behind);
                CHECK((split(kda_header_split, text, QUOTE + length + sizeof behind - 1,
                             &columns) == KDA_FORM_PLAIN) == is_plain);
                CHECK(!is_plain || (columns.names_bytes == length + 1 &&
                                    memcmp(columns.names, text + QUOTE, length) == 0 &&
                                    columns.names[length] == '\n'));
                memcpy(text + QUOTE + length, file_behind, sizeof file_behind);
                CHECK((split(kda_weight_map_split, text, QUOTE + length + sizeof file_behind - 1,
                             &columns) == KDA_FORM_PLAIN) == is_plain);
                release(&columns);
            }
}

/* As a dimension, and where a tensor begins and ends. */
static void expect_number(const char *number, int is_plain, uint64_t value)
{
    static const char *const forms[] = {
        "\"\":{\"dtype\":\"U8\",\"shape\":[%s],\"data_offsets\":[0,1]}}",
        "\"\":{\"dtype\":\"U8\",\"shape\":[1,%s],\"data_offsets\":[0,1]}}",
        "\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[%s,1]}}",
        "\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,%s]}}"};
    int form;

    for (form = 0; form < 4; form++) {
        char text[128];
        size_t bytes = (size_t)snprintf(text, sizeof text, forms[form], number);
        kda_columns columns = columns_for(bytes, 1, 1, 2);

        CHECK((split(kda_header_split, text, bytes, &columns) == KDA_FORM_PLAIN) == is_plain);
        if (is_plain && form >= 2)
            CHECK((form == 2 ? columns.begins : columns.ends)[0] == value);
        release(&columns);
    }
}

static void test_numbers(void)
{
    static const char *const others[] = {"00", "01", "-1", "+1", "1.0", "1e3", " 1", "1 ", "x", "/",
                                         ":", "10000000000000000000", "99999999999999999999"};
    size_t i;

    expect_number("0", 1, 0);
    expect_number("1", 1, 1);
    expect_number("9", 1, 9);
    expect_number("1234567890", 1, 1234567890);
    expect_number("9999999999999999999", 1, 9999999999999999999U); /* the longest */
    for (i = 0; i < sizeof others / sizeof others[0]; i++)
        expect_number(others[i], 0, 0);
}

int main(void)
{
    test_a_header();
    test_a_weight_map();
    test_too_little_room();
    test_full_slots();
    test_arguments();
    test_every_cut();
    test_every_byte();
    test_every_byte_of_a_name();
    test_numbers();
    printf("%d checks passed", checks_passed);
    if (checks_failed != 0)
        printf(", %d failed", checks_failed);
    printf("\n");
    return checks_failed != 0;
}
