// The micro-kernel of all matrix products, compiled once for each register width; widths.h includes it.
//
//   to (rows, columns) = start + x (rows, depth) w (depth, columns)
//
// ROWS rows by two registers of columns stay in registers for the whole depth. The sums of a row are made in the order of
// the depth, whatever other rows are computed with it: a row has the same bits alone and among others.

constexpr int LANES = KERNEL_WIDTH;  // numbers in a register
constexpr int PANEL = 2 * LANES;     // columns of a panel: what is computed at once
constexpr long LINE = 16;            // numbers that come from memory together

#if defined(__aarch64__)
constexpr int ROWS = 12;  // 24 of 32 registers hold sums
#else
constexpr int ROWS = LANES == 16 ? 12 : 6;  // 24 of 32 or 12 of 16
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__x86_64__) && KERNEL_WIDTH == 8
INLINE __m256i first_lanes(long some) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)some), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// A register of which only the first `some` numbers are in memory; the rest are zeros.
INLINE vec load_some(const float* from, long some) {
    if (some >= LANES) return *(const vec*)from;
    if (some <= 0) return (vec){0};
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << some) - 1), from);
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    return (vec)_mm256_maskload_ps(from, first_lanes(some));
#else
    vec v = {0};
    for (long j = 0; j < some; j++) v[j] = from[j];
    return v;
#endif
}

// Writes the first `some` numbers of a register.
INLINE void store_some(float* to, vec v, long some) {
    if (some >= LANES) {
        *(vec*)to = v;
        return;
    }
    if (some <= 0) return;
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << some) - 1), (__m512)v);
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    _mm256_maskstore_ps(to, first_lanes(some), (__m256)v);
#else
    for (long j = 0; j < some; j++) to[j] = v[j];
#endif
}

// What a block does beside its sums, at every EVERY numbers of depth: nothing, or prefetch what comes next.
struct Idle {
    static constexpr long EVERY = 0;
    INLINE_MEMBER void operator()(long) const {}
};

template <int rows, int vecs>
INLINE void add_products(vec (&sums)[rows][vecs], const Operand& x, const Panel& w) {
    vec b[vecs];
    UNROLL(8)
    for (int v = 0; v < vecs; v++) b[v] = *(const vec*)(w.at + v / 2 * w.apart + v % 2 * LANES);
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        const float number = x.at[i * x.row];
        UNROLL(8)
        for (int v = 0; v < vecs; v++) sums[i][v] += number * b[v];
    }
}

// The sums of `rows` rows and `vecs` registers of columns, of which the first `columns` numbers are written.
template <int rows, int vecs, class Beside = Idle>
INLINE void block(Operand x, Panel w, Result result, long columns, long depth, const Beside& beside = Beside()) {
    vec sums[rows][vecs];
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        UNROLL(8)
        for (int v = 0; v < vecs; v++) sums[i][v] = (vec){0};
    }
    long k = 0;
    if (Beside::EVERY)
        while (k + Beside::EVERY <= depth) {
            beside(k);
            UNROLL(4)
            for (long s = 0; s < Beside::EVERY; s++, k++, x.at += x.next, w.at += w.next) add_products(sums, x, w);
        }
    if (Beside::EVERY && k < depth) beside(k);
    for (; k < depth; k++, x.at += x.next, w.at += w.next) add_products(sums, x, w);
    const bool whole = columns >= vecs * LANES;
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        UNROLL(8)
        for (int v = 0; v < vecs; v++) {
            const long at = v * LANES, some = whole ? LANES : columns - at;
            // Start is added last: a long sum of short ones loses less.
            if (result.start) sums[i][v] += load_some(result.start + i * result.start_row + at, some);
            store_some(result.to + i * result.row + at, sums[i][v], some);
        }
    }
}

// The same for 1 to ROWS rows and 1 to PANEL columns, which are known only when it runs. A function of its own: inlined
// into a larger one, the sums would not stay in registers.
APART void block_of(const Operand& x, const Panel& w, const Result& result, int rows, long columns, long depth) {
#define KRONECELL_CASE(n)                                                       \
    case n:                                                                     \
        block<(n <= ROWS ? n : ROWS), 2>(x, w, result, columns, depth);         \
        break;                                                                  \
    case n + 16:                                                                \
        block<(n <= ROWS ? n : ROWS), 1>(x, w, result, columns, depth);         \
        break;
    switch (columns > LANES ? rows : rows + 16) {
        KRONECELL_CASE(1)
        KRONECELL_CASE(2)
        KRONECELL_CASE(3)
        KRONECELL_CASE(4)
        KRONECELL_CASE(5)
        KRONECELL_CASE(6)
        KRONECELL_CASE(7)
        KRONECELL_CASE(8)
        KRONECELL_CASE(9)
        KRONECELL_CASE(10)
        KRONECELL_CASE(11)
        KRONECELL_CASE(12)
    }
#undef KRONECELL_CASE
}

// Any number of rows and 1 to PANEL columns. The panel is read in whole registers, as many as hold `columns`; of the result,
// nothing beyond `columns` is read or written.
INLINE void multiply_panel(Operand x, const Panel& w, Result result, long rows, long columns, long depth) {
    for (long blocks = (rows + ROWS - 1) / ROWS; blocks; blocks--) {
        const long some = (rows + blocks - 1) / blocks;  // about as many in each block
        block_of(x, w, result, (int)some, columns, depth);
        rows -= some, x.at += some * x.row, result.to += some * result.row;
        if (result.start) result.start += some * result.start_row;
    }
}

// Transposes four by four numbers.
INLINE void transpose4(const float* from, long row, float* to, long to_row) {
#if defined(__x86_64__)
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + row);
    __m128 c = _mm_loadu_ps(from + 2 * row), d = _mm_loadu_ps(from + 3 * row);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a), _mm_storeu_ps(to + to_row, b);
    _mm_storeu_ps(to + 2 * to_row, c), _mm_storeu_ps(to + 3 * to_row, d);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[i * to_row + j] = from[j * row + i];
#endif
}

// A register's width of numbers from each of as many rows, transposed: number i of to[k * to_row] is
// from[i * row + k].
INLINE void transpose_registers(const float* from, long row, float* to, long to_row) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    __m512 a[16], b[16];
    UNROLL(16)
    for (int i = 0; i < 4; i++) {
        UNROLL(4)
        for (int q = 0; q < 4; q++) {  // quarter q of register 4 * 0 + i: rows i, i + 4, i + 8, i + 12, columns 4 q
            const float* at = from + i * row + 4 * q;
            __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(at));
            v = _mm512_insertf32x4(v, _mm_loadu_ps(at + 4 * row), 1);
            v = _mm512_insertf32x4(v, _mm_loadu_ps(at + 8 * row), 2);
            a[4 * q + i] = _mm512_insertf32x4(v, _mm_loadu_ps(at + 12 * row), 3);
        }
    }
    UNROLL(4)
    for (int q = 0; q < 4; q++) {  // in each quarter, four by four numbers are transposed
        __m512 *v = a + 4 * q, *t = b + 4 * q;
        __m512 ab = _mm512_unpacklo_ps(v[0], v[1]), cd = _mm512_unpacklo_ps(v[2], v[3]);
        __m512 ef = _mm512_unpackhi_ps(v[0], v[1]), gh = _mm512_unpackhi_ps(v[2], v[3]);
        t[0] = _mm512_shuffle_ps(ab, cd, 0x44), t[1] = _mm512_shuffle_ps(ab, cd, 0xee);
        t[2] = _mm512_shuffle_ps(ef, gh, 0x44), t[3] = _mm512_shuffle_ps(ef, gh, 0xee);
    }
    UNROLL(16)
    for (int k = 0; k < 16; k++) _mm512_storeu_ps(to + k * to_row, b[k]);
#else
    for (int k = 0; k < LANES; k += 4)
        for (int i = 0; i < LANES; i += 4) transpose4(from + i * row + k, row, to + k * to_row + i, to_row);
#endif
}

// Packed, w (depth, columns) is panels of (depth, PANEL), one after the other; the last one is a single register wide if
// that holds its columns, and filled with zeros. These are its numbers, and the panel that begins at column c.
INLINE long packed_size(long depth, long columns) { return (columns + LANES - 1) / LANES * LANES * depth; }

INLINE Panel packed_panel(const float* packed, long c, long depth, long columns) {
    return Panel{packed + c * depth, columns - c > LANES ? PANEL : LANES, 0};
}

// Packs w, whose lines are `row` and whose columns are `column` numbers apart.
APART void pack_panels(const float* w, long row, long column, float* packed, long depth, long columns) {
    for (long c = 0; c < columns; c += PANEL, w += PANEL * column) {
        const long some = columns - c < PANEL ? columns - c : PANEL, wide = some > LANES ? PANEL : LANES;
        float* to = packed + c * depth;
        if (column == 1) {
            for (long k = 0; k < depth; k++)
                for (long j = 0; j < wide; j += LANES) *(vec*)(to + k * wide + j) = load_some(w + k * row + j, some - j);
            continue;
        }
        if (some < wide) memset(to, 0, sizeof(float) * wide * depth);
        long j = 0;
        for (; row == 1 && j + 4 <= some; j += 4) {  // numbers of a column lie together and are read along it
            long k = 0;
            for (; k + 4 <= depth; k += 4) transpose4(w + j * column + k, column, to + k * wide + j, wide);
            for (; k < depth; k++)
                for (int i = 0; i < 4; i++) to[k * wide + j + i] = w[(j + i) * column + k];
        }
        for (; j < some; j++)
            for (long k = 0; k < depth; k++) to[k * wide + j] = w[k * row + j * column];
    }
}

// to (rows, columns) = start + x (rows, depth) w for w packed.
APART void multiply_panels(Operand x, const float* packed, Result result, long rows, long columns, long depth) {
    for (long c = 0; c < columns; c += PANEL, result.to += PANEL) {
        const long some = columns - c < PANEL ? columns - c : PANEL;
        multiply_panel(x, packed_panel(packed, c, depth, columns), result, rows, some, depth);
        if (result.start) result.start += PANEL;
    }
}
