// Functions of the gates for a register of numbers; a kernel file, see widths.h. They differ from the exact ones by at most
// a few units in the last place.

// x, but not beyond the limit; NaN stays NaN: of two numbers one of which is NaN, these instructions give the second.
INLINE vec at_most(vec x, float limit) {
    const vec most = (vec){0} + limit;
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    return (vec)_mm512_min_ps((__m512)most, (__m512)x);
#elif defined(__x86_64__) && KERNEL_WIDTH == 8
    return (vec)_mm256_min_ps((__m256)most, (__m256)x);
#elif defined(__x86_64__)
    return (vec)_mm_min_ps((__m128)most, (__m128)x);
#else
    const ivec over = x > most;
    return (vec)(((ivec)most & over) | ((ivec)x & ~over));
#endif
}

// exp(x) - 1 = (exp(r) - 1) 2^n + (2^n - 1), with r at most log(2) / 2 in size; `power` gets 2^n, which is 0 below 2^-126
// and infinite above 2^127. x must lie between -88.5 and 89.
INLINE vec exp_of_rest(vec x, vec* power) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: added, it leaves a whole number in the last bits
    vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *power = (vec)(((ivec)shifted - (0x4B400000 - 127)) << 23);
    return p * (r * r) + r;
}

// a / b for b of 1 or more, within a unit in the last place: five divisions would take half of a step's time.
INLINE vec divide(vec a, vec b) {
#if defined(__x86_64__) && KERNEL_WIDTH == 16
    const __m512 d = (__m512)b, rough = _mm512_rcp14_ps(d), one = _mm512_set1_ps(1.0f);
    const __mmask16 finite = _mm512_cmp_ps_mask(d, _mm512_set1_ps(1e38f), _CMP_LT_OQ);
    const __m512 rest = _mm512_maskz_fnmadd_ps(finite, d, rough, one);
    return a * (vec)_mm512_fmadd_ps(rough, rest, rough);
#else
    return a / b;
#endif
}

INLINE vec sigmoid(vec x) {
    vec power, p = exp_of_rest(at_most(-at_most(x, 88.0f), 88.5f), &power);
    return divide((vec){0} + 1.0f, 1.0f + (p + 1.0f) * power);
}

INLINE vec tanh_of(vec x) {
    ivec sign = (ivec)x & INT32_MIN;
    vec size = at_most((vec)((ivec)x ^ sign), 40.0f), power, p = exp_of_rest(-2.0f * size, &power);
    vec less = p * power + (power - 1.0f);  // exp(-2 |x|) - 1, exact to the last bits for a small x, too
    return (vec)((ivec)divide(-less, 2.0f + less) ^ sign);
}
