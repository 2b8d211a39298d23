"""Classifiers of whole clips: what follows a clip is never read, and training, loading and answering agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kronecell as kc
from kronecell.cli.main import main
from kronecell.data import Store, find_dataset, prepare
from kronecell.errors import KronecellError
from kronecell.training.evaluation import evaluate_clips
from kronecell.training.run import make_experiment, run, run_folder

LENGTHS = torch.tensor([5, 2, 4])


def classifier(**settings: object) -> kc.VideoClassifier:
    torch.manual_seed(0)
    model = kc.VideoClassifier(48, 8, 3, input_format="tt:m=8x6,n=2x4,r=2", input_gain=2.0, **settings)  # type: ignore[arg-type]
    return model.double().eval()


@pytest.mark.parametrize("normalise", ["pixel", "frame", "clip"])
@pytest.mark.parametrize("readout", ["last", "mean"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_packed_clip_is_answered_as_alone_whatever_follows_it(normalise: str, readout: str, cell: str) -> None:
    model = classifier(normalise=normalise, readout=readout, cell=cell)
    x = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    together = model(x, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model(x[row : row + 1, :length])
        assert torch.allclose(together[row], alone[0], rtol=1e-12, atol=1e-12)
        x[row, length:] = 77
    assert torch.equal(model(x, LENGTHS), together)


def test_normalised_clips_have_mean_0_and_rms_1_and_keep_their_motion() -> None:
    model = classifier(normalise="clip")
    x = torch.randint(0, 200, (2, 5, 48), dtype=torch.uint8)
    scale, shift = model.normalisation(x)
    seen = (x.double() / 255 * scale + shift) / 2.0  # the gain
    assert torch.allclose(seen.mean((1, 2)), torch.zeros(2).double(), atol=1e-9)
    assert torch.allclose(seen.square().mean((1, 2)), torch.ones(2).double(), atol=1e-3)
    still = seen - x.double() * (seen[:, :1, :1] - seen[:, 1:2, :1]) / (x[:, :1, :1].double() - x[:, 1:2, :1].double())
    assert torch.allclose(still, still[:, :1, :1].expand_as(still), atol=1e-9)  # one scale and shift for all frames


def test_gradients_pass_through_packed_clips() -> None:
    model = classifier(normalise="clip", readout="mean")
    x = torch.rand(2, 4, 48, dtype=torch.float64) * 255
    loss = model(x, torch.tensor([4, 3])).square().sum()
    alone = sum(model(x[i : i + 1, :n]).square().sum() for i, n in enumerate((4, 3)))
    packed = torch.autograd.grad(loss, [*model.parameters()])
    single = torch.autograd.grad(alone, [*model.parameters()])  # type: ignore[arg-type]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(packed, single, strict=True))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Bright and dark clips of unequal length: two classes that brightness tells."""
    root, generator = tmp_path_factory.mktemp("letters"), np.random.default_rng(0)
    for letter, level in (("A", 40), ("B", 200)):
        for talker in ("Ann", "Bea"):
            for n in (1, 2, 3, 4):
                path = root / "videos" / letter / f"{talker}_{n}.npy"
                path.parent.mkdir(parents=True, exist_ok=True)
                length = int(generator.integers(3, 9))
                np.save(path, np.clip(generator.normal(level, 20, (length, 6, 8)), 0, 255).astype(np.uint8))
    found = find_dataset(root / "videos")
    return prepare(
        found, root / "store", 8, 6, workers=1, progress=False, folds=4, fold_method="repetition", channels=1
    )


SETTINGS = {
    "name": "letters", "format": "tt:m=8x6,n=2x4,r=2", "hidden": 8, "width": 8, "height": 6, "channels": 1, "frames": 0,
    "readout": "mean", "epochs": 25, "learning_rate": 0.03, "batch_size": 4, "workers": 0, "pixel_mean": 0.5,
    "eval_every": 25,
}  # fmt: skip


def test_a_run_over_whole_clips_learns_loads_and_answers(
    letters: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = make_experiment(SETTINGS)
    result = run(experiment, letters, tmp_path, fold=3, show=False)
    assert result["top1_last"] == 1.0 and result["clips"]["valid"] == 4 and 3 <= result["frames"] <= 8
    folder = run_folder(tmp_path, experiment, 3, 0)
    model = kc.load(folder)
    assert model.readout == "mean" and model.preprocessing.frames == 0
    held_out = [i for i, fold in enumerate(letters.folds) if fold == 3]
    by_store = {answer.name: answer for answer in evaluate_clips(model, letters, held_out).answers}
    for i in held_out:
        one = model.predict(letters.clips[i].path)  # from the file, all of its frames
        assert one.label == by_store[letters.clips[i].name].answer == letters.clips[i].label
        assert one.probability == pytest.approx(by_store[letters.clips[i].name].probability, abs=1e-6)
    with pytest.raises(SystemExit) as stop:
        main(["export", str(folder), "--to", "onnx"])
    assert stop.value.code == 2 and "reads whole clips of any length" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["bench", str(folder), "--json", "--batches", "1"])
    out = capsys.readouterr()
    assert stop.value.code == 0 and json.loads(out.out), out.err


def test_frames_below_zero_are_refused() -> None:
    with pytest.raises(KronecellError, match="0 for whole clips"):
        make_experiment({**SETTINGS, "frames": -1})
    for name in ("init", "readout", "fold_method"):
        with pytest.raises(KronecellError, match=f"{name} must be one of .*, got 'other'"):
            make_experiment({**SETTINGS, name: "other"})
    with pytest.raises(kc.ShapeError, match="readout must be one of last, mean"):
        classifier(readout="first")
