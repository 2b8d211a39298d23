// Products with weights as integers in integers; a kernel file, see widths.h, for processors that multiply bytes (VNNI).
//
// A row of x becomes fixed-point numbers of 24 bits, X = x 2^e rounded to whole numbers, the largest almost 2^23: float32 has
// as many bits. X is three signed digits of a byte, and sums of bytes times digits are exact. A result is rounded once, so
// it has the same bits in whatever order it is computed. Numbers that are much smaller than the largest of their row lose
// bits; a row of which most would is computed in floats.

#if defined(__x86_64__) && KERNEL_WIDTH == 16

constexpr float MOST_APART = 8;  // powers of two between the largest number of a row and the others, on average

// A row of x as digits; false if it has numbers that are not finite, which whole numbers cannot be, or sizes too far apart:
// beside 1e8, ones would be zeros.
APART bool digits_of(const float* x, long columns, int8_t* digits, long plane, FixedPoint* fixed) {
    __m512 most = _mm512_setzero_ps();
    __m512 powers = _mm512_setzero_ps();
    __m512i present = _mm512_setzero_si512();
    __mmask16 odd = 0;
    for (long k = 0; k < columns; k += 16) {
        const __m512 v = (__m512)load_some(x + k, columns - k);
        const __mmask16 some = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
        powers = _mm512_mask_add_ps(powers, some, powers, _mm512_getexp_ps(v));
        present = _mm512_mask_add_epi32(present, some, present, _mm512_set1_epi32(1));
        odd |= _mm512_fpclass_ps_mask(v, 0x99);
    }
    if (odd) return false;
    const float largest = _mm512_reduce_max_ps(most);
    int power = 0;
    if (largest > 0) {
        const float highest = _mm512_cvtss_f32(_mm512_getexp_ps(_mm512_set1_ps(largest)));
        if (_mm512_reduce_add_ps(powers) < (highest - MOST_APART) * (float)_mm512_reduce_add_epi32(present)) return false;
        power = 22 - (int)highest;
        // Three signed digits of a byte reach up to 127 * (65536 + 256 + 1).
        if (_mm512_cvtss_f32(_mm512_scalef_ps(_mm512_set1_ps(largest), _mm512_set1_ps((float)power))) > 8355711.0f) power--;
    }
    const __m512 by = _mm512_set1_ps((float)power);
    const __m512i half = _mm512_set1_epi32(128);
    __m512i sum = _mm512_setzero_si512();
    for (long k = 0; k < plane; k += 16) {
        const __m512 v = (__m512)load_some(x + k, columns - k);
        const __m512i low = _mm512_cvtps_epi32(_mm512_scalef_ps(v, by));
        const __m512i middle = _mm512_srai_epi32(_mm512_add_epi32(low, half), 8);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(middle, half), 8);
        _mm_storeu_si128((__m128i*)(digits + k), _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128((__m128i*)(digits + plane + k), _mm512_cvtepi32_epi8(middle));
        _mm_storeu_si128((__m128i*)(digits + 2 * plane + k), _mm512_cvtepi32_epi8(high));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(low)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(low, 1)));
    }
    fixed->sum = _mm512_reduce_add_epi64(sum);
    fixed->unit = 1;
    for (; power > 0; power--) fixed->unit *= 0.5;
    for (; power < 0; power++) fixed->unit *= 2;
    return true;
}

// The sums of the lanes of eight registers.
INLINE __m256i sum8(const __m512i* s) {
    __m512i pair[4], quad[2];
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        pair[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2 * i], s[2 * i + 1]), _mm512_unpackhi_epi32(s[2 * i], s[2 * i + 1]));
    UNROLL(2)
    for (int i = 0; i < 2; i++)
        quad[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]),
                                   _mm512_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]));
    const __m256i a = _mm256_add_epi32(_mm512_castsi512_si256(quad[0]), _mm512_extracti64x4_epi64(quad[0], 1));
    const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(quad[1]), _mm512_extracti64x4_epi64(quad[1], 1));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

constexpr long AHEAD_ROWS = 8;  // rows of w that are prefetched before they are needed

// Adds the products of unsigned and signed bytes, four to a sum. With the intrinsic, compilers move sums around.
INLINE void add_bytes(__m512i& sum, __m512i bytes, __m512i digits) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(digits));
}

// 64 weights, of which the first `left` are there, as unsigned bytes: 128 more, or 8 more for nibbles.
template <bool nibbles>
INLINE __m512i unsigned_bytes(const int8_t* at, long left) {
    // Nothing beyond the row is read, as it may end the memory.
    if (!nibbles) {
        const __mmask64 mask = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
        return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, at), _mm512_set1_epi8((char)0x80));
    }
    const __mmask32 mask = left >= 64 ? ~(__mmask32)0 : ((__mmask32)1 << left / 2) - 1;
    const __m512i pairs = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, at));
    const __m512i twice = _mm512_shuffle_i64x2(pairs, pairs, 0x50);  // each half of a block is 16 nibbles of the same bytes
    const __m512i low = _mm512_mask_srli_epi64(twice, 0xcc, twice, 4);
    return _mm512_ternarylogic_epi64(low, _mm512_set1_epi8(15), _mm512_set1_epi8(8), 0x6a);  // (low & 15) ^ 8
}

// One row of x, as digits, times 8 rows of w of which `row` bytes are between one and the next.
template <bool nibbles, bool once>
INLINE void exact_dots_of(const int8_t* w, long row, const int8_t* digits, long plane, long columns, const FixedPoint& fixed,
                          const float* scales, float* to, long some) {
    constexpr int n = (int)Quantized::DIRECT_ROWS;
    __m512i low[n], middle[n], high[n];
    UNROLL(8)
    for (int j = 0; j < n; j++) low[j] = middle[j] = high[j] = _mm512_setzero_si512();
    const int8_t* other = w + 4 * row;
    const long row3 = 3 * row, step = nibbles ? 32 : 64;
    for (long left = columns; left > 0; left -= 64, w += step, other += step, digits += 64) {
        const __m512i a = _mm512_loadu_si512(digits), b = _mm512_loadu_si512(digits + plane);
        const __m512i c = _mm512_loadu_si512(digits + 2 * plane);
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            const int8_t* at = (j < 4 ? w : other) + (j % 4 == 3 ? row3 : j % 4 * row);
            if (once) __builtin_prefetch(at + AHEAD_ROWS * row);
            const __m512i v = unsigned_bytes<nibbles>(at, left);
            add_bytes(low[j], v, a), add_bytes(middle[j], v, b), add_bytes(high[j], v, c);
        }
    }
    const __m512d lows = _mm512_cvtepi32_pd(sum8(low)), middles = _mm512_cvtepi32_pd(sum8(middle));
    const __m512d highs = _mm512_cvtepi32_pd(sum8(high));
    __m512d all = _mm512_sub_pd(lows, _mm512_set1_pd((nibbles ? 8.0 : 128.0) * (double)fixed.sum));  // whole numbers: all of this is exact
    all = _mm512_fmadd_pd(middles, _mm512_set1_pd(256.0), all);
    all = _mm512_fmadd_pd(highs, _mm512_set1_pd(65536.0), all);
    const __mmask8 present = some >= 8 ? 0xff : (__mmask8)((1u << some) - 1);
    const __m512d scale = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(present, scales));
    _mm256_mask_storeu_ps(to, present, _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_mul_pd(all, _mm512_set1_pd(fixed.unit)), scale)));
}

#define EXACT_DOTS(name, nibbles, once)                                                                               \
    APART void name(const int8_t* w, long row, const int8_t* digits, long plane, long columns, const FixedPoint& fixed, \
                    const float* scales, float* to, long some) {                                                      \
        exact_dots_of<nibbles, once>(w, row, digits, plane, columns, fixed, scales, to, some);                        \
    }
EXACT_DOTS(byte_dots, false, false)
EXACT_DOTS(byte_dots_once, false, true)
EXACT_DOTS(nibble_dots, true, false)
EXACT_DOTS(nibble_dots_once, true, true)
#undef EXACT_DOTS

// Rows `first` to `last` of w, as quantized_product has them, without the bias.
APART void exact_product(const Quantized& w, const float* x, long x_row, float* to, long to_row, long rows, long first, long last,
                         float* memory) {
    constexpr long n = Quantized::DIRECT_ROWS;
    const long plane = w.byte_row(), most = w.exact_rows();
    int8_t* digits = (int8_t*)memory;
    int8_t* bytes = digits + most * 3 * plane;
    for (long r = 0; r < rows; r += most, x += most * x_row, to += most * to_row) {
        const long some = rows - r < most ? rows - r : most;
        FixedPoint fixed[Quantized::MOST_EXACT];
        bool fits[Quantized::MOST_EXACT];
        for (long k = 0; k < some; k++) fits[k] = digits_of(x + k * x_row, w.columns, digits + 3 * k * plane, plane, fixed + k);
        for (long i = first; i < last; i += n) {
            const long now = last - i < n ? last - i : n;
            const int8_t* at = (const int8_t*)(w.at + i * w.row);
            long row = w.row;
            const bool nibbles = w.bits == 4 && w.columns % BLOCK == 0 && now == n, direct = nibbles || (w.bits == 8 && now == n);
            if (!direct) {
                for (long j = 0; j < now; j++) {
                    if (w.bits == 8)
                        memcpy(bytes + j * plane, at + j * row, w.columns);
                    else
                        unpack_row(w.at + (i + j) * row, bytes + j * plane, w.columns, w.bits);
                }
                at = bytes, row = plane;
            }
            const auto dots_of = nibbles            ? some == 1 ? nibble_dots_once : nibble_dots
                                 : direct && some == 1 ? byte_dots_once
                                                       : byte_dots;
            for (long k = 0; k < some; k++)
                if (fits[k])
                    dots_of(at, row, digits + 3 * k * plane, plane, w.columns, fixed[k], w.scales + i, to + k * to_row + i, now);
        }
        for (long k = 0; k < some; k++)
            if (!fits[k]) float_product(w, x + k * x_row, x_row, to + k * to_row, to_row, 1, first, last, memory + w.exact_memory());
    }
}

#else

APART void exact_product(const Quantized&, const float*, long, float*, long, long, long, long, float*) {}

#endif
