// Two products in one: y (R, P, C) = x (R, P, K) w^T, and z[r, o, c] = sum over p of y[r, p, c] f[p, o, c], where f is the
// same for all columns c with the same index g among `shared`. y is folded while it is in the cache. Needs sums_kernel.h.
//
// The gradient of f needs y, that of w needs v = f x, which is as small: z is a sum over the depth of v and w, too. While x
// is in the cache for y, v is computed as well, and the gradients need no x any more.
//
// Columns count as (c / (shared * inner), g, c % inner); f is (shared, others, P), z (R, shared, others, the rest of the
// columns). `others` go four at a time; columns fill two registers at most. If they fill half of one or less, several rows
// lie in it. SETS of registers go at once, so that f and its gradient are read less often.

constexpr int FOUR = 4;
constexpr int SETS = LANES == 16 ? 4 : 2;  // as many as leave registers for the rest
constexpr long PART = 384;                 // rows of x whose product is folded at once
constexpr long HELD = 40;                  // places of x for which y and v are computed before the next ones are read

struct Folding {
    long places, columns, shared, inner, others;
    long together, wide, padded;  // rows in a set of registers, the numbers of that, and the others as whole fours
    long in_z[SETS * PANEL], in_sums[SETS * PANEL];  // of the lanes of all sets, for the first of the others

    INLINE_MEMBER long shared_of(long l) const { return l / inner % shared; }
    // Where f is for the first place, one of the others and lane l in (registers, padded / FOUR, places, FOUR, each).
    INLINE_MEMBER long factor_at(long o, long l, long each) const {
        return ((l / LANES * padded + o - o % FOUR) * places + o % FOUR) * each + l % LANES;
    }
    // Where row r is in (SETS, places, wide).
    INLINE_MEMBER long row_at(long r) const { return r / together * places * wide + r % together * columns; }
};

INLINE Folding folding_of(long places, long columns, long shared, long inner, long others) {
    Folding f = {places, columns, shared, inner, others, columns < LANES ? LANES / columns : 1,
                 (columns + LANES - 1) / LANES * LANES, (others + FOUR - 1) / FOUR * FOUR, {0}, {0}};
    for (long l = 0, lanes = f.together * columns; l < SETS * lanes; l++) {
        const long row = l / columns, c = l % columns, group = c / (inner * shared), set = l / lanes, lane = l % lanes;
        f.in_z[l] = (row * columns + f.shared_of(c) * (columns / shared)) * others + group * inner + c % inner;
        f.in_sums[l] = (set * f.wide + lane - lane % LANES) * f.padded + lane % LANES;
    }
    return f;
}

// f laid out with a number for each lane, or with one for all lanes where it is the same for all.
INLINE void lay_out_factors(const Folding& f, const float* factors, float* out) {
    const long each = f.shared == 1 ? 1 : LANES, lanes = f.shared == 1 ? 1 : f.together * f.columns;
    for (long o = 0; o < f.others; o++)
        for (long l = 0; l < lanes; l++) {
            const float* from = factors + (f.shared_of(l) * f.others + o) * f.places;
            float* to = out + f.factor_at(o, l, each);
            for (long p = 0; p < f.places; p++) to[p * FOUR * each] = from[p];
        }
}

// The way back for the gradient, which has a number for each lane.
INLINE void gather_factors(const Folding& f, const float* total, float* out) {
    for (long o = 0; o < f.others; o++)
        for (long l = 0; l < f.together * f.columns; l++) {
            const float* from = total + f.factor_at(o, l, LANES);
            float* to = out + (f.shared_of(l) * f.others + o) * f.places;
            for (long p = 0; p < f.places; p++) to[p] += from[p * FOUR * LANES];
        }
}

template <bool same>
INLINE vec factor_in_lanes(const float* from) {
    if (same) return *from - (vec){0};  // a broadcast; a sum with 0 would lose -0
    return *(const vec*)from;
}

// sums (SETS, registers, padded, LANES) = y f for y (SETS, places, wide), whose sets are `apart`.
template <bool same>
INLINE void fold_sets(const Folding& f, const float* y, long apart, const float* factors, float* sums) {
    const long each = same ? 1 : LANES;
    for (long v = 0; v < f.wide; v += LANES)
        for (long o = 0; o < f.padded; o += FOUR) {
            const float *from = y + v, *with = factors + f.factor_at(o, same ? 0 : v, each);
            vec all[SETS][FOUR];
            UNROLL(4)
            for (int s = 0; s < SETS; s++) {
                UNROLL(4)
                for (int i = 0; i < FOUR; i++) all[s][i] = (vec){0};
            }
            for (long p = 0; p < f.places; p++, from += f.wide, with += FOUR * each) {
                UNROLL(4)
                for (int i = 0; i < FOUR; i++) {
                    const vec factor = factor_in_lanes<same>(with + i * each);
                    UNROLL(4)
                    for (int s = 0; s < SETS; s++) all[s][i] += *(const vec*)(from + s * apart) * factor;
                }
            }
            UNROLL(4)
            for (int s = 0; s < SETS; s++) {
                UNROLL(4)
                for (int i = 0; i < FOUR; i++) *(vec*)(sums + (s * f.wide + v) * f.padded + (o + i) * LANES) = all[s][i];
            }
        }
}

// The gradient of f, added to `total`, from such a y and the gradient of the sums.
INLINE void unfold_sets(const Folding& f, const float* y, long apart, const float* upstream, float* total) {
    for (long v = 0; v < f.wide; v += LANES)
        for (long o = 0; o < f.padded; o += FOUR) {
            const float* from = y + v;
            vec all[SETS][FOUR];
            UNROLL(4)
            for (int s = 0; s < SETS; s++) {
                UNROLL(4)
                for (int i = 0; i < FOUR; i++)
                    all[s][i] = *(const vec*)(upstream + (s * f.wide + v) * f.padded + (o + i) * LANES);
            }
            for (long p = 0; p < f.places; p++, from += f.wide) {
                UNROLL(4)
                for (int i = 0; i < FOUR; i++, total += LANES) {
                    vec more = *(const vec*)total;
                    UNROLL(4)
                    for (int s = 0; s < SETS; s++) more += all[s][i] * *(const vec*)(from + s * apart);
                    *(vec*)total = more;
                }
            }
        }
}

// Lines of `columns` numbers to where lines are farther apart, or nearer.
INLINE void move_lines(const float* from, long row, float* to, long to_row, long lines, long columns) {
    if (columns == 4)  // the most usual; a size that is known here is not a call for every line
        for (long i = 0; i < lines; i++) memcpy(to + i * to_row, from + i * row, sizeof(float) * 4);
    else
        for (long i = 0; i < lines; i++) memcpy(to + i * to_row, from + i * row, sizeof(float) * columns);
}

// At most SETS * together rows of y as (SETS, places, wide): where they lie, or in `wider`, where the rest is zeros.
INLINE const float* widen(const Folding& f, const float* y, float* wider, long rows) {
    const bool all = rows == SETS * f.together;
    if (f.columns == f.wide && all) return y;
    if (!all) memset(wider, 0, sizeof(float) * SETS * f.places * f.wide);
    for (long r = 0; r < rows; r++, y += f.places * f.columns)
        move_lines(y, f.columns, wider + f.row_at(r), f.wide, f.places, f.columns);
    return wider;
}

// sums (tiles of lines and depth) += f x for some places of one row of x, or = for the first; the sums of the last places go
// to v. `transposed` is f as (places, width).
APART void sum_places(const float* x, const float* transposed, float* v, float* sums, long places, long depth, long lines,
                      long width, bool first, bool last, const float* later, long asked) {
    const long tiles = width / TILE * ((depth + WIDE - 1) / WIDE), groups = (places + GROUP - 1) / GROUP;
    for (long k = 0, t = 0; k < depth; k += WIDE) {
        const long at = tile_at(k, depth);  // the last tile computes some numbers again, with the same bits
        const int vecs = tile_vecs(k, depth);
        for (long n = 0; n < width; n += TILE, sums += TILE * WIDE, t++) {
            const long before = share(t, tiles, asked), after = share(t + 1, tiles, asked);
            const bool straight = last && n + TILE <= lines;
            for (long i = n; first && i < n + TILE && i < lines; i++)
                for (long j = 0; j < vecs * LANES; j += LINE) __builtin_prefetch(v + i * depth + at + j, 1, 2);
            const Result result{straight ? v + n * depth + at : sums, straight ? depth : WIDE, first ? nullptr : sums, WIDE};
            tile(x + at, depth, transposed + n, width, result, places, vecs,
                 PrefetchGroups{later + before * groups * LINE, after - before});
            for (long i = n; last && !straight && i < lines; i++)
                memcpy(v + i * depth + at, sums + (i - n) * WIDE, sizeof(float) * LANES * vecs);
        }
    }
}

// y and v of one row of x, HELD places after the other: what is read for y is in the cache for v. What comes next is
// prefetched all the while, a part with y and the rest with v, as long as each takes.
INLINE void both_products(const float* x, float* prepared, const float* transposed, float* y, float* v, float* sums,
                          long places, long depth, long columns, long lines, long width) {
    const long all = columns + 2 * width;  // a column of v takes about twice as long, with what is loaded and stored
    const long asked = (depth * columns + all - 1) / all;
    for (long p = 0; p < places; p += HELD) {
        const long some = places - p < HELD ? places - p : HELD;
        const float *here = x + p * depth, *later = here + some * depth;
        few_columns(here, false, prepared, y + p * columns, some, depth, columns, later, asked);
        sum_places(here, transposed + p * width, v, sums, some, depth, lines, width, p == 0, p + some == places,
                   later + some * asked, (GROUP * (depth - asked) + LINE - 1) / LINE);
    }
}

// Numbers of memory that fold needs: zeros.
long fold_memory(bool bytes, bool keep_y, bool keep_v, const FoldSizes& n) {
    const long places = n.places, depth = n.depth, columns = n.columns, shared = n.shared, others = n.others;
    const long wide = (columns + LANES - 1) / LANES * LANES, padded = (others + FOUR - 1) / FOUR * FOUR;
    const long width = (shared * others + TILE - 1) / TILE * TILE, together = columns < LANES ? LANES / columns : 1;
    const long tiled = keep_v ? width * ((depth + WIDE - 1) / WIDE * WIDE + places) : 0;
    const long parts = keep_y ? 0 : ((keep_v ? places : PART) + SETS * together * places) * columns;
    return columns_memory(bytes, depth, columns) + (places + SETS) * padded * wide + SETS * places * wide + tiled + parts;
}

// y and v may be null: then they are not wanted; v is for floats only.
void fold(const void* x, bool bytes, const float* w, const float* factors, float* y, float* z, float* v, float* memory,
          const FoldSizes& n) {
    const long places = n.places, depth = n.depth, columns = n.columns, shared = n.shared, others = n.others;
    const Folding f = folding_of(places, columns, shared, n.inner, others);
    const long size = f.padded * f.wide, all = n.rows * places, most = SETS * f.together, next = columns / shared;
    const long lines = shared * others, width = (lines + TILE - 1) / TILE * TILE, step = v ? places : PART;
    float *laid_out = memory + columns_memory(bytes, depth, columns), *sums = laid_out + places * size;
    float *wider = sums + SETS * size, *tiles = wider + SETS * places * f.wide;
    float* transposed = tiles + (v ? width * ((depth + WIDE - 1) / WIDE * WIDE) : 0);
    float* made = transposed + (v ? places * width : 0);
    prepare_columns(w, memory, depth, columns);
    lay_out_factors(f, factors, laid_out);
    for (long i = 0; v && i < lines; i++)
        for (long p = 0; p < places; p++) transposed[p * width + i] = factors[i * places + p];
    long ready = 0;  // lines of y that are computed and not folded yet
    for (long start = 0; start < all; start += step) {
        const long part = all - start < step ? all - start : step;
        float* here = y ? y + (start - ready) * columns : made;
        if (v)
            both_products((const float*)x + start * depth, memory, transposed, here + ready * columns,
                          v + start / places * lines * depth, tiles, places, depth, columns, lines, width);
        else
            few_columns((const char*)x + start * depth * (bytes ? 1 : (long)sizeof(float)), bytes, memory,
                        here + ready * columns, part, depth, columns, nullptr, 0);
        ready += part;
        while (ready && (ready >= most * places || start + part == all)) {
            const long some = ready / places < most ? ready / places : most;
            const float* now = widen(f, here, wider, some);
            if (shared == 1)
                fold_sets<true>(f, now, places * f.wide, laid_out, sums);
            else
                fold_sets<false>(f, now, places * f.wide, laid_out, sums);
            for (long l = 0; l < some * columns; l++)
                for (long o = 0; o < others; o++) z[f.in_z[l] + o * next] = sums[f.in_sums[l] + o * LANES];
            here += some * places * columns, ready -= some * places, z += some * others * columns;
        }
        if (!y && ready) memmove(made, here, sizeof(float) * ready * columns);
    }
}

// Numbers of memory that fold_gradients needs: zeros.
long fold_gradients_memory(const FoldSizes& n) {
    const long places = n.places, depth = n.depth, columns = n.columns, shared = n.shared, others = n.others;
    const long wide = (columns + LANES - 1) / LANES * LANES, padded = (others + FOUR - 1) / FOUR * FOUR;
    const long width = (columns / shared + TILE - 1) / TILE * TILE, deep = (depth + WIDE - 1) / WIDE;
    return (places + SETS) * padded * wide + SETS * places * wide + shared * others * width + shared * deep * width * WIDE;
}

// The gradients of w and of f, added to what is there, from that of z.
void fold_gradients(const float* y, const float* v, const float* upstream, float* of_w, float* of_f, float* memory,
                    const FoldSizes& n) {
    const long rows = n.rows, places = n.places, depth = n.depth, columns = n.columns, shared = n.shared;
    const long inner = n.inner, others = n.others;
    const Folding f = folding_of(places, columns, shared, inner, others);
    const long size = f.padded * f.wide, most = SETS * f.together, next = columns / shared, lines = shared * others;
    const long width = (next + TILE - 1) / TILE * TILE, across = width / TILE, deep = (depth + WIDE - 1) / WIDE;
    float *total = memory, *now = total + places * size, *wider = now + SETS * size;
    float *whole = wider + SETS * places * f.wide, *sums = whole + lines * width;
    const float* up = upstream;
    for (long row = 0, some; row < rows; row += some, y += some * places * columns, up += some * others * columns) {
        some = rows - row < most ? rows - row : most;
        if (some < most) memset(now, 0, sizeof(float) * SETS * size);
        for (long l = 0; l < some * columns; l++)
            for (long o = 0; o < others; o++) now[f.in_sums[l] + o * LANES] = up[f.in_z[l] + o * next];
        unfold_sets(f, widen(f, y, wider, some), places * f.wide, now, total);
    }
    const long tiles = shared * deep * across, groups = (others + GROUP - 1) / GROUP;
    const long asked = (lines * depth / groups + LINE - 1) / LINE;  // of the next row, with every group of this one
    for (long row = 0; row < rows; row++, v += lines * depth, upstream += lines * next) {
        float* to = sums;
        long t = 0;
        move_lines(upstream, next, whole, width, lines, next);
        for (long g = 0; g < shared; g++)
            for (long k = 0; k < depth; k += WIDE) {
                const float* from = v + g * others * depth + tile_at(k, depth);
                for (long j = 0; j < width; j += TILE, to += TILE * WIDE, t++) {
                    const long before = share(t, tiles, asked), after = share(t + 1, tiles, asked);
                    tile(from, depth, whole + g * others * width + j, width, Result{to, WIDE, to, WIDE}, others,
                         tile_vecs(k, depth), PrefetchGroups{v + lines * depth + before * groups * LINE, after - before});
                }
            }
    }
    for (long c = 0; c < columns; c++) {
        const long g = f.shared_of(c), j = c / (inner * shared) * inner + c % inner;
        add_line(sums + g * deep * across * TILE * WIDE, across, j, of_w + c * depth, depth);
    }
    gather_factors(f, total, of_f);
}
