/* Two products in one: y (R, P, C) = x (R, P, K) w^T, and z[r, o, c] = sum over p of y[r, p, c] f[p, o, c], where f is
 * the same for all columns c with the same g, their index among `shared`. y is folded up while it is in the cache.
 *
 * The gradient of f needs y, that of w needs v = f x, which is as small: z is a sum over the depth of v and w, too. While
 * x is in the cache for y, v is made as well, and the gradients need no x any more.
 *
 * Columns count as (c / (shared * inner), g, c % inner); f is given as (shared, others, P), z as (R, shared, others,
 * what is left of the columns). `others` go four at a time; columns may fill two registers at most. If they fill half
 * of one or less, rows lie together in it. SETS of them go at once, so that f and its gradient are read less often. */
#define FOUR 4
#define SETS (LANES == 16 ? 4 : 2) /* as many as leave registers for the rest */

typedef struct NAME(folding) {
    long places, columns, shared, inner, others;
    long together, wide, padded; /* rows in a set of registers, the numbers of that, and the others as whole fours */
    long in_z[SETS * 2 * LANES], in_sums[SETS * 2 * LANES]; /* of lanes of all sets, for the first of the others */
} NAME(folding);

INLINE long NAME(shared_of)(const NAME(folding) *f, long l) { return l / f->inner % f->shared; }

INLINE NAME(folding) NAME(folding_of)(long places, long columns, long shared, long inner, long others) {
    NAME(folding) f = {places, columns, shared, inner, others, columns < LANES ? LANES / columns : 1,
                       NAME(width)(columns), (others + FOUR - 1) / FOUR * FOUR};
    for (long l = 0, lanes = f.together * columns; l < SETS * lanes; l++) {
        long row = l / columns, c = l % columns, group = c / (inner * shared), set = l / lanes, lane = l % lanes;
        f.in_z[l] = (row * columns + NAME(shared_of)(&f, c) * (columns / shared)) * others + group * inner + c % inner;
        f.in_sums[l] = (set * f.wide + lane - lane % LANES) * f.padded + lane % LANES;
    }
    return f;
}

/* Where f is for the first place, one of the others and lane l in (registers, padded / FOUR, places, FOUR, each). */
INLINE long NAME(factor_of)(const NAME(folding) *f, long o, long l, long each) {
    return ((l / LANES * f->padded + o - o % FOUR) * f->places + o % FOUR) * each + l % LANES;
}

/* f laid out like that, with a number for each lane, or with one for all where it is the same for all. */
INLINE void NAME(spread)(const NAME(folding) *f, const float *factors, float *out) {
    const long each = f->shared == 1 ? 1 : LANES, lanes = f->shared == 1 ? 1 : f->together * f->columns;
    for (long o = 0; o < f->others; o++)
        for (long l = 0; l < lanes; l++) {
            const float *from = factors + (NAME(shared_of)(f, l) * f->others + o) * f->places;
            float *to = out + NAME(factor_of)(f, o, l, each);
            for (long p = 0; p < f->places; p++) to[p * FOUR * each] = from[p];
        }
}

INLINE vec NAME(factor)(const float *from, const int same) {
    if (same) return *from - (vec){0}; /* which is no operation, other than a sum: that has no -0 */
    return *(const vec *)from;
}

/* The way back for the gradient, which has a number for each lane. */
INLINE void NAME(gather)(const NAME(folding) *f, const float *total, float *out) {
    for (long o = 0; o < f->others; o++)
        for (long l = 0; l < f->together * f->columns; l++) {
            const float *from = total + NAME(factor_of)(f, o, l, LANES);
            float *to = out + (NAME(shared_of)(f, l) * f->others + o) * f->places;
            for (long p = 0; p < f->places; p++) to[p] += from[p * FOUR * LANES];
        }
}

/* sums (SETS, registers, padded, LANES) = y f for y (SETS, places, wide), whose sets are `apart`. */
INLINE void NAME(fold)(const NAME(folding) *f, const float *y, long apart, const float *factors, float *sums,
                       const int same) {
    const long each = same ? 1 : LANES;
    for (long v = 0; v < f->wide; v += LANES)
        for (long o = 0; o < f->padded; o += FOUR) {
            const float *from = y + v, *with = factors + NAME(factor_of)(f, o, same ? 0 : v, each);
            vec all[SETS][FOUR];
#pragma GCC unroll 4
            for (int s = 0; s < SETS; s++)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++) all[s][i] = (vec){0};
            for (long p = 0; p < f->places; p++, from += f->wide, with += FOUR * each)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++) {
                    const vec factor = NAME(factor)(with + i * each, same);
#pragma GCC unroll 4
                    for (int s = 0; s < SETS; s++) all[s][i] += *(const vec *)(from + s * apart) * factor;
                }
#pragma GCC unroll 4
            for (int s = 0; s < SETS; s++)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++)
                    *(vec *)(sums + (s * f->wide + v) * f->padded + (o + i) * LANES) = all[s][i];
        }
}

/* The gradient of f, added to `total`, from such a y and that of the sums, `up`. */
INLINE void NAME(unfold)(const NAME(folding) *f, const float *y, long apart, const float *up, float *total) {
    for (long v = 0; v < f->wide; v += LANES)
        for (long o = 0; o < f->padded; o += FOUR) {
            const float *from = y + v;
            vec all[SETS][FOUR];
#pragma GCC unroll 4
            for (int s = 0; s < SETS; s++)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++)
                    all[s][i] = *(const vec *)(up + (s * f->wide + v) * f->padded + (o + i) * LANES);
            for (long p = 0; p < f->places; p++, from += f->wide)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++, total += LANES) {
                    vec more = *(const vec *)total;
#pragma GCC unroll 4
                    for (int s = 0; s < SETS; s++) more += all[s][i] * *(const vec *)(from + s * apart);
                    *(vec *)total = more;
                }
        }
}

/* Lines of `columns` numbers to where lines are farther apart, or nearer. */
INLINE void NAME(move)(const float *from, long stride, float *to, long to_stride, long lines, long columns) {
    if (columns == 4) /* the most usual; a size that is known here is not a call for every line */
        for (long i = 0; i < lines; i++) memcpy(to + i * to_stride, from + i * stride, sizeof(float) * 4);
    else
        for (long i = 0; i < lines; i++) memcpy(to + i * to_stride, from + i * stride, sizeof(float) * columns);
}

/* Where row r is in (SETS, places, wide). */
INLINE long NAME(row_of)(const NAME(folding) *f, long r) {
    return r / f->together * f->places * f->wide + r % f->together * f->columns;
}

/* At most SETS * together rows of y as (SETS, places, wide): where they lie, or in `wider`, where the rest is zeros. */
INLINE const float *NAME(widen)(const NAME(folding) *f, const float *y, float *wider, long rows) {
    const int all = rows == SETS * f->together;
    if (f->columns == f->wide && all) return y;
    if (!all) memset(wider, 0, sizeof(float) * SETS * f->places * f->wide);
    for (long r = 0; r < rows; r++, y += f->places * f->columns)
        NAME(move)(y, f->columns, wider + NAME(row_of)(f, r), f->wide, f->places, f->columns);
    return wider;
}

/* A function of its own: with the rest around it, sums would not stay in registers. */
TARGET __attribute__((noinline)) static void NAME(multiply_part)(const void *x, int bytes, float *prepared, float *out,
                                                                 long rows, long depth, long columns, const float *later,
                                                                 long asked) {
    if (bytes)
        NAME(multiply)(x, 1, prepared, out, rows, depth, columns, NULL, 0);
    else
        NAME(multiply)(x, 0, prepared, out, rows, depth, columns, later, asked);
}

/* f (lines, places) with the places first and as many lines as fill whole tiles. */
INLINE float *NAME(by_place)(const float *factors, long lines, long places, long width) {
    float *turned = calloc(places * width, sizeof(float));
    for (long i = 0; turned && i < lines; i++)
        for (long p = 0; p < places; p++) turned[p * width + i] = factors[i * places + p];
    return turned;
}

/* sums (tiles of lines and depth) += f x for some places of one row of x, or = for the first; the sums of the last go to v.
 * Of `later`, `asked` lines of memory are asked for with every GROUP of places. A function of its own: with the rest around
 * it, sums would not stay in registers. */
TARGET __attribute__((noinline)) static void NAME(sum_places)(const float *x, const float *turned, float *v, float *sums,
                                                              long places, long depth, long lines, long width, int first,
                                                              int last, const float *later, long asked) {
    const long tiles = width / TILE * ((depth + WIDE - 1) / WIDE), groups = (places + GROUP - 1) / GROUP;
    for (long k = 0, t = 0; k < depth; k += WIDE) {
        const long at = NAME(tile_at)(k, depth); /* the last makes some numbers again, with the same bits */
        const int vecs = NAME(tile_vecs)(k, depth);
        for (long n = 0; n < width; n += TILE, sums += TILE * WIDE) {
            const long before = NAME(asked_before)(t++, tiles, asked), after = NAME(asked_before)(t, tiles, asked);
            const int straight = last && n + TILE <= lines;
            for (long i = n; first && i < n + TILE && i < lines; i++) /* where the sums will go is asked for, too */
                for (long j = 0; j < vecs * LANES; j += LINE) __builtin_prefetch(v + i * depth + at + j, 1, 2);
            NAME(tile)(x + at, depth, turned + n, width, first ? NULL : sums, straight ? v + n * depth + at : sums,
                       straight ? depth : WIDE, places, later + before * groups * LINE, after - before, vecs);
            for (long i = n; last && !straight && i < lines; i++)
                memcpy(v + i * depth + at, sums + (i - n) * WIDE, sizeof(float) * LANES * vecs);
        }
    }
}

/* y and v of one row of x, some places after the other: what is read for y is in the cache for v. What comes next is asked
 * of the memory all the while, a part with y and the rest with v, as long as each takes: more at once would have to wait. */
INLINE void NAME(both)(const float *x, float *prepared, const float *turned, float *y, float *v, float *sums, long places,
                       long depth, long columns, long lines, long width) {
    const long share = columns + 2 * width; /* a column of v takes about twice as long, with what is loaded and stored */
    const long asked = depth > DEEP ? depth : (depth * columns + share - 1) / share;
    for (long p = 0; p < places; p += HELD) {
        const long some = places - p < HELD ? places - p : HELD;
        const float *here = x + p * depth, *later = here + some * depth;
        NAME(multiply_part)(here, 0, prepared, y + p * columns, some, depth, columns, depth > DEEP ? NULL : later, asked);
        NAME(sum_places)(here, turned + p * width, v, sums, some, depth, lines, width, p == 0, p + some == places,
                         later + some * asked, (GROUP * (depth - asked) + LINE - 1) / LINE);
    }
}

TARGET static int NAME(few_columns_folded)(const void *x, int bytes, const float *w, const float *factors, float *y,
                                           float *z, float *v, long rows, long places, long depth, long columns,
                                           long shared, long inner, long others) {
    const NAME(folding) f = NAME(folding_of)(places, columns, shared, inner, others);
    const long size = f.padded * f.wide, held = SETS * places * f.wide;
    const long all = rows * places, most = SETS * f.together, next = columns / shared;
    const long lines = shared * others, width = (lines + TILE - 1) / TILE * TILE, step = v ? places : PART;
    float *prepared = bytes ? NAME(prepare)(w, 1, depth, columns) : NAME(prepare)(w, 0, depth, columns);
    const long tiled = v ? width * ((depth + WIDE - 1) / WIDE * WIDE) : 0;
    float *spread = calloc((places + SETS) * size + held + tiled + (y ? 0 : (step + most * places) * columns), sizeof(float));
    float *turned = v ? NAME(by_place)(factors, lines, places, width) : NULL;
    float *sums = spread + places * size, *wider = sums + SETS * size, *tiles = wider + held, *made = tiles + tiled;
    const int failed = !prepared || !spread || (v && !turned);
    long ready = 0; /* lines of y that are made and not folded up yet */
    if (spread) NAME(spread)(&f, factors, spread);
    for (long start = 0; !failed && start < all; start += step) {
        long part = all - start < step ? all - start : step;
        float *here = y ? y + (start - ready) * columns : made;
        if (v)
            NAME(both)((const float *)x + start * depth, prepared, turned, here + ready * columns,
                       v + start / places * lines * depth, tiles, places, depth, columns, lines, width);
        else
            NAME(multiply_part)((const char *)x + start * depth * (bytes ? 1 : sizeof(float)), bytes, prepared,
                                here + ready * columns, part, depth, columns, NULL, 0);
        ready += part;
        while (ready && (ready >= most * places || start + part == all)) {
            long some = ready / places < most ? ready / places : most;
            const float *now = NAME(widen)(&f, here, wider, some);
            const long apart = places * f.wide;
            if (shared == 1)
                NAME(fold)(&f, now, apart, spread, sums, 1);
            else
                NAME(fold)(&f, now, apart, spread, sums, 0);
            for (long l = 0; l < some * columns; l++)
                for (long o = 0; o < others; o++) z[f.in_z[l] + o * next] = sums[f.in_sums[l] + o * LANES];
            here += some * places * columns, ready -= some * places, z += some * others * columns;
        }
        if (!y) memmove(made, here, sizeof(float) * ready * columns);
    }
    free(turned);
    free(spread);
    free(prepared);
    return failed;
}

/* The gradients of w and of f, added to what is there, from that of z. */
TARGET static int NAME(folded_gradients)(const float *y, const float *v, const float *up, float *of_w, float *of_f,
                                         long rows, long places, long depth, long columns, long shared, long inner,
                                         long others) {
    const NAME(folding) f = NAME(folding_of)(places, columns, shared, inner, others);
    const long size = f.padded * f.wide, held = SETS * places * f.wide, most = SETS * f.together;
    const long next = columns / shared, width = (next + TILE - 1) / TILE * TILE, lines = shared * others;
    const long across = width / TILE, deep = (depth + WIDE - 1) / WIDE, tile = TILE * WIDE;
    float *total = calloc(places * size + SETS * size + held + lines * width + shared * deep * across * tile, sizeof(float));
    if (!total) return 1;
    float *now = total + places * size, *wider = now + SETS * size, *whole = wider + held, *sums = whole + lines * width;
    for (long row = 0, some; row < rows; row += some, y += some * places * columns, up += some * others * columns) {
        some = rows - row < most ? rows - row : most;
        if (some < most) memset(now, 0, sizeof(float) * SETS * size);
        for (long l = 0; l < some * columns; l++)
            for (long o = 0; o < others; o++) now[f.in_sums[l] + o * LANES] = up[f.in_z[l] + o * next];
        const long apart = places * f.wide;
        NAME(unfold)(&f, NAME(widen)(&f, y, wider, some), apart, now, total);
    }
    up -= rows * others * columns;
    const long tiles = shared * deep * across, groups = (others + GROUP - 1) / GROUP;
    const long asked = (lines * depth / groups + LINE - 1) / LINE; /* of the next row, with every group of this one */
    for (long row = 0; row < rows; row++, v += lines * depth, up += lines * next) {
        float *to = sums;
        long t = 0;
        NAME(move)(up, next, whole, width, lines, next);
        for (long g = 0; g < shared; g++)
            for (long k = 0; k < depth; k += WIDE) {
                const float *from = v + g * others * depth + NAME(tile_at)(k, depth);
                for (long j = 0; j < width; j += TILE, to += tile) {
                    const long before = NAME(asked_before)(t++, tiles, asked), after = NAME(asked_before)(t, tiles, asked);
                    NAME(tile)(from, depth, whole + g * others * width + j, width, to, to, WIDE, others,
                               v + lines * depth + before * groups * LINE, after - before, NAME(tile_vecs)(k, depth));
                }
            }
    }
    for (long c = 0; c < columns; c++) {
        const long g = NAME(shared_of)(&f, c), j = c / (inner * shared) * inner + c % inner;
        NAME(add_line)(sums + g * deep * across * tile, across, j, of_w + c * depth, depth);
    }
    NAME(gather)(&f, total, of_f);
    free(total);
    return 0;
}

#undef FOUR
#undef SETS
