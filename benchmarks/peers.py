"""Layers and LSTMs of other libraries at the paper's UCF11 shape, where these libraries are installed.

Both libraries take one matrix at a time. Four gates are either one layer whose first output mode is four times as
large (beside our shared weights) or four layers (beside our unshared weights). A peer that cannot be built or run is
reported with its reason.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shapes import CP_APART, GATES
from kronecell.training.paper_settings import SETTINGS, TR_M

SETTING = SETTINGS["UCF11"]


@dataclass(frozen=True)
class Peer:
    """A layer or LSTM of another library: whose, which of our formats it equals, and the module or why there is none.

    Tucker with a core over all single modes, and Tucker-2, are none of ours: their format is empty.
    """

    library: str
    name: str
    format: str
    shared: bool
    module: nn.Module | None = None
    reason: str = ""

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.library} {self.name}" + ("" if self.shared else ", four layers")


class FourLayers(nn.Module):
    """One layer per gate, results side by side."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(GATES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def layers() -> list[Peer]:
    """All peer layers of 57,600 -> 4 x 256, shared and not."""
    found = []
    for library, name, kind, make in _makers():
        for shared in (True, False):
            build = partial(make, GATES) if shared else partial(FourLayers, partial(make, 1))
            found.append(_checked(Peer(library, name, kind, shared), build, torch.zeros(1, 57600)))
    return found


def lstms() -> list[Peer]:
    """The LSTMs of tednet, hidden size 256; the other library has none."""
    found = []
    for name, kind, make in _lstm_makers():
        peer = _checked(Peer("tednet", name, kind, shared=True), make, None)
        if peer.module is not None:
            peer = _checked(peer, partial(StatefulLSTM, peer.module), torch.zeros(1, 1, 57600))
        found.append(peer)
    return found


class StatefulLSTM(nn.Module):
    """A tednet LSTM that makes its own first state, as torch.nn.LSTM does: (time, rows, features) -> the same."""

    def __init__(self, lstm: nn.Module) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros(x.shape[1], SETTING.hidden)
        y: Tensor = self.lstm(x, (zero, zero))[0]
        return y


def _checked(peer: Peer, build: Callable[[], nn.Module], example: Tensor | None) -> Peer:
    """The peer with its module, or with the reason why it has none."""
    values = (peer.library, peer.name, peer.format, peer.shared)
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            module = build()
            if example is not None:
                module.eval()(example)
    except ImportError as error:
        return Peer(*values, reason=f"not installed: {error}")
    except Exception as error:  # whatever a foreign library raises is the reason we report
        return Peer(*values, reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return Peer(*values, module=module)


Maker = Callable[[int], nn.Module]


def _makers() -> list[tuple[str, str, str, Maker]]:
    """(library, class, our format, make(gates)): factors of the sizes that our formats have."""
    m, n, tr_n = [*SETTING.m], SETTING.n, SETTING.tr_n
    r = SETTING.rank

    def tednet(path: str, cls: str, *arguments: Callable[[int], Any]) -> Maker:
        def make(gates: int) -> nn.Module:
            import importlib

            module = importlib.import_module(f"tednet.tnn.{path}.base")
            return getattr(module, cls)(*(argument(gates) for argument in arguments))

        return make

    def tensorly(factorization: str, rank: Any) -> Maker:
        def make(gates: int) -> nn.Module:
            from tltorch import FactorizedLinear

            outputs = (n[0] * gates, *n[1:])
            return FactorizedLinear(
                tuple(m), outputs, factorization=factorization, rank=rank, implementation="factorized"
            )

        return make

    def always(value: Any) -> Callable[[int], Any]:
        return lambda gates: value

    def out(gates: int) -> list[int]:
        return [n[0] * gates, *n[1:]]

    def tr_out(gates: int) -> list[int]:
        return [tr_n[0] * gates, *tr_n[1:]]

    tr_ranks = [SETTING.tr_rank] * 13
    tr_ranks[0] = tr_ranks[8] = 10
    return [
        ("tednet", "TT", "TT", tednet("tensor_train", "TTLinear", always(m), out, always([r] * 3))),
        ("tednet", "BT", "BT", tednet("bt_tucker", "BTTLinear", always(m), out, always([r] * 4), always(2))),
        ("tednet", "TR", "TR", tednet("tensor_ring", "TRLinear", always([*TR_M]), tr_out, always(tr_ranks))),
        ("tednet", "CP", CP_APART, tednet("cp", "CPLinear", always(m), out, always(8))),
        (
            "tednet",
            "Tucker2",
            "",
            tednet("tucker2", "TK2Linear", always([160, 20, 18]), lambda gates: 256 * gates, always([r, r])),
        ),
        ("tensorly-torch", "BlockTT", "TT", tensorly("blocktt", (1, r, r, r, 1))),
        ("tensorly-torch", "CP", CP_APART, tensorly("cp", 8)),
        ("tensorly-torch", "Tucker", "", tensorly("tucker", (r,) * 8)),
    ]


def _lstm_makers() -> list[tuple[str, str, Callable[[], nn.Module]]]:
    m, n, r = [*SETTING.m], [*SETTING.n], SETTING.rank

    def make(path: str, file: str, cls: str, *arguments: Any) -> nn.Module:
        import importlib

        copies = [
            [*a] if isinstance(a, list) else a for a in arguments
        ]  # these classes change the lists they are given
        return getattr(importlib.import_module(f"tednet.tnn.{path}.{file}"), cls)(*copies)

    tr_ranks = [SETTING.tr_rank] * 13
    tr_ranks[0] = tr_ranks[8] = 10
    return [
        ("TT", "TT", partial(make, "tensor_train", "tt_rnn", "TTLSTM", m, n, [r] * 3)),
        ("BT", "BT", partial(make, "bt_tucker", "btt_rnn", "BTTLSTM", m, n, [r] * 4, 2)),
        ("TR", "TR", partial(make, "tensor_ring", "tr_rnn", "TRLSTM", [*TR_M], [*SETTING.tr_n], tr_ranks)),
        ("CP", CP_APART, partial(make, "cp", "cp_rnn", "CPLSTM", m, n, 8)),
        ("Tucker2", "", partial(make, "tucker2", "tk2_rnn", "TK2LSTM", [160, 20, 18], 256, [r, r])),
    ]
