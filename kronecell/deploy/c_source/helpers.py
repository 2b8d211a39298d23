"""The few small functions that an exported file consists of beside its loops; only those that it calls are written.

`@` is the name of the export. `X` is what x holds: float, or uint8_t with the ending _bytes.
"""

from __future__ import annotations

from kronecell.ops.quantized import BLOCK, planes

PANEL = 32  # outputs of a dense matrix whose weights lie together

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
# Sums stay in registers: the compiler unrolls the loops over a constant number of them.
LANES = """\
#if defined(__SSE2__) || defined(__ARM_NEON) || defined(__wasm_simd128__) || defined(__riscv_vector)
#define VECTORS 1
#else
#define VECTORS 0
#endif
"""
GEMV = """\
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
DOT = """\
/* v[0] m[0] + v[1] m[1] + ...; numbers of v are `step` apart, those of m `skip` */
static float dot{end}(const {V} *v, size_t step, const {M} *m, size_t skip, size_t count)
{{
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
    size_t s = 0;
#if VECTORS
    float sum[16] = {{0}};
    if (step == 1 && skip == 1) {{
        for (const size_t whole = count - count % 16; s < whole; s += 16)
            for (size_t k = 0; k < 16; k++)
                sum[k] += (float)v[s + k] * (float)m[s + k];
        for (size_t k = 0; k < 16; k += 4) {{
            a += sum[k];
            b += sum[k + 1];
            c += sum[k + 2];
            d += sum[k + 3];
        }}
    }}
#endif
    for (const size_t whole = count - count % 4; s < whole; s += 4) {{
        a += (float)v[s * step] * (float)m[s * skip];
        b += (float)v[(s + 1) * step] * (float)m[(s + 1) * skip];
        c += (float)v[(s + 2) * step] * (float)m[(s + 2) * skip];
        d += (float)v[(s + 3) * step] * (float)m[(s + 3) * skip];
    }}
    for (; s < count; s++)
        a += (float)v[s * step] * (float)m[s * skip];
    return (a + b) + (c + d);
}}
"""
PANELS = """\
/* y += W x; the weights of 32 outputs lie together, for one input after the other */
static void panels{end}(float *y, const {X} *x, const float *w, size_t inputs, size_t outputs)
{{
    for (size_t o = 0; o < outputs; o += 32) {{
        const size_t width = outputs - o < 32 ? outputs - o : 32;
        rows{rows}(y + o, x, 1, w + o * inputs, width, inputs, width);
    }}
}}
"""
SCALED = """\
/* numbers of a row from `first` on, each times the scale of its group (0: one for all) */
static void scaled(float *out, const float *scales, size_t first, size_t count, size_t group)
{
    size_t j = 0;
    while (j < count) {
        const size_t of = group ? (first + j) / group : 0;
        const size_t end = group && (of + 1) * group - first < count ? (of + 1) * group - first : count;
        for (; j < end; j++)
            out[j] *= scales[of];
    }
}
"""
INTEGERS_8 = """\
/* a block of bytes as floats */
static void integers_8(float *out, const int8_t *p, size_t width, size_t count)
{
    (void)width;
    for (size_t j = 0; j < count; j++)
        out[j] = (float)p[j];
}
"""


def integers(bits: int) -> str:
    """A block of packed integers: planes of 4, 2 and 1 bits; see kronecell/ops/quantized.py."""
    if bits == 8:
        return INTEGERS_8
    text = [
        f"/* the first numbers of a block of `width` packed integers of {bits} bits */",
        f"static void integers_{bits}(float *out, const uint8_t *p, size_t width, size_t count)",
        "{",
        f"    uint8_t n[{BLOCK}] = {{0}};",
    ]
    low = 0
    for size in planes(bits):
        each, mask = 8 // size, 2**size - 1
        start = f"width / 8 * {low} + i" if low else "i"
        text.append(f"    for (size_t i = 0; i < width / {each}; i++) {{")
        for part in range(each):
            place = f"i + {part} * (width / {each})" if part > 1 else f"i + width / {each}" if part else "i"
            value = f"(p[{start}] >> {part * size} & {mask}) << {low}"
            text.append(f"        n[{place}] {'|=' if low else '='} (uint8_t)({value});")
        text.append("    }")
        low += size
    half = 2 ** (bits - 1)
    text += [
        "    for (size_t j = 0; j < count; j++)",
        f"        out[j] = (float)((n[j] ^ {half}) - {half});",
        "}",
        "",
    ]
    return "\n".join(text)


UNPACK = """\
/* `count` weights of a row of integers; their scales are those of the columns from `start` on */
static void unpack_{bits}(float *out, const {W} *w, const float *scales, size_t start, size_t count, size_t group)
{{
    for (size_t j = 0; j < count; j += {block}) {{
        const size_t some = count - j < {block} ? count - j : {block};
        integers_{bits}(out + j, w + j / 8 * {bits}, (some + 7) / 8 * 8, some);
    }}
    scaled(out, scales, start, count, group);
}}
"""


def block(bits: int, x: str, end: str) -> str:
    """A full block times x, added to 32 sums: none waits for the one before, and no number is written to memory."""
    text = [
        "#if VECTORS",
        f"/* a block of {BLOCK} integers times x, added to as many sums */",
        f"static void block_{bits}{end}(float *restrict sum, const {x} *restrict x,",
        f"                              const {stored_type(bits)} *restrict p)",
        "{",
    ]
    together = BLOCK if bits == 8 else 4 * min(planes(bits))  # numbers whose bits lie side by side in every plane
    half = 2 ** (bits - 1)
    for start in range(0, BLOCK, together):
        parts, low = [], 0
        for size in planes(bits):
            at, shift = start % (4 * size) + 4 * low, start // (4 * size) * size
            part = f"(p[i + {at}] >> {shift} & {2**size - 1})"
            parts.append(f"{part} << {low}" if low else part)
            low += size
        number = "p[i]" if bits == 8 else f"(({' | '.join(parts)}) ^ {half}) - {half}"
        place = f"i + {start}" if start else "i"
        text.append(f"    for (size_t i = 0; i < {together}; i++)")
        text.append(f"        sum[{place}] += (float)({number}) * (float)x[{place}];")
    return "\n".join([*text, "}", "#endif", ""]).replace("p[i + 0]", "p[i]").replace(" >> 0 ", " ")


def stored_type(bits: int) -> str:
    """What integers are stored in."""
    return "int8_t" if bits == 8 else "uint8_t"


QUANTIZED = """\
/* y += W x for W of integers with a scale for each row, or for each group of its columns */
static void quantized_{bits}{end}(float *restrict y, const {X} *restrict x, const {W} *restrict w,
                                  const float *restrict scales, size_t outputs, size_t columns, size_t group)
{{
    const size_t groups = group ? (columns + group - 1) / group : 1;
    for (size_t o = 0; o < outputs; o++) {{
        float total = 0.0f, some[{block}];
        size_t j = 0;
#if VECTORS
        while (group % {block} == 0 && j + {block} <= columns) {{
            const size_t next = group && j + group < columns ? j + group : columns;
            float sum[{block}] = {{0}}, part = 0.0f;
            const float by = group ? scales[j / group] : 1.0f;
            for (; j + {block} <= next; j += {block})
                block_{bits}{end}(sum, x + j, w + j / 8 * {bits});
            for (size_t k = 0; k < {block}; k++)
                part += sum[k];
            total += by * part;
        }}
#endif
        for (; j < columns; j += {block}) {{
            const size_t count = columns - j < {block} ? columns - j : {block};
            integers_{bits}(some, w + j / 8 * {bits}, (count + 7) / 8 * 8, count);
            if (group)
                scaled(some, scales, j, count, group);
            total += dot{dot}(x + j, 1, some, 1, count);
        }}
        y[o] += group ? total : total * scales[0];
        w += {row_bytes};
        scales += groups;
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
SPARSE_INTEGERS = """\
/* y += S x for `count` entries of integers; a gap is how far an entry is from the one before, output by output */
static void sparse_{bits}{end}(float *y, const {X} *x, const {W} *w, const float *scales, size_t group,
                               const {G} *gaps, size_t count, size_t inputs)
{{
    size_t at = 0;
    float some[{block}];
    for (size_t i = 0; i < count; i++) {{
        const size_t j = i % {block}, left = count - i < {block} ? count - i : {block};
        if (j == 0) {{
            integers_{bits}(some, w + i / 8 * {bits}, (left + 7) / 8 * 8, left);
            scaled(some, scales, i, left, group);
        }}
        at += (size_t)gaps[i] - (i == 0);
        for (; at >= inputs; at -= inputs)
            y++;
        *y += some[j] * (float)x[at];
    }}
}}
"""
ACTIVATIONS = """\
/* e^x, within 2 units of the last place; what is too large or small becomes the largest or smallest of it */
static float exponential(float x)
{
    union {
        float f;
        int32_t i;
    } power;
    const float low = x > -87.0f ? x : -87.0f;
    const float y = low < 88.0f ? low : 88.0f;
    const int32_t n = (int32_t)(y * 1.44269504f + (y < 0.0f ? -0.5f : 0.5f));
    const float r = (y - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    power.i = (n + 127) * 8388608;
    p = (p * r * r + r + 1.0f) * power.f;
    return x == x ? p : x; /* not a number stays so */
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

/* mean of a frame of bytes, and 1 / sqrt(variance + 1); the sums are exact */
static void moments(const uint8_t *x, size_t n, float *mean, float *rate)
{
    uint64_t sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i];
        squares += (uint32_t)x[i] * x[i];
    }
    *mean = (float)((double)sum / (double)n);
    *rate = 1.0f / square_root((float)((double)(n * squares - sum * sum) / ((double)n * (double)n)) + 1.0f);
}
"""
