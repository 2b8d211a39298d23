"""Small functions of an exported file that are no products: copies, activations, normalising.

`X` is what x holds: float, or uint8_t with the ending _bytes.
"""

from __future__ import annotations

ZERO = """\
static void zero(float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = 0.0f;
}
"""
COPY = """\
static void copy{end}(float *y, const {X} *x, size_t n)
{{
    for (size_t i = 0; i < n; i++)
        y[i] = (float)x[i];
}}
"""
ACTIVATIONS = """\
/* e^x, within 2 units of the last place, of |x| up to 87, as which larger ones count. Choices are made of integers:
   gcc makes no vectors of those between floats. */
static float exponential(float x)
{
    union {
        float f;
        int32_t i;
    } y, power;
    y.f = x;
    const int32_t size = y.i & 0x7fffffff;
    y.i = y.i - size + (size < 0x42ae0000 ? size : 0x42ae0000);
    const int32_t n = (int32_t)(y.f * 1.44269504f + 127.5f);
    const float whole = (float)(n - 127);
    const float r = (y.f - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    power.i = n * 8388608;
    power.f *= p * r * r + r + 1.0f;
    power.i |= size > 0x7f800000 ? 0x7fc00000 : 0; /* not a number stays so */
    return power.f;
}
"""
SIGMOID = """\
static float sigmoid(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

static float hyperbolic(float x)
{
    return 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
}
"""
LSTM = """\
/* gates i f g o, complete -> the next c, and h */
static void lstm(const float *restrict gates, float *restrict h, float *restrict c, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        const float cell = sigmoid(gates[n + k]) * c[k] + sigmoid(gates[k]) * hyperbolic(gates[2 * n + k]);
        c[k] = cell;
        h[k] = sigmoid(gates[3 * n + k]) * hyperbolic(cell);
    }
}
"""
GRU = """\
/* gates r z n: what x gives, and what h gives -> the next h */
static void gru(const float *restrict x, const float *restrict u, float *restrict h, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        const float r = sigmoid(x[k] + u[k]);
        const float z = sigmoid(x[n + k] + u[n + k]);
        const float fresh = hyperbolic(x[2 * n + k] + r * u[2 * n + k]);
        h[k] = fresh + z * (h[k] - fresh);
    }
}
"""
AFFINE = """\
/* y = scale y + shift ones + bias */
static void affine(float *restrict y, const float *restrict bias, const float *restrict ones, float scale, float shift,
                   size_t n)
{
    for (size_t k = 0; k < n; k++)
        y[k] = scale * y[k] + (shift * ones[k] + bias[k]);
}
"""
SCALE = """\
/* y = scale y + bias */
static void scale_and_add(float *restrict y, const float *restrict bias, float scale, size_t n)
{
    for (size_t k = 0; k < n; k++)
        y[k] = scale * y[k] + bias[k];
}
"""
MOMENTS = """\
static float square_root(float x)
{
    float root = x > 1.0f ? x : 1.0f;
    for (int i = 0; i < 40; i++) {
        const float next = 0.5f * (root + x / root);
        if (!(next < root))
            break;
        root = next;
    }
    return root;
}

/* mean of so many bytes, and 1 / sqrt(variance + 1); the sums are exact */
static void moments(const uint8_t *x, size_t n, float *mean, float *rate)
{
    uint64_t sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i];
        squares += (uint32_t)x[i] * x[i];
    }
    const double middle = (double)sum / (double)n;
    *mean = (float)middle;
    *rate = 1.0f / square_root((float)((double)squares / (double)n - middle * middle) + 1.0f);
}
"""
