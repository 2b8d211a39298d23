"""The compiled recurrence as one operation of autograd: whatever may be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kronecell.ops import lstm_kernel
from tests.lstm_cases import assert_rounded, built, combination, doubled, equations, infer, operands

LOSSES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "output, a sum": lambda r: r[0].sum(),
    "output, turned": lambda r: (r[0].permute(2, 0, 1) * torch.arange(9.0).view(9, 1, 1)).sum(),
    "last h": lambda r: r[1].sum(),
    "last c": lambda r: r[2].square().sum(),
    "one step": lambda r: r[0][1].square().sum(),
    "both states": lambda r: (r[1] * r[2]).sum(),
}


@built
@pytest.mark.parametrize("loss", LOSSES)
def test_any_of_the_results_may_have_a_gradient_that_lies_anyhow(loss: str) -> None:
    tensors = operands(4, 5, 9)
    exact = doubled(tensors)
    got = torch.autograd.grad(LOSSES[loss](lstm_kernel.train(*tensors)), tensors)
    assert_rounded(got, torch.autograd.grad(LOSSES[loss](equations(*exact)), exact))


@built
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 3)])
def test_only_what_wants_a_gradient_gets_one(wanted: tuple[int, ...]) -> None:
    tensors = operands(4, 5, 9)
    exact = doubled(tensors)
    whole = torch.autograd.grad(combination(equations(*exact)), exact)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in wanted)
    combination(lstm_kernel.train(*tensors)).backward()
    assert [tensor.grad is not None for tensor in tensors] == [i in wanted for i in range(4)]
    got = [tensors[i].grad for i in wanted]
    assert_rounded([g for g in got if g is not None], [whole[i] for i in wanted])


@built
def test_operands_that_do_not_lie_in_one_piece() -> None:
    tensors = operands(4, 5, 9)
    apart = [t.detach().mT.contiguous().mT.requires_grad_() for t in tensors]
    assert not any(t.is_contiguous() for t in apart)
    got, want = lstm_kernel.train(*apart), lstm_kernel.train(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    both = (torch.autograd.grad(combination(r), t) for r, t in ((got, apart), (want, tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    with torch.no_grad():
        assert torch.equal(infer(*apart)[0], want[0])


@built
@pytest.mark.parametrize("loss", LOSSES)
def test_second_and_third_derivatives(loss: str) -> None:
    def derivatives(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        total = LOSSES[loss](results)
        found: list[Tensor] = []
        for _ in range(3):
            gradients = torch.autograd.grad(total, tensors, create_graph=True)
            found += gradients
            total = combination(gradients)
        return found

    tensors = operands(3, 2, 9)
    exact = doubled(tensors)
    got, want = derivatives(lstm_kernel.train(*tensors), tensors), derivatives(equations(*exact), exact)
    assert_rounded(got, want, 40)


@built
def test_gradients_in_batches_are_those_one_by_one() -> None:
    tensors = operands(4, 5, 9)
    results = lstm_kernel.train(*tensors)
    upstream = [torch.randn(3, *r.shape, generator=torch.Generator().manual_seed(1)) for r in results]
    both = torch.autograd.grad(results, tensors, upstream, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        single = torch.autograd.grad(results, tensors, [u[i] for u in upstream], retain_graph=True)
        assert_rounded([b[i] for b in both], single)


@built
@pytest.mark.parametrize("which", [0, 1])  # the output is read by the gradient of U, U by that of everything
def test_a_change_of_what_the_gradient_reads_is_caught(which: int) -> None:
    tensors = operands(4, 5, 9)
    out, h, c = lstm_kernel.train(*tensors)
    loss = (out + 1).sum() + h.sum() + c.sum()
    with torch.no_grad():
        (out, tensors[1])[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@built
def test_the_last_state_may_be_changed() -> None:
    tensors = operands(4, 5, 9)
    want = torch.autograd.grad(combination(lstm_kernel.train(*tensors)), tensors)
    results = lstm_kernel.train(*tensors)
    loss = combination(results)
    with torch.no_grad():
        results[1].zero_()
        results[2].zero_()
    got = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@built
def test_saved_tensors_may_come_back_in_another_layout_or_dtype() -> None:
    tensors = operands(5, 7, 20)
    want = torch.autograd.grad(lstm_kernel.train(*tensors)[0].square().sum(), tensors)
    turned = (lambda t: t.transpose(0, -1).contiguous(), lambda t: t.transpose(0, -1))
    with torch.autograd.graph.saved_tensors_hooks(*turned):
        loss = lstm_kernel.train(*tensors)[0].square().sum()
    for got, expected in zip(torch.autograd.grad(loss, tensors), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
        loss = lstm_kernel.train(*tensors)[0].sum()
    with pytest.raises(RuntimeError, match="dtype"):
        torch.autograd.grad(loss, tensors)


@built
def test_no_steps_are_saved_that_nobody_asked_for() -> None:
    tensors = operands(4, 5, 9)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        lstm_kernel.train(*tensors)
    kept = sum(t.numel() for t in saved if all(t is not given for given in tensors))
    assert kept == (1 + 1 + 4) * 4 * 5 * 9  # output, cells, gates
