"""ONNX files whose output was compared with the module's before they get their name.

Two targets: the factored graph (small file; MatMul, Reshape, Transpose, and an LSTM, GRU or Scan node for the
recurrence) and the dense one, which every runtime with an LSTM or GRU operator can run. Batch and time are dynamic.
`streaming=True` exports one time step with the state going in and coming out.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.comparison import distance, is_rounding
from kronecell.deploy.onnx_integers import keep_integers
from kronecell.deploy.onnx_layers import OnnxCell, OnnxLinear, OnnxRecurrent
from kronecell.errors import CheckpointError, ShapeError
from kronecell.nn.cells import RecurrentCell
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import SMALL, dequantize, is_quantized
from kronecell.nn.quantized import Integers
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

TOLERANCE = 1e-5  # largest difference to the module, relative to the largest value
OTHER_SIZES = ((1, 1), (2, 9), (5, 3))  # (batch, time) of the comparisons; the example's own are never among them


@dataclass(frozen=True)
class OnnxExport:
    """What was written, and how it was checked."""

    path: Path
    size: int
    operators: dict[str, int]
    difference: float
    checked: tuple[tuple[tuple[int, ...], ...], ...]

    def __str__(self) -> str:
        nodes = ", ".join(f"{count} {name}" for name, count in sorted(self.operators.items()))
        return (
            f"{self.path}: {self.size:,} bytes; {nodes}; largest relative difference {self.difference:.1e} "
            f"over {len(self.checked)} input shapes other than the example's"
        )


def export_onnx(
    module: nn.Module,
    path: str | Path,
    example: Any,
    *,
    densify: bool = False,
    streaming: bool = False,
    dynamic: Sequence[dict[int, str] | None] | None = None,
) -> OnnxExport:
    """Write `module` to an ONNX file and compare the file with it in ONNX Runtime on other shapes.

    `example` is an input, or a tuple of inputs such as (x, (h_0, c_0)) or (x, h_0). `dynamic` names the axes that may
    change, one {axis: name} per input tensor; without it they are the batch and the time of LSTM and GRU, all leading
    axes of TensorLinear, and axes 0 (batch) and 1 (time, in inputs of three or more axes) of other modules.
    """
    onnxruntime = _import_runtime()
    integers = [part for part in module.modules() if isinstance(part, Integers)]
    module = (dequantize(module) if is_quantized(module) else copy.deepcopy(module)).eval()
    _check_module(module, streaming)
    module = _with_our_layers(module, densify)
    arguments = example if isinstance(example, tuple) else (example,)
    wrapped = Streaming(module) if streaming and isinstance(module, Recurrent) else Flat(module, arguments)
    graph = copy.deepcopy(wrapped)
    graph.module = _for_graph(graph.module, streaming)
    tensors = [*wrapped.flatten(arguments)]
    axes = _dynamic_axes(module, tensors, streaming) if dynamic is None else [{**(entry or {})} for entry in dynamic]
    if len(axes) != len(tensors):
        raise ShapeError(f"dynamic needs one entry per input tensor: expected {len(tensors)}, got {len(axes)}")
    program = _translate(
        graph, tensors, axes, _names(module, len(tensors)), 1 << 31 if densify else SMALL if integers else 1 << 12
    )
    checked: list[tuple[tuple[int, ...], ...]] = []
    worst = 0.0
    operators: dict[str, int] = {}

    def write(temporary: Path) -> None:
        nonlocal worst
        program.save(str(temporary), external_data=False)
        if integers and not densify:
            keep_integers(temporary, integers)
        operators.update(_operators(temporary))
        session = onnxruntime.InferenceSession(temporary.read_bytes(), providers=["CPUExecutionProvider"])
        for inputs in _other_inputs(tensors, axes):
            worst = max(worst, _difference(session, wrapped, inputs))
            checked.append(tuple(tuple(tensor.shape) for tensor in inputs))

    target = Path(path)
    write_atomically(target, write)
    return OnnxExport(target, target.stat().st_size, operators, worst, tuple(checked))


class Flat(nn.Module):
    """The module with its nested arguments as a flat list of tensors, and its results too."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.nested = tuple(isinstance(argument, (tuple, list)) for argument in arguments)

    def flatten(self, arguments: tuple[Any, ...]) -> Iterator[Tensor]:
        for argument in arguments:
            yield from argument if isinstance(argument, (tuple, list)) else (argument,)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments: list[Any] = []
        for position, nested in enumerate(self.nested):
            rest = tensors[position:]
            arguments.append(tuple(rest) if nested else rest[0])  # a state tuple can only be the last argument
        return flat_tensors(self.module(*arguments))


class Streaming(nn.Module):
    """One time step: x (batch, M) and the state -> output (batch, H) and the next state, for a fixed T = 1 graph."""

    def __init__(self, module: Recurrent) -> None:
        super().__init__()
        self.module: nn.Module = module
        self.time_axis = 1 if module.batch_first else 0
        self.sizes, self.layers = module.state_sizes, module.num_layers

    def flatten(self, arguments: tuple[Any, ...]) -> Iterator[Tensor]:
        """x, h_0 (and c_0); a state that is not given is zero."""
        x, *rest = arguments
        if x.ndim != 2:
            raise ShapeError(f"streaming: the example is one time step (batch, M), got {tuple(x.shape)}")
        yield x
        given = rest[0] if rest else None
        zeros = tuple(torch.zeros(self.layers, x.shape[0], size, dtype=x.dtype) for size in self.sizes)
        yield from zeros if given is None else (given,) if isinstance(given, Tensor) else given

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, *given = tensors
        state = tuple(given)
        output, *last = flat_tensors(self.module(x.unsqueeze(self.time_axis), state if len(state) > 1 else state[0]))
        return (output.squeeze(self.time_axis), *last)


def flat_tensors(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return tuple(tensor for part in result for tensor in flat_tensors(part))


def _operators(path: Path) -> Counter[str]:
    """How many nodes of each kind a file has, those inside a Scan left out."""
    import onnx

    return Counter(node.op_type for node in onnx.load(path).graph.node)


def _import_runtime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"export_onnx needs the package {error.name!r}; install it with: pip install 'kronecell[export]'"
        ) from None
    return onnxruntime


def _check_module(module: nn.Module, streaming: bool) -> None:
    dtypes = {parameter.dtype for parameter in module.parameters()} - {torch.float32}
    if dtypes:
        raise CheckpointError(f"export_onnx takes float32 modules, got {sorted(map(str, dtypes))}; call .float() first")
    if streaming and (not isinstance(module, Recurrent) or isinstance(module, RecurrentCell)):
        raise CheckpointError(f"streaming=True takes a kronecell LSTM or GRU, got {type(module).__name__}")
    if streaming and isinstance(module, Recurrent) and module.bidirectional:
        raise CheckpointError("streaming=True needs a layer that reads forwards only, got bidirectional=True")


def _with_our_layers(module: nn.Module, densify: bool) -> nn.Module:
    """torch's LSTM and GRU replaced by ours (whose time axis stays dynamic), and with densify ours by dense ones."""
    if isinstance(module, Recurrent):
        return type(module).from_dense(module.to_dense()) if densify else module
    if isinstance(module, (TensorLinear, TensorEmbedding)):
        return module.to_dense() if densify else module
    if type(module) in (nn.LSTM, nn.GRU):
        return (LSTM if isinstance(module, nn.LSTM) else GRU).from_dense(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, _with_our_layers(child, densify))
    return module


def _for_graph(module: nn.Module, streaming: bool) -> nn.Module:
    """Our layers in forms that a graph can hold."""
    if isinstance(module, RecurrentCell):
        return OnnxCell(module)
    if isinstance(module, Recurrent):
        return OnnxRecurrent(module, streaming)
    if isinstance(module, TensorLinear):
        return OnnxLinear(module)
    for name, child in module.named_children():
        setattr(module, name, _for_graph(child, streaming))
    return module


def _dynamic_axes(module: nn.Module, tensors: Sequence[Tensor], streaming: bool) -> list[dict[int, str]]:
    if streaming:
        return [{0: "batch"}, *[{1: "batch"}] * (len(tensors) - 1)]
    if isinstance(module, RecurrentCell):
        return [{0: "batch"} if tensor.ndim == 2 else {} for tensor in tensors]
    if isinstance(module, Recurrent):
        if tensors[0].ndim == 2:
            return [{0: "time"}, *[{}] * (len(tensors) - 1)]
        first = {0: "batch", 1: "time"} if module.batch_first else {0: "time", 1: "batch"}
        return [first, *[{1: "batch"}] * (len(tensors) - 1)]
    if isinstance(module, (TensorLinear, nn.Linear)):
        names = ("batch", "time", *(f"axis{i}" for i in range(2, tensors[0].ndim)))
        return [dict(enumerate(names[: tensors[0].ndim - 1]))]
    if isinstance(module, (TensorEmbedding, nn.Embedding)):
        names = ("batch", "time", *(f"axis{i}" for i in range(2, tensors[0].ndim)))
        return [dict(enumerate(names[: tensors[0].ndim]))]
    return [{0: "batch", 1: "time"} if tensor.ndim >= 3 else {0: "batch"} for tensor in tensors]


def _names(module: nn.Module, count: int) -> dict[str, Any]:
    """Names of inputs and outputs where we know what they mean."""
    if not isinstance(module, Recurrent):
        return {}
    state = ["h", "c"][: len(module.state_sizes)]
    output = [] if isinstance(module, RecurrentCell) else ["output"]  # a cell's is its h
    return {
        "input_names": ["input", *(f"{name}_0" for name in state)][:count],
        "output_names": [*output, *(f"{name}_n" for name in state)],
    }


def _translate(
    module: nn.Module, tensors: Sequence[Tensor], axes: Sequence[dict[int, str]], names: dict[str, Any], limit: int
) -> Any:
    """torch's exporter on an example in which no dynamic axis has length 1, which it would take for a constant.

    What depends on weights of at most `limit` numbers alone is computed at once; with a low limit the file keeps the
    factors and stays small.
    """
    import onnxscript.optimizer

    dims = {name: torch.export.Dim(name) for entry in axes for name in entry.values()}
    sizes = {name: 3 + i for i, name in enumerate(dims)}
    shapes = tuple({axis: dims[name] for axis, name in entry.items()} for entry in axes)
    inputs = tuple(_resized(tensors, axes, sizes))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's exporter about itself
        try:
            program = torch.onnx.export(
                module, inputs, dynamo=True, dynamic_shapes=(shapes,), verbose=False, optimize=False, **names
            )
        except torch.onnx.OnnxExporterError as error:
            raise CheckpointError(f"torch cannot translate this module to ONNX: {error}") from None
        assert program is not None
        onnxscript.optimizer.optimize(program.model, input_size_limit=limit, output_size_limit=limit)
    for graph in (program.model.graph, *program.model.graph.subgraphs()):
        for node in graph:
            node.metadata_props.clear()  # stack traces with the paths of this machine
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
    program.model.metadata_props.clear()
    program.model.graph.metadata_props.clear()
    return program


def _resized(tensors: Sequence[Tensor], axes: Sequence[dict[int, str]], sizes: dict[str, int]) -> list[Tensor]:
    """Random tensors like the given ones with the named axes of the given sizes."""
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    resized = []
    for tensor, entry in zip(tensors, axes, strict=True):
        shape = [sizes[entry[axis]] if axis in entry else size for axis, size in enumerate(tensor.shape)]
        if tensor.is_floating_point():
            resized.append(torch.randn(shape, generator=generator, dtype=tensor.dtype))
        else:  # numbers of classes or rows: those that the example shows to be allowed
            most = int(tensor.max()) if tensor.numel() else 0
            resized.append(torch.randint(0, max(most, 0) + 1, shape, generator=generator).to(tensor.dtype))
    return resized


def _other_inputs(tensors: Sequence[Tensor], axes: Sequence[dict[int, str]]) -> Iterator[list[Tensor]]:
    """Inputs of three shapes, each different from the example's."""
    names = [*dict.fromkeys(name for entry in axes for name in entry.values())]
    for sizes in OTHER_SIZES:
        chosen = {name: (sizes[0] if name == "batch" else sizes[1]) for name in names}
        inputs = _resized(tensors, axes, chosen)
        if names and [tensor.shape for tensor in inputs] == [tensor.shape for tensor in tensors]:
            inputs = _resized(tensors, axes, {name: size + 5 for name, size in chosen.items()})
        yield inputs


def _difference(session: Any, module: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Largest difference of file and module, relative to the largest value; refused beyond the tolerance."""
    shapes = [tuple(tensor.shape) for tensor in inputs]
    names = [entry.name for entry in session.get_inputs()]
    try:
        got = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    except Exception as error:  # the runtime's errors have no common base but Exception
        raise CheckpointError(
            f"the exported graph does not run on inputs {shapes}, no file was left: {error}"
        ) from None
    with torch.no_grad():
        expected = module(*inputs)
    for number, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        if tuple(ours.shape) != theirs.shape:
            raise CheckpointError(
                f"output {number} of the exported graph has shape {theirs.shape} on inputs {shapes}, expected "
                f"{tuple(ours.shape)}; no file was left"
            )
    results = [torch.from_numpy(array) for array in got]
    worst = distance(results, expected)
    if not worst <= TOLERANCE and not is_rounding_of(module, inputs, results, expected):
        raise CheckpointError(
            f"the exported graph differs from the module by {worst:.1e} on inputs {shapes}, more than {TOLERANCE:.0e}; "
            "no file was left"
        )
    return worst


def is_rounding_of(
    module: nn.Module, inputs: Sequence[Tensor], results: Sequence[Tensor], expected: Sequence[Tensor]
) -> bool:
    """Whether the file is about as near to the result in double precision as the module is."""
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    return is_rounding(results, expected, exact)
