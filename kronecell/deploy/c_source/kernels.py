"""Small products of floats that an exported file calls; those of integers are in kernels_integers.py.

They are loops that a compiler turns into vectors without help: arrays of sums that fit in registers, and inner loops of
a constant length.

`X` and `V` are what x holds: float, or uint8_t with the ending _bytes.
"""

from __future__ import annotations

PANEL = 32  # outputs of a dense matrix of floats whose weights lie together
CHUNK = 512  # products that are added up by themselves: shorter sums are more exact

LANES = """\
#if defined(__SSE2__) || defined(__ARM_NEON) || defined(__wasm_simd128__) || defined(__riscv_vector)
#define VECTORS 1
#else
#define VECTORS 0
#endif
"""
ROWS = """\
/* y[j] += v[0] m[0][j] + v[1] m[1][j] + ...; rows of m start every `skip`, numbers of v every `step` */
static void rows{end}(float *restrict y, const {V} *restrict v, size_t step, const {M} *restrict m, size_t skip,
                      size_t count, size_t width)
{{
    size_t j = 0;
#if VECTORS
    for (const size_t whole = width - width % 32; j < whole; j += 32) {{
        float sum[32] = {{0}};
        for (size_t s = 0; s < count; s++) {{
            const float by = (float)v[s * step];
            for (size_t k = 0; k < 32; k++)
                sum[k] += by * (float)m[s * skip + j + k];
        }}
        for (size_t k = 0; k < 32; k++)
            y[j + k] += sum[k];
    }}
    for (const size_t whole = width - width % 8; j < whole; j += 8) {{
        float sum[8] = {{0}};
        for (size_t s = 0; s < count; s++) {{
            const float by = (float)v[s * step];
            for (size_t k = 0; k < 8; k++)
                sum[k] += by * (float)m[s * skip + j + k];
        }}
        for (size_t k = 0; k < 8; k++)
            y[j + k] += sum[k];
    }}
#endif
    for (const size_t whole = width - width % 4; j < whole; j += 4) {{
        float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
        for (size_t s = 0; s < count; s++) {{
            const float by = (float)v[s * step];
            const {M} *row = m + s * skip + j;
            a += by * (float)row[0];
            b += by * (float)row[1];
            c += by * (float)row[2];
            d += by * (float)row[3];
        }}
        y[j] += a;
        y[j + 1] += b;
        y[j + 2] += c;
        y[j + 3] += d;
    }}
    for (; j < width; j++) {{
        float sum = 0.0f;
        for (size_t s = 0; s < count; s++)
            sum += (float)v[s * step] * (float)m[s * skip + j];
        y[j] += sum;
    }}
}}
"""


def tiles(end: str, v: str, m: str) -> str:
    """`rows` for several rows of y, four at a time: each waits for itself only, and a row of m is read once for all."""
    widths = "".join(
        f"""\
        for (const size_t whole = j + (width - j) / {width} * {width}; j < whole; j += {width}) {{
            float a[{width}] = {{0}}, b[{width}] = {{0}}, c[{width}] = {{0}}, d[{width}] = {{0}};
            for (size_t s = 0; s < count; s++) {{
                const {m} *row = m + s * skip + j;
                const float p = (float)v[s * step], q = (float)v1[s * step];
                const float f = (float)v2[s * step], g = (float)v3[s * step];
                for (size_t k = 0; k < {width}; k++) {{
                    a[k] += p * (float)row[k];
                    b[k] += q * (float)row[k];
                    c[k] += f * (float)row[k];
                    d[k] += g * (float)row[k];
                }}
            }}
            for (size_t k = 0; k < {width}; k++) {{
                y[j + k] += a[k];
                y[next + j + k] += b[k];
                y[2 * next + j + k] += c[k];
                y[3 * next + j + k] += d[k];
            }}
        }}
"""
        for width in (16, 8)
    )
    return f"""\
/* rows, for `many` rows of y that start every `next`, and as many of v every `row` */
static void tiles{end}(float *restrict y, size_t next, const {v} *restrict v, size_t row, size_t step,
                       const {m} *restrict m, size_t skip, size_t count, size_t width, size_t many)
{{
#if VECTORS
    for (; many >= 4 && width >= 8; many -= 4) {{
        const {v} *v1 = v + row, *v2 = v1 + row, *v3 = v2 + row;
        size_t j = 0;
{widths}\
        for (size_t i = 0; i < 4 && j < width; i++)
            rows{end}(y + i * next + j, v + i * row, step, m + j, skip, count, width - j);
        y += 4 * next;
        v += 4 * row;
    }}
#endif
    for (; many > 0; many--) {{
        rows{end}(y, v, step, m, skip, count, width);
        y += next;
        v += row;
    }}
}}
"""


DOT = """\
/* x[0] m[0] + x[1] m[1] + ... */
static float dot{end}(const {X} *restrict x, const float *restrict m, size_t count)
{{
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
    size_t s = 0;
#if VECTORS
    float sum[16] = {{0}};
    for (const size_t whole = count - count % 16; s < whole; s += 16)
        for (size_t k = 0; k < 16; k++)
            sum[k] += (float)x[s + k] * m[s + k];
    for (size_t k = 0; k < 16; k += 4) {{
        a += sum[k];
        b += sum[k + 1];
        c += sum[k + 2];
        d += sum[k + 3];
    }}
#endif
    for (const size_t whole = count - count % 4; s < whole; s += 4) {{
        a += (float)x[s] * m[s];
        b += (float)x[s + 1] * m[s + 1];
        c += (float)x[s + 2] * m[s + 2];
        d += (float)x[s + 3] * m[s + 3];
    }}
    for (; s < count; s++)
        a += (float)x[s] * m[s];
    return (a + b) + (c + d);
}}
"""
DOTS = """\
/* y[j] += x[0] m[j][0] + x[1] m[j][1] + ...; numbers of y are `apart`, rows of m start every `skip`. The same for
   `many` rows of y that start every `next`, and as many of x every `row`. */
static void dots{end}(float *restrict y, size_t next, size_t apart, const {X} *restrict x, size_t row,
                      const float *restrict m, size_t skip, size_t count, size_t width, size_t many)
{{
    for (; many > 0; many--) {{
        size_t j = 0;
        for (const size_t whole = width - width % 4; j < whole; j += 4) {{
            const float *m0 = m + j * skip, *m1 = m0 + skip, *m2 = m1 + skip, *m3 = m2 + skip;
            float p = 0.0f, q = 0.0f, f = 0.0f, g = 0.0f;
            size_t s = 0;
#if VECTORS
            float a[16] = {{0}}, b[16] = {{0}}, c[16] = {{0}}, d[16] = {{0}};
            for (const size_t whole = count - count % 16; s < whole; s += 16)
                for (size_t k = 0; k < 16; k++) {{
                    const float by = (float)x[s + k];
                    a[k] += by * m0[s + k];
                    b[k] += by * m1[s + k];
                    c[k] += by * m2[s + k];
                    d[k] += by * m3[s + k];
                }}
            for (size_t k = 0; k < 8; k++) {{
                a[k] += a[k + 8];
                b[k] += b[k + 8];
                c[k] += c[k + 8];
                d[k] += d[k + 8];
            }}
            for (size_t k = 0; k < 8; k++) {{
                p += a[k];
                q += b[k];
                f += c[k];
                g += d[k];
            }}
#endif
            for (; s < count; s++) {{
                const float by = (float)x[s];
                p += by * m0[s];
                q += by * m1[s];
                f += by * m2[s];
                g += by * m3[s];
            }}
            y[j * apart] += p;
            y[(j + 1) * apart] += q;
            y[(j + 2) * apart] += f;
            y[(j + 3) * apart] += g;
        }}
        for (; j < width; j++)
            y[j * apart] += dot{end}(x, m + j * skip, count);
        y += next;
        x += row;
    }}
}}
"""
PANELS = """\
/* y += W x; the weights of 32 outputs lie together, for one input after the other */
static void panels{end}(float *y, const {X} *x, const float *w, size_t inputs, size_t outputs)
{{
    for (size_t o = 0; o < outputs; o += 32) {{
        const size_t width = outputs - o < 32 ? outputs - o : 32;
        for (size_t s = 0; s < inputs; s += {chunk}) {{
            const size_t count = inputs - s < {chunk} ? inputs - s : {chunk};
            rows{rows}(y + o, x + s, 1, w, width, count, width);
            w += count * width;
        }}
    }}
}}
"""
SPARSE = """\
/* y += S x for `count` entries in blocks; a gap is how far a block is from the one before, output by output */
static void sparse{end}(float *y, const {X} *x, const float *values, const {G} *gaps, size_t count, size_t inputs,
                        size_t block)
{{
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {{
        at += (size_t)gaps[i] - (i == 0);
        for (; at >= inputs; at -= inputs)
            y += block;
        for (size_t k = 0; k < block; k++)
            y[k] += values[i * block + k] * (float)x[at];
    }}
}}
"""
