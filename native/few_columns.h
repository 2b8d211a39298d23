/* The kernels for one width of registers; included once for each. */
#ifndef DEPTH /* unless defined otherwise, numbers of a row are multiplied one at a time, by a register of columns or two */
#define DEPTH 1
#define VECS 2
#define SPREAD(p) (*(p))
#define SPREAD_SOME(p, some) SPREAD(p)
#define JOIN(v, vecs) (vecs)
#define PUT_SOME(to, line, some, first)                                                                                \
    for (int c = 0; c < (some); c++) (to)[c] = (first) ? (line)[c] : (to)[c] + (line)[c]
#define ROWS_OF_ONE 12
#define ROWS_OF_ALL 6
#endif
#define INLINE static inline __attribute__((always_inline)) TARGET
#define vec NAME(vec)
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* `rows` times `depth` bytes become numbers. */
INLINE void NAME(convert)(const uint8_t *from, long stride, float *to, long to_stride, long rows, long depth) {
    for (long i = 0; i < rows; i++, from += stride, to += to_stride) {
        long k = 0;
        for (; k + LANES <= depth; k += LANES) *(vec *)(to + k) = NUMBERS(from + k);
        for (; k < depth; k++) to[k] = from[k];
    }
}

/* Registers of w that some columns take: of the first stripe all, of the last as few as there are kernels for. */
INLINE int NAME(vecs)(long columns) { return columns <= COLUMNS ? 1 : columns <= 2 * COLUMNS ? 2 : VECS; }

/* Numbers that some columns of w take, packed. */
INLINE long NAME(packed)(long columns, long depth) {
    const long stripes = columns / STRIPE, vecs = stripes * VECS + (columns % STRIPE ? NAME(vecs)(columns % STRIPE) : 0);
    return vecs * LANES * ((depth + DEPTH - 1) / DEPTH);
}

/* The next DEPTH numbers of the rows of a block, as SPREAD_AT reads them, times as many of a stripe. Not a function: in
 * some of these, sums did not stay in registers. */
#define STEP(SPREAD_AT)                                                                                                \
    vec b[VECS];                                                                                                       \
    const float *at = DEPTH > 1 ? w : w + k * vecs * LANES; /* each is the faster where it is */                       \
    _Pragma("GCC unroll 4") for (int v = 0; v < vecs; v++) b[v] = *(const vec *)(at + v * LANES);                      \
    _Pragma("GCC unroll 12") for (int i = 0; i < rows; i++) {                                                          \
        const __typeof__(SPREAD(x)) numbers = SPREAD_AT(x + i * stride + k);                                           \
        _Pragma("GCC unroll 4") for (int v = 0; v < vecs; v++) sums[i][v] += numbers * b[v];                           \
    }
#define SPREAD_REST(p) SPREAD_SOME(p, depth - k)

/* A block of rows times a stripe of columns, packed in `vecs` registers for every DEPTH numbers of a row, which these
 * multiply at once. What comes next is asked of the memory meanwhile, or made from bytes: the multipliers are busy, the
 * rest of the core is not. */
INLINE void NAME(block)(const float *x, long stride, const float *w, float *out, long out_stride, long depth, int columns,
                        int first, const float *next, long next_stride, const uint8_t *from, float *to, const int rows,
                        const int vecs) {
    const int joined = next_stride <= depth; /* what has no gaps is asked for as it lies, line after line */
    const long asks = !next ? 0 : joined ? rows * next_stride / depth : rows; /* for every line of a row */
    const long ask_row = joined ? LINE : next_stride, ask_k = joined ? asks : 1;
    vec sums[ROWS_OF_ONE][VECS];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[i][v] = (vec){0};
    long k = 0;
    while (k + LINE <= depth) {
        for (int i = 0; i < asks; i++) __builtin_prefetch(next + k * ask_k + i * ask_row, 0, 2);
        if (from) {
            for (int i = 0; i < rows * LINE; i += BYTES) __builtin_prefetch(from + AHEAD + i, 0, 2);
#pragma GCC unroll 24
            for (int i = 0; i < rows * LINE; i += LANES) *(vec *)(to + i) = NUMBERS(from + i);
            from += rows * LINE, to += rows * LINE;
        }
#pragma GCC unroll 4
        for (int s = 0; s < LINE; s += DEPTH, k += DEPTH, w += DEPTH > 1 ? vecs * LANES : 0) {
            STEP(SPREAD)
        }
    }
    for (int i = 0; i < asks && k < depth; i++) __builtin_prefetch(next + k * ask_k + i * ask_row, 0, 2);
    if (from) NAME(convert)(from, 0, to, 0, 1, rows * (depth - k));
    for (; k + DEPTH <= depth; k += DEPTH, w += DEPTH > 1 ? vecs * LANES : 0) {
        STEP(SPREAD)
    }
    if (DEPTH > 1 && k < depth) {
        STEP(SPREAD_REST)
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++, out += out_stride) {
        float line[VECS * LANES];
        const int registers = JOIN(sums[i], vecs);
        float *place = columns < registers * LANES ? line : out;
#pragma GCC unroll 2
        for (int v = 0; v < registers; v++) {
            if (place == out && !first) sums[i][v] += *(const vec *)(place + v * LANES);
            *(vec *)(place + v * LANES) = sums[i][v];
        }
        if (place == line) PUT_SOME(out, line, columns, first);
    }
}

/* All columns of a block of rows. */
INLINE void NAME(columns_of_block)(const float *x, long stride, const float *packed, float *out, long columns, long depth,
                                   int first, const float *next, long next_stride, const uint8_t *from, float *to,
                                   const int rows, const int rows_of_all) {
    for (long c = 0; c < columns; c += STRIPE) {
        const int some = columns - c < STRIPE ? (int)(columns - c) : STRIPE, vecs = NAME(vecs)(some);
        if (vecs == 1)
            NAME(block)(x, stride, packed, out + c, columns, depth, some, first, next, next_stride, from, to, rows, 1);
        else if (VECS > 2 && vecs == 2)
            NAME(block)(x, stride, packed, out + c, columns, depth, some, first, next, next_stride, from, to, rows, 2);
        else
            for (int i = 0; i < rows; i += rows_of_all)
                NAME(block)(x + i * stride, stride, packed, out + i * columns + c, columns, depth, some, first,
                            next ? next + i * next_stride : next, next_stride, from ? from + i * depth : from,
                            to + i * depth, rows_of_all, VECS);
        packed += NAME(packed)(some, depth);
        next = NULL, from = NULL; /* done with the first columns */
    }
}

/* As many numbers as fill whole registers. */
INLINE long NAME(width)(long numbers) { return (numbers + LANES - 1) / LANES * LANES; }

/* w (columns, depth) as stripes, filled with zeros. Where a register holds several numbers of few columns, its columns are
 * every second or fourth, as JOIN finds them. */
INLINE void NAME(pack)(const float *w, long stride, float *packed, long columns, long depth) {
    memset(packed, 0, sizeof(float) * NAME(packed)(columns, depth));
    for (long c = 0; c < columns; c += STRIPE) {
        const long some = columns - c < STRIPE ? columns - c : STRIPE, vecs = NAME(vecs)(some);
        for (long j = 0; j < some; j++) {
            const float *from = w + (c + j) * stride;
            float *to = packed + (DEPTH == 1 ? j : j % vecs * LANES + j / vecs * DEPTH);
            long k = 0;
            for (; k + DEPTH <= depth; k += DEPTH, to += vecs * LANES) memcpy(to, from + k, sizeof(float) * DEPTH);
            for (; k < depth; k++) *to++ = from[k];
        }
        packed += NAME(packed)(some, depth);
    }
}

/* x w^T for w packed slice by slice (DEEP of its depth each); `scratch` is for rows that are copied or made of bytes. Of
 * memory, the next rows are asked for, or `asked` numbers of `later` for every row. */
INLINE void NAME(packed_columns)(const void *x, const int bytes, const float *packed, float *scratch, float *out, long rows,
                                 long depth, long columns, const float *later, long asked) {
    const int beside = !bytes && depth % CONFLICT == 0; /* rows that would push each other out of the cache are copied */
    for (long start = 0; start < depth; start += DEEP) {
        long deep = depth - start < DEEP ? depth - start : DEEP, r = 0;
        long stride = bytes ? deep : beside ? deep + LINE : depth;
        long ahead = (AHEAD / (ROWS_OF_ONE * deep * 4) + 1) * ROWS_OF_ONE * depth;
        float *now = scratch, *then = now + BLOCK; /* these are not pages apart */
        int ready = 0;
        while (r < rows) {
            const int whole = rows - r >= ROWS_OF_ONE;
            const int some = whole ? ROWS_OF_ONE : rows - r >= ROWS_OF_REST ? ROWS_OF_REST : 1;
            const float *here = (const float *)x + r * depth + start;
            const float *next = bytes || !whole ? NULL : later ? later + r * asked : here + ahead;
            const uint8_t *from = NULL;
            if (bytes) {
                from = (const uint8_t *)x + r * depth + start;
                if (!ready) NAME(convert)(from, depth, now, deep, some, deep);
                ready = deep == depth && rows - r >= 2 * ROWS_OF_ONE; /* the next block is all in one piece */
                from = ready ? from + ROWS_OF_ONE * depth : NULL;
                here = now;
            } else if (beside) {
                for (long i = 0; i < some; i++) memcpy(now + i * stride, here + i * depth, sizeof(float) * deep);
                here = now;
            }
            float *to = out + r * columns;
            if (whole)
                NAME(columns_of_block)(here, stride, packed, to, columns, deep, !start, next, later ? asked : depth, from,
                                       then, ROWS_OF_ONE, ROWS_OF_ALL);
            else if (some > 1)
                NAME(columns_of_block)(here, stride, packed, to, columns, deep, !start, NULL, 0, NULL, NULL, ROWS_OF_REST,
                                       ROWS_OF_REST);
            else
                NAME(columns_of_block)(here, stride, packed, to, columns, deep, !start, NULL, 0, NULL, NULL, 1, 1);
            if (ready) now = then, then = (float *)here;
            r += some;
        }
        packed += NAME(packed)(columns, deep);
    }
}

/* DOTS columns of some rows at once, each as sums along the row: x is read as it comes, a register at a time. */
INLINE void NAME(dots)(const float *x, const float *w, float *out, long depth, long padded, long columns, const float *next,
                       const int rows) {
    vec sums[ROWS_OF_DOTS][DOTS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int c = 0; c < DOTS; c++) sums[i][c] = (vec){0};
    for (long k = 0; k < padded; k += LANES) {
        float end[ROWS_OF_DOTS][LANES];
        const float *from = x + k;
        long stride = depth;
        if (k + LANES > depth) { /* what is left of the rows, with zeros behind it */
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < LANES; j++) end[i][j] = k + j < depth ? x[i * depth + k + j] : 0;
            from = end[0], stride = LANES;
        }
        for (int i = 0; i < rows * LANES && next; i += LINE) __builtin_prefetch(next + k * rows + i);
#pragma GCC unroll 4
        for (int c = 0; c < DOTS; c++)
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
                sums[i][c] += *(const vec *)(from + i * stride) * *(const vec *)(w + c * padded + k);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        float four[DOTS];
        FOUR_SUMS(four, sums[i]);
        for (int c = 0; c < columns; c++) out[i * columns + c] = four[c];
    }
}

/* The same product for at most DOTS columns; w is filled with zeros up to whole registers. A function of its own: with
 * others around it, sums would not stay in registers. */
TARGET __attribute__((noinline)) static void NAME(dot_columns)(const float *x, const float *zeros, float *out, long rows,
                                                               long depth, long columns) {
    const long padded = NAME(width)(depth), ahead = AHEAD / 4 / depth / ROWS_OF_DOTS + 1;
    long r = 0;
    for (; r + ROWS_OF_DOTS <= rows; r += ROWS_OF_DOTS, x += ROWS_OF_DOTS * depth, out += ROWS_OF_DOTS * columns)
        NAME(dots)(x, zeros, out, depth, padded, columns, x + ahead * ROWS_OF_DOTS * depth, ROWS_OF_DOTS);
    for (; r < rows; r++, x += depth, out += columns) NAME(dots)(x, zeros, out, depth, padded, columns, NULL, 1);
}

INLINE int NAME(by_dots)(const int bytes, long depth, long columns) {
    const int better = DEPTH == 1 || depth % CONFLICT == 0; /* than by stripes */
    return !bytes && columns <= DOTS && depth >= 8 * LANES && better;
}

/* What `multiply` takes: w laid out, and behind it memory to work in. NULL if there is none. */
INLINE float *NAME(prepare)(const float *w, const int bytes, long depth, long columns) {
    if (NAME(by_dots)(bytes, depth, columns)) {
        const long padded = NAME(width)(depth);
        float *zeros = calloc(DOTS * padded, sizeof(float));
        for (long c = 0; zeros && c < columns; c++) memcpy(zeros + c * padded, w + c * depth, sizeof(float) * depth);
        return zeros;
    }
    float *packed = malloc(sizeof(float) * (NAME(packed)(columns, depth) + 2 * BLOCK));
    for (long start = 0; packed && start < depth; start += DEEP)
        NAME(pack)(w + start, depth, packed + NAME(packed)(columns, start), columns,
                   depth - start < DEEP ? depth - start : DEEP);
    return packed;
}

INLINE void NAME(multiply)(const void *x, const int bytes, float *prepared, float *out, long rows, long depth,
                           long columns, const float *later, long asked) {
    if (NAME(by_dots)(bytes, depth, columns))
        NAME(dot_columns)(x, prepared, out, rows, depth, columns);
    else
        NAME(packed_columns)(x, bytes, prepared, prepared + NAME(packed)(columns, depth), out, rows, depth, columns, later,
                             asked);
}

INLINE int NAME(few_columns)(const void *x, const int bytes, const float *w, float *out, long rows, long depth,
                             long columns) {
    float *prepared = NAME(prepare)(w, bytes, depth, columns);
    if (!prepared) return 1;
    NAME(multiply)(x, bytes, prepared, out, rows, depth, columns, NULL, 0);
    free(prepared);
    return 0;
}

TARGET static int NAME(few_columns_float)(const void *x, const float *w, float *out, long rows, long depth, long columns) {
    return NAME(few_columns)(x, 0, w, out, rows, depth, columns);
}

TARGET static int NAME(few_columns_bytes)(const void *x, const float *w, float *out, long rows, long depth, long columns) {
    return NAME(few_columns)(x, 1, w, out, rows, depth, columns);
}

/* to (TILE, vecs * LANES) = from (nothing, if there is none) + g^T x for a block of rows. Of what is needed later, `ask`
 * lines of memory are asked for with every GROUP of rows: more at once would have to wait. */
INLINE void NAME(tile_of)(const float *x, long stride, const float *g, long columns, const float *from, float *to,
                          long to_stride, long rows, const float *next, long ask, const int vecs) {
    vec sums[TILE][WIDE / LANES];
#pragma GCC unroll 4
    for (int n = 0; n < TILE; n++)
#pragma GCC unroll 6
        for (int v = 0; v < vecs; v++) sums[n][v] = from ? *(const vec *)(from + n * WIDE + v * LANES) : (vec){0};
    for (long start = 0; start < rows; start += GROUP) {
        long stop = start + GROUP < rows ? start + GROUP : rows;
        for (long i = 0; i < ask; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        for (long r = start; r < stop; r++, x += stride, g += columns) {
            vec b[WIDE / LANES];
#pragma GCC unroll 6
            for (int v = 0; v < vecs; v++) b[v] = *(const vec *)(x + v * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < TILE; n++)
#pragma GCC unroll 6
                for (int v = 0; v < vecs; v++) sums[n][v] += g[n] * b[v];
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < TILE; n++)
#pragma GCC unroll 6
        for (int v = 0; v < vecs; v++) *(vec *)(to + n * to_stride + v * LANES) = sums[n][v];
}

#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        NAME(tile_of)(x, stride, g, columns, from, to, to_stride, rows, next, ask, n < WIDE / LANES ? n : WIDE / LANES); \
        break;

/* The same for any width. A function of its own: with others around it, sums would not stay in registers. */
TARGET __attribute__((noinline)) static void NAME(tile)(const float *x, long stride, const float *g, long columns,
                                                        const float *from, float *to, long to_stride, long rows,
                                                        const float *next, long ask, int vecs) {
    switch (vecs) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
#undef CASE

/* The registers of the tile that holds number k of a row: all, or of the last one as many as hold what is left. */
INLINE int NAME(tile_vecs)(long k, long depth) {
    const long left = depth - k / WIDE * WIDE;
    return left < WIDE ? (int)((left + LANES - 1) / LANES) : WIDE / LANES;
}

/* Where that tile begins; the last one reaches back to fill its registers. */
INLINE long NAME(tile_at)(long k, long depth) {
    const long at = k / WIDE * WIDE, last = depth - NAME(tile_vecs)(k, depth) * LANES;
    return at < last ? at : last;
}

/* A line of what tiles hold, (depth in tiles, `across` of them, TILE, WIDE), is added to `out`. */
INLINE void NAME(add_line)(const float *tiles, long across, long line, float *out, long depth) {
    for (long first = 0; first < depth; first += WIDE, tiles += across * TILE * WIDE) {
        const float *from = tiles + line * WIDE - NAME(tile_at)(first, depth);
        const long stop = first + WIDE < depth ? first + WIDE : depth;
        for (long k = first; k < stop; k++) out[k] += from[k];
    }
}

/* Lines of memory that the tiles before this one ask for with every GROUP of rows, if `all` are asked for by all tiles. */
INLINE long NAME(asked_before)(long tile, long tiles, long all) { return tile * all / tiles; }

/* The depth must be at least WIDE. */
INLINE int NAME(column_sums)(const void *x, const int bytes, const float *g, float *out, long rows, long depth,
                             long columns) {
    const long across = (columns + TILE - 1) / TILE, tiles = across * ((depth + WIDE - 1) / WIDE), size = TILE * WIDE;
    float *sums = calloc(tiles * size + TALL * TILE + (bytes ? TALL * depth : 0), sizeof(float));
    float *last = sums + tiles * size, *numbers = last + TALL * TILE;
    if (!sums) return 1;
    const long whole = columns - columns % TILE;
    const long lines = bytes ? 0 : (GROUP * depth + LINE - 1) / LINE;
    for (long r = 0; r < rows; r += TALL, g += TALL * columns) {
        long tall = rows - r < TALL ? rows - r : TALL;
        const float *here = (const float *)x + r * depth, *next = here + TALL * depth;
        float *to = sums;
        long tile = 0;
        if (bytes) {
            NAME(convert)((const uint8_t *)x + r * depth, depth, numbers, depth, tall, depth);
            here = numbers;
        }
        for (long i = 0; i < tall; i++)
            for (long n = whole; n < columns; n++) last[i * TILE + n - whole] = g[i * columns + n];
        for (long k = 0; k < depth; k += WIDE) {
            const float *from = here + NAME(tile_at)(k, depth);
            for (long n = 0; n < columns; n += TILE, to += size) {
                const long before = NAME(asked_before)(tile++, tiles, lines), after = NAME(asked_before)(tile, tiles, lines);
                NAME(tile)(from, depth, n < whole ? g + n : last, n < whole ? columns : TILE, to, to, WIDE, tall,
                           next + before * (TALL / GROUP) * LINE, after - before, NAME(tile_vecs)(k, depth));
            }
        }
    }
    for (long c = 0; c < columns; c++) NAME(add_line)(sums, across, c, out + c * depth, depth);
    free(sums);
    return 0;
}

TARGET static int NAME(column_sums_float)(const void *x, const float *g, float *out, long rows, long depth, long columns) {
    return NAME(column_sums)(x, 0, g, out, rows, depth, columns);
}

TARGET static int NAME(column_sums_bytes)(const void *x, const float *g, float *out, long rows, long depth, long columns) {
    return NAME(column_sums)(x, 1, g, out, rows, depth, columns);
}

TARGET static int NAME(wide)(void) { return WIDE; }

#include "spread.h"

#include "folded.h"

#undef vec
#undef INLINE
#undef LANES
#undef ROWS_OF_ONE
#undef ROWS_OF_ALL
#undef VECS
#undef DEPTH
#undef SPREAD
#undef SPREAD_SOME
#undef SPREAD_REST
#undef STEP
#undef JOIN
#undef PUT_SOME
#undef WIDE
#undef NUMBERS
#undef ROWS_OF_DOTS
#undef NAME
#undef TARGET
