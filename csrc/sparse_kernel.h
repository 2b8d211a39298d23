// Products with a sparse matrix; a kernel file, see widths.h.
//
// Few rows are computed one by one, many rows are transposed and computed LANES at once. The sum of an output is made in the
// same order either way: a row has the same bits alone and among others.

// Up to LANES rows of x transposed, (columns, LANES); rows that are missing are zeros.
APART void lines_of(const float* x, long x_row, long rows, long columns, float* lines) {
    const long whole = rows == LANES ? columns / LANES * LANES : 0;
    for (long i = 0; i < whole; i += LANES) transpose_registers(x + i, x_row, lines + i * LANES, LANES);
    if (rows < LANES) memset(lines, 0, sizeof(float) * columns * LANES);
    for (long r = 0; r < rows; r += 4) {
        long i = whole;
        for (; r + 4 <= rows && i + 4 <= columns; i += 4)
            transpose4(x + r * x_row + i, x_row, lines + i * LANES + r, LANES);
        for (; i < columns; i++)
            for (long q = r; q < rows && q < r + 4; q++) lines[i * LANES + q] = x[q * x_row + i];
    }
}

// Transposed back and added to `to`. Some registers of each row together: rows may lie a multiple of 4 KB apart, which the
// cache does not like.
APART void add_lines(const float* lines, long columns, float* to, long to_row, long rows) {
    constexpr long WIDE = 6 * LANES;
    alignas(64) float tile[LANES * WIDE];
    for (long o = 0; o < columns; o += WIDE, lines += WIDE * LANES, to += WIDE) {
        const long wide = columns - o < WIDE ? columns - o : WIDE, whole = wide / LANES * LANES;
        for (long i = 0; i < whole; i += LANES) transpose_registers(lines + i * LANES, LANES, tile + i, WIDE);
        for (long i = whole; i < wide; i++)
            for (long r = 0; r < rows; r++) tile[r * WIDE + i] = lines[i * LANES + r];
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < wide; i += LANES) {
                float* at = to + r * to_row + i;
                store_some(at, load_some(at, wide - i) + load_some(tile + r * WIDE + i, wide - i), wide - i);
            }
    }
}

// As stored ---------------------------------------------------------------------------------------------------------------

// to (outputs) += S x for one row.
APART void sparse_row(const Sparse& s, const float* x, float* to) {
    for (long o = 0, k = 0, start = 0; o < s.outputs; o += s.block, k++, start += s.inputs)
        for (long b = 0; b < s.block; b++) {
            float sum = 0;
            for (long e = s.starts[k]; e < s.starts[k + 1]; e++) sum += s.values[e * s.block + b] * x[s.places[e] - start];
            to[o + b] += sum;
        }
}

// The same for up to LANES rows.
APART void sparse_rows(const Sparse& s, const float* x, long x_row, float* to, long to_row, long rows, float* memory) {
    float *lines = memory, *sums = lines + s.inputs * LANES;
    lines_of(x, x_row, rows, s.inputs, lines);
    for (long o = 0, k = 0, start = 0; o < s.outputs; o += s.block, k++, start += s.inputs)
        for (long b = 0; b < s.block; b++) {
            vec sum = {0};
            for (long e = s.starts[k]; e < s.starts[k + 1]; e++)
                sum += s.values[e * s.block + b] * *(const vec*)(lines + (s.places[e] - start) * LANES);
            *(vec*)(sums + (o + b) * LANES) = sum;
        }
    add_lines(sums, s.outputs, to, to_row, rows);
}

// Blocks of whole registers, for some rows. The sum of an output is made of those of every other entry.
template <int rows>
INLINE void sparse_blocks(const Sparse& s, const float* x, long x_row, float* to, long to_row) {
    for (long o = 0, k = 0, start = 0; o < s.outputs; o += s.block, k++, start += s.inputs) {
        const long first = s.starts[k], last = s.starts[k + 1];
        for (long b = 0; first < last && b < s.block; b += LANES) {
            vec sums[rows][2];
            UNROLL(4)
            for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (vec){0};
            const auto take = [&](long e, int half) __attribute__((always_inline)) {
                const vec values = *(const vec*)(s.values + e * s.block + b);
                const float* from = x + s.places[e] - start;
                UNROLL(4)
                for (int r = 0; r < rows; r++) sums[r][half] += from[r * x_row] * values;
            };
            long e = first;
            for (; e + 2 <= last; e += 2) take(e, 0), take(e + 1, 1);
            if (e < last) take(e, 0);
            UNROLL(4)
            for (int r = 0; r < rows; r++) *(vec*)(to + r * to_row + o + b) += sums[r][0] + sums[r][1];
        }
    }
}

APART void sparse_blocks_row(const Sparse& s, const float* x, float* to) { sparse_blocks<1>(s, x, 0, to, 0); }

APART void sparse_blocks_4(const Sparse& s, const float* x, long x_row, float* to, long to_row) {
    sparse_blocks<4>(s, x, x_row, to, to_row);
}

// As windows --------------------------------------------------------------------------------------------------------------

#if defined(__x86_64__) && KERNEL_WIDTH == 16

// The sums of a bundle, which begin with those of its entries without a turn; returns where the next values are.
template <bool narrow>
INLINE const float* window_sums(const Windows& w, long bundle, long inputs, const float* x, const float* values, float* sums) {
    constexpr int GROUPS = Windows::GROUPS;
    __m512 sum[GROUPS], v[GROUPS];
    UNROLL(6)
    for (int g = 0; g < GROUPS; g++) sum[g] = _mm512_loadu_ps(sums + g * LANES);
    const uint32_t* indices = w.indices + bundle * w.turns * Windows::LANES;
    const uint16_t* masks = w.masks + bundle * w.turns * Windows::MASKS;
    for (long t = 0; t < w.turns; t++, indices += Windows::LANES, masks += Windows::MASKS) {
        const float* from = x + w.begin(t, inputs);
        const __m512 low = (__m512)load_some(from, inputs), high = (__m512)load_some(from + LANES, inputs - LANES);
        __m512i index = _mm512_loadu_si512(indices);
        __asm__("" : "+v"(index));  // stays in a register: loaded again for each group, it would keep the loads busy
        UNROLL(6)
        for (int g = 0; g < GROUPS; g++) {  // apart from the rest: the instruction waits for what is in its register
            const __m512 some = narrow ? _mm512_zextps256_ps512(_mm256_loadu_ps(values)) : _mm512_loadu_ps(values);
            v[g] = _mm512_maskz_expand_ps(masks[g], some);
            values += __builtin_popcount(masks[g]);
        }
        UNROLL(6)
        for (int g = 0; g < GROUPS; g++) {  // a lane without an entry must not meet x, which may not be finite
            const __m512i at = _mm512_srli_epi32(index, Windows::INDEX_BITS * g);
            sum[g] = _mm512_mask3_fmadd_ps(v[g], _mm512_permutex2var_ps(low, at, high), sum[g], masks[g]);
        }
    }
    UNROLL(6)
    for (int g = 0; g < GROUPS; g++) _mm512_storeu_ps(sums + g * LANES, sum[g]);
    return values;
}

// to (outputs) += S x for one row.
APART void windows_row(const Sparse& s, const float* x, float* to) {
    const Windows& w = *s.windows;
    const float* values = w.values;
    for (long b = 0, o = 0; b < w.bundles; b++, o += Windows::OUTPUTS) {
        alignas(64) float sums[Windows::OUTPUTS];
        UNROLL(6)
        for (int g = 0; g < Windows::GROUPS; g++) *(vec*)(sums + g * LANES) = (vec){0};
        const uint32_t* at = w.at + (values - w.values);
        for (long e = 0; e < w.left[b]; e++) {
            float* sum = sums + at[e] % (1 << Windows::LANE_BITS);
            *sum = __builtin_fmaf(values[e], x[at[e] >> Windows::LANE_BITS], *sum);
        }
        values += w.left[b];
        values = w.narrow ? window_sums<true>(w, b, s.inputs, x, values, sums) : window_sums<false>(w, b, s.inputs, x, values, sums);
        for (long i = 0; i < Windows::OUTPUTS && o + i < s.outputs; i += LANES) {
            const long some = s.outputs - o - i;
            store_some(to + o + i, load_some(to + o + i, some) + *(const vec*)(sums + i), some);
        }
    }
}

// The same for up to LANES rows.
APART void windows_rows(const Sparse& s, const float* x, long x_row, float* to, long to_row, long rows, float* memory) {
    const Windows& w = *s.windows;
    float *lines = memory, *sums = lines + s.inputs * LANES;
    lines_of(x, x_row, rows, s.inputs, lines);
    const auto line = [&](long e) { return _mm512_loadu_ps(lines + (w.at[e] >> Windows::LANE_BITS) * LANES); };
    const int32_t* ends = w.ends;
    for (long b = 0, o = 0, first = 0; b < w.bundles; b++, o += Windows::OUTPUTS, ends += Windows::OUTPUTS) {
        const long some = s.outputs - o < Windows::OUTPUTS ? s.outputs - o : Windows::OUTPUTS;
        memset(sums, 0, sizeof(float) * some * LANES);
        for (const long last = first + w.left[b]; first < last; first++) {
            float* sum = sums + w.at[first] % (1 << Windows::LANE_BITS) * LANES;
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_set1_ps(w.values[first]), line(first), _mm512_loadu_ps(sum)));
        }
        for (long i = 0, e = first; i < some; i++) {
            __m512 sum = _mm512_loadu_ps(sums + i * LANES);
            for (const long last = first + ends[i]; e < last; e++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(w.ordered[e]), line(e), sum);
            _mm512_storeu_ps(sums + i * LANES, sum);
        }
        first += ends[Windows::OUTPUTS - 1];
        add_lines(sums, some, to + o, to_row, rows);
    }
}

#endif

// Of any number of rows; `memory` is for s.memory(rows) numbers -----------------------------------------------------------

// to (rows, outputs) += x (rows, inputs) S^T.
void add_sparse(const Sparse& s, const float* x, long x_row, float* to, long to_row, long rows, float* memory) {
    if (!s.count) return;
    if (s.block % LANES == 0) {
        for (; rows >= 4; rows -= 4, x += 4 * x_row, to += 4 * to_row) sparse_blocks_4(s, x, x_row, to, to_row);
        for (; rows > 0; rows--, x += x_row, to += to_row) sparse_blocks_row(s, x, to);
        return;
    }
    auto row = sparse_row;
    auto together = sparse_rows;
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    if (s.windows) row = windows_row, together = windows_rows;
#endif
    for (long r = 0, some; r < rows; r += some, x += some * x_row, to += some * to_row) {
        some = rows - r < LANES ? rows - r : LANES;
        if (s.many(some))
            together(s, x, x_row, to, to_row, some, memory);
        else
            for (long i = 0; i < some; i++) row(s, x + i * x_row, to + i * to_row);
    }
}
