/* The last product for one width of registers; included once for each. */
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDTH (2 * LANES)
#define vec NAME(last_vec)
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* to (rows, vecs * LANES) = from (the same for all rows, or NULL) + x (rows, depth) w. */
INLINE void NAME(block)(const float *x, long x_row, const float *w, long w_row, const float *from, float *to, long to_row,
                        long depth, const int rows, const int vecs) {
    vec sums[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) sums[i][v] = from ? *(const vec *)(from + v * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        vec b[2];
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) b[v] = *(const vec *)(w + k * w_row + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) sums[i][v] += x[i * x_row + k] * b[v];
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) *(vec *)(to + i * to_row + v * LANES) = sums[i][v];
}

/* The same for any number of rows and of whole registers of columns; w (depth, columns) lies without gaps. */
TARGET static void NAME(last_product)(const float *x, long x_row, const float *w, const float *bias, float *y, long y_row,
                                      long rows, long depth, long columns) {
    while (rows) {
        const int many = rows >= ROWS;
        for (long c = 0; c < columns; c += WIDTH) {
            const float *from = bias ? bias + c : bias;
            if (many && columns - c >= WIDTH)
                NAME(block)(x, x_row, w + c, columns, from, y + c, y_row, depth, ROWS, 2);
            else if (many)
                NAME(block)(x, x_row, w + c, columns, from, y + c, y_row, depth, ROWS, 1);
            else if (columns - c >= WIDTH)
                NAME(block)(x, x_row, w + c, columns, from, y + c, y_row, depth, 1, 2);
            else
                NAME(block)(x, x_row, w + c, columns, from, y + c, y_row, depth, 1, 1);
        }
        const long done = many ? ROWS : 1;
        rows -= done, x += done * x_row, y += done * y_row;
    }
}

/* of_w (depth, columns) += x^T up, and of_bias += the sum of up, for a few rows, which stay in registers. */
INLINE void NAME(sums)(const float *x, long x_row, const float *up, long up_row, float *of_w, float *of_bias, long depth,
                       long columns, const int rows) {
    for (long c = 0; c < columns; c += LANES) {
        vec now[SOME];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) now[r] = *(const vec *)(up + r * up_row + c);
        if (of_bias) {
            vec sum = *(vec *)(of_bias + c);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum += now[r];
            *(vec *)(of_bias + c) = sum;
        }
        for (long k = 0; k < depth && of_w; k++) {
            vec sum = *(vec *)(of_w + k * columns + c);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum += x[r * x_row + k] * now[r];
            *(vec *)(of_w + k * columns + c) = sum;
        }
    }
}

/* The gradients of one group: that of x, and added to what is there, those of w and of the bias. `turned` is memory for
 * (columns, wide) numbers, `line` for (PART, wide), where `wide` is the depth as whole registers. */
TARGET static void NAME(last_gradients)(const float *x, long x_row, const float *w, const float *up, long up_row,
                                        float *of_x, float *of_w, float *of_bias, long rows, long depth, long columns,
                                        float *turned, float *line) {
    const long wide = (depth + LANES - 1) / LANES * LANES;
    if (of_x)
        for (long c = 0; c < columns; c++)
            for (long k = 0; k < wide; k++) turned[c * wide + k] = k < depth ? w[k * columns + c] : 0;
    for (long start = 0; start < rows; start += PART) { /* few enough to stay in cache for all that is made of them */
        long part = rows - start < PART ? rows - start : PART;
        if (of_x) {
            NAME(last_product)(up, up_row, turned, NULL, line, wide, part, columns, wide);
            for (long r = 0; r < part; r++) memcpy(of_x + r * x_row, line + r * wide, sizeof(float) * depth);
            of_x += part * x_row;
        }
        long r = 0;
        for (; r + SOME <= part; r += SOME)
            NAME(sums)(x + r * x_row, x_row, up + r * up_row, up_row, of_w, of_bias, depth, columns, SOME);
        for (; r < part; r++)
            NAME(sums)(x + r * x_row, x_row, up + r * up_row, up_row, of_w, of_bias, depth, columns, 1);
        x += part * x_row, up += part * up_row;
    }
}

TARGET static long NAME(last_turned)(long depth, long columns) { return (depth + LANES - 1) / LANES * LANES * columns; }

#undef vec
#undef INLINE
#undef WIDTH
