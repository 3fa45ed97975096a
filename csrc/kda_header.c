/* kda_header.c: see kda_header.h, where the contracts are. */
#include "kda_header.h"

#include <string.h>

/* The most digits that always fit 64 bits. */
#define KDA_DIGITS_MAX 19

/* What is left of a text. */
typedef struct kda_rest {
    const char *at;
    const char *end;
} kda_rest;

/* Steps over `literal`, a string constant; 1 when it stood there. */
#define KDA_SKIP(rest, literal) kda_skip((rest), (literal), sizeof(literal) - 1)

static inline int kda_skip(kda_rest *rest, const char *literal, size_t bytes)
{
    if ((size_t)(rest->end - rest->at) < bytes || memcmp(rest->at, literal, bytes) != 0)
        return 0;
    rest->at += bytes;
    return 1;
}

static void kda_skip_space(kda_rest *rest)
{
    while (rest->at < rest->end &&
           (*rest->at == ' ' || *rest->at == '\n' || *rest->at == '\r' || *rest->at == '\t'))
        rest->at++;
}

/* 1 when a string may hold `byte` without an escape. */
static inline int kda_is_plain(unsigned char byte)
{
    return byte >= 0x20 && byte != '"' && byte != '\\';
}

/* 0 when none of eight bytes is one that `kda_is_plain` refuses. */
static inline uint64_t kda_has_other(uint64_t eight)
{
    const uint64_t ones = UINT64_MAX / 255, tops = ones * 0x80;
    uint64_t quote = eight ^ ones * '"', backslash = eight ^ ones * '\\';
    uint64_t low = (eight - ones * 0x20) & ~eight;

    return (low | ((quote - ones) & ~quote) | ((backslash - ones) & ~backslash)) & tops;
}

/* Steps over a name and its closing quote; copies it and a newline to `out`. Returns where the copy
 * ends, or null. A name takes no more room there than it does in the text with that quote. */
static char *kda_copy_name(kda_rest *rest, char *out)
{
    uint64_t eight;

    while (rest->end - rest->at >= (ptrdiff_t)sizeof eight) {
        memcpy(&eight, rest->at, sizeof eight);
        if (kda_has_other(eight))
            break;
        memcpy(out, &eight, sizeof eight);
        rest->at += sizeof eight;
        out += sizeof eight;
    }
    while (rest->at < rest->end && kda_is_plain((unsigned char)*rest->at))
        *out++ = *rest->at++;
    if (!KDA_SKIP(rest, "\""))
        return NULL;
    *out++ = '\n';
    return out;
}

/* Steps over a number; 1 when there was one. The caller looks at what follows, so that a 20th
 * digit, or one behind a 0, is found there. */
static int kda_number(kda_rest *rest, uint64_t *value)
{
    const char *begin = rest->at;
    uint64_t sum = 0;

    if (KDA_SKIP(rest, "0")) {
        *value = 0;
        return 1;
    }
    while (rest->at < rest->end && *rest->at >= '0' && *rest->at <= '9' &&
           rest->at - begin < KDA_DIGITS_MAX)
        sum = sum * 10 + (uint64_t)(*rest->at++ - '0');
    *value = sum;
    return rest->at != begin;
}

/* Steps over DTYPE","shape":[N,... and stops before the ']'; 1 when it stood there. */
static int kda_skip_kind(kda_rest *rest)
{
    const char *begin = rest->at;
    uint64_t ignored;

    while (rest->at < rest->end && ((*rest->at >= 'A' && *rest->at <= 'Z') ||
                                    (*rest->at >= '0' && *rest->at <= '9') || *rest->at == '_'))
        rest->at++;
    if (rest->at == begin || !KDA_SKIP(rest, "\",\"shape\":["))
        return 0;
    if (rest->at < rest->end && *rest->at == ']')
        return 1;
    do {
        if (!kda_number(rest, &ignored))
            return 0;
    } while (KDA_SKIP(rest, ","));
    return 1;
}

static uint64_t kda_hash(const char *word, size_t bytes)
{
    uint64_t hash = bytes, part;

    for (; bytes != 0; word += sizeof part, bytes -= sizeof part) {
        part = 0;
        if (bytes <= sizeof part) {
            memcpy(&part, word, bytes);
            return (hash ^ part) * 0x9E3779B97F4A7C15u >> 32;
        }
        memcpy(&part, word, sizeof part);
        hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

/* 1 when the word `number` is `word`. */
static int kda_is_word(const kda_columns *columns, size_t number, const char *text,
                       const char *word, size_t bytes)
{
    size_t begin = columns->word_begins[number];

    return columns->word_ends[number] - begin == bytes && memcmp(text + begin, word, bytes) == 0;
}

/* Says that the next row has `word`, which gets a number if it is new; 1 when there is room. */
static int kda_put_word(kda_columns *columns, const char *text, const char *word, size_t bytes)
{
    size_t slot = (size_t)kda_hash(word, bytes) & (columns->slots_max - 1);
    size_t number;

    for (int probe = 0; probe < KDA_PROBES_MAX; probe++) {
        if (columns->slots[slot] == 0) {
            number = columns->words;
            if (number == columns->words_max)
                return 0;
            columns->word_begins[number] = (size_t)(word - text);
            columns->word_ends[number] = (size_t)(word - text) + bytes;
            columns->word_rows[number] = 0;
            columns->slots[slot] = (uint32_t)++columns->words;
        }
        number = columns->slots[slot] - 1;
        if (kda_is_word(columns, number, text, word, bytes)) {
            columns->row_words[columns->rows] = (uint32_t)number;
            columns->word_rows[number]++;
            return 1;
        }
        slot = (slot + 1) & (columns->slots_max - 1);
    }
    return 0;
}

/* Makes the results empty; 1 when the arguments can be used. */
static int kda_begin(const char *text, kda_columns *columns)
{
    if (text == NULL || columns == NULL)
        return 0;
    columns->rows = columns->words = columns->names_bytes = columns->used = 0;
    if (columns->names == NULL || columns->row_words == NULL || columns->word_begins == NULL ||
        columns->word_ends == NULL || columns->word_rows == NULL || columns->slots == NULL)
        return 0;
    if (columns->words_max >= UINT32_MAX || columns->slots_max == 0 ||
        (columns->slots_max & (columns->slots_max - 1)) != 0)
        return 0;
    memset(columns->slots, 0, columns->slots_max * sizeof *columns->slots);
    return 1;
}

int kda_header_split(const char *text, size_t text_bytes, kda_columns *columns)
{
    kda_rest rest;
    char *out;

    if (!kda_begin(text, columns) || columns->begins == NULL || columns->ends == NULL)
        return KDA_FORM_OTHER;
    rest.at = text;
    rest.end = text + text_bytes;
    out = columns->names;
    do {
        size_t row = columns->rows;
        const char *kind;

        if (row == columns->rows_max || !KDA_SKIP(&rest, "\""))
            return KDA_FORM_OTHER;
        out = kda_copy_name(&rest, out);
        if (out == NULL || !KDA_SKIP(&rest, ":{\"dtype\":\""))
            return KDA_FORM_OTHER;
        kind = rest.at;
        if (!kda_skip_kind(&rest) || !kda_put_word(columns, text, kind, (size_t)(rest.at - kind)))
            return KDA_FORM_OTHER;
        if (!KDA_SKIP(&rest, "],\"data_offsets\":[") || !kda_number(&rest, &columns->begins[row]) ||
            !KDA_SKIP(&rest, ",") || !kda_number(&rest, &columns->ends[row]) ||
            !KDA_SKIP(&rest, "]}"))
            return KDA_FORM_OTHER;
        columns->rows++;
    } while (KDA_SKIP(&rest, ","));
    if (!KDA_SKIP(&rest, "}") || rest.at != rest.end)
        return KDA_FORM_OTHER;
    columns->names_bytes = (size_t)(out - columns->names);
    columns->used = text_bytes;
    return KDA_FORM_PLAIN;
}

int kda_weight_map_split(const char *text, size_t text_bytes, kda_columns *columns)
{
    kda_rest rest;
    char *out;

    if (!kda_begin(text, columns))
        return KDA_FORM_OTHER;
    rest.at = text;
    rest.end = text + text_bytes;
    out = columns->names;
    do {
        const char *file;

        kda_skip_space(&rest);
        if (columns->rows == columns->rows_max || !KDA_SKIP(&rest, "\""))
            return KDA_FORM_OTHER;
        out = kda_copy_name(&rest, out);
        if (out == NULL)
            return KDA_FORM_OTHER;
        kda_skip_space(&rest);
        if (!KDA_SKIP(&rest, ":"))
            return KDA_FORM_OTHER;
        kda_skip_space(&rest);
        if (!KDA_SKIP(&rest, "\""))
            return KDA_FORM_OTHER;
        file = rest.at;
        while (rest.at < rest.end && kda_is_plain((unsigned char)*rest.at))
            rest.at++;
        if (!kda_put_word(columns, text, file, (size_t)(rest.at - file)) ||
            !KDA_SKIP(&rest, "\""))
            return KDA_FORM_OTHER;
        columns->rows++;
        kda_skip_space(&rest);
    } while (KDA_SKIP(&rest, ","));
    if (!KDA_SKIP(&rest, "}"))
        return KDA_FORM_OTHER;
    columns->names_bytes = (size_t)(out - columns->names);
    columns->used = (size_t)(rest.at - text);
    return KDA_FORM_PLAIN;
}
