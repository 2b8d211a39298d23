// Products with weights as integers; a kernel file, see widths.h. It uses the dots of recurrence_products.h.
//
// One row of x meets integers that are converted in registers. For more rows, a tile of w is converted to floats once and
// read by all of them. Either way the sums are the same numbers added in the same order: a row has the same bits alone and
// among others. A scale for a whole row multiplies the finished sum; a scale for a group multiplies the weights.

// LANES numbers from as many bytes.
INLINE vec from_bytes(const int8_t* at) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    vec v;
    for (int j = 0; j < LANES; j++) v[j] = (float)at[j];
    return v;
#endif
}

// The same for the last few of a row: nothing beyond them is read.
INLINE vec from_some_bytes(const int8_t* at, long some) {
    if (some >= LANES) return from_bytes(at);
    int8_t line[LANES] = {0};
    for (long j = 0; j < some; j++) line[j] = at[j];
    return from_bytes(line);
}

// What reads nibbles: the low or the high ones of LANES bytes, as signed numbers.
struct Nibbles {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    __m512 numbers;
    INLINE_MEMBER Nibbles() : numbers(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)) {}
    INLINE_MEMBER void operator()(const unsigned char* at, vec& low, vec& high) const {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
        low = (vec)_mm512_permutexvar_ps(bytes, numbers);  // by the last four bits
        high = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
    }
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    INLINE_MEMBER void operator()(const unsigned char* at, vec& low, vec& high) const {
        const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
        low = (vec)_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 28), 28));
        high = (vec)_mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4));
    }
#else
    INLINE_MEMBER void operator()(const unsigned char* at, vec& low, vec& high) const {
        for (int j = 0; j < LANES; j++) {
            low[j] = (float)(((at[j] & 15) ^ 8) - 8);
            high[j] = (float)(((at[j] >> 4) ^ 8) - 8);
        }
    }
#endif
};

constexpr long BLOCK = 32;  // columns whose planes lie together
static_assert(BLOCK % (2 * LANES) == 0, "nibbles of a block are read in whole registers");

// A block of m columns as bytes.
INLINE void unpack_some(const unsigned char* at, int8_t* to, long m, long bits) {
    unsigned char values[BLOCK] = {0};
    long low = 0;
    for (long plane = 4; plane; plane /= 2) {
        if (!(bits & plane)) continue;
        const long wide = m * plane / 8;
        const int mask = (1 << plane) - 1;
        for (long i = 0; i * plane < 8; i++)
            for (long j = 0; j < wide; j++) values[i * wide + j] |= (unsigned char)(((at[j] >> (i * plane)) & mask) << low);
        at += wide, low += plane;
    }
    const int half = 1 << (bits - 1);
    for (long j = 0; j < m; j++) to[j] = (int8_t)((values[j] ^ half) - half);
}

// A whole block.
template <int bits>
INLINE void unpack_block(const unsigned char* at, int8_t* to) {
#if defined(__x86_64__) && KERNEL_WIDTH >= 8
    constexpr int low1 = bits & 6, low2 = bits & 4;  // where the planes of one and two bits go
    __m256i v = _mm256_setzero_si256();
    if (bits & 4) {
        const __m128i p = _mm_loadu_si128((const __m128i*)at);
        v = _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(p), _mm_srli_epi16(p, 4), 1), _mm256_set1_epi8(15));
        at += 16;
    }
    if (bits & 2) {
        __m256i p = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)at));
        p = _mm256_and_si256(_mm256_srlv_epi64(p, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
        v = _mm256_or_si256(v, _mm256_slli_epi16(p, low2));
        at += 8;
    }
    if (bits & 1) {
        int32_t plane;
        memcpy(&plane, at, 4);
        __m256i p = _mm256_srlv_epi32(_mm256_set1_epi32(plane), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        v = _mm256_or_si256(v, _mm256_slli_epi16(_mm256_and_si256(p, _mm256_set1_epi8(1)), low1));
    }
    const __m256i half = _mm256_set1_epi8((char)(1 << (bits - 1)));
    _mm256_storeu_si256((__m256i*)to, _mm256_sub_epi8(_mm256_xor_si256(v, half), half));
#else
    unpack_some(at, to, BLOCK, bits);
#endif
}

// A row as bytes, of which up to 7 more than its columns are written.
template <int bits>
INLINE void unpack_row_of(const unsigned char* at, int8_t* to, long columns) {
    long k = 0;
    for (; k + BLOCK <= columns; k += BLOCK, at += BLOCK * bits / 8) unpack_block<bits>(at, to + k);
    if (k < columns) unpack_some(at, to + k, (columns - k + 7) / 8 * 8, bits);
}

APART void unpack_row(const unsigned char* at, int8_t* to, long columns, long bits) {
    switch (bits) {
        case 3:
            unpack_row_of<3>(at, to, columns);
            break;
        case 4:
            unpack_row_of<4>(at, to, columns);
            break;
        case 5:
            unpack_row_of<5>(at, to, columns);
            break;
        case 6:
            unpack_row_of<6>(at, to, columns);
            break;
        case 7:
            unpack_row_of<7>(at, to, columns);
            break;
    }
}

// A row of w as floats; `bytes` is memory for it as bytes. With groups, the scales are in.
APART void convert_row(const Quantized& w, long i, float* to, int8_t* bytes) {
    const unsigned char* at = w.at + i * w.row;
    const int8_t* from = (const int8_t*)at;
    long k = 0;
    if (w.bits == 4) {
        const Nibbles nibbles;
        for (; k + BLOCK <= w.columns; k += BLOCK, at += BLOCK / 2)
            for (long j = 0; j < BLOCK / 2; j += LANES) {
                vec low, high;
                nibbles(at + j, low, high);
                *(vec*)(to + k + j) = low, *(vec*)(to + k + BLOCK / 2 + j) = high;
            }
        if (k < w.columns) unpack_some(at, bytes + k, (w.columns - k + 7) / 8 * 8, 4);
        from = bytes;
    } else if (w.bits != 8) {
        unpack_row(at, bytes, w.columns, w.bits);
        from = bytes;
    }
    for (; k + LANES <= w.columns; k += LANES) *(vec*)(to + k) = from_bytes(from + k);
    if (k < w.columns) store_some(to + k, from_some_bytes(from + k, w.columns - k), w.columns - k);
    if (!w.group) return;
    const float* scales = w.scales + i * w.groups;
    for (long g = 0; g < w.groups; g++) {
        const long end = (g + 1) * w.group < w.columns ? (g + 1) * w.group : w.columns;
        for (long j = g * w.group; j < end; j++) to[j] *= scales[g];
    }
}

// Groups that registers do not cross.
INLINE bool is_direct(const Quantized& w) { return w.group % 16 == 0; }

// x (columns) times 8 rows of bytes.
template <bool grouped>
INLINE void direct_bytes_of(const Quantized& w, const float* x, const int8_t* at, long row, const float* scales, float* to) {
    constexpr int n = (int)Quantized::DIRECT_ROWS;
    vec sums[n];
    UNROLL(8)
    for (int j = 0; j < n; j++) sums[j] = (vec){0};
    const long ahead = n * row;
    long k = 0;
    for (; k + LANES <= w.columns; k += LANES) {
        const vec a = *(const vec*)(x + k);
        const long g = grouped ? k / w.group : 0;
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            const int8_t* here = at + j * row + k;
            if (k % 64 == 0) __builtin_prefetch(here + ahead);
            vec b = from_bytes(here);
            if (grouped) b *= scales[j * w.groups + g];
            sums[j] += a * b;
        }
    }
    if (k < w.columns) {
        const long left = w.columns - k;
        const vec a = load_some(x + k, left);
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            vec b = from_some_bytes(at + j * row + k, left);
            if (grouped) b *= scales[j * w.groups + k / w.group];
            sums[j] += a * b;
        }
    }
    sum4(sums, to, 4), sum4(sums + 4, to + 4, 4);
}

APART void direct_bytes(const Quantized& w, const float* x, const int8_t* at, long row, const float* scales, float* to) {
    if (w.group)
        direct_bytes_of<true>(w, x, at, row, scales, to);
    else
        direct_bytes_of<false>(w, x, at, row, scales, to);
}

// The same for nibbles.
template <bool grouped>
INLINE void direct_nibbles_of(const Quantized& w, const float* x, const unsigned char* at, const float* scales, float* to) {
    constexpr int n = (int)Quantized::DIRECT_ROWS;
    const Nibbles nibbles;
    vec sums[n];
    UNROLL(8)
    for (int j = 0; j < n; j++) sums[j] = (vec){0};
    const long ahead = n * w.row;
    long k = 0;
    for (; k + BLOCK <= w.columns; k += BLOCK) {
        vec low[n][BLOCK / 2 / LANES];
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            const unsigned char* here = at + j * w.row + k / 2;
            if (k % 128 == 0) __builtin_prefetch(here + ahead);
        }
        // The order of the columns is kept: all low nibbles of a block come before the high ones.
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            const float first = grouped ? scales[j * w.groups + k / w.group] : 1.0f;
            const float second = grouped ? scales[j * w.groups + (k + BLOCK / 2) / w.group] : 1.0f;
            UNROLL(4)
            for (int v = 0; v < BLOCK / 2 / LANES; v++) {
                vec high;
                nibbles(at + j * w.row + k / 2 + v * LANES, low[j][v], high);
                if (grouped) low[j][v] *= first;
                sums[j] += *(const vec*)(x + k + v * LANES) * low[j][v];
                low[j][v] = grouped ? high * second : high;
            }
            UNROLL(4)
            for (int v = 0; v < BLOCK / 2 / LANES; v++)
                sums[j] += *(const vec*)(x + k + BLOCK / 2 + v * LANES) * low[j][v];
        }
    }
    if (k < w.columns) {
        UNROLL(8)
        for (int j = 0; j < n; j++) {
            int8_t bytes[BLOCK] = {0};
            unpack_some(at + j * w.row + k / 2, bytes, (w.columns - k + 7) / 8 * 8, 4);
            for (long c = k; c < w.columns; c += LANES) {
                vec b = from_some_bytes(bytes + (c - k), w.columns - c);
                if (grouped) b *= scales[j * w.groups + c / w.group];
                sums[j] += load_some(x + c, w.columns - c) * b;
            }
        }
    }
    sum4(sums, to, 4), sum4(sums + 4, to + 4, 4);
}

APART void direct_nibbles(const Quantized& w, const float* x, const unsigned char* at, const float* scales, float* to) {
    if (w.group)
        direct_nibbles_of<true>(w, x, at, scales, to);
    else
        direct_nibbles_of<false>(w, x, at, scales, to);
}

// Rows `first` to `last` of w: to (rows, first...) = x (rows, columns) w^T.
APART void float_product(const Quantized& w, const float* x, long x_row, float* to, long to_row, long rows, long first, long last,
                         float* memory) {
    constexpr long n = Quantized::DIRECT_ROWS, most = 96;  // rows of x that stay in cache while w goes by
    int8_t* bytes = (int8_t*)(memory + Quantized::TILE * w.tile_row());
    for (long r = 0; r < rows; r += most, x += most * x_row, to += most * to_row) {
        const long some = rows - r < most ? rows - r : most;
        for (long i = first, now; i < last; i += now) {
            const unsigned char* at = w.at + i * w.row;
            const float* scales = w.scales + i * w.groups;
            now = last - i < Quantized::TILE ? last - i : Quantized::TILE;
            if (some == 1 && now >= n && is_direct(w)) {
                now = n;
                if (w.bits == 4) {
                    direct_nibbles(w, x, at, scales, to + i);
                } else if (w.bits == 8) {
                    direct_bytes(w, x, (const int8_t*)at, w.row, scales, to + i);
                } else {
                    for (long j = 0; j < n; j++) unpack_row(at + j * w.row, bytes + j * w.byte_row(), w.columns, w.bits);
                    direct_bytes(w, x, bytes, w.byte_row(), scales, to + i);
                }
            } else {
                for (long j = 0; j < now; j++) convert_row(w, i + j, memory + j * w.tile_row(), bytes);
                dots(x, x_row, memory, w.tile_row(), to + i, to_row, some, now, w.columns);
            }
            if (w.group) continue;
            for (long k = 0; k < some; k++)
                for (long j = 0; j < now; j++) to[k * to_row + i + j] *= scales[j];
        }
    }
}
