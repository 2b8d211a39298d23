"""Where a run differs from the paper's protocol, in words: figures compare only where the protocols agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kronecell.training.experiment import DENSE, Experiment
from kronecell.training.loop import Progress
from kronecell.training.paper_settings import CLASSES, CLIPS, SETTINGS

DECAY = 0.01
FLIPPED = ("UCF50",)
DECAYED = ("YCF", "UCF50")  # "for all the tensor-decomposed LSTMs": not for the uncompressed one


def settle_data(experiment: Experiment, name: str, classes: Sequence[str], clips: int) -> Experiment:
    """The experiment with the data set it really is trained on: the paper's settings are of use for other data, too,
    but its accuracies are not to be compared with theirs.
    """
    if experiment.dataset not in SETTINGS or is_papers(experiment.dataset, classes, clips):
        return experiment
    name = f"{name} ({clips} clips)" if name in SETTINGS else name  # a part of UCF11 is not UCF11
    return replace(experiment, dataset=name)


def is_papers(dataset: str, classes: Sequence[str], clips: int) -> bool:
    """Whether this is one of the paper's data sets, by its numbers of clips and classes and some of their names."""
    least, most = CLIPS[dataset]
    if not least <= clips <= most:
        return False
    plain = {"".join(c for c in label.lower() if c.isalnum()) for label in classes}
    return len(classes) == SETTINGS[dataset].classes and {*CLASSES[dataset]} <= plain


def deviations(experiment: Experiment, progress: Progress | None = None) -> list[str]:
    """Differences from the paper's protocol; where the paper is silent, what was chosen."""
    e, found = experiment, []
    setting = SETTINGS.get(e.dataset)
    epochs = 400 if setting is None else setting.epochs
    decay = DECAY if e.dataset in DECAYED and e.format != DENSE else 0.0
    if setting is None:
        found.append(f"data set: {e.dataset or 'your own'}, which is not in the paper")
    for name, paper in (("epochs", epochs), ("learning_rate", 1e-3), ("weight_decay", decay), ("folds", 5)):
        if getattr(e, name) != paper and not (name == "folds" and e.folds == 0):  # 0: not settled yet
            found.append(f"{name} {getattr(e, name):g} instead of {paper:g}")
    expected = {"flip": e.dataset in FLIPPED, "frames": 6, "segments": 10, "width": 160, "height": 120, "cell": "lstm"}
    for name, value in expected.items():
        if getattr(e, name) != value:
            found.append(f"{name} {getattr(e, name)} instead of {value}")
    if setting is not None and e.hidden != setting.hidden:
        found.append(f"hidden {e.hidden} instead of {setting.hidden}")
    found.append(
        {
            "group": "folds keep the clips of a group together; the paper does not say so",
            "random": "folds are random and split groups, as the paper's may: clips of one source are on both sides",
            "talker": "folds keep the clips of a person together, in all classes; the paper does not say so",
            "repetition": "folds are repetitions of the same words, which the paper's data do not have",
            "store": "folds are those of the store; the paper does not say how its own were made",
        }[e.fold_method]
    )
    found.append(f"batch of {e.batch_size}: the paper does not say")
    if e.weight_decay:
        found.append("weight decay is decoupled (AdamW): the paper does not say which kind")
    extras = {
        f"gradients clipped to norm {e.clip_norm:g}": e.clip_norm > 0,
        f"learning rate schedule {e.schedule}": e.schedule != "constant",
        "a learning rate for each factor of W": e.rates != "uniform",
        "W starts with the spectral norm of a dense one": e.init != "entries",
        f"mixed precision {e.precision}": e.precision != "float32",
        f"dropout {e.dropout:g}": e.dropout > 0,
        "mean of all outputs instead of the last state": e.readout != "last",
        f"input normalised ({e.normalise}, mean {e.pixel_mean:g}, gain {e.input_gain:g})": (
            e.normalise != "pixel" or e.input_gain != 1.0 or e.pixel_mean != 0.0
        ),
        f"stops after {e.early_stop} epochs without improvement": e.early_stop > 0,
        f"validated every {e.eval_every} epochs": e.eval_every > 1,
    }
    found += [text for text, holds in extras.items() if holds]
    if e.max_seconds:
        spent = "" if progress is None else f": {counted(progress.steps, 'step')} in {counted(progress.epoch, 'epoch')}"
        found.append(f"time budget of {e.max_seconds:g} s of training steps{spent}")
    return found


def counted(count: int, word: str) -> str:
    """1 step, 2 steps."""
    return f"{count} {word}{'s' * (count != 1)}"
