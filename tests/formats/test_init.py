"""Initialisation: the dense matrix has the variance asked for, for every gate, and a seed decides everything."""

from __future__ import annotations

import pytest
import torch

import kronecell as kc
from kronecell.paper.tables import paper_format
from kronecell.training.paper_settings import SETTINGS
from tests.formats.oracles import CASES

LABELS = {
    "UCF11": ("TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)"),
    "UCF50": ("TT", "BT", "TR", "HT", "KCP(6,2,2)"),
}


@pytest.mark.parametrize(("dataset", "label"), [(d, label) for d, labels in LABELS.items() for label in labels])
@pytest.mark.parametrize("shared", [False, True])
def test_variance_is_that_of_nn_lstm_at_the_papers_shapes(dataset: str, label: str, shared: bool) -> None:
    """Estimated from random probes: E |v W|^2 = |W|_F^2 for unit-variance v, without forming W."""
    fmt, hidden = paper_format(dataset, label), SETTINGS[dataset].hidden
    generator = torch.Generator().manual_seed(0)
    factors = fmt.init(generator, gates=4, shared=shared, dtype=torch.float64)
    probes = torch.randn(16, fmt.M, generator=generator, dtype=torch.float64)
    products = fmt.matmul(probes, factors, gates=4, shared=shared).square().reshape(16, 4, fmt.N)
    norms = products.sum(2)  # of every probe and gate
    error = norms.std(0) / 4  # of the mean over 16
    assert ((norms.mean(0) - fmt.M * fmt.N / (3 * hidden)).abs() < 4 * error).all()
    assert (error < 0.25 * norms.mean(0)).all()


@pytest.mark.parametrize("fmt", [case[0] for case in CASES], ids=str)
@pytest.mark.parametrize("gating", [(1, False), (3, False), (3, True)])
def test_rms_of_the_dense_entries_is_exact_for_every_gate(fmt: kc.Format, gating: tuple[int, bool]) -> None:
    gates, shared = gating
    factors = fmt.init(torch.Generator().manual_seed(1), std=0.7, gates=gates, shared=shared, dtype=torch.float64)
    W = fmt.to_dense(factors, gates=gates, shared=shared).reshape(gates, -1)
    torch.testing.assert_close(W.square().mean(1).sqrt(), torch.full((gates,), 0.7, dtype=torch.float64))


def test_the_ucf11_kcp_output_has_the_scale_of_a_dense_layer() -> None:
    fmt = paper_format("UCF11", "KCP(4,4,2)")
    scales = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        factors = fmt.init(generator, gates=4)
        x = torch.randn(64, fmt.M, generator=generator)
        scales.append(fmt.matmul(x, factors, gates=4).std().item() / (fmt.M / (3 * fmt.N)) ** 0.5)
    assert all(0.9 < scale < 1.1 for scale in scales), scales


def test_a_generator_decides_the_factors_and_the_global_state_is_untouched() -> None:
    fmt = kc.TT((4, 3), (2, 2), 2)
    state = torch.get_rng_state()
    first = fmt.init(torch.Generator().manual_seed(5))
    second = fmt.init(torch.Generator().manual_seed(5))
    other = fmt.init(torch.Generator().manual_seed(6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_a_column_of_one_number_is_not_forced_to_one() -> None:
    """CP((1,), (1,), r=2) once became 1 - 1 = 0 and the rescaling NaN."""
    for seed in range(20):
        fmt = kc.CP((1,), (1,), 2)
        assert torch.isfinite(fmt.to_dense(fmt.init(torch.Generator().manual_seed(seed)))).all()
