"""LSTM and GRU beside the numbers: formats per layer, sharing, initialisation, derivatives, dropout, errors, text."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import kronecell as kc
from kronecell.formats.recipes import recipe_modes
from kronecell.paper.tables import paper_format
from tests.nn.recurrent_cases import RECIPES, flat, largest_difference

KCP_UCF11 = "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2"


def cells() -> list[type]:
    return [kc.LSTM, kc.GRU]


@pytest.mark.parametrize("recurrence", ["auto", "native", "loop"])
@pytest.mark.parametrize("cell", cells())
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_first_and_second_derivatives_are_right(recipe: str, cell: type, recurrence: str) -> None:
    torch.manual_seed(0)
    rnn = cell(6, 4, input_format=recipe, hidden_format=recipe, recurrence=recurrence, dtype=torch.float64)
    x = torch.randn(2, 1, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in rnn.named_parameters()]
    inputs = (x, *(p.detach().clone().requires_grad_() for p in rnn.parameters()))

    def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(rnn, dict(zip(names, parameters, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_the_state_dict_of_a_dense_module_is_that_of_torch() -> None:
    options = {"num_layers": 2, "bidirectional": True, "proj_size": 3}
    ours, theirs = kc.LSTM(5, 4, **options), nn.LSTM(5, 4, **options)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_the_same_seed_gives_the_same_dense_weights_as_torch() -> None:
    for ours, theirs in ((kc.LSTM, nn.LSTM), (kc.GRU, nn.GRU)):
        torch.manual_seed(3)
        a = ours(5, 4, 2, bidirectional=True)
        torch.manual_seed(3)
        b = theirs(5, 4, 2, bidirectional=True)
        assert all(torch.equal(a.state_dict()[name], value) for name, value in b.state_dict().items())


def test_the_names_of_factors_are_nested_under_torch_s_names() -> None:
    rnn = kc.LSTM(12, 4, bidirectional=True, input_format="tt:r=2")
    assert {"weight_ih_l0.G1", "weight_ih_l0_reverse.G2", "weight_hh_l0", "bias_hh_l0_reverse"} <= {*rnn.state_dict()}


def test_directions_do_not_share_factors() -> None:
    rnn = kc.GRU(12, 4, bidirectional=True, input_format="tt:r=2")
    assert not torch.equal(rnn.weight_ih_l0.G1, rnn.weight_ih_l0_reverse.G1)


@pytest.mark.parametrize("shared,count", [(False, 4 * 1184), (True, 1184 + 3 * (4 * 8 * 4 + 4 * 4 * 2))])
def test_shared_weights_keep_one_copy_of_all_but_the_first_mode(shared: bool, count: int) -> None:
    rnn = kc.LSTM(57600, 256, input_format=KCP_UCF11, shared=shared)
    assert sum(p.numel() for p in rnn.weight_ih_l0.parameters()) == count


def test_the_stricter_sharing_keeps_only_the_first_A_per_gate() -> None:
    rnn = kc.LSTM(57600, 256, input_format=KCP_UCF11, shared=("A1",))
    assert rnn.weight_ih_l0.A1.shape == (4, 4, 8, 4) and rnn.weight_ih_l0.B1.shape == (4, 4, 2)


def test_formats_per_layer_and_recipes() -> None:
    rnn = kc.LSTM(
        48, 16, 3, input_format=[kc.TT((6, 8), (4, 4), r=2), None, "kcp:K=2,CA=2,CB=1"], hidden_format="cp:r=2"
    )
    assert [fmt and fmt.kind for fmt in rnn.input_formats] == ["tt", None, "kcp"]
    assert {fmt.kind for fmt in rnn.hidden_formats} == {"cp"}
    x = torch.randn(3, 2, 48)
    assert largest_difference(flat(rnn(x)), flat(rnn.to_dense()(x))) < 1e-6


def test_recipes_get_four_modes_for_the_paper_s_sizes() -> None:
    assert recipe_modes("kcp", 57600, 256) == ((16, 16, 15, 15), (4, 4, 4, 4))
    assert [len(n) for _, n in (recipe_modes("tt", 256, 64), recipe_modes("tt", 64, 16))] == [3, 2]
    assert recipe_modes("lowrank", 57600, 257) == ((57600,), (257,))


@pytest.mark.parametrize("cell,gate", [(kc.LSTM, slice(4, 8)), (kc.GRU, slice(4, 8))])
def test_forget_bias_sets_the_gate_that_remembers(cell: type, gate: slice) -> None:
    rnn = cell(6, 4, 2, forget_bias=1.5)
    for layer in range(2):
        total = getattr(rnn, f"bias_ih_l{layer}") + getattr(rnn, f"bias_hh_l{layer}")
        assert torch.equal(total[gate], torch.full((4,), 1.5))
        assert not (total[:4] == 1.5).any()


def test_dropout_draws_what_torch_draws() -> None:
    theirs = nn.LSTM(6, 8, 3, dropout=0.4, bidirectional=True)
    ours = kc.LSTM.from_dense(theirs)
    x = torch.randn(5, 3, 6)
    torch.manual_seed(7)
    a = ours(x)[0]
    torch.manual_seed(7)
    torch.testing.assert_close(a, theirs(x)[0])
    assert torch.equal(ours.eval()(x)[0], ours(x)[0])
    with pytest.warns(UserWarning, match="num_layers=1"):
        kc.LSTM(6, 8, dropout=0.4)


def test_packed_sequences_that_are_sorted_stay_sorted() -> None:
    rnn, x = kc.LSTM(12, 8, batch_first=True, input_format="kt:K=2"), torch.randn(3, 5, 12)
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
    output, (h, _) = rnn(packed)
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    alone = rnn(x[1:2, :4])[0]
    assert lengths.tolist() == [5, 4, 2]
    torch.testing.assert_close(padded[1, :4], alone[0])
    torch.testing.assert_close(h[0, 1], alone[0, -1])


@pytest.mark.parametrize("cell", cells())
def test_dense_layers_can_be_compressed_and_given_back(cell: type) -> None:
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    trained = getattr(nn, cell.__name__)(12, 8, **options, dtype=torch.float64).eval()
    ours = cell.from_dense(trained, input_format="lowrank:r=8", hidden_format="kt:K=8")
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    assert largest_difference(flat(ours(x)), flat(trained(x))) < 1e-10
    assert ours.weight_ih_l0.fit_error < 1e-10 and not ours.training
    assert largest_difference(flat(ours.to_dense()(x)), flat(trained(x))) < 1e-10


def test_a_padded_input_is_fitted_too() -> None:
    trained = nn.LSTM(59, 16, dtype=torch.float64)
    ours = kc.LSTM.from_dense(trained, input_format="tt:r=64", pad_input=True)
    assert ours.input_formats[0].M == 60
    x = torch.randn(3, 2, 59, dtype=torch.float64)
    assert largest_difference(flat(ours(x)), flat(trained(x))) < 1e-10


PAPER_LABELS = ("TT", "TR", "BT", "HT", "KCP(4,4,2)")
OTHER_FORMATS = ("lowrank:{modes},r=8", "cp:{modes},r=8", "tucker:{modes},r=4", "kt:{modes},K=4",
                 "kcp:{modes},K=4,CA=4,CB=2,tie=all")  # fmt: skip


@pytest.fixture(scope="module")
def white() -> torch.Tensor:
    return torch.randn(96, 57600, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("label", [*PAPER_LABELS, *OTHER_FORMATS])
@pytest.mark.parametrize("dataset", ["UCF11", "YCF", "UCF50"])
def test_gate_preactivations_start_at_the_scale_of_torch(dataset: str, label: str, white: torch.Tensor) -> None:
    """nn.LSTM(M, H) draws W and b uniform in +-1/sqrt(H): x W + b has variance (M + 2) / (3 H) for white x."""
    torch.manual_seed(0)
    modes = paper_format(dataset, "TT")
    named = "m={},n={}".format(*("x".join(map(str, side)) for side in (modes.m, modes.n)))
    fmt = paper_format(dataset, label) if label in PAPER_LABELS else kc.parse(label.format(modes=named))
    for shared in (False, True):
        rnn = kc.LSTM(fmt.M, fmt.N, input_format=fmt, shared=shared, hidden_format="lowrank:r=1")
        with torch.no_grad():
            gates = rnn.weight_ih_l0(white) + rnn.bias_ih_l0 + rnn.bias_hh_l0
        assert gates.square().mean().sqrt().item() == pytest.approx(((fmt.M + 2) / (3 * fmt.N)) ** 0.5, rel=0.1)


@pytest.mark.slow
def test_the_scale_of_torch_is_what_the_formula_says(white: torch.Tensor) -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(57600, 256)
    with torch.no_grad():
        gates = white @ theirs.weight_ih_l0.t() + theirs.bias_ih_l0 + theirs.bias_hh_l0
    assert gates.square().mean().sqrt().item() == pytest.approx((57602 / 768) ** 0.5, rel=0.02)


ERRORS = [
    (lambda: kc.LSTM(0, 4), "input_size"),
    (lambda: kc.LSTM(4, 4, proj_size=4), "proj_size"),
    (lambda: kc.LSTM(4, 4, dropout=1.5), "dropout"),
    (lambda: kc.LSTM(4, 4, recurrence="fast"), "recurrence"),
    (lambda: kc.LSTM(4, 4, bias=False, forget_bias=1.0), "forget_bias"),
    (lambda: kc.LSTM(12, 4, 2, input_format=["tt:r=2"]), "one entry per layer: expected 2, got 1"),
    (lambda: kc.LSTM(12, 4, 2, input_format=kc.TT((3, 4), (2, 2), r=2)), "input_format of layer 1 does not fit"),
    (lambda: kc.LSTM(11, 4, input_format=kc.TT((3, 4), (2, 2), r=2)), "pad_input=True"),
    (lambda: kc.LSTM(12, 4, input_format=3), "got int"),
    (lambda: kc.LSTM(12, 4, input_format="tx:r=2"), "unknown format"),
    (lambda: kc.LSTM(12, 257, input_format="tt:r=2"), "nearest sizes"),
    (lambda: kc.LSTM(12, 4, input_format="tt:r=2", order="sideways"), "no order"),
    (lambda: kc.LSTM.from_dense(nn.GRU(4, 4)), r"torch\.nn\.LSTM"),
    (lambda: kc.LSTM(12, 4)(torch.zeros(2, 3, 11)), r"expected \(\.\.\., 12\)"),
    (lambda: kc.LSTM(12, 4)(torch.zeros(2, 2, 3, 12)), "2-D or 3-D"),
    (lambda: kc.LSTM(12, 4)(torch.zeros(2, 3, 12), torch.zeros(1, 3, 4)), r"\(h_0, c_0\)"),
    (lambda: kc.GRU(12, 4)(torch.zeros(2, 3, 12), torch.zeros(1, 2, 4)), r"expected \(1, 3, 4\), got \(1, 2, 4\)"),
]


@pytest.mark.parametrize("mistake,message", ERRORS, ids=[message for _, message in ERRORS])
def test_mistakes_are_named(mistake, message: str) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        mistake()


def test_the_text_of_a_layer_says_modes_ranks_counts_and_how_it_runs() -> None:
    text = repr(kc.LSTM(57600, 256, input_format=KCP_UCF11, hidden_format="tt:r=4"))
    for part in (
        "57600, 256",
        "K=4,CA=4,CB=2",
        "U tt:m=4x4x4x4",
        "made dense once per forward",
        "x fewer than",
    ):
        assert part in text
    assert "two narrow products a step" in repr(kc.GRU(64, 512, hidden_format="lowrank:r=2"))


def test_building_a_layer_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kc.LSTM(12, 4, 2, dropout=0.1, input_format="tt:r=2")


@pytest.mark.parametrize("recurrence", ["auto", "native", "loop"])
def test_hooks_of_the_input_weight_run(recurrence: str) -> None:
    """Pruning works through a hook before every forward; without it the second step has no graph."""
    rnn = kc.LSTM(12, 12, input_format="tt:m=4x3,n=4x3,r=2", recurrence=recurrence)
    prune.l1_unstructured(rnn.weight_ih_l0, "G1", 0.5)
    for _ in range(2):
        rnn(torch.randn(3, 2, 12))[0].sum().backward()
    weight = rnn.weight_ih_l0
    assert weight.G1_orig.grad.any() and not weight.G1_orig.grad[weight.G1_mask == 0].any()


def test_an_input_without_time_steps_is_refused() -> None:
    rnn = kc.LSTM(12, 4, input_format="kcp:m=4x3,n=2x2,K=2,CA=2,CB=2")
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(kc.ShapeError, match="no time steps"):
            rnn(torch.zeros(0, 2, 12))
    assert rnn(torch.zeros(3, 0, 12))[0].shape == (3, 0, 4)


@pytest.mark.parametrize("recurrence", ["auto", "native", "loop"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_the_last_state_shares_no_memory_with_the_output_or_the_first_state(
    cell: type, training: bool, recurrence: str
) -> None:
    rnn = cell(12, 4, input_format="tt:m=4x3,n=2x2,r=2", recurrence=recurrence).train(training)
    first = torch.zeros(1, 2, 4)
    with torch.set_grad_enabled(training):
        output, last = rnn(torch.randn(1, 2, 12), (first, first.clone()) if cell is kc.LSTM else first)
    parts = last if isinstance(last, tuple) else (last,)
    memory = {tensor.untyped_storage().data_ptr() for tensor in (output, first, *parts)}
    assert len(memory) == 2 + len(parts)
