// The micro-kernel of all matrix products, compiled once for each register width; widths.h includes it.
//
//   to (rows, columns) = start + x (rows, depth) w (depth, columns)
//
// ROWS rows by two registers of columns stay in registers for the whole depth. The sums of a row are made in the order of
// the depth, whatever other rows are computed with it: a row has the same bits alone and among others.

constexpr int LANES = KERNEL_WIDTH;  // numbers in a register
constexpr int PANEL = 2 * LANES;     // columns of a panel: what is computed at once

#if defined(__aarch64__)
constexpr int ROWS = 12;  // 24 of 32 registers hold sums
#else
constexpr int ROWS = LANES == 16 ? 12 : 6;  // 24 of 32 or 12 of 16
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A register of which only the first `some` numbers are in memory; the rest are zeros.
INLINE vec load_some(const float* from, long some) {
    if (some >= LANES) return *(const vec*)from;
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << (some < 0 ? 0 : some)) - 1), from);
#else
    vec v = {0};
    for (long j = 0; j < some; j++) v[j] = from[j];
    return v;
#endif
}

INLINE void store_some(float* to, vec v, long some) {
    if (some >= LANES) {
        *(vec*)to = v;
        return;
    }
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << (some < 0 ? 0 : some)) - 1), (__m512)v);
#else
    for (long j = 0; j < some; j++) to[j] = v[j];
#endif
}

// What a block does beside its sums, once for every LINE numbers of depth: nothing, or prefetch what comes next.
struct Idle {
    static constexpr bool busy = false;
    INLINE_MEMBER void operator()(long) const {}
};
constexpr int LINE = 16;  // numbers that come from memory together

// The sums of `rows` rows and `vecs` registers of columns.
template <int rows, int vecs, class Beside = Idle>
INLINE void block(Operand x, Panel w, Result result, long depth, const Beside& beside = Beside()) {
    vec sums[rows][vecs];
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        UNROLL(8)
        for (int v = 0; v < vecs; v++) sums[i][v] = (vec){0};
    }
    for (long k = 0; k < depth; k++, x.at += x.next, w.at += w.next) {
        if (Beside::busy && k % LINE == 0) beside(k);
        vec b[vecs];
        UNROLL(8)
        for (int v = 0; v < vecs; v++) b[v] = *(const vec*)(w.at + v / 2 * w.apart + v % 2 * LANES);
        UNROLL(12)
        for (int i = 0; i < rows; i++) {
            UNROLL(8)
            for (int v = 0; v < vecs; v++) sums[i][v] += x.at[i * x.row] * b[v];
        }
    }
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        UNROLL(8)
        for (int v = 0; v < vecs; v++) {
            const long at = v * LANES;  // start is added last: long sums of short ones lose less
            if (result.start) sums[i][v] += *(const vec*)(result.start + i * result.start_row + at);
            *(vec*)(result.to + i * result.row + at) = sums[i][v];
        }
    }
}

// The same for 1 to ROWS rows and 1 or 2 registers, which are known only when it runs.
APART void block_of(const Operand& x, const Panel& w, const Result& result, long depth, int rows, int vecs) {
#define KRONECELL_CASE(n)                                              \
    case n:                                                            \
        block<(n <= ROWS ? n : ROWS), 2>(x, w, result, depth);         \
        break;                                                         \
    case n + 16:                                                       \
        block<(n <= ROWS ? n : ROWS), 1>(x, w, result, depth);         \
        break;
    switch (vecs == 2 ? rows : rows + 16) {
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

// Any number of rows and 1 to PANEL columns. The panel is read in whole registers; of the result, nothing beyond `columns`
// is read or written.
INLINE void multiply_panel(Operand x, const Panel& w, Result result, long rows, long columns, long depth) {
    const int vecs = columns <= LANES ? 1 : 2;
    const bool whole = columns == vecs * LANES;
    for (long blocks = (rows + ROWS - 1) / ROWS; blocks; blocks--) {
        const long some = (rows + blocks - 1) / blocks;  // about as many in each block
        if (whole) {
            block_of(x, w, result, depth, (int)some, vecs);
        } else {
            float line[ROWS * PANEL] = {0};
            for (long i = 0; result.start && i < some; i++)
                memcpy(line + i * PANEL, result.start + i * result.start_row, sizeof(float) * columns);
            block_of(x, w, Result{line, PANEL, line, PANEL}, depth, (int)some, vecs);
            for (long i = 0; i < some; i++) memcpy(result.to + i * result.row, line + i * PANEL, sizeof(float) * columns);
        }
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

// Numbers of w (depth, columns) as packed panels.
INLINE long packed_size(long depth, long columns) { return (columns + PANEL - 1) / PANEL * PANEL * depth; }

// w (depth, columns), whose lines are `row` and columns `column` numbers apart, as panels of (depth, PANEL) one after the
// other; the last one is filled with zeros. Panel{packed + c / PANEL * PANEL * depth, PANEL, PANEL * depth} starts at column c.
APART void pack_panels(const float* w, long row, long column, float* packed, long depth, long columns) {
    for (long c = 0; c < columns; c += PANEL, w += PANEL * column, packed += PANEL * depth) {
        const long some = columns - c < PANEL ? columns - c : PANEL;
        if (some < PANEL) memset(packed, 0, sizeof(float) * PANEL * depth);
        if (column == 1) {
            for (long k = 0; k < depth; k++)
                for (long j = 0; j < some; j += LANES)
                    *(vec*)(packed + k * PANEL + j) = load_some(w + k * row + j, some - j);
            continue;
        }
        long j = 0;
        for (; row == 1 && j + 4 <= some; j += 4) {  // numbers of a column lie together and are read along it
            long k = 0;
            for (; k + 4 <= depth; k += 4) transpose4(w + j * column + k, column, packed + k * PANEL + j, PANEL);
            for (; k < depth; k++)
                for (int i = 0; i < 4; i++) packed[k * PANEL + j + i] = w[(j + i) * column + k];
        }
        for (; j < some; j++)
            for (long k = 0; k < depth; k++) packed[k * PANEL + j] = w[k * row + j * column];
    }
}

// to (rows, columns) = start + x (rows, depth) w for packed panels of the whole depth.
APART void multiply_panels(Operand x, const float* packed, Result result, long rows, long columns, long depth) {
    for (long c = 0; c < columns; c += PANEL, packed += PANEL * depth, result.to += PANEL) {
        multiply_panel(x, Panel{packed, PANEL, 0}, result, rows, columns - c < PANEL ? columns - c : PANEL, depth);
        if (result.start) result.start += PANEL;
    }
}
