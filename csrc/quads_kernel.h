// Up to 16 columns with AVX-512: four numbers of a row times four columns fill a register, and two or four registers hold
// all columns. With a number for all 16 lanes, loads that broadcast it are the limit: this form takes 0.85 of the time of
// fold with 16 columns, and 0.6 with 8.

constexpr int QUAD = 4;

#if defined(__x86_64__) && KERNEL_WIDTH == 16
INLINE bool by_quads(long columns) { return columns <= LANES; }

INLINE long quads_memory(long depth) { return (depth + QUAD - 1) / QUAD * QUAD * LANES; }

// w (columns, depth), `vecs` registers for every four numbers: column j is quarter j / vecs of register j % vecs.
INLINE void pack_quads(const float* w, float* packed, long depth, long columns) {
    const long vecs = columns > LANES / 2 ? 4 : 2;
    memset(packed, 0, sizeof(float) * quads_memory(depth));
    for (long j = 0; j < columns; j++, w += depth) {
        float* to = packed + j % vecs * LANES + j / vecs * QUAD;
        for (long k = 0; k < depth; k++) to[k / QUAD * vecs * LANES + k % QUAD] = w[k];
    }
}

template <int rows, int vecs>
INLINE void add_quads(vec (&sums)[rows][vecs], const float* x, long row, const float* w, long some) {
    vec b[vecs];
    UNROLL(4)
    for (int v = 0; v < vecs; v++) b[v] = *(const vec*)(w + v * LANES);
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        const float* at = x + i * row;
        const __m128 four = some >= QUAD ? _mm_loadu_ps(at) : _mm_maskz_loadu_ps((__mmask8)((1 << some) - 1), at);
        const vec numbers = (vec)_mm512_broadcast_f32x4(four);
        UNROLL(4)
        for (int v = 0; v < vecs; v++) sums[i][v] += numbers * b[v];
    }
}

// Adds up the four numbers of each quarter of four registers; they become the numbers of that quarter.
INLINE __m512 join(vec first, vec second, vec third, vec fourth) {
    const __m512 a = (__m512)first, b = (__m512)second, c = (__m512)third, d = (__m512)fourth;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// The sums of all columns, in order.
template <int vecs>
INLINE vec join_quads(const vec (&v)[vecs]) {
    const __m512 all = join(v[0], v[1], v[vecs - 2], v[vecs - 1]);
    if (vecs == 4) return (vec)all;
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return (vec)_mm512_permutexvar_ps(order, all);
}

template <int rows, int vecs, class Beside>
INLINE void quad_block(const float* x, const float* w, float* out, long columns, long depth, const Beside& beside) {
    vec sums[rows][vecs];
    UNROLL(12)
    for (int i = 0; i < rows; i++) {
        UNROLL(4)
        for (int v = 0; v < vecs; v++) sums[i][v] = (vec){0};
    }
    long k = 0;
    while (k + LINE <= depth) {
        if (Beside::EVERY) beside(k);
        UNROLL(4)
        for (long s = 0; s < LINE; s += QUAD, k += QUAD, w += vecs * LANES) add_quads(sums, x + k, depth, w, QUAD);
    }
    if (Beside::EVERY && k < depth) beside(k);
    for (; k + QUAD <= depth; k += QUAD, w += vecs * LANES) add_quads(sums, x + k, depth, w, QUAD);
    if (k < depth) add_quads(sums, x + k, depth, w, depth - k);
    UNROLL(12)
    for (int i = 0; i < rows; i++) store_some(out + i * columns, join_quads(sums[i]), columns);
}

// Twelve rows; `beside` runs with the first of them.
template <class Beside>
INLINE void tall_quads(const float* x, long depth, const float* packed, float* out, long columns, const Beside& beside) {
    if (columns <= LANES / 2) {
        quad_block<12, 2>(x, packed, out, columns, depth, beside);
    } else {
        quad_block<6, 4>(x, packed, out, columns, depth, beside);
        quad_block<6, 4>(x + 6 * depth, packed, out + 6 * columns, columns, depth, Idle());
    }
}

INLINE void rest_of_quads(const float* x, const float* packed, float* out, long rows, long depth, long columns) {
    for (; rows; rows -= rows > 1 ? 2 : 1, x += 2 * depth, out += 2 * columns) {
        if (columns <= LANES / 2 && rows > 1)
            quad_block<2, 2>(x, packed, out, columns, depth, Idle());
        else if (columns <= LANES / 2)
            quad_block<1, 2>(x, packed, out, columns, depth, Idle());
        else if (rows > 1)
            quad_block<2, 4>(x, packed, out, columns, depth, Idle());
        else
            quad_block<1, 4>(x, packed, out, columns, depth, Idle());
    }
}
#else
INLINE bool by_quads(long) { return false; }
INLINE long quads_memory(long) { return 0; }
INLINE void pack_quads(const float*, float*, long, long) {}
template <class Beside>
INLINE void tall_quads(const float*, long, const float*, float*, long, const Beside&) {}
INLINE void rest_of_quads(const float*, const float*, float*, long, long, long) {}
#endif
