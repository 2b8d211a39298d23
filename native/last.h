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

#undef vec
#undef INLINE
#undef WIDTH
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET
