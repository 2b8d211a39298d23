"""Weights of integers in an exported file: how they lie in its arrays, and the functions that make floats of them.

A loop of at most 16 rounds is unrolled by gcc before it looks for vectors, and often not vectorised then; so blocks of
integers are longer than those of the operators, and made floats in loops of 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.ops.quantized import planes

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
static void integers_8(float *restrict out, const int8_t *restrict p, size_t width, size_t count)
{
    (void)width;
    for (size_t j = 0; j < count; j++)
        out[j] = (float)p[j];
}
"""


def block(bits: int) -> int:
    """Integers that are packed together: with planes of 32 bytes, or of 16 where a plane is of one bit."""
    return {8: 32, 4: 64}.get(bits, 128)


def packed(integers: Tensor, bits: int) -> Tensor:
    """int8 numbers (rows, columns) in blocks of planes, as kronecell/ops/quantized.py has them, but longer ones."""
    if bits == 8:
        return integers.contiguous()
    numbers = F.pad(integers.to(torch.int32) & (2**bits - 1), (0, -integers.shape[1] % 8))
    parts: list[Tensor] = [integers.new_empty(len(integers), 0, dtype=torch.int32)]
    for some in numbers.split(block(bits), 1):
        low = 0
        for size in planes(bits):
            plane = ((some >> low) & (2**size - 1)).reshape(len(some), 8 // size, -1)
            parts.append((plane << torch.arange(0, 8, size, dtype=torch.int32)[:, None]).sum(1))
            low += size
    return torch.cat(parts, 1).to(torch.uint8)


def integers(bits: int) -> str:
    """A block of packed integers as floats: planes of 4, 2 and 1 bits."""
    if bits == 8:
        return INTEGERS_8
    full, half = block(bits), 2 ** (bits - 1)
    text = [
        f"/* the first numbers of a block of `width` packed integers of {bits} bits; most have {full} */",
        f"static void integers_{bits}(float *restrict out, const uint8_t *restrict p, size_t width, size_t count)",
        "{",
        f"    uint8_t n[{full}] = {{0}};",
    ]
    if min(planes(bits)) > 1:
        text += [f"    if (count == {full}) {{", *_full_block(bits), "        return;", "    }"]
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
    text += [
        "    for (size_t j = 0; j < count; j++)",
        f"        out[j] = (float)((n[j] ^ {half}) - {half});",
        "}",
        "",
    ]
    return "\n".join(text)


def _full_block(bits: int) -> list[str]:
    """The same without steps between, in loops of 32."""
    text, full, half = [], block(bits), 2 ** (bits - 1)
    for start in range(0, full, 32):
        parts, low = [], 0
        for size in planes(bits):
            wide = full * size // 8  # bytes of the plane
            at, shift = full // 8 * low + start % wide, start // wide * size
            part = f"p[i{f' + {at}' if at else ''}]{f' >> {shift}' if shift else ''} & {2**size - 1}"
            parts.append(f"({part}) << {low}" if low else f"({part})")
            low += size
        text.append("        for (size_t i = 0; i < 32; i++)")
        number = " | ".join(parts)
        text.append(f"            out[i{f' + {start}' if start else ''}] = (float)((({number}) ^ {half}) - {half});")
    return text


def stored_type(bits: int) -> str:
    """What integers are stored in."""
    return "int8_t" if bits == 8 else "uint8_t"


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
INTEGER_PANELS = """\
/* y += W x for W of integers; those of {block} outputs lie together, for one input after the other, and so do their
   scales, for one group of inputs after the other (0: for all) */
static void panels_{bits}{end}(float *restrict y, const {X} *restrict x, const {W} *restrict w,
                               const float *restrict scales, size_t inputs, size_t outputs, size_t group)
{{
    const size_t most = group ? group : {chunk};
    for (size_t o = 0; o < outputs; o += {block}) {{
        const size_t width = outputs - o < {block} ? outputs - o : {block}, wide = (width + 7) / 8 * 8;
        for (size_t s = 0, end; s < inputs; s = end) {{
            float sum[{block}] = {{0}}, some[{block}];
            end = inputs - s < most ? inputs : s + most;
            if (width == {block})
                for (; s < end; s++, w += {full_bytes}) {{
                    integers_{bits}(some, w, {block}, {block});
                    for (size_t k = 0; k < {block}; k++)
                        sum[k] += (float)x[s] * some[k];
                }}
            for (; s < end; s++, w += {bytes}) {{
                integers_{bits}(some, w, wide, width);
                for (size_t k = 0; k < width; k++)
                    sum[k] += (float)x[s] * some[k];
            }}
            for (size_t k = 0; k < width; k++)
                y[o + k] += scales[k] * sum[k];
            scales += group ? width : 0;
        }}
        scales += group ? 0 : width;
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
