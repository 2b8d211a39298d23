/* Two products in one: y (R, P, C) = x (R, P, K) w^T, and z[r, o, c] = sum over p of y[r, p, c] f[p, o, c], where f is the
 * same for all columns c with the same g, their index among `shared`. y is folded up while it is in the cache.
 *
 * Columns count as (c / (shared * inner), g, c % inner); f is given as (shared, others, P), z as (R, shared, others, the
 * rest of the columns). `others` go four at a time; columns may fill two registers at most. */
#define FOUR 4

typedef struct NAME(folding) {
    long places, columns, shared, inner, others, wide, padded; /* wide: columns as whole registers; padded: others */
} NAME(folding);

INLINE long NAME(shared_of)(const NAME(folding) *f, long c) { return c / f->inner % f->shared; }

/* Where column c of the first of the others is in a row of z; the next of the others are `columns / shared` apart. */
INLINE long NAME(place_of)(const NAME(folding) *f, long c) {
    long group = c / (f->inner * f->shared), each = f->columns / f->shared;
    return NAME(shared_of)(f, c) * f->others * each + group * f->inner + c % f->inner;
}

/* f as (places, padded, wide), a number for every column. */
INLINE void NAME(spread)(const NAME(folding) *f, const float *factors, float *out) {
    const float *from[2 * LANES];
    for (long c = 0; c < f->columns; c++) from[c] = factors + NAME(shared_of)(f, c) * f->others * f->places;
    for (long p = 0; p < f->places; p++)
        for (long o = 0; o < f->padded; o++, out += f->wide) {
            for (long c = 0; c < f->columns; c++) out[c] = o < f->others ? from[c][o * f->places + p] : 0;
            for (long c = f->columns; c < f->wide; c++) out[c] = 0;
        }
}

/* sums (padded, wide) += y f for some places of one row. */
INLINE void NAME(fold)(const NAME(folding) *f, const float *y, const float *factors, float *sums, long places,
                       const int vecs) {
    const long step = f->padded * f->wide;
    for (long o = 0; o < f->padded; o += FOUR, factors += FOUR * f->wide, sums += FOUR * f->wide) {
        vec all[FOUR][2];
#pragma GCC unroll 4
        for (int i = 0; i < FOUR; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) all[i][v] = *(vec *)(sums + (i * vecs + v) * LANES);
        for (long p = 0; p < places; p++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) {
                vec now = *(const vec *)(y + p * f->wide + v * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++)
                    all[i][v] += now * *(const vec *)(factors + p * step + (i * vecs + v) * LANES);
            }
#pragma GCC unroll 4
        for (int i = 0; i < FOUR; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) *(vec *)(sums + (i * vecs + v) * LANES) = all[i][v];
    }
}

/* gradients of y, and of f added to `total`, for some places of one row; `up` (padded, wide) is that of z. */
INLINE void NAME(unfold)(const NAME(folding) *f, const float *y, const float *factors, const float *up, float *gradient,
                         float *total, long places, const int vecs) {
    const long step = f->padded * f->wide;
    for (long o = 0; o < f->padded; o += FOUR, factors += FOUR * f->wide, up += FOUR * f->wide, total += FOUR * f->wide) {
        vec all[FOUR][2];
#pragma GCC unroll 4
        for (int i = 0; i < FOUR; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) all[i][v] = *(const vec *)(up + (i * vecs + v) * LANES);
        for (long p = 0; p < places; p++)
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) {
                vec now = *(const vec *)(y + p * f->wide + v * LANES), *to = (vec *)(gradient + p * f->wide + v * LANES);
                vec sum = o ? *to : (vec){0};
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++) {
                    long at = p * step + (i * vecs + v) * LANES;
                    sum += all[i][v] * *(const vec *)(factors + at);
                    *(vec *)(total + at) += all[i][v] * now;
                }
                *to = sum;
            }
    }
}

/* Rows of `columns` numbers as rows of `wide`, or back in the same place. */
INLINE void NAME(widen)(const float *from, long from_stride, float *to, long to_stride, long rows, long columns) {
    for (long i = 0; i < rows; i++) memmove(to + i * to_stride, from + i * from_stride, sizeof(float) * columns);
}

INLINE const void *NAME(from)(const void *x, const int bytes, long start) {
    return (const char *)x + start * (bytes ? 1 : sizeof(float));
}

INLINE int NAME(folded)(const void *x, const int bytes, const float *w, const float *factors, float *y, float *z, long rows,
                        long depth, const NAME(folding) *f) {
    const long size = f->padded * f->wide, each = f->columns / f->shared, all = rows * f->places;
    const int narrow = f->columns < f->wide; /* then rows of y are not whole registers */
    float *prepared = NAME(prepare)(w, bytes, depth, f->columns);
    if (!prepared) return 1;
    float *spread = malloc(sizeof(float) * (f->places * size + size + (1 + narrow) * PART * f->wide));
    if (!spread) {
        free(prepared);
        return 1;
    }
    float *sums = spread + f->places * size, *made = sums + size, *wider = made + PART * f->wide;
    NAME(spread)(f, factors, spread);
    for (long start = 0; start < all; start += PART) {
        long part = all - start < PART ? all - start : PART;
        float *here = y ? y + start * f->columns : made;
        NAME(multiply)(NAME(from)(x, bytes, start * depth), bytes, prepared, here, part, depth, f->columns);
        if (narrow) NAME(widen)(here, f->columns, wider, f->wide, part, f->columns), here = wider;
        for (long done = 0; done < part;) {
            long p = (start + done) % f->places, row = (start + done) / f->places;
            long some = f->places - p < part - done ? f->places - p : part - done;
            if (!p) memset(sums, 0, sizeof(float) * size);
            if (f->wide == LANES)
                NAME(fold)(f, here + done * f->wide, spread + p * size, sums, some, 1);
            else
                NAME(fold)(f, here + done * f->wide, spread + p * size, sums, some, 2);
            done += some;
            if (p + some < f->places) continue;
            for (long c = 0; c < f->columns; c++) {
                float *to = z + row * f->others * f->columns + NAME(place_of)(f, c);
                for (long o = 0; o < f->others; o++) to[o * each] = sums[o * f->wide + c];
            }
        }
    }
    free(prepared);
    free(spread);
    return 0;
}

/* The gradients of w and of f, added to what is there, from that of z. */
INLINE int NAME(folded_gradients)(const void *x, const int bytes, const float *factors, const float *y, const float *up,
                                  float *of_w, float *of_f, long rows, long depth, const NAME(folding) *f) {
    const long size = f->padded * f->wide, each = f->columns / f->shared, all = rows * f->places;
    const int narrow = f->columns < f->wide;
    float *spread = malloc(sizeof(float) * (2 * f->places * size + size + (1 + narrow) * PART * f->wide));
    if (!spread) return 1;
    float *total = spread + f->places * size, *now = total + f->places * size;
    float *gradient = now + size, *wider = gradient + PART * f->wide;
    int failed = 0;
    NAME(spread)(f, factors, spread);
    memset(total, 0, sizeof(float) * (f->places + 1) * size);
    for (long start = 0; start < all; start += PART) {
        long part = all - start < PART ? all - start : PART;
        const float *here = y + start * f->columns;
        if (narrow) NAME(widen)(here, f->columns, wider, f->wide, part, f->columns), here = wider;
        for (long done = 0; done < part;) {
            long p = (start + done) % f->places, row = (start + done) / f->places;
            long some = f->places - p < part - done ? f->places - p : part - done;
            if (!p)
                for (long c = 0; c < f->columns; c++) {
                    const float *from = up + row * f->others * f->columns + NAME(place_of)(f, c);
                    for (long o = 0; o < f->others; o++) now[o * f->wide + c] = from[o * each];
                }
            const float *ys = here + done * f->wide;
            float *to = gradient + done * f->wide;
            if (f->wide == LANES)
                NAME(unfold)(f, ys, spread + p * size, now, to, total + p * size, some, 1);
            else
                NAME(unfold)(f, ys, spread + p * size, now, to, total + p * size, some, 2);
            done += some;
        }
        if (narrow) NAME(widen)(gradient, f->wide, gradient, f->columns, part, f->columns);
        failed |= NAME(column_sums)(NAME(from)(x, bytes, start * depth), bytes, gradient, of_w, part, depth, f->columns);
    }
    float *to[2 * LANES];
    for (long c = 0; c < f->columns; c++) to[c] = of_f + NAME(shared_of)(f, c) * f->others * f->places;
    for (long p = 0; p < f->places; p++)
        for (long o = 0; o < f->others; o++)
            for (long c = 0; c < f->columns; c++) to[c][o * f->places + p] += total[(p * f->padded + o) * f->wide + c];
    free(spread);
    return failed;
}

INLINE NAME(folding) NAME(folding_of)(long places, long columns, long shared, long inner, long others) {
    return (NAME(folding)){places, columns, shared, inner, others, NAME(width)(columns), (others + FOUR - 1) / FOUR * FOUR};
}

TARGET static int NAME(few_columns_folded)(const void *x, int bytes, const float *w, const float *factors, float *y, float *z,
                                           long rows, long places, long depth, long columns, long shared, long inner,
                                           long others) {
    NAME(folding) f = NAME(folding_of)(places, columns, shared, inner, others);
    return bytes ? NAME(folded)(x, 1, w, factors, y, z, rows, depth, &f)
                 : NAME(folded)(x, 0, w, factors, y, z, rows, depth, &f);
}

TARGET static int NAME(column_sums_folded)(const void *x, int bytes, const float *factors, const float *y, const float *up,
                                           float *of_w, float *of_f, long rows, long places, long depth, long columns,
                                           long shared, long inner, long others) {
    NAME(folding) f = NAME(folding_of)(places, columns, shared, inner, others);
    return bytes ? NAME(folded_gradients)(x, 1, factors, y, up, of_w, of_f, rows, depth, &f)
                 : NAME(folded_gradients)(x, 0, factors, y, up, of_w, of_f, rows, depth, &f);
}

#undef FOUR
