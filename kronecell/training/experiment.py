"""An experiment as data: one flat table of settings, in a TOML file that holds only what differs from the defaults.

    experiments/defaults.toml    settings of all packaged experiments, then one table per data set
    experiments/NAME.toml        what makes this experiment; `dataset` names the table it takes

The folder is part of the package, so that an installed kronecell finds its experiments anywhere.
Strength, from weak to strong: this class, defaults.toml, its table for the data set, the file, `--set key=value`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kronecell.data.folds import METHODS
from kronecell.deploy import records
from kronecell.errors import KronecellError
from kronecell.formats import Format, parse, split_doping
from kronecell.formats.recipes import layer_formats
from kronecell.nn.rates import spectral_start
from kronecell.training.classifier import CELLS, NORMALISATIONS, READOUTS, VideoClassifier
from kronecell.training.loop import TrainSettings, check_settings
from kronecell.training.predict import Preprocessing

DEFAULTS = "defaults.toml"
FOLDER = Path(__file__).resolve().parent / "experiments"
DENSE = "dense"
INITS = ("entries", "spectral")
LARGEST = (2**53, 1e300)  # whole numbers, others


def setting(default: Any, meaning: str, change: str = "") -> Any:
    """A setting with what it means and when to change it, for the table in docs/train.md and `experiments settings`."""
    return field(default=default, metadata={"meaning": meaning, "change": change})


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run computes, apart from the data, the fold and the seed."""

    name: str = setting(
        "", "name of the experiment and of its folder below `--out`; empty: the name of its file",
        "to keep runs with other settings apart",
    )  # fmt: skip
    dataset: str = setting(
        "", "UCF11, YCF, UCF50, or any other name; names a table of `defaults.toml`", "for the settings of that table"
    )
    paper: str = setting(
        "", "the column of the paper's tables this is, such as KCP(4,4,2)", "only in files that repeat the paper"
    )
    format: str = setting(
        DENSE,
        "format of W: `dense`, one with modes and ranks, or a recipe such as `tt:r=4`, whose modes are chosen",
        "to compress: `docs/choosing.md` says which",
    )
    shared: bool | tuple[str, ...] = setting(
        False, "one copy of a factor for all gates: true as the paper shares, or the names of the unshared factors",
        "for three times fewer parameters of W",
    )  # fmt: skip
    cell: str = setting("lstm", "`lstm` or `gru`", "`gru` has three gates instead of four: a quarter fewer parameters")
    hidden: int = setting(256, "hidden size", "smaller for little data; its square is the size of U")
    classes: int = setting(0, "number of classes; 0: as many as the data has", "to insist on a number")
    width: int = setting(160, "width of the frames", "smaller frames train faster")
    height: int = setting(120, "height of the frames", "together with `width`")
    channels: int = setting(3, "3: colour; 1: grey", "grey where colour says nothing about the class")
    frames: int = setting(
        6,
        "frames of a sample; 0: whole clips, packed, up to the 120 frames that a store keeps",
        "more, or 0, for classes that only a longer motion tells",
    )
    segments: int = setting(
        10, "parts of a validation clip whose probabilities are averaged", "fewer to validate faster, and less exactly"
    )
    spread: bool = setting(
        True,
        "samples of clips shorter than segments * frames reach over half of the clip",
        "false to repeat runs of release 0.1",
    )
    normalise: str = setting(
        "pixel", "`pixel`: bytes to 0 to 1; `frame`: each frame to mean 0 and rms 1; `clip`: all its frames together",
        "`clip` or `frame` where brightness says nothing",
    )  # fmt: skip
    pixel_mean: float = setting(0.0, "subtracted from every pixel (of 0 to 1)", "to the mean of your frames")
    input_gain: float = setting(
        1.0, "factor of the normalised input", "sqrt(3 hidden / inputs) where training starts saturated"
    )
    readout: str = setting(
        "last", "what is classified: the `last` state, or the `mean` of all outputs", "`mean` for long clips"
    )
    dropout: float = setting(
        0.0,
        "probability with which each number that is classified is dropped in training",
        "0.3 to 0.5 where training accuracy is 100%",
    )
    order: str = setting("auto", "order of contraction, chosen by cost if auto", "to compare orders")
    flip: bool = setting(False, "half of the training samples are mirrored", "where left and right mean the same")
    folds: int = setting(
        0, "folds for cross validation; 0: as many as the store has",
        "more for few clips: each run then trains on more of them",
    )  # fmt: skip
    fold_method: str = setting(
        "store",
        "how clips are split: `store` as the store was; `group` keeps the clips of a recording in one fold; `talker` "
        "those of a person, in all classes; `repetition` goes by the number that names end in; `random` by chance",
        "`talker` to test on new people; `random`, as the paper's may be, puts like clips on both sides",
    )
    fold_seed: int = setting(
        -1, "seed of the folds; negative: that of the store", "to repeat an experiment on another split"
    )
    batch_size: int = setting(
        16, "clips of a training step, over all processes",
        "smaller where memory is short; then search the learning rate again",
    )  # fmt: skip
    epochs: int = setting(400, "passes over the training clips", "fewer for a first look")
    learning_rate: float = setting(
        1e-3,
        "step size of Adam",
        "try 1e-3, 4e-3, 1.6e-2 for a compressed W: the best rate differs from format to format",
    )
    rates: str = setting(
        "uniform",
        "`uniform`: one rate for all; `structure`: that of U, and W, or each factor of it, at what suits its width",
        "`structure` for a dense W over wide inputs: it learns better, and takes the formats' rates",
    )
    init: str = setting(
        "entries",
        "W starts with torch's rms of `entries`, or, where that is less, with its `spectral` norm",
        "to compare; see also `rates`",
    )
    weight_decay: float = setting(
        0.0,
        "each step shrinks the weights by `learning_rate` times this: decoupled, as in AdamW",
        "0.01 to 0.1 for little data",
    )
    clip_norm: float = setting(0.0, "largest norm of a gradient; 0: not clipped", "1.0 for high rates")
    schedule: str = setting(
        "constant", "`constant`, or `cosine` to zero at the last epoch", "cosine where the last epoch counts"
    )
    precision: str = setting("float32", "`float32`, or `bfloat16` under autocast", "bfloat16 on GPUs")
    early_stop: int = setting(
        0,
        "epochs without a better validation before the end; 0: off",
        "for a quick look: it selects on the validation clips",
    )
    eval_every: int = setting(
        1,
        "epochs between validations; the last is always validated",
        "more where validation takes longer than training",
    )
    max_seconds: float = setting(
        0.0, "most seconds of training steps; 0: no limit",
        "to give every run the same time; reports draw a run that it cuts short hollow",
    )  # fmt: skip
    checkpoint_seconds: float = setting(60.0, "seconds between checkpoints", "longer where the disk is slow")
    sparse_from: float = setting(
        0.1,
        "of a doped format: part of the training in which its sparse matrix S is dense",
        "0 to prune from the start",
    )
    sparse_at: float = setting(
        0.6,
        "part of the training after which S has the density of the format; epochs before are not validated. "
        "0: S stays where it starts, at random places",
        "smaller to leave more steps for the places that are kept",
    )
    codropout: float = setting(
        0.5,
        "co-matrix dropout: in that part of the outputs structure or S is left out, at random; falls to zero at "
        "`sparse_at`",
        "0 where the training is short",
    )
    workers: int = setting(1, "threads that read ahead; 0: none", "more where training waits for the store")

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before any data is read."""
        for name in ("hidden", "width", "height", "segments", "batch_size"):
            if getattr(self, name) < 1:
                raise KronecellError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.frames < 0:
            raise KronecellError(f"frames must be at least 1, or 0 for whole clips, got {self.frames}")
        if self.channels not in (1, 3):
            raise KronecellError(f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        if self.folds < 0 or self.folds == 1 or self.workers < 0 or self.classes < 0 or self.classes == 1:
            raise KronecellError(
                f"folds must be 0 or at least 2, workers at least 0, classes 0 or at least 2; "
                f"got {self.folds}, {self.workers}, {self.classes}"
            )
        if not 0 <= self.dropout < 1:
            raise KronecellError(f"dropout must be from 0 to below 1, got {self.dropout}")
        choices: dict[str, tuple[str, ...]] = {"cell": (*CELLS,), "normalise": NORMALISATIONS, "readout": READOUTS}
        choices["init"] = INITS
        choices["fold_method"] = ("store", *METHODS)
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise KronecellError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.name and ("/" in self.name or self.name.startswith(".") or "\0" in self.name):
            raise KronecellError(f"name becomes a folder: no '/', no leading '.', got {self.name!r}")
        check_settings(self.train_settings(0))
        fmt = self.weight_format()
        if fmt is None:
            return
        object.__setattr__(self, "format", str(fmt))  # with the modes of a recipe, as config.toml shall have it
        fmt.network(CELLS[self.cell].GATES, self.shared)  # unknown factor names are refused here
        if self.order != "auto":
            fmt.plan(self.order)

    @property
    def input_size(self) -> int:
        """Numbers in one frame."""
        return self.width * self.height * self.channels

    def weight_format(self) -> Format | None:
        """The format of W; None is a plain matrix."""
        if self.format == DENSE:
            return None
        needed = self.input_size, self.hidden
        if "m=" not in self.format:
            return layer_formats(self.format, [needed], "format", pad=False)[0]
        fmt = parse(self.format)
        if needed != (fmt.M, fmt.N):
            raise KronecellError(
                f"format {self.format!r} is {fmt.M} x {fmt.N}, but frames of {self.width} x {self.height} x "
                f"{self.channels} and hidden = {self.hidden} need {self.input_size} x {self.hidden}; a recipe without "
                f"modes, {self.recipe()!r}, fits every size"
            )
        return fmt

    def recipe(self) -> str:
        """The format's kind and ranks without its modes."""
        structure = split_doping(self.format)[1]
        kind, _, options = structure.partition(":")
        kept = [part for part in options.split(",") if part.strip()[:2] not in ("m=", "n=")]
        return self.format.removesuffix(structure) + (f"{kind}:{','.join(kept)}" if kept else kind)

    def preprocessing(self) -> Preprocessing:
        """How clips become frames."""
        return Preprocessing(self.width, self.height, self.channels, self.frames, self.segments, self.spread)

    def train_settings(self, seed: int) -> TrainSettings:
        """The part that `fit` reads."""
        names = {field.name for field in fields(TrainSettings)} - {"seed"}
        return TrainSettings(**{name: getattr(self, name) for name in names}, seed=seed)

    def build_model(self, classes: int | Sequence[str], facts: Mapping[str, Any] | None = None) -> VideoClassifier:
        """A fresh model for this number of classes, or for classes of these names; draws from torch's generator."""
        model = VideoClassifier(
            self.input_size,
            self.hidden,
            classes,
            cell=self.cell,
            input_format=self.weight_format(),
            shared=self.shared,
            order=self.order,
            dropout=self.dropout,
            readout=self.readout,
            normalise=self.normalise,
            pixel_mean=self.pixel_mean,
            input_gain=self.input_gain,
            preprocessing=self.preprocessing(),
            facts=facts,
        )
        if self.init == "spectral":
            spectral_start(model)
        return model

    def to_toml(self) -> str:
        """All settings, one per line."""
        return "".join(f"{field.name} = {_toml(getattr(self, field.name))}\n" for field in fields(self))


def describe_settings() -> list[tuple[str, str, str, str]]:
    """(name, default as in TOML, meaning, when to change it) of every setting."""
    return [(f.name, _toml(f.default), f.metadata["meaning"], f.metadata["change"]) for f in fields(Experiment)]


OLD = {"spread": False, "sparse_at": 0.0}  # what release 0.1, whose files lack these settings, did
_DEFAULTS = {f.name: f.default for f in fields(Experiment)}
KINDS: dict[str, type] = {f.name: type(f.default) for f in fields(Experiment)}


def load_experiment(name: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment in a file, given by its path, or a packaged one, given by its name."""
    path = find_experiment(name)
    settings: dict[str, Any] = {}
    own = read_toml(path)
    # A file anywhere takes the packaged defaults; a run's config.toml, which has every setting, needs none.
    defaults_path = path.parent / DEFAULTS
    if not defaults_path.is_file():
        defaults_path = FOLDER / DEFAULTS
    if not {"width", "segments", "schedule"} <= own.keys():
        defaults = read_toml(defaults_path)
        tables = {key: value for key, value in defaults.items() if isinstance(value, dict)}
        settings |= {key: value for key, value in defaults.items() if key not in tables}
        settings |= tables.get((overrides or {}).get("dataset", own.get("dataset", "")), {})
    settings |= own | dict(overrides or {})
    settings.setdefault("name", path.stem)
    return make_experiment(settings, str(path))


def make_experiment(settings: Mapping[str, Any], source: str = "experiment") -> Experiment:
    """Check names and types, then build; every error says where the setting came from."""
    checked = {}
    for key, value in settings.items():
        if key not in KINDS:
            raise KronecellError(f"{source}: unknown setting {key!r}{_similar(key)}; known: {', '.join(KINDS)}")
        checked[key] = _checked(key, value, source)
    try:
        return Experiment(**checked)
    except KronecellError as error:
        raise type(error)(f"{source}: {error}") from None


def find_experiment(name: str) -> Path:
    """The file of an experiment."""
    for path in (Path(name), FOLDER / f"{name}.toml"):
        if os.path.isfile(path):  # unlike Path.is_file, False for a name that no file can have
            return path
    close = _similar(name, list_experiments())
    raise KronecellError(
        f"no experiment {name!r}: neither a file nor a packaged experiment{close}; `kronecell experiments list` "
        f"shows them"
    )


def list_experiments(pattern: str = "*") -> list[str]:
    """Names of packaged experiments that match a shell pattern."""
    names = sorted(path.stem for path in FOLDER.glob("*.toml") if path.name != DEFAULTS)
    return [name for name in names if fnmatch.fnmatch(name, pattern)]


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary."""
    return records.read_toml(path, KronecellError)


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """`key=value` from the command line; the value is TOML, or else a plain string."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise KronecellError(f"--set needs key=value, got {assignment!r}")
        try:
            overrides[key.strip()] = records.parse_toml(f"value = {value}")["value"]
        except ValueError:
            overrides[key.strip()] = value
    return overrides


def differences(old: Mapping[str, Any], new: Experiment) -> list[str]:
    """Settings of a saved configuration that would compute something else than `new`, as text."""
    free = {"checkpoint_seconds", "workers"}  # these do not change a single number
    found = []
    for key, value in dataclasses.asdict(new).items():
        before = old.get(key, OLD.get(key, _DEFAULTS[key]))  # a setting that an older release did not have
        before = tuple(before) if isinstance(before, list) else before
        if key not in free and before != value:
            found.append(f"{key} was {before!r}, is {value!r}")
    return found


def _checked(key: str, value: Any, source: str) -> Any:
    if key == "shared":
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        if isinstance(value, bool):
            return value
        raise KronecellError(f"{source}: shared must be true, false or a list of factor names, got {value!r}")
    kind = KINDS[key]
    if isinstance(value, int | float) and not abs(value) <= LARGEST[kind is float]:  # NaN, too
        raise KronecellError(f"{source}: {key} must be a finite number, and a whole one at most 2**53")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise KronecellError(f"{source}: {key} must be {_KIND_NAMES[kind]}, got {value!r}")
    return value


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _similar(name: str, known: Sequence[str] = ()) -> str:
    import difflib

    close = difflib.get_close_matches(name[:100], known or [*KINDS], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # true, numbers and quoted strings are written alike in JSON and TOML
