// out (rows, columns) = x (rows, depth) w^T for few columns: x is read once, where it lies, and prefetched. Libraries for
// matrices of all shapes copy x into blocks first, which costs as much as the product when w is a register or two wide.

constexpr long AHEAD = 8192;   // bytes of x that are prefetched before they are needed, at least
constexpr int TALL_BLOCK = 12;  // rows at once
constexpr int DOTS = 4;         // columns at once whose sums are made along the rows
constexpr int DOT_ROWS = LANES == 16 ? 6 : 3;
constexpr long MOST_DOTS = LANES / 2;  // columns up to which that is faster than panels, of which the rest is zeros

// Bytes as numbers.
INLINE void convert(const uint8_t* from, float* to, long size) {
    long k = 0;
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    for (; k + LANES <= size; k += LANES)
        *(vec*)(to + k) = (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + k))));
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    for (; k + LANES <= size; k += LANES)
        *(vec*)(to + k) = (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + k))));
#endif
    for (const uint8_t* end = from + size; from + k < end; k++) to[k] = from[k];
}

// Prefetches `lines` lines of memory for every LINE numbers of depth.
struct Prefetch {
    static constexpr long EVERY = LINE;
    const float* next;
    long lines;
    INLINE_MEMBER void operator()(long k) const {
        for (long i = 0; i < lines; i++) __builtin_prefetch(next + k * lines + i * LINE, 0, 2);
    }
};

// Converts the next TALL_BLOCK rows while the multipliers are busy with these.
struct ConvertNext {
    static constexpr long EVERY = LINE;
    const uint8_t* from;
    float* to;
    long depth;
    INLINE_MEMBER void operator()(long k) const {
        const long at = k * TALL_BLOCK;
        if (k + LINE <= depth) {
            for (long i = 0; i < TALL_BLOCK * LINE; i += 64) __builtin_prefetch(from + AHEAD + at + i, 0, 2);
            convert(from + at, to + at, TALL_BLOCK * LINE);
        } else {
            convert(from + at, to + at, TALL_BLOCK * (depth - k));
        }
    }
};

// TALL_BLOCK rows by all columns; `beside` runs with the first panel.
template <class Beside>
INLINE void tall_block(const float* x, long depth, const float* packed, float* out, long columns, const Beside& beside) {
    for (long c = 0; c < columns; c += PANEL) {
        const Panel w = packed_panel(packed, c, depth, columns);
        const Operand a{x, depth, 1};
        const Result result{out + c, columns, nullptr, 0};
        if (w.next == LANES && c == 0)
            block<TALL_BLOCK, 1>(a, w, result, columns - c, depth, beside);
        else if (w.next == LANES)
            block<TALL_BLOCK, 1>(a, w, result, columns - c, depth);
        else if (c == 0)
            block<ROWS, 2>(a, w, result, columns - c, depth, beside);
        else
            block<ROWS, 2>(a, w, result, columns - c, depth);
        for (int i = ROWS; w.next == PANEL && i < TALL_BLOCK; i += ROWS)
            block<ROWS, 2>(Operand{x + i * depth, depth, 1}, w, Result{out + i * columns + c, columns, nullptr, 0},
                           columns - c, depth);
    }
}

// `later`, of which `asked` numbers a row are prefetched, is what is read after these rows; without it they go on.
APART void float_rows(const float* x, const float* packed, float* out, long rows, long depth, long columns,
                      const float* later, long asked) {
    const long ahead = (AHEAD / (TALL_BLOCK * depth * 4) + 1) * TALL_BLOCK * depth;
    const long lines = later ? TALL_BLOCK * asked / depth : TALL_BLOCK;
    long r = 0;
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK) {
        const float* here = x + r * depth;
        const Prefetch prefetch{later ? later + r * asked : here + ahead, lines};
        tall_block(here, depth, packed, out + r * columns, columns, prefetch);
    }
    x += r * depth, out += r * columns;
    multiply_panels(Operand{x, depth, 1}, packed, Result{out, columns, nullptr, 0}, rows - r, columns, depth);
}

// `scratch` is room for two blocks of rows.
APART void byte_rows(const uint8_t* x, const float* packed, float* scratch, float* out, long rows, long depth, long columns) {
    float *now = scratch, *then = scratch + TALL_BLOCK * depth + LINE;  // not whole pages apart
    long r = 0;
    if (rows >= TALL_BLOCK) convert(x, now, TALL_BLOCK * depth);
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK, out += TALL_BLOCK * columns) {
        const ConvertNext next{x + (r + TALL_BLOCK) * depth, then, depth};
        const bool more = r + 2 * TALL_BLOCK <= rows;
        if (more)
            tall_block(now, depth, packed, out, columns, next);
        else
            tall_block(now, depth, packed, out, columns, Idle());
        float* swap = now;
        now = then, then = swap;
    }
    convert(x + r * depth, now, (rows - r) * depth);
    multiply_panels(Operand{now, depth, 1}, packed, Result{out, columns, nullptr, 0}, rows - r, columns, depth);
}

#if defined(__x86_64__) && KERNEL_WIDTH == 16
// Adds up the four numbers of each quarter of four registers; they become the numbers of that quarter.
INLINE __m512 join(vec first, vec second, vec third, vec fourth) {
    const __m512 a = (__m512)first, b = (__m512)second, c = (__m512)third, d = (__m512)fourth;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}
#endif

// The sums of the numbers in each of four registers.
INLINE void sums_across(const vec* v, float* to) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    const __m512 four = join(v[0], v[1], v[2], v[3]);
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    const __m256 two = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
    for (int c = 0; c < 4; c++) {
        to[c] = v[c][0];
        for (int j = 1; j < LANES; j++) to[c] += v[c][j];
    }
#endif
}

// A register of numbers, of which `some` are there; behind them are zeros.
INLINE vec numbers_at(const float* from, long some) { return load_some(from, some); }

INLINE vec numbers_at(const uint8_t* from, long some) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    const __mmask16 there = (__mmask16)(some >= LANES ? 0xffff : (1u << some) - 1);
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, from)));
#else
    vec v = {0};
    convert(from, (float*)&v, some < LANES ? some : LANES);
    return v;
#endif
}

// Up to DOTS columns of some rows at once, each as sums along the row: x is read a register at a time. w is filled with
// zeros up to whole registers.
template <int rows, class Number>
INLINE void dots(const Number* x, const float* w, float* out, long depth, long row, long columns, const Number* next,
                 long asked) {
    const long padded = (depth + LANES - 1) / LANES * LANES;
    vec sums[rows][DOTS];
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        UNROLL(4)
        for (int c = 0; c < DOTS; c++) sums[i][c] = (vec){0};
    }
    for (long k = 0; k < padded; k += LANES) {
        for (long i = 0; i < asked; i++) __builtin_prefetch(next + (k / LANES * asked + i) * (64 / (long)sizeof(Number)), 0, 2);
        vec numbers[rows];
        UNROLL(6)
        for (int i = 0; i < rows; i++) numbers[i] = numbers_at(x + i * depth + k, depth - k);
        UNROLL(4)
        for (int c = 0; c < DOTS; c++) {
            const vec b = *(const vec*)(w + c * padded + k);
            UNROLL(6)
            for (int i = 0; i < rows; i++) sums[i][c] += numbers[i] * b;
        }
    }
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        float line[DOTS];
        sums_across(sums[i], line);
        for (long c = 0; c < columns; c++) out[i * row + c] = line[c];
    }
}

// Rows are read from memory with the first columns, and from the cache with the others.
template <int rows, class Number>
APART void dots_of_rows(const Number* x, const float* w, float* out, long depth, long columns, const Number* next, long asked) {
    const long padded = (depth + LANES - 1) / LANES * LANES;
    for (long c = 0; c < columns; c += DOTS, w += DOTS * padded, asked = 0)
        dots<rows>(x, w, out + c, depth, columns, columns - c < DOTS ? columns - c : DOTS, next, asked);
}

// `later`, of which `asked` numbers a row are prefetched, is what is read after these rows; without it they go on.
template <class Number>
APART void dot_rows(const Number* x, const float* w, float* out, long rows, long depth, long columns, const Number* later,
                    long asked) {
    constexpr long line = 64 / (long)sizeof(Number);
    const long ahead = (AHEAD / (DOT_ROWS * depth * (long)sizeof(Number)) + 1) * DOT_ROWS * depth;
    const long steps = (depth + LANES - 1) / LANES, each = DOT_ROWS * (later ? asked : depth);
    const long lines = (each + steps * line - 1) / (steps * line);  // of each step
    long r = 0;
    for (; r + DOT_ROWS <= rows; r += DOT_ROWS, x += DOT_ROWS * depth, out += DOT_ROWS * columns)
        dots_of_rows<DOT_ROWS>(x, w, out, depth, columns, later ? later + r * asked : x + ahead, lines);
    for (; r < rows; r++, x += depth, out += columns) dots_of_rows<1>(x, w, out, depth, columns, x, 0);
}

INLINE bool by_dots(long depth, long columns) { return columns <= MOST_DOTS && depth >= 4 * LANES; }

INLINE long dots_memory(long depth, long columns) {
    return (columns + DOTS - 1) / DOTS * DOTS * ((depth + LANES - 1) / LANES * LANES);
}

// Numbers of memory that a product needs: w as it is read, and scratch.
long columns_memory(bool bytes, long depth, long columns) {
    if (by_dots(depth, columns)) return dots_memory(depth, columns);
    return packed_size(depth, columns) + (bytes ? 2 * TALL_BLOCK * depth + LINE : 0);
}

// w (columns, depth) in that memory.
void prepare_columns(const float* w, float* memory, long depth, long columns) {
    if (!by_dots(depth, columns)) {
        pack_panels(w, 1, depth, memory, depth, columns);
        return;
    }
    const long padded = (depth + LANES - 1) / LANES * LANES;
    memset(memory, 0, sizeof(float) * dots_memory(depth, columns));
    for (long c = 0; c < columns; c++) memcpy(memory + c * padded, w + c * depth, sizeof(float) * depth);
}

// x is uint8 if `bytes`, else float.
void few_columns(const void* x, bool bytes, float* memory, float* out, long rows, long depth, long columns,
                 const float* later, long asked) {
    if (by_dots(depth, columns) && bytes)
        dot_rows((const uint8_t*)x, memory, out, rows, depth, columns, (const uint8_t*)nullptr, 0);
    else if (by_dots(depth, columns))
        dot_rows((const float*)x, memory, out, rows, depth, columns, later, asked);
    else if (bytes)
        byte_rows((const uint8_t*)x, memory, memory + packed_size(depth, columns), out, rows, depth, columns);
    else
        float_rows((const float*)x, memory, out, rows, depth, columns, later, asked);
}
