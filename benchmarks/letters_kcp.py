"""What makes KCP weaker or stronger in benchmarks.letters, on the inner split alone: two rates, then two seeds.

Each question changes one thing of a format. And how much each format could hold of what a dense W learns: the best fit
to the change of W in training.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.letters_records import Record
from kronecell.data import Loader
from kronecell.training.loop import fit
from kronecell.training.run import make_experiment
from kronecell.training.splits import loaders

THREE, FOUR = "n=4x4x8", "n=4x4x4x2"  # modes of the 128 hidden units
PLAIN = f"m=12x10x10,{THREE}"  # as the paper: near to each other, without regard to the picture
REFERENCE = f"kcp:{PLAIN},K=4,CA=4,CB=2,tie=all"
# question -> label -> (format, shared); the picture is 30 rows of 40 pixels, row by row
QUESTIONS: dict[str, dict[str, tuple[str, bool]]] = {
    "K against C at equal parameters": {
        "K=1, CA=16, CB=8": (f"kcp:{PLAIN},K=1,CA=16,CB=8,tie=all", True),
        "K=2, CA=8, CB=4": (f"kcp:{PLAIN},K=2,CA=8,CB=4,tie=all", True),
        "K=4, CA=4, CB=2": (REFERENCE, True),
        "K=8, CA=2, CB=1": (f"kcp:{PLAIN},K=8,CA=2,CB=1,tie=all", True),
        "K=16, CA=1, CB=1": (f"kcp:{PLAIN},K=16,CA=1,CB=1,tie=all", True),
    },
    "one branch index for all modes, or one for each pair": {
        "all, K=4": (REFERENCE, True),
        "pair, K=4": (f"kcp:{PLAIN},K=4,CA=4,CB=2", True),
        "all, K=8, CA=2, CB=1": (f"kcp:{PLAIN},K=8,CA=2,CB=1,tie=all", True),
        "pair, K=8, CA=2, CB=1": (f"kcp:{PLAIN},K=8,CA=2,CB=1", True),
    },
    "modes along rows and columns of the picture": {
        "KCP, 12 x 10 x 10": (REFERENCE, True),
        "KCP, 10 x 6 x 5 x 4": (f"kcp:m=10x6x5x4,{FOUR},K=4,CA=4,CB=2,tie=all", True),
        "KCP, rows 6 x 5, columns 8 x 5": (f"kcp:m=6x5x8x5,{FOUR},K=4,CA=4,CB=2,tie=all", True),
        "KCP, rows 30, columns 40": ("kcp:m=30x40,n=8x16,K=4,CA=2,CB=1,tie=all", True),
        "TT, 12 x 10 x 10": (f"tt:{PLAIN},r=4", True),
        "TT, 10 x 6 x 5 x 4": (f"tt:m=10x6x5x4,{FOUR},r=4", True),
        "TT, rows 6 x 5, columns 8 x 5": (f"tt:m=6x5x8x5,{FOUR},r=4", True),
        "TT, rows 30, columns 40": ("tt:m=30x40,n=8x16,r=1", True),
    },
    "factors shared by the gates, at equal parameters": {
        "shared, K=4": (REFERENCE, True),
        "own, K=2": (f"kcp:{PLAIN},K=2,CA=4,CB=2,tie=all", False),
        "shared, K=8, CA=4, CB=2": (f"kcp:{PLAIN},K=8,CA=4,CB=2,tie=all", True),
        "own, K=4": (f"kcp:{PLAIN},K=4,CA=4,CB=2,tie=all", False),
    },
    "more parameters": {
        "K=4, 1,312": (REFERENCE, True),
        "K=16, CA=4, CB=2, shared": (f"kcp:{PLAIN},K=16,CA=4,CB=2,tie=all", True),
        "K=32, CA=4, CB=2, shared": (f"kcp:{PLAIN},K=32,CA=4,CB=2,tie=all", True),
        "TT, rank 8": (f"tt:{PLAIN},r=8", True),
        "TT, rank 12": (f"tt:{PLAIN},r=12", True),
    },
}
RATES, SEEDS = (4e-3, 1.6e-2), 2
HELD = "kcp-learnt-fold1-seed0"


def formats() -> dict[tuple[str, bool], str]:
    """(format, shared) -> place, each once."""
    every = dict.fromkeys(entry for answers in QUESTIONS.values() for entry in answers.values())
    return {entry: f"kcp-{_slug(entry)}" for entry in every}


def runs(study: Any) -> Iterator[tuple[dict[str, Any], str, int]]:
    """(settings, place, seed) of every run: all rates with seed 0, more seeds at the best of them."""
    rates = [rate for rate in RATES if rate in study.rates] or study.rates
    chosen = [*formats().items()][: 2 if study.seeds == 1 else None]
    for (text, shared), place in chosen:
        for rate in rates:
            yield _settings(text, shared, rate), f"{place}-rate{rate:g}", 0
    for seed in range(1, min(study.seeds, SEEDS)):
        for (text, shared), place in chosen:
            rate = best_rate(study, text, shared)
            yield _settings(text, shared, rate), f"{place}-rate{rate:g}", seed


def best_rate(study: Any, text: str, shared: bool) -> float:
    """By seed 0; 0 where nothing has run."""
    found = {}
    for rate in study.rates:
        record = _record(study, text, shared, rate, 0)
        if record is not None:
            found[rate] = record["accuracy"]
    return max(found, key=lambda rate: found[rate], default=0.0)


def collect(study: Any) -> dict[str, Any]:
    """{question: lines}, each with its runs at the best rate; and what a dense W learns."""
    found: dict[str, Any] = {}
    for question, answers in QUESTIONS.items():
        lines = []
        for label, (text, shared) in answers.items():
            rate = best_rate(study, text, shared)
            tries = [_record(study, text, shared, rate, seed) for seed in range(SEEDS)]
            done = [record for record in tries if record is not None]
            if done:
                lines.append({"label": label, "format": text, "shared": shared, "rate": rate, "runs": done})
        found[question] = lines
    return {"questions": found, "learnt": study.records.known.get(HELD)}


def _record(study: Any, text: str, shared: bool, rate: float, seed: int) -> Record | None:
    key = f"{formats()[text, shared]}-rate{rate:g}-fold1-seed{seed}"
    return study.records.get(key, _settings(text, shared, rate)) if rate else None


def _settings(text: str, shared: bool, rate: float) -> dict[str, Any]:
    return {"format": text, "shared": shared, "learning_rate": rate}


def _slug(entry: tuple[str, bool]) -> str:
    return "".join(c if c.isalnum() else "-" for c in entry[0]) + ("-shared" if entry[1] else "")


# What a dense W learns ----------------------------------------------------------------------------------------


def learnt(study: Any) -> Record:
    """Effective rank of W's gradient at the start and of its change in training, and how much of them formats hold."""
    settings = {"format": "dense", "learning_rate": 1e-3}
    known = study.records.get(HELD, settings)
    if known is not None:
        return dict(known)
    split = {"fold_method": "repetition", "folds": 2, "fold_seed": 0, "name": "learnt"}
    e = make_experiment({**study.base, **split, **settings, "eval_every": study.base["epochs"]}, "letters")
    train, valid = loaders(e, study.inner, 1, 0)
    torch.manual_seed(0)
    model = e.build_model(study.inner.classes)
    first = model.rnn.to_dense().weight_ih_l0.detach().clone()
    gradient = gradient_of(model, train)
    fit(model, train, valid, e.train_settings(0))
    change = model.rnn.to_dense().weight_ih_l0.detach() - first
    print("learnt: fitting formats", file=sys.stderr, flush=True)
    record: Record = {"settings": settings, "accuracy": 0.0, "matrices": {}, "held": {}}
    for name, matrix in (("gradient at the start", gradient), ("change in training", change)):
        record["matrices"][name] = {"effective rank": effective_rank(matrix), "rank of 90%": rank_of(matrix, 0.9)}
    for own in study.formats.values():
        text, shared = str(own["format"]), bool(own.get("shared"))
        if text != "dense" and shared and text not in record["held"]:
            record["held"][text] = held(change, text, shared)
    return dict(study.records.put(HELD, record))


def gradient_of(model: nn.Module, train: Loader) -> Tensor:
    """Of the mean loss over the training clips, with respect to W."""
    model.eval()
    model.zero_grad()
    for batch in train:
        nn.functional.cross_entropy(model(batch.x, batch.lengths), batch.y, reduction="sum").backward()
    weights: Mapping[str, Any] = dict(model.rnn.named_parameters())  # type: ignore[union-attr]
    return next(p.grad for name, p in weights.items() if name.startswith("weight_ih"))


def effective_rank(matrix: Tensor) -> float:
    """exp of the entropy of the energies of the singular values."""
    energy = torch.linalg.svdvals(matrix.double()).square()
    share = energy / energy.sum()
    return math.exp(float(torch.special.entr(share).sum()))


def rank_of(matrix: Tensor, share: float) -> int:
    """How many singular values have this share of the energy."""
    energy = torch.linalg.svdvals(matrix.double()).square().cumsum(0)
    return int((energy < share * energy[-1]).sum()) + 1


def held(matrix: Tensor, text: str, shared: bool) -> float:
    """The share of a matrix's energy that the best fit of a format has, all gates in one layer."""
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    linear.weight = nn.Parameter(matrix.detach().clone())
    layer = kc.TensorLinear.from_dense(linear, text, gates=4, shared=shared)
    return 1.0 - float(layer.fit_error) ** 2
