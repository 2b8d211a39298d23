// Products with a sparse matrix; a kernel file, see widths.h.
//
// The sum of an output is made of four: entries 0, 4, 8, ..., entries 1, 5, 9, ... and so on. A row has the same bits alone, as
// sums over lanes of outputs, and among others, as sums over lanes of rows.

INLINE vec four(const vec* s) { return (s[0] + s[1]) + (s[2] + s[3]); }

// Numbers of x for a slot: from[at[lane]] where an output has an entry, zero elsewhere.
INLINE vec gathered(const float* from, const int32_t* at, const int32_t* counts, long slot) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    const __mmask16 has = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(counts), _mm512_set1_epi32((int)slot));
    return (vec)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), has, _mm512_loadu_si512(at), from, 4);
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    const __m256i has = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)counts), _mm256_set1_epi32((int)slot));
    return (vec)_mm256_mask_i32gather_ps(_mm256_setzero_ps(), from, _mm256_loadu_si256((const __m256i*)at), (__m256)has, 4);
#else
    vec v = {0};
    for (int i = 0; i < LANES; i++)
        if (counts[i] > slot) v[i] = from[at[i]];
    return v;
#endif
}

// to (outputs) += S x for one row.
APART void slots_row(const Slots& s, const float* x, float* to) {
    for (long o = 0, g = 0; o < s.outputs; o += LANES, g++) {
        const long first = s.first[g], count = s.first[g + 1] - first;
        const float* values = s.values + first * LANES;
        vec sums[4] = {{0}, {0}, {0}, {0}};
        if (s.broadcast) {
            const int32_t* at = s.inputs_of + first;
            long k = 0;
            for (; k + 4 <= count; k += 4) {
                UNROLL(4)
                for (int i = 0; i < 4; i++) sums[i] += x[at[k + i]] * *(const vec*)(values + (k + i) * LANES);
            }
            for (; k < count; k++) sums[k % 4] += x[at[k]] * *(const vec*)(values + k * LANES);
        } else {
            const int32_t *at = s.inputs_of + first * LANES, *counts = s.counts + o;
            for (long k = 0; k < count; k++)
                sums[k % 4] += gathered(x, at + k * LANES, counts, k) * *(const vec*)(values + k * LANES);
        }
        if (!count) continue;
        const long some = s.outputs - o;
        store_some(to + o, load_some(to + o, some) + four(sums), some);
    }
}

// to (rows, outputs) += x (rows, inputs) S^T for up to LANES rows; `memory` is for s.memory() numbers.
APART void slots_rows(const Slots& s, const float* x, long x_row, float* to, long to_row, long rows, float* memory) {
    float *lines = memory, *sums_of = lines + s.inputs * LANES;
    const long whole = rows / 4 * 4;
    if (rows < LANES) memset(lines, 0, sizeof(float) * s.inputs * LANES);
    for (long r = 0; r < rows; r += 4) {
        long i = 0;
        for (; r < whole && i + 4 <= s.inputs; i += 4) transpose4(x + r * x_row + i, x_row, lines + i * LANES + r, LANES);
        for (; i < s.inputs; i++)
            for (long q = r; q < rows && q < r + 4; q++) lines[i * LANES + q] = x[q * x_row + i];
    }
    for (long o = 0; o < s.outputs; o++) {
        const long g = o / LANES, lane = o % LANES, first = s.first[g], count = s.counts[o];
        const float* values = s.values + first * LANES + lane;
        const int32_t* at = s.broadcast ? s.inputs_of + first : s.inputs_of + first * LANES + lane;
        const long next = s.broadcast ? 1 : LANES;
        vec sums[4] = {{0}, {0}, {0}, {0}};
        long k = 0;
        for (; k + 4 <= count; k += 4) {
            UNROLL(4)
            for (int i = 0; i < 4; i++)
                sums[i] += values[(k + i) * LANES] * *(const vec*)(lines + at[(k + i) * next] * LANES);
        }
        for (; k < count; k++) sums[k % 4] += values[k * LANES] * *(const vec*)(lines + at[k * next] * LANES);
        *(vec*)(sums_of + o * LANES) = four(sums);
    }
    for (long r = 0; r < rows; r += 4) {
        long o = 0;
        for (; r < whole && o + 4 <= s.outputs; o += 4) {
            float some[16];
            transpose4(sums_of + o * LANES + r, LANES, some, 4);
            for (int q = 0; q < 4; q++)
                for (int i = 0; i < 4; i++) to[(r + q) * to_row + o + i] += some[4 * q + i];
        }
        for (; o < s.outputs; o++)
            for (long q = r; q < rows && q < r + 4; q++) to[q * to_row + o] += sums_of[o * LANES + q];
    }
}

// The same for any number of rows.
void add_slots(const Slots& s, const float* x, long x_row, float* to, long to_row, long rows, float* memory) {
    constexpr long few = 4;  // up to which transposing takes longer
    for (long r = 0, some; r < rows; r += some, x += some * x_row, to += some * to_row) {
        some = rows - r < LANES ? rows - r : LANES;
        if (some > few)
            slots_rows(s, x, x_row, to, to_row, some, memory);
        else
            for (long i = 0; i < some; i++) slots_row(s, x + i * x_row, to + i * to_row);
    }
}
