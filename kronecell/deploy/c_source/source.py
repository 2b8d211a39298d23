"""The file as it grows: const arrays, the small functions that are called, and the functions of this network."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from kronecell.deploy.c_source import helpers, kernels, kernels_integers
from kronecell.errors import CheckpointError

INTEGERS = {torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.int32: "int32_t"}
MOST_BYTES = 2**28  # of all arrays: a compiler needs about ten times as much memory
A_LINE = 116  # characters


class Source:
    """Texts of one C file, in the order in which they are needed."""

    def __init__(self) -> None:
        self.arrays: list[str] = []
        self.functions: list[str] = []
        self.num_bytes = 0  # of the arrays
        self._helpers: dict[str, str] = {}
        self._names: set[str] = set()

    def text(self) -> str:
        """Everything but the head of the file."""
        return "\n".join([*self.arrays, *self._helpers.values(), *self.functions])

    # Arrays ------------------------------------------------------------------------------------------------------

    def floats(self, name: str, values: Tensor) -> str:
        """A const array of float32; returns its name."""
        return self._array(name, "float", values.reshape(-1).to(torch.float32), 4)

    def integers(self, name: str, values: Tensor) -> str:
        """A const array of integers."""
        return self._array(name, INTEGERS[values.dtype], values.reshape(-1), values.element_size())

    def _array(self, name: str, kind: str, values: Tensor, each: int) -> str:
        self.num_bytes += each * values.numel()
        if self.num_bytes > MOST_BYTES:
            raise CheckpointError(
                f"the weights take over {MOST_BYTES:,} bytes, too many for a C file: compress or quantize the module"
            )
        if kind == "float" and not bool(values.isfinite().all()):
            raise CheckpointError(f"{name} has values that float32 does not hold; nothing was written")
        name = self.fresh(name)
        if kind == "float":
            numbers = [_float(value) for value in values.tolist()]
        else:
            numbers = [str(value) for value in values.tolist()]
        self.arrays.append(f"static const {kind} {name}[{max(1, len(numbers))}] = {{\n{_wrapped(numbers)}\n}};\n")
        return name

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        plain = re.sub(r"\W+", "_", name)
        found, number = plain, 2
        while found in self._names:
            found, number = f"{plain}_{number}", number + 1
        self._names.add(found)
        return found

    # Helpers -----------------------------------------------------------------------------------------------------

    def zero(self) -> str:
        """zero(y, n)"""
        return self._helper("zero", helpers.ZERO)

    def copy(self, of_bytes: bool = False) -> str:
        """copy(y, x, n)"""
        end = "_bytes" if of_bytes else ""
        return self._helper(f"copy{end}", helpers.COPY.format(end=end, X=_type(of_bytes)))

    def rows(self, v_bytes: bool, m_bytes: bool = False) -> str:
        """rows(y, v, step, m, skip, count, width)"""
        self._helper("vectors", kernels.LANES)
        end = "_bytes" if v_bytes else "_of_bytes" if m_bytes else ""
        return self._helper(f"rows{end}", kernels.ROWS.format(end=end, V=_type(v_bytes), M=_type(m_bytes)))

    def tiles(self, v_bytes: bool, m_bytes: bool = False) -> str:
        """tiles(y, next, v, row, step, m, skip, count, width, many)"""
        end = self.rows(v_bytes, m_bytes).removeprefix("rows")
        return self._helper(f"tiles{end}", kernels.tiles(end, _type(v_bytes), _type(m_bytes)))

    def dots(self, of_bytes: bool) -> str:
        """dots(y, next, apart, x, row, m, skip, count, width, many)"""
        self._helper("vectors", kernels.LANES)
        end = "_bytes" if of_bytes else ""
        for name, text in (("dot", kernels.DOT), ("dots", kernels.DOTS)):
            self._helper(f"{name}{end}", text.format(end=end, X=_type(of_bytes)))
        return f"dots{end}"

    def panels(self, of_bytes: bool) -> str:
        """panels(y, x, w, inputs, outputs)"""
        self.rows(of_bytes)
        end = "_bytes" if of_bytes else ""
        text = kernels.PANELS.format(end=end, rows=end, X=_type(of_bytes), chunk=kernels.CHUNK)
        return self._helper(f"panels{end}", text)

    def unpack(self, bits: int) -> str:
        """unpack_8(out, w, scales, start, count, group)"""
        self._integers(bits)
        self._helper("scaled", kernels_integers.SCALED)
        text = kernels_integers.UNPACK.format(
            bits=bits, W=kernels_integers.stored_type(bits), block=kernels_integers.block(bits)
        )
        return self._helper(f"unpack_{bits}", text)

    def integer_panels(self, bits: int, of_bytes: bool) -> str:
        """panels_8(y, x, w, scales, inputs, outputs, group)"""
        self._integers(bits)
        block, end = kernels_integers.block(bits), "_bytes" if of_bytes else ""
        text = kernels_integers.INTEGER_PANELS.format(
            bits=bits, end=end, X=_type(of_bytes), W=kernels_integers.stored_type(bits), block=block,
            chunk=kernels.CHUNK, full_bytes=block * bits // 8, bytes="width" if bits == 8 else f"wide / 8 * {bits}",
        )  # fmt: skip
        return self._helper(f"panels_{bits}{end}", text)

    def sparse(self, gaps: torch.dtype, of_bytes: bool) -> str:
        """sparse(y, x, values, gaps, count, inputs, block)"""
        end = f"_{8 * gaps.itemsize}" + ("_bytes" if of_bytes else "")
        return self._helper(f"sparse{end}", kernels.SPARSE.format(end=end, X=_type(of_bytes), G=INTEGERS[gaps]))

    def sparse_integers(self, bits: int, gaps: torch.dtype, of_bytes: bool) -> str:
        """sparse_8(y, x, w, scales, group, gaps, count, inputs)"""
        self._integers(bits)
        self._helper("scaled", kernels_integers.SCALED)
        end = f"_{8 * gaps.itemsize}" + ("_bytes" if of_bytes else "")
        text = kernels_integers.SPARSE_INTEGERS.format(
            bits=bits,
            end=end,
            X=_type(of_bytes),
            W=kernels_integers.stored_type(bits),
            G=INTEGERS[gaps],
            block=kernels_integers.block(bits),
        )
        return self._helper(f"sparse_{bits}{end}", text)

    def _integers(self, bits: int) -> None:
        self._helper(f"integers_{bits}", kernels_integers.integers(bits))

    def activation(self, name: str, text: str) -> str:
        """A function that needs sigmoid and tanh."""
        self.exponential()
        self._helper("sigmoid", helpers.SIGMOID)
        return self._helper(name, text)

    def exponential(self) -> str:
        """exponential(x)"""
        return self._helper("exponential", helpers.ACTIVATIONS)

    def other(self, name: str, text: str) -> str:
        """Any other function of helpers.py."""
        return self._helper(name, text)

    def _helper(self, name: str, text: str) -> str:
        self._names.add(name)
        self._helpers.setdefault(name, text)
        return name


def _type(of_bytes: bool) -> str:
    return "uint8_t" if of_bytes else "float"


def _float(value: float) -> str:
    text = f"{value:.9g}"  # nine digits name a float32
    return text + ("f" if "." in text or "e" in text else ".0f")


def _wrapped(numbers: list[str]) -> str:
    lines, line = [], "   "
    for number in numbers or ["0"]:
        if len(line) + len(number) + 2 > A_LINE:
            lines.append(line)
            line = "   "
        line += f" {number},"
    return "\n".join([*lines, line])
