/* Products of matrices for one width of registers; included once for each. */
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDTH (2 * LANES) /* of a stripe of columns */
#define vec NAME(matrix_vec)
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Some lines of b, (deep, columns), as stripes of (deep, WIDTH), the last one filled with zeros. */
INLINE void NAME(pack)(const float *b, long row, long column, float *packed, long deep, long columns) {
    for (long c = 0; c < columns; c += WIDTH, b += WIDTH * column) {
        const long some = columns - c < WIDTH ? columns - c : WIDTH;
        for (long k = 0; k < deep; k++, packed += WIDTH) {
            const float *from = b + k * row;
            if (column == 1 && some == WIDTH)
                for (int v = 0; v < WIDTH; v += LANES) *(vec *)(packed + v) = *(const vec *)(from + v);
            else
                for (long j = 0; j < WIDTH; j++) packed[j] = j < some ? from[j * column] : 0;
        }
    }
}

/* The same where columns of b lie together: they are read along, and a stripe that is filled stays in the cache. */
INLINE void NAME(pack_turned)(const float *b, long column, float *packed, long deep, long columns) {
    for (long c = 0; c < columns; c += WIDTH, packed += deep * WIDTH, b += WIDTH * column) {
        const long some = columns - c < WIDTH ? columns - c : WIDTH;
        if (some < WIDTH) memset(packed, 0, sizeof(float) * deep * WIDTH);
        long j = 0;
        for (; j + 4 <= some; j += 4) {
            long k = 0;
            for (; k + 4 <= deep; k += 4) turn(b + j * column + k, column, packed + k * WIDTH + j, WIDTH);
            for (; k < deep; k++)
                for (int i = 0; i < 4; i++) packed[k * WIDTH + j + i] = b[(j + i) * column + k];
        }
        for (; j < some; j++)
            for (long k = 0; k < deep; k++) packed[k * WIDTH + j] = b[j * column + k];
    }
}

/* to (rows, vecs * LANES) = a stripe times some rows, whose numbers are `next` apart; added to what is there, if `add`. */
INLINE void NAME(block)(const float *a, long row, long next, const float *stripe, float *to, long stride, long deep, int add,
                        const int rows, const int vecs) {
    vec sums[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) sums[i][v] = (vec){0};
    for (long k = 0; k < deep; k++, a += next, stripe += WIDTH) {
        vec b[2];
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) b[v] = *(const vec *)(stripe + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) sums[i][v] += a[i * row] * b[v];
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            vec *place = (vec *)(to + i * stride + v * LANES);
            if (add) sums[i][v] += *place; /* last: long sums of short ones lose less */
            *place = sums[i][v];
        }
}

#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        NAME(block)(a, row, next, stripe, to, stride, deep, add, n <= ROWS ? n : ROWS, 2);                             \
        break;                                                                                                         \
    case n + 16:                                                                                                       \
        NAME(block)(a, row, next, stripe, to, stride, deep, add, n <= ROWS ? n : ROWS, 1);                             \
        break;

/* The same for any number of rows up to ROWS. A function of its own: with others around it, sums would not stay in
 * registers. */
TARGET __attribute__((noinline)) static void NAME(rows_of_stripe)(const float *a, long row, long next, const float *stripe,
                                                                  float *to, long stride, long deep, int add, int rows,
                                                                  int vecs) {
    switch (vecs == 2 ? rows : rows + 16) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}
#undef CASE

/* All rows, TALL at most, times all stripes. */
TARGET static void NAME(tall)(const float *a, long row, long next, const float *packed, float *c, long c_row, long rows,
                              long deep, long columns, int add) {
    float beside[ROWS * WIDTH];
    for (long start = 0; start < columns; start += WIDTH, packed += deep * WIDTH) {
        const long some = columns - start < WIDTH ? columns - start : WIDTH;
        const int vecs = some <= LANES ? 1 : 2, straight = some == vecs * LANES;
        for (long blocks = (rows + ROWS - 1) / ROWS, r = 0; blocks; blocks--) {
            const long now = (rows - r + blocks - 1) / blocks; /* about as many in each */
            float *to = c + r * c_row + start;
            if (straight)
                NAME(rows_of_stripe)(a + r * row, row, next, packed, to, c_row, deep, add, now, vecs);
            else { /* the last columns are made beside and copied */
                for (long i = 0; i < now && add; i++) memcpy(beside + i * WIDTH, to + i * c_row, sizeof(float) * some);
                NAME(rows_of_stripe)(a + r * row, row, next, packed, beside, WIDTH, deep, add, now, vecs);
                for (long i = 0; i < now; i++) memcpy(to + i * c_row, beside + i * WIDTH, sizeof(float) * some);
            }
            r += now;
        }
    }
}

/* c (rows, columns) = a (rows, depth) b (depth, columns), or added to it. `packed` is memory for what is packed at once of b,
 * `turned` for as much of TALL rows of a: rows whose numbers do not lie together are turned over. */
TARGET static void NAME(matrix_product)(const float *a, long a_row, long a_column, const float *b, long b_row, long b_column,
                                        float *c, long c_row, int add, long rows, long depth, long columns, float *packed,
                                        float *turned) {
    const long slices = (depth + DEEP - 1) / DEEP, each = (depth + slices - 1) / slices;
    for (long first = 0; first < columns; first += MOST_COLUMNS) {
        const long wide = columns - first < MOST_COLUMNS ? columns - first : MOST_COLUMNS;
        for (long start = 0; start < depth; start += each) {
            const long deep = depth - start < each ? depth - start : each;
            const float *from = b + start * b_row + first * b_column;
            if (b_row == 1 && b_column > 1)
                NAME(pack_turned)(from, b_column, packed, deep, wide);
            else
                NAME(pack)(from, b_row, b_column, packed, deep, wide);
            for (long r = 0; r < rows; r += TALL) {
                const long some = rows - r < TALL ? rows - r : TALL;
                const float *here = a + r * a_row + start * a_column;
                long row = a_row, next = a_column;
                if (a_column != 1) { /* as (deep, rows): what a block reads at once lies together */
                    for (long k = 0; k < deep; k++) {
                        if (a_row == 1)
                            memcpy(turned + k * some, here + k * a_column, sizeof(float) * some);
                        else
                            for (long i = 0; i < some; i++) turned[k * some + i] = here[k * a_column + i * a_row];
                    }
                    here = turned, row = 1, next = some;
                }
                NAME(tall)(here, row, next, packed, c + r * c_row + first, c_row, some, deep, wide, add || start);
            }
        }
    }
}

#undef vec
#undef INLINE
#undef WIDTH
