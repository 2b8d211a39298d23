/* The gradient of a small matrix f (lines, places) that multiplies every matrix of a batch x (batch, places, depth):
 *
 *   of_f (lines, places) += up (batch, lines, depth) x^T, summed over the batch
 *
 * For a batch of products with results as small as these, BLAS spends most of its time on its start. */

/* sums (rows, DOTS, LANES) += the products of rows of x and DOTS lines of `up`, number by number. What is left of a row is
 * a register that reaches back, with zeros for what was there before. */
INLINE void NAME(dots_of)(const float *x, const float *const *up, float *sums, long depth, vec rest, const int rows) {
    vec all[ROWS_OF_DOTS][DOTS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int c = 0; c < DOTS; c++) all[i][c] = *(const vec *)(sums + (i * DOTS + c) * LANES);
    for (long k = 0; k < depth; k += LANES) {
        const int last = k + LANES > depth;
        const long at = last ? depth - LANES : k;
        vec lines[DOTS];
#pragma GCC unroll 4
        for (int c = 0; c < DOTS; c++) lines[c] = *(const vec *)(up[c] + at);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            vec numbers = *(const vec *)(x + i * depth + at);
            if (last) numbers *= rest;
#pragma GCC unroll 4
            for (int c = 0; c < DOTS; c++) all[i][c] += numbers * lines[c];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int c = 0; c < DOTS; c++) *(vec *)(sums + (i * DOTS + c) * LANES) = all[i][c];
}

/* Of all lines, `some` from the first on. */
TARGET static int NAME(spread_gradient)(const float *x, const float *up, float *of_f, long batch, long places, long depth,
                                        long lines, long first, long some) {
    const long across = (some + DOTS - 1) / DOTS, size = places * DOTS * LANES;
    float *sums = calloc(across * size, sizeof(float));
    if (!sums) return 1;
    vec rest;
    up += first * depth, of_f += first * places;
    for (int j = 0; j < LANES; j++) rest[j] = j >= LANES - depth % LANES;
    for (long i = 0; i < batch; i++, x += places * depth, up += lines * depth)
        for (long n = 0; n < some; n += DOTS) {
            const float *from[DOTS];
            for (long c = 0; c < DOTS; c++) from[c] = up + (n + c < some ? n + c : some - 1) * depth;
            float *to = sums + n / DOTS * size;
            long p = 0;
            for (; p + ROWS_OF_DOTS <= places; p += ROWS_OF_DOTS)
                NAME(dots_of)(x + p * depth, from, to + p * DOTS * LANES, depth, rest, ROWS_OF_DOTS);
            for (; p < places; p++) NAME(dots_of)(x + p * depth, from, to + p * DOTS * LANES, depth, rest, 1);
        }
    for (long n = 0; n < some; n++)
        for (long p = 0; p < places; p++)
            for (int j = 0; j < LANES; j++)
                of_f[n * places + p] += sums[n / DOTS * size + (p * DOTS + n % DOTS) * LANES + j];
    free(sums);
    return 0;
}

