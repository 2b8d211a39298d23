"""The paper's network: frames of a clip -> one recurrent layer in a chosen format -> classifier on the last state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from kronecell.deploy.c_source.parts import ClassifierParts
from kronecell.deploy.modules import describe, rebuild, register
from kronecell.errors import ShapeError
from kronecell.formats import Shared
from kronecell.formats.recipes import FormatSpecs
from kronecell.nn.rnn import GRU, LSTM
from kronecell.training.predict import Prediction, Preprocessing, predict

CELLS: dict[str, type[LSTM] | type[GRU]] = {"lstm": LSTM, "gru": GRU}
NORMALISATIONS = ("pixel", "frame", "clip")
READOUTS = ("last", "mean")


@register
class VideoClassifier(nn.Module):
    """(batch, time, M) uint8 or float -> (batch, classes) scores; `predict` goes from files to names of classes.

    `classes` is their number or their names, `preprocessing` how clips become frames, `facts` where the weights come
    from (any JSON). All three are saved with the model; `rnn` is a finished layer to take instead of making one.

    A byte p becomes (p / 255 - pixel_mean) * input_gain; with normalise="frame" every frame is first shifted and
    scaled to mean 0 and rms 1; with "clip" all frames of a clip together, which keeps what changes between them.
    The gain matters: torch draws W for about hidden_size inputs, so 57,600 pixels saturate every gate; for inputs of
    rms 1 a gain of sqrt(3 H / M) starts the gates at unit variance. What is classified is the last state, or with
    readout="mean" the mean of the outputs of all steps.

    >>> model = VideoClassifier(576, 16, 11, input_format="kcp:m=24x24,n=4x4,K=2,CA=2,CB=2")
    >>> model(torch.zeros(2, 6, 576, dtype=torch.uint8)).shape
    torch.Size([2, 11])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        classes: int | Sequence[str],
        *,
        cell: str = "lstm",
        input_format: FormatSpecs = None,
        hidden_format: FormatSpecs = None,
        shared: Shared = False,
        order: str = "auto",
        dropout: float = 0.0,
        readout: str = "last",
        normalise: str = "pixel",
        pixel_mean: float = 0.0,
        input_gain: float = 1.0,
        forget_bias: float | None = None,
        preprocessing: Preprocessing | None = None,
        facts: Mapping[str, Any] | None = None,
        rnn: LSTM | GRU | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        names = [f"class {number}" for number in range(classes)] if isinstance(classes, int) else [*classes]
        if cell not in CELLS:
            raise ShapeError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if normalise not in NORMALISATIONS:
            raise ShapeError(f"normalise must be one of {', '.join(NORMALISATIONS)}, got {normalise!r}")
        if readout not in READOUTS:
            raise ShapeError(f"readout must be one of {', '.join(READOUTS)}, got {readout!r}")
        if len(names) < 2:
            raise ShapeError(f"classes must be at least 2, got {len(names)}")
        if preprocessing is not None and preprocessing.input_size != input_size:
            raise ShapeError(f"frames of {preprocessing} have {preprocessing.input_size} numbers, not {input_size}")
        if not 0 <= dropout < 1:
            raise ShapeError(f"dropout must be from 0 to below 1, got {dropout}")
        self.readout = readout
        self.normalise, self.pixel_mean, self.input_gain = normalise, float(pixel_mean), float(input_gain)
        self.class_names, self.named = tuple(names), not isinstance(classes, int)
        self.preprocessing, self.facts = preprocessing, dict(facts or {})
        self.rnn = rnn or CELLS[cell](
            input_size,
            hidden_size,
            batch_first=True,
            input_format=input_format,
            hidden_format=hidden_format,
            shared=shared,
            order=order,
            forget_bias=forget_bias,
            **factory,
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, len(names), **factory)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`lengths` (batch,) says how many frames of each clip count; what follows them is never read."""
        affine = self.normalisation(frames, lengths)
        sequence: Tensor | PackedSequence = frames
        if lengths is not None:
            packed = _packed(frames, lengths)
            scale, shift = affine
            if isinstance(scale, Tensor) and isinstance(shift, Tensor):  # one for each row of the packed sequence
                every = (*frames.shape[:2], 1)
                affine = _packed(scale.expand(every), lengths).data, _packed(shift.expand(every), lengths).data
            sequence = packed
        output, state = self.rnn(sequence, affine=affine)
        hidden = state[0] if isinstance(state, tuple) else state  # LSTM gives (h, c), GRU gives h
        return self.classifier(self.dropout(hidden[-1] if self.readout == "last" else _mean_over_time(output, lengths)))

    def normalisation(self, frames: Tensor, lengths: Tensor | None = None) -> tuple[Tensor | float, Tensor | float]:
        """(scale, shift) of what the recurrent layer reads: its first product takes the bytes, and no copy is made.

        The layer reads a byte as a number from 0 to 1, a float as it is; both count as 0 to 255 here.
        """
        unit = 255.0 if frames.dtype == torch.uint8 else 1.0
        if self.normalise == "pixel":
            return unit / 255.0 * self.input_gain, -self.pixel_mean * self.input_gain
        mean, variance = _moments(frames, self.classifier.weight.dtype)
        if self.normalise == "clip":
            mean, variance = _over_time(mean, variance, lengths)
        scale = self.input_gain * (variance + 1.0).rsqrt()  # + 1: a black frame stays black
        return unit * scale, -mean * scale

    def predict(self, source: Any, batch_size: int = 16) -> Any:
        """The classes of a clip with their probabilities: a `Prediction`, or a list of them for a list of clips.

        A clip is the path of a video, of a folder of pictures or of a .npy or .npz file, or frames in memory, uint8
        (time, height, width, 3) or (time, height, width). Its answer is the mean over `preprocessing.segments` parts.
        """
        if isinstance(source, (list, tuple)):
            return [self.predict(one, batch_size) for one in source]
        result: Prediction = predict(self, source, batch_size)
        return result

    def classifier_parts(self) -> ClassifierParts:
        """For `kc.export_c`."""
        rnn, head = self.rnn, self.classifier
        reads = self.normalise, self.pixel_mean, self.input_gain
        return ClassifierParts(rnn, head, *reads, self.class_names, self.readout)

    def saved_arguments(self) -> dict[str, Any]:
        """What `kc.save` and a run directory keep beside the weights, in JSON's types."""
        return {
            "rnn": describe(self.rnn),
            "classes": [*self.class_names] if self.named else len(self.class_names),
            "dropout": self.dropout.p,
            "readout": self.readout,
            "normalise": self.normalise,
            "pixel_mean": self.pixel_mean,
            "input_gain": self.input_gain,
            "preprocessing": None if self.preprocessing is None else asdict(self.preprocessing),
            "facts": self.facts,
        }

    @classmethod
    def from_saved(cls, arguments: Mapping[str, Any], **factory: Any) -> VideoClassifier:
        """The model of `saved_arguments`, with new weights."""
        rest = dict(arguments)
        rnn: Any = rebuild(rest.pop("rnn"), **factory)
        if rest.get("preprocessing") is not None:
            rest["preprocessing"] = Preprocessing(**rest["preprocessing"])
        return cls(rnn.input_size, rnn.output_size, rnn=rnn, **rest, **factory)

    def extra_repr(self) -> str:
        return f"normalise={self.normalise}, pixel_mean={self.pixel_mean:g}, input_gain={self.input_gain:g}"


def _packed(x: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)


def _mean_over_time(output: Tensor | PackedSequence, lengths: Tensor | None) -> Tensor:
    if isinstance(output, PackedSequence):
        padded, counts = pad_packed_sequence(output, batch_first=True)
        return padded.sum(1) / counts.to(padded.device, padded.dtype)[:, None]
    return output.mean(1)


def _over_time(mean: Tensor, variance: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Moments of whole clips (batch, 1, 1) from those of their frames (batch, time, 1), all of which have one size."""
    if lengths is None:
        whole = mean.mean(1, keepdim=True)
        return whole, (variance + (mean - whole).square()).mean(1, keepdim=True)
    there = (torch.arange(mean.shape[1], device=mean.device) < lengths.to(mean.device)[:, None])[..., None]
    count = there.sum(1, keepdim=True)
    whole = (mean * there).sum(1, keepdim=True) / count
    return whole, ((variance + (mean - whole).square()) * there).sum(1, keepdim=True) / count


def _moments(frames: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of every frame (batch, time, 1), a clip at a time: a float copy of all bytes would be large."""
    if torch.compiler.is_compiling() or frames.dtype == dtype:
        variance, mean = torch.var_mean(frames.to(dtype), dim=-1, keepdim=True, correction=0)
        return mean, variance
    pairs = [torch.var_mean(clip.to(dtype), dim=-1, keepdim=True, correction=0) for clip in frames]
    return torch.stack([mean for _, mean in pairs]), torch.stack([variance for variance, _ in pairs])
