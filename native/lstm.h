/* The recurrence of an LSTM for one width of registers; included once for each. */
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDTH (2 * LANES) /* of a stripe */
#define vec NAME(lstm_vec)
#define ivec NAME(lstm_ivec)
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* A vector of which only the first numbers are in memory. */
INLINE vec NAME(load)(const float *from, long some) {
    if (some >= LANES) return *(const vec *)from;
    vec v = {0};
    for (long j = 0; j < some; j++) v[j] = from[j];
    return v;
}

INLINE void NAME(store)(float *to, vec v, long some) {
    if (some >= LANES)
        *(vec *)to = v;
    else
        for (long j = 0; j < some; j++) to[j] = v[j];
}

/* Products -------------------------------------------------------------------------------------------------------- */

/* Numbers of a packed matrix, but for the one at the end. */
TARGET static long NAME(lstm_packed)(long columns, long depth) { return depth * ((columns + WIDTH - 1) / WIDTH * WIDTH); }

INLINE int NAME(zero)(const float *x, long size) {
    for (long i = 0; i < size; i++)
        if (x[i] != 0) return 0;
    return 1;
}

/* Whether all are finite: what is not, less itself, is not zero. Four sums at once, because one waits for its last. */
INLINE int NAME(finite)(const float *x, long size) {
    vec sums[4] = {{0}};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) sums[v] += *(const vec *)(x + i + v * LANES) - *(const vec *)(x + i + v * LANES);
    float rest = 0;
    for (; i < size; i++) rest += x[i] - x[i];
    for (int j = 0; j < LANES; j++) rest += sums[0][j] + sums[1][j] + sums[2][j] + sums[3][j];
    return rest == 0;
}

/* w, which is (columns, depth) if turned and (depth, columns) if not, as stripes of WIDTH columns, (DEEP, WIDTH) each,
 * filled with zeros: all stripes of the first DEEP lines, then those of the next. At the end stands whether w is finite,
 * 1 or 0. */
TARGET static void NAME(lstm_pack)(const float *w, float *packed, long columns, long depth, int turned) {
    float *end = packed + NAME(lstm_packed)(columns, depth);
    *end = 1;
    for (long start = 0; start < depth; start += DEEP) {
        long deep = depth - start < DEEP ? depth - start : DEEP;
        for (long c = 0; c < columns; c += WIDTH, packed += deep * WIDTH) {
            long some = columns - c < WIDTH ? columns - c : WIDTH, k = 0;
            if (!turned)
                for (; k < deep; k++)
                    for (long j = 0; j < WIDTH; j += LANES)
                        *(vec *)(packed + k * WIDTH + j) = NAME(load)(w + (start + k) * columns + c + j, some - j);
            else if (some == WIDTH)
                for (; k + 4 <= deep; k += 4)
                    for (long j = 0; j < WIDTH; j += 4)
                        turn(w + (c + j) * depth + start + k, depth, packed + k * WIDTH + j, WIDTH);
            for (; k < deep; k++)
                for (long j = 0; j < WIDTH; j++)
                    packed[k * WIDTH + j] = j < some ? w[(c + j) * depth + start + k] : 0;
            if (*end) *end = NAME(finite)(packed, deep * WIDTH); /* of a stripe, while it is in cache */
        }
    }
}

/* Some rows of x times some stripes, each `apart` from the one before, added to `from` (nothing, if there is none). The
 * sums are made in the order of the depth, one product after the other, whatever is done at once: a row has the same
 * bits alone and among others. */
INLINE void NAME(block)(const float *x, long x_stride, const float *w, long apart, const float *from, float *to, long stride,
                        long deep, const int rows, const int stripes) {
    vec sums[ROWS][2 * MOST_STRIPES];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * stripes; v++) sums[i][v] = from ? *(const vec *)(from + i * stride + v * LANES) : (vec){0};
    for (long k = 0; k < deep; k++) {
        vec b[2 * MOST_STRIPES];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * stripes; v++) b[v] = *(const vec *)(w + v / 2 * apart + k * WIDTH + v % 2 * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int v = 0; v < 2 * stripes; v++) sums[i][v] += x[i * x_stride + k] * b[v];
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * stripes; v++) *(vec *)(to + i * stride + v * LANES) = sums[i][v];
}

#define CASE(n, stripes)                                                                                               \
    case n:                                                                                                            \
        NAME(block)(x, x_stride, w, apart, from, to, stride, deep, n <= ROWS ? n : ROWS, stripes);                     \
        break;

TARGET static void NAME(one_stripe)(const float *x, long x_stride, const float *w, const float *from, float *to, long stride,
                                    long deep, int rows) {
    const long apart = 0;
    switch (rows) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
    }
}

/* Few rows leave registers for several stripes, and the multipliers are busy only with many sums at once. */
TARGET static void NAME(few_rows)(const float *x, long x_stride, const float *w, long apart, const float *from, float *to,
                                  long stride, long deep, int rows) {
    switch (rows) {
        CASE(1, 4) CASE(2, 2) CASE(3, 2)
    }
}
#undef CASE

/* to (rows, columns) = from + x (rows, depth) w, with w packed. */
TARGET static void NAME(product)(const float *x, const float *packed, const float *from, float *to, long rows, long columns,
                                 long depth) {
    const long together = rows == 1 ? 4 : rows < 4 ? 2 : 1; /* stripes */
    for (long start = 0; start < depth; start += DEEP, x += DEEP, from = to) {
        long deep = depth - start < DEEP ? depth - start : DEEP, apart = deep * WIDTH;
        for (long c = 0; c < columns;) {
            long left = columns - c;
            if (together > 1 && left >= together * WIDTH) {
                NAME(few_rows)(x, depth, packed, apart, from ? from + c : NULL, to + c, columns, deep, rows);
                c += together * WIDTH, packed += together * apart;
                continue;
            }
            for (long blocks = (rows + ROWS - 1) / ROWS, r = 0; blocks; blocks--) {
                long now = (rows - r + blocks - 1) / blocks; /* about as many in each */
                const float *before = from ? from + r * columns + c : NULL;
                float *after = to + r * columns + c;
                if (left >= WIDTH)
                    NAME(one_stripe)(x + r * depth, depth, packed, before, after, columns, deep, now);
                else { /* the last columns are made beside and copied */
                    float line[ROWS * WIDTH] = {0};
                    for (long i = 0; i < now && before; i++)
                        memcpy(line + i * WIDTH, before + i * columns, sizeof(float) * left);
                    NAME(one_stripe)(x + r * depth, depth, packed, line, line, WIDTH, deep, now);
                    for (long i = 0; i < now; i++) memcpy(after + i * columns, line + i * WIDTH, sizeof(float) * left);
                }
                r += now;
            }
            c += WIDTH, packed += apart;
        }
    }
}

/* Functions of the gates ------------------------------------------------------------------------------------------ */

/* x, but not beyond the limit; what is not a number stays so. */
INLINE vec NAME(at_most)(vec x, float limit) {
    vec most = (vec){0} + limit;
    ivec over = x > most;
    return (vec)(((ivec)most & over) | ((ivec)x & ~over));
}

/* exp(x) - 1 = (exp(r) - 1) 2^n + (2^n - 1), with r at most log(2) / 2 in size; `power` gets 2^n, which is 0 below 2^-126
 * and infinite above 2^127. x must lie between -88.5 and 89. */
INLINE vec NAME(exp_of_rest)(vec x, vec *power) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: added, it leaves a whole number in the last bits */
    vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *power = (vec)(((ivec)shifted - (0x4B400000 - 127)) << 23);
    return p * (r * r) + r;
}

INLINE vec NAME(sigmoid)(vec x) {
    vec power, p = NAME(exp_of_rest)(NAME(at_most)(-NAME(at_most)(x, 88.0f), 88.5f), &power);
    return 1.0f / (1.0f + (p + 1.0f) * power);
}

INLINE vec NAME(tanh)(vec x) {
    ivec sign = (ivec)x & INT32_MIN;
    vec size = NAME(at_most)((vec)((ivec)x ^ sign), 40.0f), power, p = NAME(exp_of_rest)(-2.0f * size, &power);
    vec less = p * power + (power - 1.0f); /* exp(-2 |x|) - 1, exact to the last bits where x is small, too */
    return (vec)((ivec)(-less / (2.0f + less)) ^ sign);
}

/* The gates as sums become what they are, and the state goes on. All are (rows, ...) and lie one row after the other. */
TARGET static void NAME(step)(float *gates, const float *c_before, float *c, float *h, long rows, long hidden) {
    for (long r = 0; r < rows; r++, gates += 4 * hidden, c_before += hidden, c += hidden, h += hidden)
        for (long j = 0; j < hidden; j += LANES) {
            long some = hidden - j;
            float *at = gates + j;
            vec i = NAME(sigmoid)(NAME(load)(at, some)), f = NAME(sigmoid)(NAME(load)(at + hidden, some));
            vec g = NAME(tanh)(NAME(load)(at + 2 * hidden, some)), o = NAME(sigmoid)(NAME(load)(at + 3 * hidden, some));
            vec now = f * NAME(load)(c_before + j, some) + i * g;
            NAME(store)(at, i, some);
            NAME(store)(at + hidden, f, some);
            NAME(store)(at + 2 * hidden, g, some);
            NAME(store)(at + 3 * hidden, o, some);
            NAME(store)(c + j, now, some);
            NAME(store)(h + j, o * NAME(tanh)(now), some);
        }
}

/* The gradients of the sums in the gates from those of h (`more`, if there is any, is added) and c; that of c goes back. */
TARGET static void NAME(step_back)(const float *gates, const float *c_before, const float *c, const float *dh,
                                   const float *more, float *dc, float *d_gates, long rows, long hidden) {
    for (long r = 0; r < rows; r++) {
        for (long j = 0; j < hidden; j += LANES) {
            long some = hidden - j;
            const float *at = gates + j;
            vec i = NAME(load)(at, some), f = NAME(load)(at + hidden, some);
            vec g = NAME(load)(at + 2 * hidden, some), o = NAME(load)(at + 3 * hidden, some);
            vec th = NAME(tanh)(NAME(load)(c + j, some)), up = NAME(load)(dh + j, some);
            if (more) up += NAME(load)(more + j, some);
            vec down = NAME(load)(dc + j, some) + up * o * (1.0f - th * th);
            NAME(store)(d_gates + j, down * g * i * (1.0f - i), some);
            NAME(store)(d_gates + hidden + j, down * NAME(load)(c_before + j, some) * f * (1.0f - f), some);
            NAME(store)(d_gates + 2 * hidden + j, down * i * (1.0f - g * g), some);
            NAME(store)(d_gates + 3 * hidden + j, up * th * o * (1.0f - o), some);
            NAME(store)(dc + j, down * f, some);
        }
        gates += 4 * hidden, d_gates += 4 * hidden, c_before += hidden, c += hidden, dh += hidden, dc += hidden;
        more = more ? more + hidden : more;
    }
}

/* Sequences ------------------------------------------------------------------------------------------------------- */

/* All steps of some rows of the batch, from row `first` on. Without `train`, only the last c and no gates are kept. */
TARGET static void NAME(lstm_forward)(const float *gates, const float *packed, const float *h, const float *c, float *out,
                                      float *cells, float *active, float *last_h, float *last_c, int train, long steps,
                                      long batch, long hidden, long first, long rows) {
    const long line = batch * hidden, skip = first * hidden;
    h += skip, c += skip, cells += skip, active += 4 * skip;
    for (long t = 0; t < steps; t++) {
        const float *from = gates + 4 * (t * line + skip);
        if (t || !NAME(zero)(h, rows * hidden) || !packed[NAME(lstm_packed)(4 * hidden, hidden)])
            NAME(product)(h, packed, from, active, rows, 4 * hidden, hidden);
        else /* nothing comes from a first state of zeros, unless w is not finite */
            memcpy(active, from, sizeof(float) * 4 * rows * hidden);
        NAME(step)(active, c, cells, out + t * line + skip, rows, hidden);
        h = out + t * line + skip, c = cells;
        if (train) cells += line, active += 4 * line;
    }
    memcpy(last_h + skip, h, sizeof(float) * rows * hidden);
    if (last_c) memcpy(last_c + skip, c, sizeof(float) * rows * hidden);
}

/* The same backwards; dh and dc hold the gradients of the last state and then those of the first. */
TARGET static void NAME(lstm_backward)(const float *d_out, const float *packed, const float *active, const float *cells,
                                       const float *c, float *dh, float *dc, float *d_gates, int whole, long steps,
                                       long batch, long hidden, long first, long rows) {
    const long line = batch * hidden, skip = first * hidden;
    dh += skip, dc += skip, c += skip;
    for (long t = steps - 1; t >= 0; t--) {
        const long at = t * line + skip;
        NAME(step_back)(active + 4 * at, t ? cells + at - line : c, cells + at, dh, d_out ? d_out + at : d_out, dc,
                        d_gates + 4 * at, rows, hidden);
        if (t || whole) NAME(product)(d_gates + 4 * at, packed, NULL, dh, rows, hidden, 4 * hidden);
    }
}

/* The gradient of w ------------------------------------------------------------------------------------------------ */

/* Whether nothing comes from the first step: its state is zero, and its gradients are finite. */
TARGET static int NAME(lstm_rests)(const float *h, const float *d_gates, long size) {
    return NAME(zero)(h, size) && NAME(finite)(d_gates, 4 * size);
}

/* The states before the steps, which are the rows of h and then of out, without the first `skipped` of them: stripes as
 * those of w, all of the first `each` rows, then those of the next. */
TARGET static void NAME(lstm_pack_states)(const float *h, const float *out, float *packed, long batch, long hidden,
                                          long skipped, long rows, long each) {
    for (long start = 0; start < rows; start += each) {
        long deep = rows - start < each ? rows - start : each;
        for (long k = 0; k < deep; k++) {
            long row = skipped + start + k;
            const float *from = row < batch ? h + row * hidden : out + (row - batch) * hidden;
            for (long c = 0; c < hidden; c += WIDTH)
                for (long j = 0; j < WIDTH; j += LANES)
                    *(vec *)(packed + c * deep + k * WIDTH + j) = NAME(load)(from + c + j, hidden - c - j);
        }
        packed += NAME(lstm_packed)(hidden, deep);
    }
}

/* Some lines of the gradient, GATES at most, from as many columns of d_gates. These are turned over first: numbers that
 * lie 4H apart compete for the same places in cache. Sums of `each` rows are added up: a single one is less exact. */
TARGET static void NAME(lstm_weight_gradient)(const float *d_gates, const float *packed, float *d_weight, long hidden,
                                              long rows, long each, long some) {
    float turned[GATES * LONG], beside[GATES * WIDTH];
    for (long start = 0; start < rows; start += each, d_gates += each * 4 * hidden) {
        long deep = rows - start < each ? rows - start : each, k = 0;
        for (; k + 4 <= deep; k += 4)
            for (long g = 0; g < some; g += 4) /* as 4H is, `some` is a multiple of 4 */
                turn(d_gates + k * 4 * hidden + g, 4 * hidden, turned + g * deep + k, deep);
        for (; k < deep; k++)
            for (long g = 0; g < some; g++) turned[g * deep + k] = d_gates[k * 4 * hidden + g];
        for (long c = 0; c < hidden; c += WIDTH, packed += deep * WIDTH) {
            const int straight = !start && hidden - c >= WIDTH; /* if not, they are made beside and added or copied */
            const long stride = straight ? hidden : WIDTH;
            float *to = straight ? d_weight + c : beside;
            for (long blocks = (some + ROWS - 1) / ROWS, r = 0; blocks; blocks--) {
                long now = (some - r + blocks - 1) / blocks; /* about as many in each */
                NAME(one_stripe)(turned + r * deep, deep, packed, NULL, to + r * stride, stride, deep, now);
                r += now;
            }
            for (long i = 0; i < some && !straight; i++)
                for (long j = c; j < c + WIDTH && j < hidden; j += LANES) {
                    float *at = d_weight + i * hidden + j;
                    vec sum = *(const vec *)(beside + i * WIDTH + j - c);
                    if (start) sum += NAME(load)(at, hidden - j);
                    NAME(store)(at, sum, hidden - j);
                }
        }
    }
}

#undef vec
#undef ivec
#undef INLINE
#undef WIDTH
