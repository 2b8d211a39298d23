"""y += W x as a C function: a dense matrix, one of integers, or a tensor network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kronecell.deploy.c_source.chains import Chain, Operand, chains_of
from kronecell.deploy.c_source.kernels import PANEL
from kronecell.deploy.c_source.kernels_integers import block, packed
from kronecell.deploy.c_source.memory import place
from kronecell.deploy.c_source.nests import Layout, Nest, contiguous, nests_of
from kronecell.deploy.c_source.parts import Matrix
from kronecell.deploy.c_source.source import Source
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedFactor, QuantizedLinear
from kronecell.nn.sparse import SparseMatrix
from kronecell.ops.quantized import unpack

SMALL = {"balance": 2**10, "size": 2**7, "speed": 2**15}  # floats of scratch that are not worth a loop


@dataclass(frozen=True)
class Product:
    """A C function NAME(x, y, t) that adds W x to y and uses t, and what it costs."""

    name: str
    text: str  # how it runs, for people
    scratch: int  # floats of t
    macs: int
    num_bytes: int  # of its arrays


@dataclass(frozen=True)
class Memory:
    """Loops around the steps of a chain, and where everything lies in t."""

    loops: tuple[str, ...]
    streamed: tuple[bool, ...]  # operands of which a row at a time is made floats
    behind: tuple[int, ...]  # where the result of a step lies; the last is y
    unpacked: tuple[int, ...]  # where the floats of an operand of integers lie
    total: int


def product(source: Source, matrix: Matrix, of_bytes: bool, prefer: str) -> Product:
    """Write the function; `prefer` is "size", "speed" or "balance", the smallest product of bytes and multiply-adds."""
    before = source.num_bytes
    if isinstance(matrix.weight, TensorLinear):
        chain, memory = plan_network(matrix.weight, prefer)
        padded = matrix.inputs + matrix.padding if matrix.padding else 0
        name, body = _network(source, matrix, chain, memory, of_bytes, padded)
        text = f"{matrix.weight.format}, order {chain.order}"
        scratch, macs = padded + memory.total, chain.macs
        if matrix.weight.sparse is not None:
            body.append(
                _sparse(source, matrix.name, matrix.weight.sparse, "t" if padded else "x", of_bytes and not padded)
            )
            macs += matrix.weight.sparse.size.num_values
    elif isinstance(matrix.weight, QuantizedLinear):
        name, body = _quantized(source, matrix, matrix.weight, of_bytes)
        text, scratch, macs = f"dense, {matrix.weight.bits_text()}", 0, matrix.inputs * matrix.outputs
    else:
        name, body = _dense(source, matrix, matrix.weight, of_bytes)
        text, scratch, macs = "dense", 0, matrix.inputs * matrix.outputs
    kind = "uint8_t" if of_bytes else "float"
    unused = [] if scratch else ["    (void)t;"]
    lines = [f"static void {name}(const {kind} *x, float *y, float *t)", "{", *unused, *body, "}", ""]
    source.functions.append("\n".join([f"/* y += {matrix.name} x: {text}, {macs} multiply-adds */", *lines]))
    return Product(name, text, scratch, macs, source.num_bytes - before)


def _dense(source: Source, matrix: Matrix, weight: Tensor, of_bytes: bool) -> tuple[str, list[str]]:
    panels = [panel.t().reshape(-1) for panel in weight.split(PANEL)]
    array = source.floats(f"{matrix.name}_weights", torch.cat(panels))
    function = source.panels(of_bytes)
    return source.fresh(matrix.name), [f"    {function}(y, x, {array}, {matrix.inputs}, {matrix.outputs});"]


def _quantized(source: Source, matrix: Matrix, layer: QuantizedLinear, of_bytes: bool) -> tuple[str, list[str]]:
    integers, wide = unpack(layer.integers, layer.bits, layer.columns), block(layer.bits)
    panels = [packed(panel.t(), layer.bits).reshape(-1) for panel in integers.split(wide)]
    array = source.integers(f"{matrix.name}_integers", torch.cat(panels))
    scales = torch.cat([some.t().reshape(-1) for some in layer.scales.split(wide)])
    of_groups = source.floats(f"{matrix.name}_scales", scales)
    function = source.integer_panels(layer.bits, of_bytes)
    sizes = f"{layer.columns}, {layer.rows}, {layer.group}"
    return source.fresh(matrix.name), [f"    {function}(y, x, {array}, {of_groups}, {sizes});"]


def _sparse(source: Source, name: str, sparse: SparseMatrix, x: str, of_bytes: bool) -> str:
    """The sparse part of a doped matrix, after its structure."""
    size, gaps = sparse.size, source.integers(f"{name}_gaps", sparse.gaps)
    factor = dict(getattr(sparse, "quantized", None) or {}).get("entries")
    if factor is not None and factor.rows == 1 and size.block == 1:
        stored = packed(unpack(factor.integers, factor.bits, factor.columns), factor.bits)
        array, scales = source.integers(f"{name}_S", stored), source.floats(f"{name}_S_scales", factor.scales)
        function = source.sparse_integers(factor.bits, sparse.gaps.dtype, of_bytes)
        return f"    {function}(y, {x}, {array}, {scales}, {factor.group}, {gaps}, {size.count}, {size.inputs});"
    values = source.floats(f"{name}_S", sparse.entries)
    function = source.sparse(sparse.gaps.dtype, of_bytes)
    return f"    {function}(y, {x}, {values}, {gaps}, {size.count}, {size.inputs}, {size.block});"


# Tensor networks --------------------------------------------------------------------------------------------------


def plan_network(layer: TensorLinear, prefer: str) -> tuple[Chain, Memory]:
    """The order of a network, with the loops that keep its memory small."""
    found = [(chain, memory_for(chain, prefer)) for chain in chains_of(layer, prefer)]

    def price(of: tuple[Chain, Memory]) -> tuple[float, float]:
        chain, memory = of
        if prefer == "size":
            return chain.num_bytes + 4 * memory.total, chain.macs
        return (
            (_cycles(chain, memory), chain.num_bytes)
            if prefer == "speed"
            else (chain.macs * chain.num_bytes, memory.total)
        )

    return min(found, key=price)


def _cycles(chain: Chain, memory: Memory) -> float:
    """What a product takes by the prices of its loops, of making integers floats, and of reading weights."""
    nests = nests_of(chain, memory.loops, memory.streamed)
    cycles = chain.num_bytes / 16
    for step, (operand, nest) in enumerate(zip(chain.operands, nests, strict=True)):
        around = prod(chain.sizes[leg] for leg in memory.loops if chain.removed(leg) >= step)
        cycles += around * nest.price
        if operand.factor is not None:
            cycles += operand.elements(chain.sizes) * (around if memory.streamed[step] else 1) / 4
    return cycles


def memory_for(chain: Chain, prefer: str) -> Memory:
    """With as few loops as keep the memory small, or those that make it smallest."""
    loops = chain.loop_order()
    memories = [memory_of(chain, loops[:count]) for count in range(len(loops) + 1)]
    return next((m for m in memories if m.total <= SMALL[prefer]), min(memories, key=lambda m: m.total))


def memory_of(chain: Chain, loops: tuple[str, ...]) -> Memory:
    """Where intermediates and the floats of integers lie."""
    steps = len(chain.operands)
    depths = [chain.depth(step, loops) for step in range(steps)] + [0]
    sizes = [chain.size(step, loops) for step in range(steps - 1)]
    conflicts = {(i, i + 1) for i in range(steps - 2)}
    for j in range(steps - 1):
        if depths[j + 1] < depths[j]:  # summed over a loop, in which all steps before run
            conflicts |= {(i, j) for i in range(j)}
    streamed = []
    places: list[int] = [-1] * steps
    for step, operand in enumerate(chain.operands):
        elements = operand.elements(chain.sizes)
        lead = operand.lead(chain.sizes) if operand.factor is not None else ()
        streams = bool(lead) and depths[step] == 0
        streamed.append(streams)
        if operand.factor is not None:
            places[step] = len(sizes)
            sizes.append(elements // prod(chain.sizes[leg] for leg in lead) if streams else elements)
            conflicts |= {(i, len(sizes) - 1) for i in range(len(sizes) - 1)}
    offsets, total = place(sizes, conflicts)
    unpacked = tuple(-1 if at < 0 else offsets[at] for at in places)
    return Memory(loops, tuple(streamed), (*offsets[: steps - 1], -1), unpacked, total)


def _network(
    source: Source, matrix: Matrix, chain: Chain, memory: Memory, of_bytes: bool, padded: int
) -> tuple[str, list[str]]:
    lines: list[str] = []
    if padded:  # zeros behind x, in floats
        lines += [f"    {source.copy(of_bytes)}(t, x, {matrix.inputs});"]
        lines += [f"    {source.zero()}(t + {matrix.inputs}, {matrix.padding});"]
    nests = nests_of(chain, memory.loops, memory.streamed)
    writer = _Writer(source, matrix.name, chain, memory, nests, of_bytes and not padded, padded)
    return source.fresh(matrix.name), [*lines, *writer.whole(), *writer.block(0)]


class _Writer:
    """The loops of one chain as text."""

    def __init__(
        self, source: Source, name: str, chain: Chain, memory: Memory, nests: Sequence[Nest], of_bytes: bool, start: int
    ) -> None:
        self.source, self.chain, self.memory, self.nests = source, chain, memory, nests
        self.of_bytes, self.start = of_bytes, start
        self.steps = len(chain.operands)
        self.depths = [chain.depth(step, memory.loops) for step in range(self.steps)] + [0]
        self.arrays = [self._array(name, operand, nests[i]) for i, operand in enumerate(chain.operands)]

    def _array(self, name: str, operand: Operand, nest: Nest) -> tuple[str, str]:
        """The names of the array and of its scales."""
        label = f"{name}_{operand.name}" if operand.name.isidentifier() else f"{name}_product"
        if operand.factor is None:
            assert operand.values is not None
            order = sorted(operand.legs, key=lambda leg: (-nest.operand[leg], self.chain.sizes[leg] > 1))
            values = operand.values.permute([operand.legs.index(leg) for leg in order])
            return self.source.floats(label, values), ""
        factor, rows = operand.factor, operand.rows(self.chain.sizes)
        integers = unpack(factor.integers, factor.bits, factor.columns).reshape(rows, -1)
        stored = self.source.integers(f"{label}_integers", packed(integers, factor.bits))
        return stored, self.source.floats(f"{label}_scales", factor.scales)

    def whole(self) -> list[str]:
        """Operands of integers that are made floats before anything else."""
        lines = []
        for step, operand in enumerate(self.chain.operands):
            if operand.factor is None or self.memory.streamed[step]:
                continue
            rows = operand.rows(self.chain.sizes)
            columns = operand.elements(self.chain.sizes) // rows
            target = self._scratch(self.memory.unpacked[step])
            if rows == 1:
                lines.append("    " + self._unpack(step, operand.factor, target, "0", 1, columns))
            else:
                lines.append(f"    for (size_t row = 0; row < {rows}; row++)")
                lines.append(
                    "        " + self._unpack(step, operand.factor, f"{target} + row * {columns}", "row", rows, columns)
                )
        return lines

    def _unpack(self, step: int, factor: QuantizedFactor, target: str, row: str, rows: int, columns: int) -> str:
        array, scales = self.arrays[step]
        parts, groups = rows // factor.rows, factor.scales.shape[1]
        stored = columns if factor.bits == 8 else -(-columns // 8) * factor.bits
        if row == "0":
            return f"{self.source.unpack(factor.bits)}({target}, {array}, {scales}, 0, {columns}, {factor.group});"
        of = f"({row}) / {parts}" if parts > 1 else f"({row})"
        at = f"({row}) % {parts} * {columns}" if parts > 1 else "0"
        first = f"{scales} + {of} * {groups}" if factor.rows > 1 else scales
        function = self.source.unpack(factor.bits)
        return f"{function}({target}, {array} + ({row}) * {stored}, {first}, {at}, {columns}, {factor.group});"

    def _scratch(self, offset: int) -> str:
        at = self.start + offset
        return f"t + {at}" if at else "t"

    def block(self, depth: int) -> list[str]:
        """The steps inside so many loops."""
        loops, indent = self.memory.loops, "    " * (depth + 1)
        inside = sum(d > depth for d in self.depths[:-1])
        lines: list[str] = []
        if inside:
            lines += self._zeroed(inside - 1, depth, indent)
            leg = loops[depth]
            lines.append(
                f"{indent}for (size_t {_index(leg)} = 0; {_index(leg)} < {self.chain.sizes[leg]}; {_index(leg)}++) {{"
            )
            lines += self.block(depth + 1)
            lines.append(f"{indent}}}")
        for step in range(inside, self.steps):
            if self.depths[step] == depth:
                lines += self._zeroed(step, depth, indent)
                lines += self._step(step, indent)
        return lines

    def _zeroed(self, step: int, depth: int, indent: str) -> list[str]:
        if step == self.steps - 1 or self.depths[step + 1] != depth:
            return []
        size = self.chain.size(step, self.memory.loops)
        return [f"{indent}{self.source.zero()}({self._scratch(self.memory.behind[step])}, {size});"]

    def _step(self, step: int, indent: str) -> list[str]:
        chain, nest, operand = self.chain, self.nests[step], self.chain.operands[step]
        sizes = chain.sizes
        loops = [*nest.loops]
        around = [leg for leg in self.memory.loops if chain.removed(leg) >= step]
        lead = [*operand.lead(sizes)] if self.memory.streamed[step] else []
        lines: list[str] = []

        def opened(leg: str) -> None:
            nonlocal indent
            lines.append(f"{indent}for (size_t {_index(leg)} = 0; {_index(leg)} < {sizes[leg]}; {_index(leg)}++) {{")
            indent += "    "

        for leg in loops[: len(lead)]:
            opened(leg)
        if lead:
            assert operand.factor is not None
            rows = prod(sizes[leg] for leg in lead)
            row = _sum("", contiguous(lead, sizes), lead)
            target = self._scratch(self.memory.unpacked[step])
            columns = operand.elements(sizes) // rows
            lines.append(indent + self._unpack(step, operand.factor, target, row, rows, columns))
        for leg in loops[len(lead) :]:
            opened(leg)
        fixed = [*loops, *around]
        x_from = ("t" if self.start else "x") if step == 0 else self._scratch(self.memory.behind[step - 1])
        x = _sum(x_from, nest.x, fixed)
        if operand.factor is None:
            small = _sum(self.arrays[step][0], nest.operand, fixed)
        else:
            small = _sum(
                self._scratch(self.memory.unpacked[step]), nest.operand, [leg for leg in fixed if leg not in lead]
            )
        y = _sum("y" if step == self.steps - 1 else self._scratch(self.memory.behind[step]), nest.out, fixed)
        lines.append(indent + self._call(nest, x, small, y, step == 0 and self.of_bytes))
        while len(indent) > 4 * (self.depths[step] + 1):
            indent = indent[4:]
            lines.append(f"{indent}}}")
        return lines

    def _call(self, nest: Nest, x: str, small: str, y: str, of_bytes: bool) -> str:
        sizes, source = self.chain.sizes, self.source
        count, width, many = (prod(sizes[leg] for leg in group) for group in (nest.summed, nest.side, nest.many))

        def by(layout: Layout, legs: Sequence[str]) -> int:
            return layout.get(legs[-1], 0) if legs else 0

        next_y, of_x, of_small = by(nest.out, nest.many), by(nest.x, nest.summed), by(nest.operand, nest.summed)
        if nest.kind == "dots":
            apart, skip = by(nest.out, nest.side), by(nest.operand, nest.side)
            matrix = f"{x}, {by(nest.x, nest.many)}, {small}, {skip}, {count}, {width}, {many}"
            return f"{source.dots(of_bytes)}({y}, {next_y}, {apart}, {matrix});"
        if nest.kind == "operand":
            vectors, row, step, matrix, skip = x, by(nest.x, nest.many), of_x, small, of_small
            kinds = (of_bytes, False)
        else:
            vectors, row, step, matrix, skip = small, by(nest.operand, nest.many), of_small, x, of_x
            kinds = (False, of_bytes)
        if many == 1:
            return f"{source.rows(*kinds)}({y}, {vectors}, {step}, {matrix}, {skip}, {count}, {width});"
        sizes_text = f"{matrix}, {skip}, {count}, {width}, {many}"
        return f"{source.tiles(*kinds)}({y}, {next_y}, {vectors}, {row}, {step}, {sizes_text});"


def _index(leg: str) -> str:
    return "i_" + "".join(c if c.isalnum() else "_" for c in leg)


def _sum(start: str, layout: Layout, legs: Sequence[str]) -> str:
    """A place, moved by indices of these legs."""
    parts = [f"{layout[leg]} * {_index(leg)}" if layout[leg] != 1 else _index(leg) for leg in legs if leg in layout]
    return " + ".join(part for part in (start, *parts) if part) or "0"
