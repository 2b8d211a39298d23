#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* Four by four numbers are turned over. */
static inline __attribute__((always_inline)) void turn(const float *from, long stride, float *to, long to_stride) {
#if defined(__x86_64__)
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride);
    __m128 c = _mm_loadu_ps(from + 2 * stride), d = _mm_loadu_ps(from + 3 * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a), _mm_storeu_ps(to + to_stride, b);
    _mm_storeu_ps(to + 2 * to_stride, c), _mm_storeu_ps(to + 3 * to_stride, d);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[i * to_stride + j] = from[j * stride + i];
#endif
}
