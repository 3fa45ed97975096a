/* kda_header.h: takes headers and indexes apart, in the form that writers emit.
 *
 * Both functions know one form, without escapes, and say of every other text that it is another
 * one; whether that is legal is for the caller to find out. Neither judges a dtype, a shape's
 * size, an offset or a name that comes twice. They allocate nothing, keep no state, know no Python.
 *
 * What lies between the two "cffi" lines is also read by build_native.py, as it stands: it must
 * stay free of preprocessor lines.
 */
#ifndef KDA_HEADER_H
#define KDA_HEADER_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

enum kda_form {
    KDA_FORM_PLAIN = 0, /* all of it was understood, and all columns are filled */
    KDA_FORM_OTHER      /* null pointer, another form, or more than there is room for */
};

/* How many slots are looked at for one word: a crafted text cannot make the search long. */
enum kda_header_limit { KDA_PROBES_MAX = 64 };

/* A text's members as columns, and the different words among them. The caller gives the memory and
 * says how much of it there is; when the answer is KDA_FORM_OTHER it may hold anything. */
typedef struct kda_columns {
    char *names;         /* room for as many bytes as the text has */
    uint32_t *row_words; /* a row's word; room for rows_max */
    uint64_t *begins;    /* room for rows_max; a weight map has none, and null will do */
    uint64_t *ends;      /* as begins */
    size_t *word_begins; /* word n is text[word_begins[n]] to ... */
    size_t *word_ends;   /* ... text[word_ends[n] - 1]; room for words_max */
    size_t *word_rows;   /* how many rows have it; room for words_max */
    uint32_t *slots;     /* the words by hash, for these functions alone; room for slots_max */
    size_t rows_max;
    size_t words_max;    /* at most UINT32_MAX - 1 */
    size_t slots_max;    /* a power of two; twice words_max is well */
    size_t rows;         /* out: how many members */
    size_t words;        /* out: how many different words */
    size_t names_bytes;  /* out: the names, each followed by a newline; none has one inside */
    size_t used;         /* out: how much of the text the members take, with their '}' */
} kda_columns;

/* Takes a header's entries apart: `text` is what follows the header's '{', or its __metadata__ and
 * comma, to the last '}'. Each entry must be exactly
 *   "NAME":{"dtype":"DTYPE","shape":[N,...],"data_offsets":[BEGIN,END]}
 * with a comma between two. NAME has no '"', '\' or byte under 0x20, DTYPE is of A-Z, 0-9 and '_',
 * and a number has no sign, no leading zero and at most 19 digits. At least one entry.
 *
 * A row's word is what stands from DTYPE to the last N: DTYPE","shape":[N,...
 *
 * Returns KDA_FORM_PLAIN, and then `text` up to its last byte is such entries and a '}'; otherwise
 * KDA_FORM_OTHER. Bytes from 0x80 on are taken as they are: the caller checks that they are UTF-8.
 * Reads no byte outside of `text` and writes none outside of `columns` and its rooms.
 * Any number of threads may call this at once, each with its own columns. */
int kda_header_split(const char *text, size_t text_bytes, kda_columns *columns);

/* Takes a weight map apart: `text` is what follows its '{'. Each member must be "NAME":"FILE", both
 * without '"', '\' or a byte under 0x20; white space of JSON may stand between any two parts. At
 * least one member. A row's word is FILE; `begins` and `ends` are not used.
 *
 * Returns KDA_FORM_PLAIN, and then text[columns->used - 1] is the '}' that ends the map and what
 * follows was not looked at; otherwise KDA_FORM_OTHER. All else as for kda_header_split. */
int kda_weight_map_split(const char *text, size_t text_bytes, kda_columns *columns);

/* cffi: end */

#endif
