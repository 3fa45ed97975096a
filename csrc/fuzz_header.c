/* fuzz_header.c: LibFuzzer target. The first two bytes say which function of kda_header.h is asked
 * and how much room it gets, the others are its text. A parser that works in another way, by
 * patterns, says whether the text has the form and what the columns must be; a header is also
 * written anew from its columns, and must come out as it went in. See tests/fuzz/README.md.
 */
#include "kda_header.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_BYTES_MAX = 4096, ROWS_MAX = 1024, DIGITS_MAX = 19, CANARY_BYTES = 8 };

/* Capitals stand for kinds of text, see `match_kind`; everything else stands for itself. */
#define ENTRY "\"N\":{\"dtype\":\"D\",\"shape\":[LE],\"data_offsets\":[I,I]}"
#define MEMBER "S\"N\"S:S\"FE\"S"

/* A member of the text, as the patterns see it: offsets in the text. */
typedef struct row {
    size_t name, name_end, word, word_end;
    uint64_t numbers[2];
} row;

static row rows[ROWS_MAX];
static char written[TEXT_BYTES_MAX + 64];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(int holds)
{
    if (!holds)
        abort();
}

/* What the patterns say -----------------------------------------------------------------------*/

static size_t while_any_of(const char *set, const char *text, size_t size, size_t at)
{
    while (at < size && text[at] != 0 && strchr(set, text[at]) != NULL)
        at++;
    return at;
}

static size_t while_in_string(const char *text, size_t size, size_t at)
{
    while (at < size && (unsigned char)text[at] > 31 && text[at] != '"' && text[at] != '\\')
        at++;
    return at;
}

/* Where the integer at `at` ends; `at` when there is none. */
static size_t after_integer(const char *text, size_t size, size_t at)
{
    size_t end = while_any_of("0123456789", text, size, at);

    return end - at > DIGITS_MAX || (end - at > 1 && text[at] == '0') ? at : end;
}

/* Where the text of `kind` that begins at `at` ends; SIZE_MAX when it is something else. */
static size_t match_kind(char kind, const char *text, size_t size, size_t at, row *found)
{
    size_t end = at;
    size_t next;

    switch (kind) {
    case 'S': /* white space */
        return while_any_of(" \t\r\n", text, size, at);
    case 'N': /* a name */
        found->name = at;
        return found->name_end = while_in_string(text, size, at);
    case 'F': /* a file, which is the word */
        found->word = at;
        return while_in_string(text, size, at);
    case 'D': /* a dtype, where the word begins */
        found->word = at;
        end = while_any_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789", text, size, at);
        return end == at ? SIZE_MAX : end;
    case 'L': /* integers with a comma between two, or none */
        while ((next = after_integer(text, size, end)) != end) {
            if (next == size || text[next] != ',')
                return next;
            end = next + 1;
        }
        return end == at ? at : SIZE_MAX;
    case 'E': /* nothing, where the word ends */
        return found->word_end = at;
    case 'I': /* the two offsets */
        end = after_integer(text, size, at);
        found->numbers[0] = found->numbers[1];
        for (found->numbers[1] = 0, next = at; next < end; next++)
            found->numbers[1] = found->numbers[1] * 10 + (uint64_t)(text[next] - '0');
        return end == at ? SIZE_MAX : end;
    default:
        return at < size && text[at] == kind ? at + 1 : SIZE_MAX;
    }
}

/* How many members `text` has, and where the brace after them ends; 0 in any other form. */
static size_t match_members(const char *pattern, const char *text, size_t size, size_t *used)
{
    size_t count = 0;
    size_t at = 0;

    for (;; at++) {
        const char *kind;

        need(count < ROWS_MAX);
        for (kind = pattern; *kind != 0 && at != SIZE_MAX; kind++)
            at = match_kind(*kind, text, size, at, &rows[count]);
        if (at >= size)
            return 0;
        count++;
        if (text[at] == '}') {
            *used = at + 1;
            return count;
        }
        if (text[at] != ',')
            return 0;
    }
}

static int same_word(const char *text, const row *a, const row *b)
{
    size_t bytes = a->word_end - a->word;

    return bytes == b->word_end - b->word && memcmp(text + a->word, text + b->word, bytes) == 0;
}

/* How many different words the rows have. */
static size_t count_words(const char *text, size_t count)
{
    size_t words = 0;
    size_t i, j;

    for (i = 0; i < count; i++) {
        for (j = 0; j < i && !same_word(text, &rows[i], &rows[j]); j++)
            ;
        words += j == i;
    }
    return words;
}

/* The rooms -----------------------------------------------------------------------------------*/

enum { NAMES, ROW_WORDS, BEGINS, ENDS, WORD_BEGINS, WORD_ENDS, WORD_ROWS, SLOTS, ROOMS };

enum { NUMBERS_MAX = TEXT_BYTES_MAX, ROOM_BYTES_MAX = NUMBERS_MAX * 8 };

/* One after the other, so that what is written behind one of them is found by the sanitizer. */
static uint64_t names[NUMBERS_MAX], row_words[NUMBERS_MAX], begins[NUMBERS_MAX], ends[NUMBERS_MAX];
static uint64_t word_begins[NUMBERS_MAX], word_ends[NUMBERS_MAX], word_rows[NUMBERS_MAX];
static uint64_t slots[NUMBERS_MAX];
static uint64_t *const memory[] = {names,       row_words, begins,    ends,
                                   word_begins, word_ends, word_rows, slots};
static unsigned char *room_begins[ROOMS];

/* Room for so many bytes; behind it is nothing, before it a canary. */
static void *make_room(int which, size_t bytes)
{
    need(bytes <= ROOM_BYTES_MAX - CANARY_BYTES);
    room_begins[which] = (unsigned char *)memory[which] + ROOM_BYTES_MAX - bytes;
    memset(room_begins[which] - CANARY_BYTES, 0xC5, CANARY_BYTES);
    return room_begins[which];
}

static void need_canaries(void)
{
    static const unsigned char canary[] = {0xC5, 0xC5, 0xC5, 0xC5, 0xC5, 0xC5, 0xC5, 0xC5};
    int which;

    for (which = 0; which < ROOMS; which++)
        need(memcmp(room_begins[which] - CANARY_BYTES, canary, CANARY_BYTES) == 0);
}

static void make_rooms(kda_columns *columns, size_t text_bytes, int has_offsets)
{
    size_t offsets_max = has_offsets ? columns->rows_max : 0;

    columns->names = make_room(NAMES, text_bytes);
    columns->row_words = make_room(ROW_WORDS, columns->rows_max * sizeof *columns->row_words);
    columns->begins = make_room(BEGINS, offsets_max * sizeof *columns->begins);
    columns->ends = make_room(ENDS, offsets_max * sizeof *columns->ends);
    columns->word_begins =
        make_room(WORD_BEGINS, columns->words_max * sizeof *columns->word_begins);
    columns->word_ends = make_room(WORD_ENDS, columns->words_max * sizeof *columns->word_ends);
    columns->word_rows = make_room(WORD_ROWS, columns->words_max * sizeof *columns->word_rows);
    columns->slots = make_room(SLOTS, columns->slots_max * sizeof *columns->slots);
}

/* Takes one of the arguments away; 1 when the function must do without an answer. */
static int spoil(kda_columns *columns, unsigned which, int has_offsets)
{
    switch (which) {
    case 0:
        columns->names = NULL;
        return 1;
    case 1:
        columns->row_words = NULL;
        return 1;
    case 2:
        columns->begins = NULL;
        return has_offsets;
    case 3:
        columns->ends = NULL;
        return has_offsets;
    case 4:
        columns->word_begins = NULL;
        return 1;
    case 5:
        columns->word_ends = NULL;
        return 1;
    case 6:
        columns->word_rows = NULL;
        return 1;
    case 7:
        columns->slots = NULL;
        return 1;
    case 8:
        columns->words_max = UINT32_MAX;
        return 1;
    default:
        columns->slots_max -= columns->slots_max == 1 ? 1 : columns->slots_max / 4;
        return 1; /* 0, or no power of two: the least is 4 otherwise */
    }
}

/* The columns against the rows ------------------------------------------------------------------*/

static void need_columns(const kda_columns *columns, const char *text, size_t count, int offsets)
{
    static size_t in_use[ROWS_MAX];
    const char *name = columns->names;
    size_t words = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        size_t bytes = rows[i].name_end - rows[i].name;
        size_t word = columns->row_words[i];

        need(memcmp(name, text + rows[i].name, bytes) == 0 && name[bytes] == '\n');
        name += bytes + 1;
        need(word <= words && word < columns->words);
        if (word == words)
            in_use[words++] = 0;
        in_use[word]++;
        bytes = rows[i].word_end - rows[i].word;
        need(columns->word_ends[word] - columns->word_begins[word] == bytes);
        need(memcmp(text + columns->word_begins[word], text + rows[i].word, bytes) == 0);
        need(!offsets || columns->begins[i] == rows[i].numbers[0]);
        need(!offsets || columns->ends[i] == rows[i].numbers[1]);
    }
    need(name == columns->names + columns->names_bytes);
    need(words == columns->words);
    for (i = 0; i < words; i++)
        need(columns->word_rows[i] == in_use[i]);
}

/* Writes a header's entries out of the columns alone; what was read must come out. */
static void need_same_header(const kda_columns *columns, const char *text, size_t text_bytes)
{
    const char *name = columns->names;
    size_t at = 0;
    size_t i;

    for (i = 0; i < columns->rows; i++) {
        size_t word = columns->row_words[i];
        const char *end = memchr(name, '\n', columns->names_bytes);
        size_t bytes = columns->word_ends[word] - columns->word_begins[word];

        need(end != NULL && (size_t)(end - name) + bytes + 64 < sizeof written - at);
        written[at++] = '"';
        memcpy(written + at, name, (size_t)(end - name));
        at += (size_t)(end - name);
        memcpy(written + at, "\":{\"dtype\":\"", 12);
        memcpy(written + at + 12, text + columns->word_begins[word], bytes);
        at += 12 + bytes;
        at += (size_t)snprintf(written + at, sizeof written - at, "],\"data_offsets\":[%llu,%llu]}%c",
                               (unsigned long long)columns->begins[i],
                               (unsigned long long)columns->ends[i],
                               i + 1 == columns->rows ? '}' : ',');
        name = end + 1;
    }
    need(at == text_bytes && memcmp(written, text, at) == 0);
}

/* The shortest entry and member bound how many there can be. */
static size_t rows_at_most(size_t text_bytes, int is_map)
{
    size_t shortest = sizeof "\"\":{\"dtype\":\"X\",\"shape\":[],\"data_offsets\":[0,0]}";

    return text_bytes / (is_map ? sizeof "\"\":\"\"" : shortest) + 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    kda_columns columns;
    const char *text = (const char *)data + 2;
    size_t text_bytes = size - 2;
    size_t used = 0, count, words;
    unsigned amount;
    int is_map, is_form, has_room, status;

    if (size < 2 || text_bytes > TEXT_BYTES_MAX)
        return 0;
    is_map = data[0] % 2;
    amount = data[1];
    memset(&columns, 0xFF, sizeof columns);
    columns.rows_max = columns.words_max = rows_at_most(text_bytes, is_map);
    for (columns.slots_max = 4; columns.slots_max < 2 * columns.words_max;)
        columns.slots_max *= 2;
    switch (data[0] / 2 % 8) {
    case 0:
        columns.rows_max = amount;
        break;
    case 1:
        columns.words_max = amount;
        break;
    case 2:
        columns.slots_max = (size_t)1 << amount % 8;
        break;
    default:
        break;
    }
    make_rooms(&columns, text_bytes, !is_map);

    count = match_members(is_map ? MEMBER : ENTRY, text, text_bytes, &used);
    words = count_words(text, count);
    is_form = count != 0 && (is_map || used == text_bytes);
    has_room = count <= columns.rows_max && words <= columns.words_max;
    if (data[0] / 2 % 8 == 3)
        has_room = !spoil(&columns, amount % 10, !is_map);
    status = is_map ? kda_weight_map_split(text, text_bytes, &columns)
                    : kda_header_split(text, text_bytes, &columns);
    need_canaries();
    need(status == KDA_FORM_PLAIN || status == KDA_FORM_OTHER);
    if (status == KDA_FORM_OTHER) {
        need(!is_form || !has_room || columns.slots_max < 2 * words);
        return 0;
    }
    need(is_form && has_room && words <= columns.slots_max);
    need(columns.rows == count && columns.words == words && columns.used == used);
    need_columns(&columns, text, count, !is_map);
    if (!is_map)
        need_same_header(&columns, text, text_bytes);
    return 0;
}
