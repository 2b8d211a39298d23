// 9 to 16 columns with AVX-512: four numbers of a row times four columns fill a register. With a number for all 16 lanes,
// loads that broadcast it are the limit; this form takes 0.85 of the time of fold with 16 columns (csrc/fold.cpp, 360 deep).

constexpr int QUAD = 4;

#if defined(__x86_64__) && KERNEL_WIDTH == 16
INLINE bool by_quads(long columns) { return columns > LANES / 2 && columns <= LANES; }

INLINE long quads_memory(long depth) { return (depth + QUAD - 1) / QUAD * QUAD * LANES; }

// w (columns, depth), four registers for every four numbers: column j is quarter j / 4 of register j % 4.
INLINE void pack_quads(const float* w, float* packed, long depth, long columns) {
    memset(packed, 0, sizeof(float) * quads_memory(depth));
    for (long j = 0; j < columns; j++)
        for (long k = 0; k < depth; k++) packed[k / QUAD * QUAD * LANES + j % QUAD * LANES + j / QUAD * QUAD + k % QUAD] = w[j * depth + k];
}

template <int rows>
INLINE void add_quads(vec (&sums)[rows][QUAD], const float* x, long row, const float* w, long some) {
    vec b[QUAD];
    UNROLL(4)
    for (int v = 0; v < QUAD; v++) b[v] = *(const vec*)(w + v * LANES);
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        const float* at = x + i * row;
        const __m128 four = some >= QUAD ? _mm_loadu_ps(at) : _mm_maskz_loadu_ps((__mmask8)((1 << some) - 1), at);
        const vec numbers = (vec)_mm512_broadcast_f32x4(four);
        UNROLL(4)
        for (int v = 0; v < QUAD; v++) sums[i][v] += numbers * b[v];
    }
}

// Adds up the four numbers of each column.
INLINE vec join_quads(const vec* v) {
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return (vec)_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

template <int rows, class Beside>
INLINE void quad_block(const float* x, long row, const float* w, float* out, long columns, long depth, const Beside& beside) {
    vec sums[rows][QUAD];
    UNROLL(6)
    for (int i = 0; i < rows; i++) {
        UNROLL(4)
        for (int v = 0; v < QUAD; v++) sums[i][v] = (vec){0};
    }
    long k = 0;
    for (; k + LINE <= depth;) {
        if (Beside::EVERY) beside(k);
        UNROLL(4)
        for (long s = 0; s < LINE; s += QUAD, k += QUAD, w += QUAD * LANES) add_quads(sums, x + k, row, w, QUAD);
    }
    if (Beside::EVERY && k < depth) beside(k);
    for (; k + QUAD <= depth; k += QUAD, w += QUAD * LANES) add_quads(sums, x + k, row, w, QUAD);
    if (k < depth) add_quads(sums, x + k, row, w, depth - k);
    UNROLL(6)
    for (int i = 0; i < rows; i++) store_some(out + i * columns, join_quads(sums[i]), columns);
}
#else
INLINE bool by_quads(long) { return false; }
INLINE long quads_memory(long) { return 0; }
INLINE void pack_quads(const float*, float*, long, long) {}
template <int rows, class Beside>
INLINE void quad_block(const float*, long, const float*, float*, long, long, const Beside&) {}
#endif
