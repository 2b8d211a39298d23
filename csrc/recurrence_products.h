// Products of a few rows with weights that stay the same for many steps; a kernel file, see widths.h.
//
// Two forms. `dots` is x W^T for W (n, depth) as it lies: numbers of a row lie together, and nothing is packed. `Columns`
// is x W for W (depth, columns), packed or as it lies, by the micro-kernel. Each gives the same bits for any number of rows,
// packed or not.

// Sums over the lanes of four registers.
INLINE void sum4(const vec* s, float* to, long some) {
#if defined(__x86_64__)
#if KERNEL_WIDTH == 16
    __m512 a = (__m512)s[0], b = (__m512)s[1], c = (__m512)s[2], d = (__m512)s[3];
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif KERNEL_WIDTH == 8
    __m256 a = (__m256)s[0], b = (__m256)s[1], c = (__m256)s[2], d = (__m256)s[3];
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    __m128 a = (__m128)s[0], b = (__m128)s[1], c = (__m128)s[2], d = (__m128)s[3];
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    __m128 sums = _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x44), _mm_shuffle_ps(ab, cd, 0xee));
#endif
    if (some == 4) {
        _mm_storeu_ps(to, sums);
        return;
    }
    float line[4];
    _mm_storeu_ps(line, sums);
#else
    float line[4];
    for (int i = 0; i < 4; i++) {
        line[i] = 0;
        for (int j = 0; j < LANES; j++) line[i] += s[i][j];
    }
#endif
    for (long i = 0; i < some; i++) to[i] = line[i];
}

// Some rows of x by 4 rows of w, or `fours` times 4; where fewer are left, the last one is taken again.
template <int rows, int fours>
INLINE void dots_block(const float* x, long x_row, const float* w, long w_row, float* to, long to_row, long depth, long some) {
    const float* lines[4 * fours];
    vec sums[rows][4 * fours];
    UNROLL(8)
    for (int j = 0; j < 4 * fours; j++) lines[j] = w + (j < some ? j : some - 1) * w_row;
    UNROLL(8)
    for (int i = 0; i < rows; i++) {
        UNROLL(8)
        for (int j = 0; j < 4 * fours; j++) sums[i][j] = (vec){0};
    }
    long k = 0;
    for (; k + LANES <= depth; k += LANES) {
        vec b[4 * fours];
        UNROLL(8)
        for (int j = 0; j < 4 * fours; j++) {
            b[j] = *(const vec*)(lines[j] + k);
            if (rows == 1) __builtin_prefetch(lines[j] + k + 256);  // of a large U, which is read once a step
        }
        UNROLL(8)
        for (int i = 0; i < rows; i++) {
            const vec a = *(const vec*)(x + i * x_row + k);
            UNROLL(8)
            for (int j = 0; j < 4 * fours; j++) sums[i][j] += a * b[j];
        }
    }
    if (k < depth) {
        UNROLL(8)
        for (int i = 0; i < rows; i++) {
            const vec a = load_some(x + i * x_row + k, depth - k);
            UNROLL(8)
            for (int j = 0; j < 4 * fours; j++) sums[i][j] += a * load_some(lines[j] + k, depth - k);
        }
    }
    UNROLL(8)
    for (int i = 0; i < rows; i++) {
        UNROLL(2)
        for (int f = 0; f < fours; f++) {
            const long left = some - 4 * f;
            if (left > 0) sum4(sums[i] + 4 * f, to + i * to_row + 4 * f, left < 4 ? left : 4);
        }
    }
}

#if KERNEL_WIDTH == 16 || defined(__aarch64__)
constexpr int DOT_ROWS = 6;  // 24 of 32 registers hold sums
#else
constexpr int DOT_ROWS = 2;  // 8 of 16
#endif

APART void dots_one(const float* x, const float* w, long w_row, float* to, long depth) {
    dots_block<1, 2>(x, 0, w, w_row, to, 0, depth, 8);
}

APART void dots_of(const float* x, long x_row, const float* w, long w_row, float* to, long to_row, long depth, long some,
                   int rows) {
#define KRONECELL_CASE(n)                                                                                        \
    case n:                                                                                                      \
        dots_block<(n <= DOT_ROWS ? n : DOT_ROWS), 1>(x, x_row, w, w_row, to, to_row, depth, some);              \
        break;
    switch (rows) {
        KRONECELL_CASE(1)
        KRONECELL_CASE(2)
        KRONECELL_CASE(3)
        KRONECELL_CASE(4)
        KRONECELL_CASE(5)
        KRONECELL_CASE(6)
    }
#undef KRONECELL_CASE
}

// to (rows, n) = x (rows, depth) W^T for W (n, depth).
APART void dots(const float* x, long x_row, const float* w, long w_row, float* to, long to_row, long rows, long n, long depth) {
    if (rows == 1) {
        for (; n >= 8; n -= 8, w += 8 * w_row, to += 8) dots_one(x, w, w_row, to, depth);
        for (; n > 0; n -= 4, w += 4 * w_row, to += 4) dots_of(x, 0, w, w_row, to, 0, depth, n < 4 ? n : 4, 1);
        return;
    }
    constexpr long together = 32;  // rows of w that stay in cache while x goes by, a few rows at a time
    for (; n > 0; n -= together, w += together * w_row, to += together) {
        const long now = n < together ? n : together;
        for (long blocks = (rows + DOT_ROWS - 1) / DOT_ROWS, i = 0, some; blocks; blocks--, i += some) {
            some = (rows - i + blocks - 1) / blocks;  // about as many in each
            for (long j = 0; j < now; j += 4)
                dots_of(x + i * x_row, x_row, w + j * w_row, w_row, to + i * to_row + j, to_row, depth,
                        now - j < 4 ? now - j : 4, (int)some);
        }
    }
}

// Memory for what is packed of `Columns`: all, or what is left of the last panel.
long columns_memory(long depth, long columns, bool pack) { return packed_size(depth, pack ? columns : columns % PANEL); }

// U (n, depth) as panels of its transpose.
APART void pack_transposed(const float* w, long w_row, float* packed, long n, long depth) {
    for (long c = 0; c < n; c += PANEL, w += PANEL * w_row, packed += PANEL * depth) {
        if (n - c < PANEL) {
            pack_panels(w, 1, w_row, packed, depth, n - c);
            break;
        }
        for (int v = 0; v < PANEL; v += LANES) {
            long k = 0;
            for (; k + LANES <= depth; k += LANES) transpose_registers(w + v * w_row + k, w_row, packed + k * PANEL + v, PANEL);
            for (; k < depth; k++)
                for (int i = 0; i < LANES; i++) packed[k * PANEL + v + i] = w[(v + i) * w_row + k];
        }
    }
}

INLINE Columns packed_columns(const float* memory, long depth, long columns) {
    const long whole = columns / PANEL * PANEL;
    return Columns{Panel{memory, PANEL, PANEL * depth}, packed_panel(memory, whole, depth, columns), depth, columns};
}

// Of U (columns, depth), transposed, which must be packed.
APART Columns columns_of_transposed(const float* w, long depth, long columns, float* memory) {
    pack_transposed(w, depth, memory, columns, depth);
    return packed_columns(memory, depth, columns);
}

// Of W (depth, columns).
APART Columns columns_of(const float* w, long w_row, long depth, long columns, bool pack, float* memory) {
    if (pack) {
        pack_panels(w, w_row, 1, memory, depth, columns);
        return packed_columns(memory, depth, columns);
    }
    const long whole = columns / PANEL * PANEL;
    if (whole < columns) pack_panels(w + whole, w_row, 1, memory, depth, columns - whole);
    return Columns{Panel{w, w_row, PANEL}, packed_panel(memory, 0, depth, columns - whole), depth, columns};
}

// Prefetches what a block of several panels reads some lines later: the processor does not see streams as short as these.
template <int vecs>
struct Ahead {
    static constexpr long EVERY = 1;
    const float* at;
    long next, apart;
    INLINE_MEMBER void operator()(long k) const {
        UNROLL(8)
        for (int v = 0; v < vecs; v += 16 / LANES) __builtin_prefetch(at + k * next + v / 2 * apart + v % 2 * LANES);
    }
};

template <int rows, int vecs>
INLINE void some_panels_of(const Operand& x, const Panel& w, const Result& result, long depth) {
    const long distance = depth < 64 ? vecs / 2 * w.apart : 24 * w.next;  // the next panels, or the same ones further on
    block<rows, vecs>(x, w, result, vecs * LANES, depth, Ahead<vecs>{w.at + distance, w.next, w.apart});
}

// A few rows leave registers for several panels, and the multipliers are busy only with many sums at once.
APART void some_panels(const Operand& x, const Panel& w, const Result& result, long depth, int rows) {
    switch (rows) {
        case 1:
            some_panels_of<1, 8>(x, w, result, depth);
            break;
        case 2:
            some_panels_of<2, (LANES == 16 ? 8 : 4)>(x, w, result, depth);
            break;
        case 3:
            some_panels_of<3, 4>(x, w, result, depth);
            break;
    }
}

INLINE int panels_together(long rows) {
    if (rows == 1) return 4;
    if (rows == 2) return LANES == 16 ? 4 : 2;
    return rows == 3 && LANES == 16 ? 2 : 1;
}

// to (rows, columns) = x (rows, depth) W, or added to it.
APART void multiply_columns(const float* x, long x_row, const Columns& w, float* to, long to_row, long rows, bool add) {
    const int together = panels_together(rows);
    const long whole = w.columns / PANEL * PANEL;
    for (long c = 0, now = 1; c < w.columns; c += now * PANEL) {
        const bool body = c < whole;
        now = body && c + together * PANEL <= whole ? together : 1;
        const long some = body ? now * PANEL : w.columns - c;
        Panel panel = body ? Panel{w.body.at + c / PANEL * w.body.apart, w.body.next, w.body.apart} : w.tail;
        Result result{to + c, to_row, add ? to + c : nullptr, to_row};
        for (long s = 0; s < w.depth; s += DEPTH, panel.at += DEPTH * panel.next, result.start = to + c) {
            const long deep = w.depth - s < DEPTH ? w.depth - s : DEPTH;
            if (now > 1)
                some_panels(Operand{x + s, x_row, 1}, panel, result, deep, (int)rows);
            else
                multiply_panel(Operand{x + s, x_row, 1}, panel, result, rows, some, deep);
        }
    }
    if (!w.depth && !add)
        for (long i = 0; i < rows; i++) memset(to + i * to_row, 0, sizeof(float) * w.columns);
}
