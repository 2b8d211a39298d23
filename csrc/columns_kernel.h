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
APART void float_rows(const float* x, const float* packed, float* out, long rows, long depth, long columns,
                      const float* later, long asked) {
    const long ahead = (AHEAD / (TALL_BLOCK * depth * 4) + 1) * TALL_BLOCK * depth;
    const long lines = later ? TALL_BLOCK * asked / depth : TALL_BLOCK;
    long r = 0;
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK) {
        const float* here = x + r * depth;
        tall_block(here, depth, packed, out + r * columns, columns, Prefetch{later ? later + r * asked : here + ahead, lines});
    }
    multiply_panels(Operand{x + r * depth, depth, 1}, packed, Result{out + r * columns, columns, nullptr, 0}, rows - r,
                    columns, depth);
}

// `scratch` is room for two blocks of rows.
APART void byte_rows(const uint8_t* x, const float* packed, float* scratch, float* out, long rows, long depth, long columns) {
    float *now = scratch, *then = scratch + TALL_BLOCK * depth + LINE;  // not whole pages apart
    long r = 0;
    if (rows >= TALL_BLOCK) convert(x, now, TALL_BLOCK * depth);
    for (; r + TALL_BLOCK <= rows; r += TALL_BLOCK) {
        const uint8_t* next = x + (r + TALL_BLOCK) * depth;
        if (r + 2 * TALL_BLOCK <= rows)
            tall_block(now, depth, packed, out + r * columns, columns, ConvertNext{next, then, depth});
        else
            tall_block(now, depth, packed, out + r * columns, columns, Idle());
        float* swap = now;
        now = then, then = swap;
    }
    convert(x + r * depth, now, (rows - r) * depth);
    multiply_panels(Operand{now, depth, 1}, packed, Result{out + r * columns, columns, nullptr, 0}, rows - r, columns, depth);
}

// The sums of the numbers in each of DOTS registers.
INLINE void sums_across(const vec* v, float* to) {
#if defined(__x86_64__) && KERNEL_WIDTH >= 8
    __m128 sums[DOTS];
    for (int c = 0; c < DOTS; c++) {
#if KERNEL_WIDTH == 16
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[c]), _mm512_extractf32x8_ps((__m512)v[c], 1));
#else
        const __m256 half = (__m256)v[c];
#endif
        sums[c] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(sums[0], sums[1]), _mm_hadd_ps(sums[2], sums[3])));
#else
    for (int c = 0; c < DOTS; c++) {
        to[c] = v[c][0];
        for (int j = 1; j < LANES; j++) to[c] += v[c][j];
    }
#endif
}

// DOTS columns of some rows at once, each as sums along the row: x is read a register at a time. w is filled with zeros up
// to whole registers.
template <int rows>
INLINE void dots(const float* x, const float* w, float* out, long depth, long columns, const float* next) {
    const long padded = (depth + LANES - 1) / LANES * LANES;
    vec sums[rows][DOTS];
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        UNROLL(4)
        for (int c = 0; c < DOTS; c++) sums[i][c] = (vec){0};
    }
    for (long k = 0; k < padded; k += LANES) {
        float end[rows][LANES];
        const float* from = x + k;
        long row = depth;
        if (k + LANES > depth) {  // the last numbers of the rows, with zeros behind
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < LANES; j++) end[i][j] = k + j < depth ? x[i * depth + k + j] : 0;
            from = end[0], row = LANES;
        }
        if (next)
            for (int i = 0; i < rows * LANES; i += LINE) __builtin_prefetch(next + k * rows + i);
        UNROLL(4)
        for (int c = 0; c < DOTS; c++) {
            UNROLL(6)
            for (int i = 0; i < rows; i++) sums[i][c] += *(const vec*)(from + i * row) * *(const vec*)(w + c * padded + k);
        }
    }
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        float four[DOTS];
        sums_across(sums[i], four);
        for (long c = 0; c < columns; c++) out[i * columns + c] = four[c];
    }
}

APART void dot_rows(const float* x, const float* w, float* out, long rows, long depth, long columns) {
    const long ahead = (AHEAD / (DOT_ROWS * depth * 4) + 1) * DOT_ROWS * depth;
    long r = 0;
    for (; r + DOT_ROWS <= rows; r += DOT_ROWS, x += DOT_ROWS * depth, out += DOT_ROWS * columns)
        dots<DOT_ROWS>(x, w, out, depth, columns, x + ahead);
    for (; r < rows; r++, x += depth, out += columns) dots<1>(x, w, out, depth, columns, nullptr);
}

INLINE bool by_dots(bool bytes, long depth, long columns) { return !bytes && columns <= DOTS && depth >= 4 * LANES; }

// Numbers of memory that a product needs: w as it is read, and scratch.
long columns_memory(bool bytes, long depth, long columns) {
    if (by_dots(bytes, depth, columns)) return DOTS * ((depth + LANES - 1) / LANES * LANES);
    return packed_size(depth, columns) + (bytes ? 2 * TALL_BLOCK * depth + LINE : 0);
}

// w (columns, depth) in that memory.
void prepare_columns(const float* w, bool bytes, float* memory, long depth, long columns) {
    if (by_dots(bytes, depth, columns)) {
        const long padded = (depth + LANES - 1) / LANES * LANES;
        memset(memory, 0, sizeof(float) * DOTS * padded);
        for (long c = 0; c < columns; c++) memcpy(memory + c * padded, w + c * depth, sizeof(float) * depth);
    } else {
        pack_panels(w, 1, depth, memory, depth, columns);
    }
}

// x is uint8 if `bytes`, else float.
void few_columns(const void* x, bool bytes, float* memory, float* out, long rows, long depth, long columns,
                 const float* later, long asked) {
    if (by_dots(bytes, depth, columns))
        dot_rows((const float*)x, memory, out, rows, depth, columns);
    else if (bytes)
        byte_rows((const uint8_t*)x, memory, memory + packed_size(depth, columns), out, rows, depth, columns);
    else
        float_rows((const float*)x, memory, out, rows, depth, columns, later, asked);
}
