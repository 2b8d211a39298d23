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
APART bool digits_of(const float* x, long columns, int8_t* digits, long plane, int* sums, FixedPoint* fixed) {
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
    __m512i sum = _mm512_setzero_si512();  // 64 numbers of 24 bits fit into 32
    for (long k = 0; k < plane; k += 16) {
        const __m512 v = (__m512)load_some(x + k, columns - k);
        const __m512i low = _mm512_cvtps_epi32(_mm512_scalef_ps(v, by));
        const __m512i middle = _mm512_srai_epi32(_mm512_add_epi32(low, half), 8);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(middle, half), 8);
        _mm_storeu_si128((__m128i*)(digits + k), _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128((__m128i*)(digits + plane + k), _mm512_cvtepi32_epi8(middle));
        _mm_storeu_si128((__m128i*)(digits + 2 * plane + k), _mm512_cvtepi32_epi8(high));
        sum = _mm512_add_epi32(sum, low);
        if (k % Quantized::EXACT_STEP == 48) sums[k / Quantized::EXACT_STEP] = _mm512_reduce_add_epi32(sum), sum = _mm512_setzero_si512();
    }
    fixed->sums = sums;
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
constexpr long FEW_ROWS = 2;    // of x, up to which weights of two planes of bits are unpacked for each

// Adds the products of unsigned and signed bytes, four to a sum. With the intrinsic, compilers move sums around.
INLINE void add_bytes(__m512i& sum, __m512i bytes, __m512i digits) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(digits));
}

// Bits of a where the mask has ones, else those of b.
INLINE __m512i chosen(int mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)mask), a, b, 0xca); }

// 64 weights, of which the first `left` are there, as unsigned bytes: 2^(bits - 1) more. Nothing beyond the row is read, as it
// may end the memory: of fewer bits than 8 there are whole blocks. Rotations bring each plane to its place in every byte.
template <int bits>
INLINE __m512i unsigned_bytes(const int8_t* at, long left) {
    if (bits == 8) {
        const __mmask64 mask = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
        return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, at), _mm512_set1_epi8((char)0x80));
    }
    const int8_t* next = left >= 64 ? at + 4 * bits : at;  // the second block of 32 columns; x is zero where there is none
    __m512i v = _mm512_setzero_si512();
    if (bits & 4) {
        __m512i wide;
        if (bits == 4) {
            const __mmask32 mask = left >= 64 ? ~(__mmask32)0 : 0xffff;
            wide = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, at));
        } else {
            const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at));
            wide = _mm512_castsi256_si512(_mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i*)next), 1));
        }
        v = _mm512_shuffle_i64x2(wide, wide, 0x50);  // each half of a block is 16 nibbles of the same bytes
        v = _mm512_mask_srli_epi64(v, 0xcc, v, 4);
        at += 16, next += 16;
    }
    if (bits & 2) {  // each quarter of a block is pairs of bits of the same 8 bytes
        constexpr int low = bits & 4;
        long long one, two;
        memcpy(&one, at, 8), memcpy(&two, next, 8);
        __m512i pairs = _mm512_mask_set1_epi64(_mm512_set1_epi64(one), 0xf0, two);
        pairs = _mm512_rolv_epi64(pairs, _mm512_setr_epi64(low, low + 62, low + 60, low + 58, low, low + 62, low + 60, low + 58));
        v = low ? chosen(15, v, pairs) : pairs;
        at += 8, next += 8;
    }
    if (bits & 1) {  // each eighth of a block is bits of the same 4 bytes
        constexpr int low = bits & 6;
        int one, two;
        memcpy(&one, at, 4), memcpy(&two, next, 4);
        __m512i single = _mm512_mask_set1_epi32(_mm512_set1_epi32(one), 0xff00, two);
        single = _mm512_rolv_epi32(single, _mm512_setr_epi32(low, low + 31, low + 30, low + 29, low + 28, low + 27, low + 26, low + 25,
                                                             low, low + 31, low + 30, low + 29, low + 28, low + 27, low + 26, low + 25));
        v = chosen((1 << low) - 1, v, single);
    }
    return _mm512_ternarylogic_epi64(v, _mm512_set1_epi8((1 << bits) - 1), _mm512_set1_epi8((char)(1 << (bits - 1))), 0x6a);  // (v & ones) ^ half
}

// One row of x, as digits, times 8 rows of w of which `row` bytes are between one and the next, and of which `some` count.
template <int bits>
INLINE void exact_dots_of(const Quantized& w, const int8_t* at, long row, long ahead, const int8_t* digits, long plane,
                          const FixedPoint& fixed, const float* scales, float* to, long some) {
    constexpr int n = (int)Quantized::DIRECT_ROWS;
    constexpr long step = Quantized::EXACT_STEP;
    const int* sums = fixed.sums;
    const int8_t* other = at + 4 * row;
    const long row3 = 3 * row, group = w.group ? w.group : w.columns;
    const __mmask8 present = some >= 8 ? 0xff : (__mmask8)((1u << some) - 1);
    const __m256i places = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)w.groups));
    __m512d total = _mm512_setzero_pd();
    for (long g = 0, left = w.columns; g < w.groups; g++) {
        __m512i low[n], middle[n], high[n];
        UNROLL(8)
        for (int j = 0; j < n; j++) low[j] = middle[j] = high[j] = _mm512_setzero_si512();
        const long end = left - group;
        long sum = 0;
        for (; left > 0 && left > end; left -= step, at += 8 * bits, other += 8 * bits, digits += step) {
            const __m512i a = _mm512_loadu_si512(digits), b = _mm512_loadu_si512(digits + plane);
            const __m512i c = _mm512_loadu_si512(digits + 2 * plane);
            UNROLL(8)
            for (int j = 0; j < n; j++) {
                const int8_t* here = (j < 4 ? at : other) + (j % 4 == 3 ? row3 : j % 4 * row);
                __builtin_prefetch(here + ahead);
                const __m512i v = unsigned_bytes<bits>(here, left);
                add_bytes(low[j], v, a), add_bytes(middle[j], v, b), add_bytes(high[j], v, c);
            }
            sum += *sums++;
        }
        const __m512d lows = _mm512_cvtepi32_pd(sum8(low)), middles = _mm512_cvtepi32_pd(sum8(middle));
        const __m512d highs = _mm512_cvtepi32_pd(sum8(high));
        __m512d all = _mm512_sub_pd(lows, _mm512_set1_pd((double)(1 << (bits - 1)) * (double)sum));  // whole numbers: all of this is exact
        all = _mm512_fmadd_pd(middles, _mm512_set1_pd(256.0), all);
        all = _mm512_fmadd_pd(highs, _mm512_set1_pd(65536.0), all);
        const __m256 own = w.groups == 1 ? _mm256_maskz_loadu_ps(present, scales)
                                         : _mm256_mmask_i32gather_ps(_mm256_setzero_ps(), present, places, scales + g, 4);
        total = _mm512_fmadd_pd(all, _mm512_cvtps_pd(own), total);
    }
    _mm256_mask_storeu_ps(to, present, _mm512_cvtpd_ps(_mm512_mul_pd(total, _mm512_set1_pd(fixed.unit))));
}

#define EXACT_DOTS(bits)                                                                                               \
    APART void exact_dots_##bits(const Quantized& w, const int8_t* at, long row, long ahead, const int8_t* digits, long plane, \
                                 const FixedPoint& fixed, const float* scales, float* to, long some) {                 \
        exact_dots_of<bits>(w, at, row, ahead, digits, plane, fixed, scales, to, some);                                \
    }
EXACT_DOTS(3) EXACT_DOTS(4) EXACT_DOTS(5) EXACT_DOTS(6) EXACT_DOTS(7) EXACT_DOTS(8)
#undef EXACT_DOTS

// Rows `first` to `last` of w, as quantized_product has them, without the bias.
APART void exact_product(const Quantized& w, const float* x, long x_row, float* to, long to_row, long rows, long first, long last,
                         float* memory) {
    constexpr long n = Quantized::DIRECT_ROWS;
    const long plane = w.byte_row(), most = w.exact_rows();
    int8_t* digits = (int8_t*)memory;
    int8_t* bytes = digits + most * 3 * plane;
    int* sums = (int*)(bytes + n * plane);
    const long steps = plane / Quantized::EXACT_STEP;
    decltype(&exact_dots_8) const direct_dots[] = {exact_dots_3, exact_dots_4, exact_dots_5, exact_dots_6, exact_dots_7, exact_dots_8};
    for (long r = 0; r < rows; r += most, x += most * x_row, to += most * to_row) {
        const long some = rows - r < most ? rows - r : most;
        FixedPoint fixed[Quantized::MOST_EXACT];
        bool fits[Quantized::MOST_EXACT];
        for (long k = 0; k < some; k++)
            fits[k] = digits_of(x + k * x_row, w.columns, digits + 3 * k * plane, plane, sums + k * steps, fixed + k);
        for (long i = first; i < last; i += n) {
            const long now = last - i < n ? last - i : n;
            const int8_t* at = (const int8_t*)(w.at + i * w.row);
            long row = w.row;
            // What is read once comes from memory; rows of x that share it find it in the cache.
            const bool direct = now == n && (w.bits == 8 || w.columns % BLOCK == 0) && (some <= FEW_ROWS || w.bits == 8 || w.bits == 4);
            const auto dots_of = direct_dots[direct ? w.bits - 3 : 5];
            const long ahead = direct && some == 1 ? AHEAD_ROWS * row : 0;
            if (!direct) {
                for (long j = 0; j < now; j++) {
                    if (w.bits == 8)
                        memcpy(bytes + j * plane, at + j * row, w.columns);
                    else
                        unpack_row(w.at + (i + j) * row, bytes + j * plane, w.columns, w.bits);
                }
                at = bytes, row = plane;
            }
            for (long k = 0; k < some; k++)
                if (fits[k])
                    dots_of(w, at, row, ahead, digits + 3 * k * plane, plane, fixed[k], w.scales + i * w.groups, to + k * to_row + i, now);
        }
        for (long k = 0; k < some; k++)
            if (!fits[k]) float_product(w, x + k * x_row, x_row, to + k * to_row, to_row, 1, first, last, memory + w.exact_memory());
    }
}

#else

APART void exact_product(const Quantized&, const float*, long, float*, long, long, long, long, float*) {}

#endif
