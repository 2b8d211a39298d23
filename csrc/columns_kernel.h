// out (rows, columns) = x (rows, depth) w^T for few columns: x is read once, where it lies, and prefetched. Libraries for
// matrices of all shapes copy x into blocks first, which costs as much as the product when w is a register or two wide.

constexpr long AHEAD = 8192;   // bytes of x that are prefetched before they are needed, at least
constexpr int TALL_BLOCK = 12;  // rows at once
constexpr int DOTS = 4;         // columns up to which sums are made along the rows
constexpr int DOT_ROWS = LANES == 16 ? 6 : 3;

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
template <bool quads>
APART void float_rows(const float* x, const float* packed, float* out, long rows, long depth, long columns,
                      const float* later, long asked) {
    const long ahead = (AHEAD / (TALL_BLOCK * depth * 4) + 1) * TALL_BLOCK * depth;
    const long lines = later ? TALL_BLOCK * asked / depth : TALL_BLOCK;
    long r = 0;
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK) {
        const float* here = x + r * depth;
        const Prefetch prefetch{later ? later + r * asked : here + ahead, lines};
        if (quads)
            tall_quads(here, depth, packed, out + r * columns, columns, prefetch);
        else
            tall_block(here, depth, packed, out + r * columns, columns, prefetch);
    }
    x += r * depth, out += r * columns;
    if (quads)
        rest_of_quads(x, packed, out, rows - r, depth, columns);
    else
        multiply_panels(Operand{x, depth, 1}, packed, Result{out, columns, nullptr, 0}, rows - r, columns, depth);
}

// `scratch` is room for two blocks of rows.
template <bool quads>
APART void byte_rows(const uint8_t* x, const float* packed, float* scratch, float* out, long rows, long depth, long columns) {
    float *now = scratch, *then = scratch + TALL_BLOCK * depth + LINE;  // not whole pages apart
    long r = 0;
    if (rows >= TALL_BLOCK) convert(x, now, TALL_BLOCK * depth);
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK, out += TALL_BLOCK * columns) {
        const ConvertNext next{x + (r + TALL_BLOCK) * depth, then, depth};
        const bool more = r + 2 * TALL_BLOCK <= rows;
        if (quads && more)
            tall_quads(now, depth, packed, out, columns, next);
        else if (quads)
            tall_quads(now, depth, packed, out, columns, Idle());
        else if (more)
            tall_block(now, depth, packed, out, columns, next);
        else
            tall_block(now, depth, packed, out, columns, Idle());
        float* swap = now;
        now = then, then = swap;
    }
    convert(x + r * depth, now, (rows - r) * depth);
    if (quads)
        rest_of_quads(now, packed, out, rows - r, depth, columns);
    else
        multiply_panels(Operand{now, depth, 1}, packed, Result{out, columns, nullptr, 0}, rows - r, columns, depth);
}

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
INLINE void dots(const Number* x, const float* w, float* out, long depth, long columns, const Number* next) {
    const long padded = (depth + LANES - 1) / LANES * LANES;
    vec sums[rows][DOTS];
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        UNROLL(4)
        for (int c = 0; c < DOTS; c++) sums[i][c] = (vec){0};
    }
    for (long k = 0; k < padded; k += LANES) {
        if (next)
            for (int i = 0; i < rows * LANES; i += 64 / (int)sizeof(Number)) __builtin_prefetch(next + k * rows + i);
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
        for (long c = 0; c < columns; c++) out[i * columns + c] = line[c];
    }
}

template <class Number>
APART void dot_rows(const Number* x, const float* w, float* out, long rows, long depth, long columns) {
    const long ahead = (AHEAD / (DOT_ROWS * depth * (long)sizeof(Number)) + 1) * DOT_ROWS * depth;
    long r = 0;
    for (; r + DOT_ROWS <= rows; r += DOT_ROWS, x += DOT_ROWS * depth, out += DOT_ROWS * columns)
        dots<DOT_ROWS>(x, w, out, depth, columns, x + ahead);
    for (; r < rows; r++, x += depth, out += columns) dots<1>(x, w, out, depth, columns, (const Number*)nullptr);
}

INLINE bool by_dots(long depth, long columns) { return columns <= DOTS && depth >= 4 * LANES; }

INLINE long dots_memory(long depth) { return DOTS * ((depth + LANES - 1) / LANES * LANES); }

INLINE long packed_memory(long depth, long columns) {
    return by_quads(columns) ? quads_memory(depth) : packed_size(depth, columns);
}

// Numbers of memory that a product needs: w as it is read, and scratch.
long columns_memory(bool bytes, long depth, long columns) {
    if (by_dots(depth, columns)) return dots_memory(depth);
    return packed_memory(depth, columns) + (bytes ? 2 * TALL_BLOCK * depth + LINE : 0);
}

// w (columns, depth) in that memory.
void prepare_columns(const float* w, float* memory, long depth, long columns) {
    if (by_dots(depth, columns)) {
        const long padded = (depth + LANES - 1) / LANES * LANES;
        memset(memory, 0, sizeof(float) * dots_memory(depth));
        for (long c = 0; c < columns; c++) memcpy(memory + c * padded, w + c * depth, sizeof(float) * depth);
    } else if (by_quads(columns)) {
        pack_quads(w, memory, depth, columns);
    } else {
        pack_panels(w, 1, depth, memory, depth, columns);
    }
}

// x is uint8 if `bytes`, else float.
void few_columns(const void* x, bool bytes, float* memory, float* out, long rows, long depth, long columns,
                 const float* later, long asked) {
    if (by_dots(depth, columns) && bytes)
        dot_rows((const uint8_t*)x, memory, out, rows, depth, columns);
    else if (by_dots(depth, columns))
        dot_rows((const float*)x, memory, out, rows, depth, columns);
    else if (by_quads(columns) && bytes)
        byte_rows<true>((const uint8_t*)x, memory, memory + quads_memory(depth), out, rows, depth, columns);
    else if (by_quads(columns))
        float_rows<true>((const float*)x, memory, out, rows, depth, columns, later, asked);
    else if (bytes)
        byte_rows<false>((const uint8_t*)x, memory, memory + packed_size(depth, columns), out, rows, depth, columns);
    else
        float_rows<false>((const float*)x, memory, out, rows, depth, columns, later, asked);
}
