"""The split W = In Out: which formats have one, its size, and that its two matrices multiply to W."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kronecell as kc
from kronecell.ops.execute import contract_network
from kronecell.plans.split import split_of
from tests.cases import formats

F64 = torch.float64
GATINGS = st.sampled_from([(1, False), (3, False), (3, True)])
SPLITS = ("lowrank", "tr", "kt", "kcp-pair", "kcp-all")
NEVER = ("dense", "tt", "ht", "bt", "tucker", "cp")  # a factor holds an input and an output mode


@pytest.mark.parametrize("kind", NEVER)
def test_formats_whose_factors_touch_both_sides_have_no_split(kind: str) -> None:
    @settings(max_examples=10)
    @given(formats(kind), GATINGS)
    def law(fmt: kc.Format, gating: tuple[int, bool]) -> None:
        assert split_of(fmt.network(*gating)) is None

    law()


@pytest.mark.parametrize("kind", SPLITS)
def test_both_parts_multiply_to_the_matrix_of_every_gate(kind: str) -> None:
    @settings(max_examples=20)
    @given(formats(kind), GATINGS)
    def law(fmt: kc.Format, gating: tuple[int, bool]) -> None:
        gates, shared = gating
        factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64, gates=gates, shared=shared)
        W = fmt.to_dense(factors, gates=gates, shared=shared).reshape(gates, fmt.M, fmt.N)
        split = split_of(fmt.network(gates, shared))
        assert split is not None and split.gates == gates
        assert split.width == split.rank * (gates if split.gated else 1)
        inner, outer = contract_network(split.inner, factors), contract_network(split.outer, factors)
        In = inner.reshape(-1, fmt.M, split.rank)
        Out = outer.reshape(-1, split.rank, fmt.N)
        assert len(In) == (gates if split.gated else 1)
        assert len(Out) in (1, gates)
        torch.testing.assert_close(In @ Out if len(In @ Out) == gates else (In @ Out).expand(gates, -1, -1), W)

    law()


def test_the_split_of_the_papers_matrix_has_few_columns() -> None:
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
    split = split_of(fmt.network(4, True))
    assert split is not None and not {"m1", "m2"} & {*split.bonds}
    assert split.rank == 16 and split.width < 256
