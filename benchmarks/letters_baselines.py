"""What else one would do with the clips of benchmarks.letters: ridge regression; PCA or a CNN before an LSTM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import kronecell as kc
from benchmarks.letters_records import Record
from kronecell.data import Loader, Store
from kronecell.training.experiment import Experiment
from kronecell.training.loop import Diverged, fit
from kronecell.training.run import make_experiment
from kronecell.training.splits import loaders

STEPS = 20  # frames that ridge regression sees of a clip, evenly spaced
PENALTIES = tuple(10.0**k for k in range(-1, 6))
RIDGE, CNN, CNN_KCP = "ridge regression on pixels", "CNN + dense LSTM", "CNN + KCP (4,4,2) LSTM"
PCA = {"PCA to 64 + dense LSTM": 64, "PCA to 256 + dense LSTM": 256}
NETWORKS = (*PCA, CNN_KCP, CNN)


class Encoded(nn.Module):
    """Frames, normalised as a clip -> encoder of single frames -> LSTM -> mean of its outputs -> classes."""

    def __init__(
        self, encoder: nn.Module, width: int, hidden: int, classes: int, dropout: float, gain: float, recipe: str | None
    ) -> None:
        super().__init__()
        self.encoder, self.gain = encoder, gain
        self.rnn = kc.LSTM(width, hidden, batch_first=True, input_format=recipe)
        self.dropout, self.classifier = nn.Dropout(dropout), nn.Linear(hidden, classes)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        there = (torch.arange(frames.shape[1]) < lengths[:, None])[..., None]
        x = frames.float()
        count = there.sum((1, 2), keepdim=True) * x.shape[2]
        mean = (x * there).sum((1, 2), keepdim=True) / count
        deviation = (((x - mean) * there).square().sum((1, 2), keepdim=True) / count + 1.0).sqrt()
        packed = pack_padded_sequence((x - mean) / deviation, lengths, batch_first=True, enforce_sorted=False)
        features = PackedSequence(self.encoder(packed.data) * self.gain, *packed[1:])
        output, counts = pad_packed_sequence(self.rnn(features)[0], batch_first=True)
        return self.classifier(self.dropout(output.sum(1) / counts[:, None]))


class Projection(nn.Module):
    """Principal components with unit variance; not trained."""

    def __init__(self, rows: Tensor, width: int) -> None:
        super().__init__()
        _, values, directions = torch.pca_lowrank(rows, min(width, *rows.shape), center=False, niter=4)
        self.register_buffer("matrix", directions / (values / len(rows) ** 0.5).clamp_min(1e-6))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.get_buffer("matrix")


def cnn(width: int, height: int) -> tuple[nn.Module, int]:
    """Three convolutions of stride 2, and how many numbers they make of a frame."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, height, width))]
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        width, height = -(-width // 2), -(-height // 2)
    return nn.Sequential(*layers, nn.Flatten()), 32 * width * height


def rounds(study: Any, trials: Callable[..., Any], best_of: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """The pieces of work: ridge regression, then each network with all its seeds."""
    yield lambda: ridge(study)
    for name in NETWORKS:
        for seed in range(study.seeds):

            def piece(name: str = name, seed: int = seed) -> object:
                def train(settings: dict[str, Any], tag: str) -> Record:
                    return one_run(study, name, f"inner-{tag}", settings, study.inner, 1, 0)

                return one_run(study, name, "test", best_of(trials(study, train)), study.whole, 2, seed)

            yield piece


def one_run(
    study: Any, name: str, place: str, settings: Mapping[str, Any], store: Store, fold: int, seed: int
) -> Record:
    """As that of benchmarks.letters, for networks that are not experiments."""
    key = f"{_place(name, place)}-fold{fold}-seed{seed}"
    known = study.records.get(key, settings)
    if known is not None:
        return dict(known)
    split = {"fold_method": "repetition", "folds": 2 if store is study.inner else 3, "fold_seed": 0, "name": "baseline"}
    e = make_experiment({**study.base, **split, **settings, "eval_every": study.base["epochs"]}, "letters")
    train, valid = loaders(e, store, fold, seed)
    torch.manual_seed(seed)
    model = build(name, e, train, len(store.classes))
    try:
        fit(model, train, valid, e.train_settings(seed))
    except Diverged as error:
        record: Record = {"accuracy": 0.0, "diverged": str(error)[:200]}
    else:
        right = answers(model, valid)
        record = {"accuracy": sum(right.values()) / len(right), "clips": len(right)}
        record |= {"right": "".join(str(right[key]) for key in sorted(right))}
        weight: Any = model.rnn.weight_ih_l0
        record["params_w"] = (
            sum(p.numel() for p in weight.parameters()) if isinstance(weight, nn.Module) else weight.numel()
        )
        record["params_model"] = sum(p.numel() for p in model.parameters())
        record["params_model"] += sum(b.numel() for b in model.encoder.buffers())
    record |= {"settings": dict(settings), "fold": fold, "seed": seed}
    print(f"{name} {place} seed {seed}: {record['accuracy']:.1%}", file=sys.stderr, flush=True)
    return dict(study.records.put(key, record))


def build(name: str, e: Experiment, train: Loader, classes: int) -> Encoded:
    if name in PCA:
        rows = torch.cat([torch.from_numpy(clip) for clip, _, _ in clips_of(train)])
        encoder: nn.Module = Projection(rows[torch.randperm(len(rows))[:8000]], PCA[name])
        width = encoder.get_buffer("matrix").shape[1]
        return Encoded(encoder, width, e.hidden, classes, e.dropout, e.input_gain, None)
    encoder, width = cnn(e.width, e.height)
    recipe = "kcp:K=4,CA=4,CB=2" if name == CNN_KCP else None
    return Encoded(encoder, width, e.hidden, classes, e.dropout, e.input_gain, recipe)


def clips_of(loader: Loader) -> Iterator[tuple[np.ndarray, int, str]]:
    """(frames normalised as a clip, class, name) of every clip of a loader."""
    for i in loader.indices:
        clip = loader.store.clips[int(i)]
        x = np.asarray(loader.store.frames(int(i))).reshape(len(loader.store.indices(int(i))), -1).astype(np.float32)
        yield (x - x.mean()) / np.sqrt(x.var() + 1.0), clip.class_index, clip.name


@torch.no_grad()
def answers(model: nn.Module, valid: Loader) -> dict[str, int]:
    """Clip -> 1 if it is answered correctly."""
    model.eval()
    found = {}
    for batch in valid:
        scores = model(batch.x.flatten(0, 1), batch.lengths)
        for name, y, answer, counts in zip(batch.names, batch.y, scores.argmax(-1), batch.valid, strict=True):
            if counts:
                found[name] = int(y == answer)
    return found


@torch.no_grad()
def ridge(study: Any) -> Record:
    """One-against-all ridge regression on evenly spaced frames; the penalty by the inner split."""
    key = f"{_place(RIDGE, 'test')}-fold2-seed0"
    if key in study.records.known:
        return dict(study.records.known[key])
    scores = {penalty: _ridge(study, study.inner, 1, 2, penalty)[0] for penalty in PENALTIES}
    penalty = max(scores, key=lambda key: scores[key])
    accuracy, right, size = _ridge(study, study.whole, 2, 3, penalty)
    record = {"accuracy": accuracy, "right": right, "clips": len(right)}
    record |= {"params_w": size, "params_model": size, "settings": {"penalty": penalty}, "fold": 2, "seed": 0}
    print(f"{RIDGE}: {accuracy:.1%}", file=sys.stderr, flush=True)
    return dict(study.records.put(key, record))


def _ridge(study: Any, store: Store, fold: int, folds: int, penalty: float) -> tuple[float, str, int]:
    e = make_experiment({**study.base, "fold_method": "repetition", "folds": folds, "name": "ridge"}, "letters")
    train, valid = loaders(e, store, fold, 0)

    def table(loader: Loader) -> tuple[np.ndarray, np.ndarray, list[str]]:
        found = [(x[_steps(len(x))].ravel(), y, name) for x, y, name in clips_of(loader)]
        return np.stack([x for x, _, _ in found]), np.array([y for _, y, _ in found]), [name for *_, name in found]

    (x, y, _), (other, truth, names) = table(train), table(valid)
    middle = x.mean(0)
    x, other = (x - middle).astype(np.float64), (other - middle).astype(np.float64)
    wanted = 2.0 * np.eye(len(store.classes))[y] - 1.0
    kernel = x @ x.T
    weights = np.linalg.solve(
        kernel + penalty * np.trace(kernel) / len(x) * np.eye(len(x)) * 1e-2, wanted - wanted.mean(0)
    )
    answer = (other @ x.T @ weights + wanted.mean(0)).argmax(1)
    right = dict(zip(names, (answer == truth).astype(int).tolist(), strict=True))
    return (
        float(np.mean(answer == truth)),
        "".join(str(right[name]) for name in sorted(right)),
        x.shape[1] * wanted.shape[1],
    )


def _steps(count: int) -> np.ndarray:
    return np.round(np.linspace(0, count - 1, STEPS)).astype(int)


def collect(study: Any) -> list[dict[str, Any]]:
    """What is finished, by name."""
    rows = []
    for name in (RIDGE, *NETWORKS):
        found, inner = study.records.of(_place(name, "test")), _place(name, "inner")
        tried = [record for key, record in study.records.known.items() if key.startswith(inner)]
        if found:
            rows.append({"name": name, "trials": tried, "test": found})
    return rows


def _place(name: str, place: str) -> str:
    return "beside-" + "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") + f"-{place}"
