"""The steps that touch x as one operation: second derivatives, what is saved, who else may look, the narrow kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, narrow
from kronecell.ops.candidates import Chunked, candidates
from kronecell.ops.operation import Op

F64 = torch.float64
KCP = kc.KCP((4, 3, 2, 3), (2, 2, 2, 1), 2, 2, 2)
CASES = [
    KCP,
    kc.TT((4, 3), (2, 2), 2),
    kc.TR((4, 3), (2, 2), 2),
    kc.BT((3, 2), (2, 2), 2, P=2),
    kc.LowRank((6,), (4,), 2),
]


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_x_factors_and_bias_have_first_and_second_derivatives(fmt: kc.Format, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = {n: t.requires_grad_() for n, t in fmt.init(generator, dtype=F64, gates=2).items()}
    x = torch.randn(5, fmt.M, dtype=F64, generator=generator, requires_grad=True)
    bias = torch.randn(2 * fmt.N, dtype=F64, generator=generator, requires_grad=True)
    plan = replace(fmt.plan("optimal", 5, gates=2), wide=True)

    def product(x: Tensor, bias: Tensor, *tensors: Tensor) -> Tensor:
        return plan.apply(x, plan.prepare(dict(zip(factors, tensors, strict=True))), bias, chunk)

    inputs = (x, bias, *factors.values())
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


@pytest.mark.parametrize("wanted", ["x", "bias", "A1", "B4"])
def test_only_what_is_asked_for_gets_a_gradient_and_it_is_the_same(wanted: str) -> None:
    layer = kc.TensorLinear(KCP, gates=2, dtype=F64)
    x = torch.randn(5, KCP.M, dtype=F64, requires_grad=True)
    everything = {"x": x, **dict(layer.named_parameters())}
    layer(x).square().sum().backward()
    expected = everything[wanted].grad
    assert expected is not None
    for name, tensor in everything.items():
        tensor.grad = None
        tensor.requires_grad_(name == wanted)
    layer(x).square().sum().backward()
    torch.testing.assert_close(everything[wanted].grad, expected, rtol=1e-13, atol=1e-14)
    assert all(tensor.grad is None for name, tensor in everything.items() if name != wanted)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_layer_used_twice_has_the_same_gradients_with_and_without_a_graph(chunk: int | None) -> None:
    fmt = kc.LowRank((6,), (6,), 2)
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(0), dtype=F64).items()}
    bias = torch.randn(6, dtype=F64, requires_grad=True)
    x = torch.randn(5, 6, dtype=F64, requires_grad=True)
    plan = fmt.plan("optimal", 5)
    prepared = plan.prepare(factors)
    y = plan.apply(plan.apply(x, prepared, bias, chunk), prepared, bias, chunk).square().sum()
    leaves = [x, bias, *factors.values()]
    plain = torch.autograd.grad(y, leaves, retain_graph=True)
    for got, want in zip(torch.autograd.grad(y, leaves, create_graph=True), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_batched_gradients_go_through_chunks(fmt: kc.Format) -> None:
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64)
    x = torch.randn(5, fmt.M, dtype=F64)
    chunked = Chunked(fmt.plan("optimal", 2))
    name, tensor = next(iter(factors.items()))

    def product(x: Tensor, tensor: Tensor) -> Tensor:
        return chunked.execute(x, {**factors, name: tensor}).sum(0)

    plain = torch.autograd.functional.jacobian(product, (x, tensor))
    for got, want in zip(torch.autograd.functional.jacobian(product, (x, tensor), vectorize=True), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def saved_elements(run: Callable[[], object]) -> int:
    """Elements that autograd saves while something runs, every storage once."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def test_only_what_the_backward_reads_is_saved() -> None:
    layer = kc.TensorLinear("tt:m=8x8,n=8x8,r=4", order="forward").requires_grad_(False)
    x = torch.randn(64, 64)
    weights = sum(p.numel() for p in layer.parameters())
    layer.bias.requires_grad_()  # type: ignore[union-attr]
    assert saved_elements(lambda: layer(x)) == 0
    layer.bias.requires_grad_(False)  # type: ignore[union-attr]
    z = torch.randn(64, 64, requires_grad=True)
    assert 0 < saved_elements(lambda: layer(z * 1)) <= weights + 1
    x = z * 1
    x += layer(x)  # x is not needed for its own gradient
    x.sum().backward()
    torch.testing.assert_close(z.grad, 1 + layer.dense_weight().sum(0).expand(64, -1))
    layer.requires_grad_()
    y = layer(z).sum()
    with torch.no_grad():
        layer.bias.zero_()  # type: ignore[union-attr]
    y.backward()
    y = layer(z).sum()
    with torch.no_grad():
        layer.G1.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("fmt", [*CASES, KCP], ids=str)
def test_no_rows_give_no_rows_and_gradients_of_zero(fmt: kc.Format, dtype: torch.dtype) -> None:
    layer = kc.TensorLinear(fmt, gates=4)
    y = layer(torch.zeros(0, fmt.M, dtype=dtype))
    assert y.shape == (0, 4 * fmt.N)
    y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    with torch.no_grad():
        assert layer.eval()(torch.zeros(2, 0, fmt.M, dtype=dtype)).shape == (2, 0, 4 * fmt.N)


@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_autocast_of_plain_products_is_torchs(fmt: kc.Format) -> None:
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(0), gates=2).items()}
    x = torch.randn(5, fmt.M)
    expected = fmt.matmul(x, factors, gates=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = fmt.matmul(x, factors, gates=2)
        with torch.no_grad():
            assert fmt.matmul(x, factors, gates=2).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))
    y.float().square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in factors.values())


SHRINKS = kc.TT((8, 8, 4), (2, 2, 8), 4)  # what x is before the last step is smaller than x, and larger before
GROWS = kc.TT((8, 8), (8, 8), 8)


@pytest.mark.parametrize(("fmt", "kept"), [(GROWS, 0), (SHRINKS, 1)], ids=str)
def test_in_chunks_nothing_is_saved_but_x_the_weights_and_what_is_small_beside_x(fmt: kc.Format, kept: int) -> None:
    layer = Chunked(fmt.plan("forward", 4))
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(0)).items()}
    x = torch.randn(64, fmt.M)

    weights = sum(t.numel() for t in factors.values())
    in_chunks, whole = (saved_elements(lambda run=run: run.execute(x, factors)) for run in (layer, layer.plan))
    assert x.numel() < in_chunks <= x.numel() * (1 + kept / 2) + 3 * weights < whole
    assert not kept or in_chunks > x.numel() + 3 * weights


@pytest.mark.parametrize("frozen", [(), ("G1",), ("G2",), ("G3",), ("G1", "G2"), ("G2", "G3")], ids=str)
@pytest.mark.parametrize("rows", [4, 10, 64])
def test_what_is_kept_of_chunks_is_not_made_again_and_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, rows: int, frozen: tuple[str, ...]
) -> None:
    factors = SHRINKS.init(torch.Generator().manual_seed(0), dtype=F64)
    learning = {name: t.requires_grad_() for name, t in factors.items() if name not in frozen}
    plan, x = SHRINKS.plan("forward", 4), torch.randn(rows, SHRINKS.M, dtype=F64)
    wanted = torch.autograd.grad(plan.execute(x, factors).square().sum(), [*learning.values()])
    y = Chunked(plan).execute(x, factors)
    made: list[str] = []
    real = Op.product
    monkeypatch.setattr(Op, "product", lambda op, *rest: made.append(op.out) or real(op, *rest))  # type: ignore[func-returns-value]
    found = torch.autograd.grad(y.square().sum(), [*learning.values()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    first, *_ = plan.program.hot
    again = rows > 4 and "G2" in learning  # before the second step, x is too large to be kept
    assert {*made} == ({first.out} if again else set())


# Others who look at operations ---------------------------------------------------------------------------------------


@pytest.fixture
def everything_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("onednn_faster", "compiled_faster"):
        monkeypatch.setattr(narrow, limit, lambda elements, depth, columns: True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward mode
@pytest.mark.usefixtures("everything_is_narrow")
def test_the_transforms_of_torch_func_and_forward_mode_see_plain_operations() -> None:
    layer = kc.TensorLinear("kcp:m=4x3,n=2x2,K=2,CA=2,CB=2")
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(5, 12)
    W = layer.dense_weight().detach()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    layer(x).square().sum().backward()
    for name, gradient in torch.func.grad(loss)(parameters, x).items():
        torch.testing.assert_close(gradient, dict(layer.named_parameters())[name].grad)
    single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    torch.testing.assert_close(single["bias"].sum(0), layer.bias.grad)  # type: ignore[union-attr]
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(lambda x: layer(x), (x,), (tangent,))
    torch.testing.assert_close(forward, tangent @ W.T)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent, tangent @ W.T)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("everything_is_narrow")
def test_the_narrow_product_keeps_its_tangents_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, tangent = torch.randn(3, 5, 8), torch.randn(4, 8), torch.randn(5, 8)
    for place, name in ((narrow, "_kernel"), (compiled, "few_columns")):
        monkeypatch.setattr(place, name, lambda *arguments: pytest.fail("the kernel has no rule for this"))
    torch.testing.assert_close(torch.func.vmap(lambda x: narrow.narrow(x, weight))(x), x @ weight.T)
    _, forward = torch.func.jvp(lambda x: narrow.narrow(x, weight), (x[0],), (tangent,))
    torch.testing.assert_close(forward, tangent @ weight.T)
    with torch.autograd.forward_ad.dual_level():
        dual = narrow.narrow(torch.autograd.forward_ad.make_dual(x[0], tangent), weight)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent @ weight.T)
    graph = torch.compile(lambda x: narrow.narrow(x, weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x[0]), x[0] @ weight.T)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it itself
def test_bytes_compile_into_one_graph() -> None:
    layer = kc.TensorLinear("kcp:m=4x3,n=2x2,K=2,CA=2,CB=2")
    x = torch.randint(0, 256, (5, 12), dtype=torch.uint8)
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x), layer(x))
    with torch.no_grad():
        torch.testing.assert_close(graph(x), layer(x))


# Forms of a step -----------------------------------------------------------------------------------------------------


PAPER = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)


def results(plan: kc.Plan, chunk: int | None = None) -> list[Tensor]:
    """The product and the gradients of all factors."""
    generator = torch.Generator().manual_seed(0)
    factors = {n: t.requires_grad_() for n, t in PAPER.init(generator, dtype=F64, gates=4).items()}
    x = torch.randn(7, PAPER.M, dtype=F64, generator=generator)
    y = plan.apply(x, plan.prepare(factors), None, chunk)
    return [y, *torch.autograd.grad(y.square().sum(), [*factors.values()])]


@pytest.mark.parametrize("chunk", [None, 3])
def test_at_the_papers_size_every_form_of_a_step_is_taken_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    plan = candidates(PAPER, 128, 4, False)["optimal/128 wide"]
    assert isinstance(plan, kc.Plan)
    ops = plan.program.hot
    assert ops[0].narrow and ops[1].spread and ops[1].diagonal and plan.program.straight
    expected = results(PAPER.plan("separable", gates=4))  # held against dense by the law suite
    for many in (2**40, 0):  # gradients of a spread operand made first and then summed, and summed as they are made
        monkeypatch.setattr("kronecell.ops.operation.MANY", many)
        for got, want in zip(results(plan, chunk), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
