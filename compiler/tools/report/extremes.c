/* The extremes of the columns of JSON Lines. long_metrics.py calls it, and says which extremes it needs.

   It reads what a run writes: objects of numbers, words and objects, in ASCII without escapes. It declines all else. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_MEMBERS = 512, MOST_DEPTH = 4, MOST_PATH = 128, MOST_DIGITS = 18, MOST_POWER = 27 };

typedef struct {
    const char *name; /* of this member in the line before */
    int64_t size, prefix, column;
} Member;

typedef struct {
    const char *at, *end;
    const char *keys; /* the paths of the columns, each ended by 0 */
    int64_t num_keys, num_members, is_known; /* is_known: all members so far are those of the line before */
    Member members[MOST_MEMBERS];
    double *values; /* [column], of this line */
    int has_whole_step;
    char path[MOST_PATH];
} Reader;

static const long double POWERS[MOST_POWER + 1] = {1e0L,  1e1L,  1e2L,  1e3L,  1e4L,  1e5L,  1e6L,  1e7L,  1e8L,  1e9L,
                                                   1e10L, 1e11L, 1e12L, 1e13L, 1e14L, 1e15L, 1e16L, 1e17L, 1e18L, 1e19L,
                                                   1e20L, 1e21L, 1e22L, 1e23L, 1e24L, 1e25L, 1e26L, 1e27L};

static void skip_blanks(Reader *r) {
    while (r->at < r->end && *r->at == ' ')
        r->at++;
}

static int take(Reader *r, char wanted) {
    skip_blanks(r);
    if (r->at >= r->end || *r->at != wanted)
        return 0;
    r->at++;
    return 1;
}

static int is_digit(const Reader *r) {
    return r->at < r->end && *r->at >= '0' && *r->at <= '9';
}

/* A word in quotes: its text without them. */
static int read_word(Reader *r, const char **text, int64_t *size) {
    if (!take(r, '"'))
        return 0;
    *text = r->at;
    while (r->at < r->end && *r->at != '"') {
        if (*r->at == '\\' || (unsigned char)*r->at < 0x20 || (unsigned char)*r->at > 0x7e)
            return 0;
        r->at++;
    }
    *size = r->at - *text;
    return take(r, '"');
}

/* A number, rounded as by the long double of this machine, and whether it is written as an integer. */
static int read_number(Reader *r, double *value, int *is_whole) {
    const char *begin = r->at;
    uint64_t digits = 0;
    int64_t count = 0, power = 0;
    int is_negative = r->at < r->end && *r->at == '-';
    r->at += is_negative;
    if (!is_digit(r) || (*r->at == '0' && r->at + 1 < r->end && r->at[1] >= '0' && r->at[1] <= '9'))
        return 0;
    for (; is_digit(r); r->at++, count += digits > 0)
        digits = count < MOST_DIGITS ? 10 * digits + (uint64_t)(*r->at - '0') : (power++, digits);
    *is_whole = 1;
    if (r->at < r->end && *r->at == '.') {
        r->at++;
        *is_whole = 0;
        if (!is_digit(r))
            return 0;
        for (; is_digit(r); r->at++, count += digits > 0)
            if (count < MOST_DIGITS) {
                digits = 10 * digits + (uint64_t)(*r->at - '0');
                power--;
            }
    }
    if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
        int64_t written = 0;
        r->at++;
        *is_whole = 0;
        int is_less = r->at < r->end && *r->at == '-';
        r->at += is_less || (r->at < r->end && *r->at == '+');
        if (!is_digit(r))
            return 0;
        for (; is_digit(r); r->at++)
            written = written < 1000 ? 10 * written + (*r->at - '0') : written;
        power += is_less ? -written : written;
    }
    if (power < -MOST_POWER || power > MOST_POWER) {
        char copy[64];
        int64_t size = r->at - begin;
        if (size >= (int64_t)sizeof copy)
            return 0;
        memcpy(copy, begin, (size_t)size);
        copy[size] = 0;
        *value = strtod(copy, NULL);
        return 1;
    }
    long double exact = power < 0 ? digits / POWERS[-power] : digits * POWERS[power];
    *value = (double)(is_negative ? -exact : exact);
    return 1;
}

/* The column of a path, or -1. */
static int64_t column_of(const Reader *r, int64_t size) {
    const char *key = r->keys;
    for (int64_t i = 0; i < r->num_keys; i++) {
        size_t length = strlen(key);
        if ((int64_t)length == size && !memcmp(key, r->path, length))
            return i;
        key += length + 1;
    }
    return -1;
}

static int read_literal(Reader *r, const char *word) {
    int64_t size = (int64_t)strlen(word);
    if (r->end - r->at < size || memcmp(r->at, word, (size_t)size))
        return 0;
    r->at += size;
    return 1;
}

/* An object whose path, with a dot, takes `prefix` bytes. Lines mostly have the members of the line before. */
static int read_object(Reader *r, int64_t prefix, int depth) {
    if (depth > MOST_DEPTH || !take(r, '{'))
        return 0;
    if (take(r, '}'))
        return 1;
    do {
        const char *name;
        int64_t size;
        if (r->num_members == MOST_MEMBERS || !read_word(r, &name, &size) || !take(r, ':'))
            return 0;
        if (prefix + size + 1 >= MOST_PATH)
            return 0;
        Member *member = &r->members[r->num_members++];
        r->is_known = r->is_known && member->size == size && member->prefix == prefix && !memcmp(member->name, name, (size_t)size);
        skip_blanks(r);
        if (r->at >= r->end)
            return 0;
        if (!r->is_known || *r->at == '{')
            memcpy(r->path + prefix, name, (size_t)size);
        if (!r->is_known)
            *member = (Member){name, size, prefix, column_of(r, prefix + size)};
        member->name = name;
        if (*r->at == '{') {
            r->path[prefix + size] = '.';
            if (!read_object(r, prefix + size + 1, depth + 1))
                return 0;
        } else if (*r->at == '"') {
            if (!read_word(r, &name, &size))
                return 0;
        } else if (*r->at == '-' || is_digit(r)) {
            double value;
            int is_whole;
            if (!read_number(r, &value, &is_whole))
                return 0;
            if (member->column >= 0 && fabs(value) < 1e100) {
                r->values[member->column] = value;
                r->has_whole_step |= member->column == 0 && is_whole;
            }
        } else if (!read_literal(r, "null") && !read_literal(r, "true") && !read_literal(r, "false"))
            return 0;
    } while (take(r, ','));
    return take(r, '}');
}

/* `data`: whole lines. `keys`: paths of columns; the first one is that of the step. Writes for each column where the
   lines with its first least and first greatest value begin, -1 without a value, these values, and the sum of values in
   [0, 1e9). Returns the number of lines, or -1 for lines that Python must read. */
int64_t extremes(const char *data, int64_t size, const char *keys, int64_t num_keys, int64_t *places, double *bounds,
                 double *sums, double *values) {
    Reader reader = {.at = data, .end = data + size, .keys = keys, .num_keys = num_keys, .values = values};
    int64_t count = 0;
    for (int64_t i = 0; i < num_keys; i++) {
        places[2 * i] = places[2 * i + 1] = -1;
        sums[i] = 0;
    }
    for (; reader.at < data + size; count++) {
        int64_t begin = reader.at - data;
        const char *newline = memchr(reader.at, '\n', (size_t)(data + size - reader.at));
        if (!newline)
            return -1;
        reader.end = newline;
        reader.num_members = 0;
        reader.is_known = 1;
        reader.has_whole_step = 0;
        for (int64_t i = 0; i < num_keys; i++)
            values[i] = NAN;
        if (!read_object(&reader, 0, 0) || reader.at != newline || !reader.has_whole_step)
            return -1;
        reader.at = newline + 1;
        for (int64_t i = 0; i < num_keys; i++) {
            double value = values[i];
            if (isnan(value))
                continue;
            if (places[2 * i] < 0 || value < bounds[2 * i]) {
                places[2 * i] = begin;
                bounds[2 * i] = value;
            }
            if (places[2 * i + 1] < 0 || value > bounds[2 * i + 1]) {
                places[2 * i + 1] = begin;
                bounds[2 * i + 1] = value;
            }
            if (value >= 0 && value < 1e9)
                sums[i] += value;
        }
    }
    return count;
}
