/* Two products of a tall x and a few columns, which are nearly all the time of most layers:
 *
 *   few_columns:  out (R, N)  = x (R, K) w^T,  w (N, K)
 *   column_sums:  out (N, K) += g^T x,         g (R, N)
 *
 * x is read once, where it lies, and asked of the memory before it is needed; that is what libraries for matrices of all
 * shapes do not do. x is float or uint8, whose numbers are those from 0 to 255. A row of the first product has the same
 * bits alone and among others; the second depends on the number of threads, among which its rows are divided.
 *
 * The code is written once for a vector of LANES numbers (few_columns.h) and compiled for every kind of processor.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEEP 512   /* length of the sums that are made at once: so much of w stays in cache */
#define TALL 64    /* rows of x that are read at once where they are summed over */
#define GROUP 8    /* of these, rows after which memory is asked for more */
#define TILE 4     /* columns of g at once */
#define DOTS 4     /* columns up to which they are made as sums along the rows */
#define PART 384   /* rows of x whose product is folded up at once; a multiple of the rows above and below */
#define HELD 40    /* places of x for which two products are made before the next places are read */
#define ROWS_OF_REST 4 /* rows at once of those that are left */
#define LINE 16    /* numbers that come from memory together */
#define BYTES 64   /* the same of bytes */
#define CONFLICT 256 /* rows of a multiple of this length compete for the same lines of the cache */
#define BLOCK ((DEEP + LINE) * ROWS_OF_ONE + 240) /* numbers of x in a block, and some, so that two are not pages apart */
#define COLUMNS (LANES / DEPTH)   /* in a register of w */
#define STRIPE (VECS * COLUMNS)   /* columns at once */
#define AHEAD 8192 /* bytes of x that are asked for before they are needed, at least */

#if defined(__x86_64__)
#include <immintrin.h>

/* `to` gets the sums of the numbers in each of four registers. */
#define FOUR_SUMS(to, v)                                                                                               \
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(HALVES((v)[0]), HALVES((v)[1])), _mm_hadd_ps(HALVES((v)[2]), HALVES((v)[3]))))
#define HALVES(v) _mm_add_ps(_mm256_castps256_ps128(HALF(v)), _mm256_extractf128_ps(HALF(v), 1))

/* Sums of four numbers of each column, as step leaves them, become one register of columns. */
static inline __attribute__((always_inline, target("avx512f"))) __m512 join(__m512 a, __m512 b, __m512 c, __m512 d,
                                                                            const int vecs) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    if (vecs == 1) return _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), all);
    if (vecs == 2) return _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 12, 9, 8, 5, 4, 1, 0), all);
    return all;
}

/* Of x, the numbers that step multiplies at once are spread over a register. Loads that spread a single number for 16 lanes
 * come one in a cycle, and two products could be made: hence four at a time, by the same four of four columns. */
#define LANES 16
#define DEPTH 4 /* numbers of a row in a register of w */
#define VECS 4  /* registers of w for a stripe of columns */
#define SPREAD(p) ((vec)_mm512_broadcast_f32x4(_mm_loadu_ps(p)))
#define SPREAD_SOME(p, some) ((vec)_mm512_broadcast_f32x4(_mm_maskz_loadu_ps((1 << (some)) - 1, p)))
#define JOIN(v, vecs)                                                                                                  \
    ((v)[0] = (vec)join((__m512)(v)[0], (__m512)(v)[(vecs) > 1], (__m512)(v)[(vecs) > 2 ? 2 : 0],                      \
                        (__m512)(v)[(vecs) > 2 ? 3 : 0], vecs),                                                        \
     1)
#define PUT_SOME(to, line, some, first)                                                                                \
    do {                                                                                                               \
        const __mmask16 there = (1 << (some)) - 1;                                                                     \
        __m512 numbers = _mm512_loadu_ps(line);                                                                        \
        if (!(first)) numbers = _mm512_add_ps(numbers, _mm512_maskz_loadu_ps(there, to));                              \
        _mm512_mask_storeu_ps(to, there, numbers);                                                                     \
    } while (0)
#define ROWS_OF_ONE 12 /* rows of x at once, by a register of w or two: as many as leave registers for the rest */
#define ROWS_OF_ALL 6  /* by all of a stripe */
#define WIDE 96        /* numbers of a row of x at once, where rows are summed over */
#define HALF(v) _mm256_add_ps(_mm512_castps512_ps256((__m512)(v)), _mm512_extractf32x8_ps((__m512)(v), 1))
#define ROWS_OF_DOTS 6
#define NUMBERS(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#include "few_columns.h"

#define LANES 8
#define WIDE 24
#undef HALF
#define HALF(v) ((__m256)(v))
#define ROWS_OF_DOTS 3
#define NUMBERS(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "few_columns.h"
#undef FOUR_SUMS
#endif

#define LANES 4
#define WIDE 12
#define FOUR_SUMS(to, v)                                                                                               \
    for (int c = 0; c < 4; c++) (to)[c] = (v)[c][0] + (v)[c][1] + (v)[c][2] + (v)[c][3]
#define ROWS_OF_DOTS 3
#define NUMBERS(p) ((vec){(p)[0], (p)[1], (p)[2], (p)[3]})
#define NAME(name) name##_any
#define TARGET
#include "few_columns.h"

#include "call.h"

/* Both return 0, or 1 if there is no memory. Rows are divided among threads; with GNU's OpenMP these are torch's own,
 * because a process has one library of that name. */
int few_columns(const void *x, int bytes, const float *w, float *out, long rows, long depth, long columns, int threads) {
    int failed = 0;
    long each = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int t = 0; t < threads; t++) {
        long start = t * each, some = rows - start < each ? rows - start : each;
        if (some <= 0) continue;
        const char *from = (const char *)x + start * depth * (bytes ? 1 : sizeof(float));
        failed |= bytes ? CALL(few_columns_bytes, from, w, out + start * columns, some, depth, columns)
                        : CALL(few_columns_float, from, w, out + start * columns, some, depth, columns);
    }
    return failed;
}

int column_sums(const void *x, int bytes, const float *g, float *out, long rows, long depth, long columns, int threads) {
    int failed = 0;
    long each = (rows + threads - 1) / threads, size = columns * depth;
    float *others = threads > 1 ? calloc((threads - 1) * size, sizeof(float)) : NULL; /* sums of all but the first */
    if (threads > 1 && !others) return 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int t = 0; t < threads; t++) {
        long start = t * each, some = rows - start < each ? rows - start : each;
        if (some <= 0) continue;
        const char *from = (const char *)x + start * depth * (bytes ? 1 : sizeof(float));
        float *to = t ? others + (t - 1) * size : out;
        failed |= bytes ? CALL(column_sums_bytes, from, g + start * columns, to, some, depth, columns)
                        : CALL(column_sums_float, from, g + start * columns, to, some, depth, columns);
    }
    for (long i = 0; i < (threads - 1) * size; i++) out[i % size] += others[i]; /* in order: the same in every run */
    free(others);
    return failed;
}

/* The two products of folded.h, and their gradients; y and v may be NULL where nobody needs them, v must be for bytes. */
int few_columns_folded(const void *x, int bytes, const float *w, const float *factors, float *y, float *z, float *v,
                       long rows, long places, long depth, long columns, long shared, long inner, long others,
                       int threads) {
    int failed = 0;
    long each = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int t = 0; t < threads; t++) {
        long start = t * each, some = rows - start < each ? rows - start : each;
        if (some <= 0) continue;
        const char *from = (const char *)x + start * places * depth * (bytes ? 1 : sizeof(float));
        failed |= CALL(few_columns_folded, from, bytes, w, factors, y ? y + start * places * columns : y,
                       z + start * columns * others, v ? v + start * shared * others * depth : v, some, places, depth,
                       columns, shared, inner, others);
    }
    return failed;
}

/* By one thread: it takes a tenth of the time of what comes before. */
int folded_gradients(const float *y, const float *v, const float *up, float *of_w, float *of_f, long rows, long places,
                     long depth, long columns, long shared, long inner, long others) {
    return CALL(folded_gradients, y, v, up, of_w, of_f, rows, places, depth, columns, shared, inner, others);
}

/* That of spread.h. Threads divide the lines, which leaves the bits. */
int spread_gradient(const float *x, const float *up, float *of_f, long batch, long places, long depth, long lines,
                    int threads) {
    int failed = 0;
    const long each = (lines + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (long first = 0; first < lines; first += each)
        failed |= CALL(spread_gradient, x, up, of_f, batch, places, depth, lines, first,
                       lines - first < each ? lines - first : each);
    return failed;
}

/* The least depth for which column_sums, and what is in folded.h and spread.h, may be called. */
int least_depth(void) { return CALL(wide); }
