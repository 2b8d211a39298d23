"""Run by `make test-torch` beside an installed wheel: the kernels are there and compute what torch computes."""

from __future__ import annotations

from pathlib import Path

import torch

import kronecell as kc
from kronecell.ops.kernels import register_width
from kronecell.ops.library import why_not

assert "site-packages" in str(Path(kc.__file__)), kc.__file__
assert register_width() in (4, 8, 16), why_not()
torch.manual_seed(0)
x = torch.randn(24, 4, 57600)
for recipe in ("kcp:K=4,CA=4,CB=2", "tt:r=4", "bt:r=2,P=2", "ht:r=3"):
    rnn = kc.LSTM(57600, 64, input_format=recipe)
    dense = rnn.to_dense()
    got, want = rnn(x)[0], dense(x)[0]
    assert (got - want).abs().max() < 1e-4, recipe
    got.square().mean().backward()
    want.square().mean().backward()
    ours, theirs = rnn.get_parameter("weight_hh_l0"), dense.weight_hh_l0
    assert ours.grad is not None and theirs.grad is not None
    assert (ours.grad - theirs.grad).abs().max() < 1e-5, recipe
gru = kc.GRU(4096, 48, input_format="kcp:K=2,CA=2,CB=2")
small = torch.randn(5, 3, 4096)
assert (gru(small)[0] - gru.to_dense()(small)[0]).abs().max() < 1e-4
print(f"torch {torch.__version__}: kernels of width {register_width()} are right")
