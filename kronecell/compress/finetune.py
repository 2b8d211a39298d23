"""kc.finetune: a compressed model learns to answer as the model that it came from.

    loss = (1 - soft) task + soft (outputs like the teacher's) + hidden (states of recurrent layers like the teacher's)

With `bits` the student computes with rounded weights in every forward, and the result has integers. The loop is `_fit`
below: a step is drawn from (seed, epoch, step) alone, so a run that continues from its checkpoint goes on bit for bit.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.compress.inputs import call
from kronecell.errors import KronecellError
from kronecell.nn.aware import Rounding, ours
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import Bits, Group, is_quantized
from kronecell.nn.recurrent import Recurrent
from kronecell.training.checkpoint import load_checkpoint, save_checkpoint
from kronecell.training.loop import mix

LINES = 5.0  # seconds between lines of progress
WARM = 0.03  # of the steps, in which the learning rate grows
LAST_RATE = 0.02  # of the learning rate, where the cosine ends
Matching = Callable[[Any, Any], Tensor]


@dataclass
class Finetuning:
    """How it went: one row per validation, and which of them is kept."""

    history: list[dict[str, float]] = field(default_factory=list)
    best: float = math.inf
    best_step: int = 0
    step: int = 0
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {"best": self.best if math.isfinite(self.best) else None}

    def __str__(self) -> str:
        lines = [f"{'step':>8}  {'training':>10}  {'validation':>10}  {'seconds':>8}"]
        for row in self.history:
            cells = f"{row['step']:8.0f}  {row['training']:10.4f}  {row['validation']:10.4f}  {row['seconds']:8.0f}"
            lines.append(cells + ("  kept" if row["step"] == self.best_step else ""))
        return "\n".join(lines)


def finetune(
    student: nn.Module,
    teacher: nn.Module | None,
    loader: Iterable[Any],
    *,
    loss: Callable[..., Tensor] | None = None,
    valid: Iterable[Any] | None = None,
    epochs: int = 1,
    steps: int | None = None,
    lr: float = 1e-3,
    soft: float = 0.5,
    hidden: float = 0.0,
    match: str | Matching = "kl",
    temperature: float = 1.0,
    bits: Bits | None = None,
    group: Group = None,
    eval_every: int | None = None,
    patience: int = 0,
    clip_norm: float = 1.0,
    folder: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[nn.Module, Finetuning]:
    """A trained copy of `student` in eval mode, the best that was validated, and how it went.

    loader       an iterable of batches that can be read several times: inputs, or with `loss` (inputs, target ...);
                 several inputs are a tuple
    loss         loss(output, target ...); without one the teacher alone is learnt from
    teacher      the model that outputs and states are compared with; None to learn from `loss` alone
    valid        batches as those of the loader; the state with the smallest loss on them is kept
    epochs       how often the loader is read, or `steps` in all
    lr           learning rate of dense weights; factors get one that changes the matrix by as much. It warms up and
                 then falls with a cosine
    soft         how much of the loss is likeness to the teacher's outputs, if there are both
    hidden       weight of the likeness of outputs of recurrent layers that both models have under the same name
    match        how outputs are compared: "kl" of logits over the last dimension at `temperature`, "mse", or a function
    bits, group  train with weights as kc.quantize(student, bits, group) has them; the result is that quantized module
    eval_every   steps between validations; once an epoch if not given
    patience     validations without a better one after which training stops; 0 for never
    folder       where a checkpoint is written at each validation, and read if there is one
    """
    settings = _Settings(epochs, steps, lr, soft, hidden, match, temperature, eval_every, patience, clip_norm, seed)
    settings.check(loader, loss, teacher)
    if is_quantized(student):
        raise KronecellError("integers do not train: give the module that kc.quantize was called with, and bits")
    student = ours(student) if bits is not None else copy.deepcopy(student)
    student.requires_grad_(True)
    rounding = None if bits is None else Rounding(student, bits, group)
    task = _Task(student, teacher, rounding, loss, settings)
    report = _fit(task, loader, valid, settings, None if folder is None else Path(folder), progress)
    task.student.eval()
    return (task.student if rounding is None else rounding.quantized(task.student)), report


@dataclass(frozen=True)
class _Settings:
    """What does not change in a run."""

    epochs: int
    steps: int | None
    lr: float
    soft: float
    hidden: float
    match: str | Matching
    temperature: float
    eval_every: int | None
    patience: int
    clip_norm: float
    seed: int

    def check(self, loader: Any, loss: Any, teacher: Any) -> None:
        """Refuse what makes no sense, by name."""
        if loss is None and teacher is None:
            raise KronecellError("finetune needs a teacher, a loss, or both")
        if iter(loader) is loader:
            raise KronecellError(
                "the loader can be read only once: give a list or a DataLoader, which can be read again"
            )
        for name in ("epochs", "steps", "eval_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise KronecellError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, most in (("lr", math.inf), ("temperature", math.inf), ("soft", 1.0), ("hidden", math.inf)):
            if not 0 <= getattr(self, name) <= most or not math.isfinite(getattr(self, name)):
                raise KronecellError(f"{name} must be from 0 to {most:g}, got {getattr(self, name)}")
        if self.match not in ("kl", "mse") and not callable(self.match):
            raise KronecellError(f'match must be "kl", "mse" or a function, got {self.match!r}')

    def rate(self, step: int, total: int) -> float:
        """The factor of the learning rate."""
        warm = max(1, int(WARM * total))
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, total - warm)
        return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _fit(
    task: _Task,
    loader: Iterable[Any],
    valid: Iterable[Any] | None,
    settings: _Settings,
    folder: Path | None,
    progress: Callable[[str], None] | None,
) -> Finetuning:
    """The loop."""
    report, optimiser = Finetuning(), torch.optim.Adam(task.groups(settings.lr), foreach=False)
    best = copy.deepcopy(task.trained)
    kept = nn.ModuleDict({"now": task.trained, "best": best})
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = load_checkpoint(folder, kept, optimiser)
        report = report if facts is None else _report_of(facts)
    per_epoch = len(loader) if isinstance(loader, Sized) else None
    if per_epoch is None and settings.steps is None:
        raise KronecellError("the loader has no length: give steps")
    total = settings.steps or settings.epochs * (per_epoch or 0)
    started, said, sums = time.monotonic() - report.seconds, time.monotonic(), [0.0, 0]
    while report.step < total and not _stopped(report, settings):
        epoch, skip = divmod(report.step, per_epoch) if per_epoch else (report.step, 0)
        torch.manual_seed(mix(settings.seed, epoch))  # a loader that shuffles draws its order from here
        for batch in islice(loader, skip, None):
            torch.manual_seed(mix(settings.seed, epoch, report.step))
            for group in optimiser.param_groups:
                group["lr"] = group["own_lr"] * settings.rate(report.step, total)
            optimiser.zero_grad(set_to_none=True)
            value = task.loss(batch, train=True)
            value.backward()
            norm = float(nn.utils.clip_grad_norm_(task.trained.parameters(), settings.clip_norm or math.inf))
            if not math.isfinite(norm):
                raise KronecellError(
                    f"step {report.step}: the loss is {value.item():g}, its gradient {norm:g}; lower lr"
                )
            optimiser.step()
            report.step += 1
            sums = [sums[0] + float(value.detach()), sums[1] + 1]
            if progress is not None and time.monotonic() - said > LINES:
                said = time.monotonic()
                progress(f"step {report.step} of {total}: loss {sums[0] / sums[1]:.4f}, {said - started:.0f} s")
            last = report.step == total
            if last or report.step % (settings.eval_every or per_epoch or 100) == 0:
                report.seconds = time.monotonic() - started
                _validate(task, valid, report, best, sums, progress)
                sums = [0.0, 0]
                if folder is not None:
                    save_checkpoint(folder, kept, optimiser, report.record(), report.step)
            if last or _stopped(report, settings):
                break
    task.trained.load_state_dict(best.state_dict())
    return report


def _validate(
    task: _Task,
    valid: Iterable[Any] | None,
    report: Finetuning,
    best: nn.Module,
    sums: list[float],
    progress: Callable[[str], None] | None,
) -> None:
    """The loss on the validation batches, or without any that of training: the last state is then kept."""
    training = sums[0] / max(sums[1], 1)
    value = training
    if valid is not None:
        with torch.no_grad():
            losses = [float(task.loss(batch, train=False)) for batch in valid]
        if not losses:
            raise KronecellError("the validation loader is empty")
        value = sum(losses) / len(losses)
    row = {"step": report.step, "training": training, "validation": value, "seconds": report.seconds}
    report.history.append(row)
    if valid is None or value < report.best:
        report.best, report.best_step = value, report.step
        best.load_state_dict(task.trained.state_dict())
    if progress is not None:
        progress(f"step {report.step}: training {training:.4f}, validation {value:.4f}, best {report.best:.4f}")


def _stopped(report: Finetuning, settings: _Settings) -> bool:
    since = [row for row in report.history if row["step"] > report.best_step]
    return settings.patience > 0 and len(since) >= settings.patience


def _report_of(facts: Mapping[str, Any]) -> Finetuning:
    best = facts["best"]
    return Finetuning(**{**facts, "best": math.inf if best is None else best})


class _Task:
    """Student, teacher and what is compared."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        rounding: Rounding | None,
        loss: Callable[..., Tensor] | None,
        settings: _Settings,
    ) -> None:
        self.student, self.rounding, self.task, self.settings = student, rounding, loss, settings
        self.teacher = None if teacher is None else copy.deepcopy(teacher).eval().requires_grad_(False)
        parts: dict[str, nn.Module] = {"student": student} | ({} if rounding is None else {"rounding": rounding})
        self.trained = nn.ModuleDict(parts)
        self.states: dict[str, dict[str, Tensor]] = {"student": {}, "teacher": {}}
        if settings.hidden and self.teacher is not None:
            theirs = {name for name, part in self.teacher.named_modules() if _is_recurrent(part)}
            ours = {name for name, part in student.named_modules() if _is_recurrent(part)}
            if not ours & theirs:
                raise KronecellError("hidden: the models have no recurrent layer of the same name; use hidden=0")
            for who, model in (("student", student), ("teacher", self.teacher)):
                for name in ours & theirs:
                    model.get_submodule(name).register_forward_hook(self._keep(who, name))

    def _keep(self, who: str, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and not isinstance(output, PackedSequence) else output
            self.states[who][name] = first.data if isinstance(first, PackedSequence) else first

        return hook

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Learning rates by structure: a step changes a product of factors by as much as it would a dense matrix.

        Those of kc.param_groups are for a first training: for narrow factors they are higher, by sqrt(M / r).
        """
        groups: dict[float, list[Tensor]] = {}
        seen: set[int] = set()
        for part in self.student.modules():
            if isinstance(part, (TensorLinear, TensorEmbedding)):
                with torch.no_grad():
                    dense = float(part.dense_weight().square().mean().sqrt())
                factors = part.factors()
                for factor in factors.values():
                    size = float(factor.detach().square().mean().sqrt())
                    ratio = size / dense / len(factors) if size and dense else 1.0
                    groups.setdefault(lr * min(max(ratio, 0.1), 10.0), []).append(factor)
                    seen.add(id(factor))
        groups.setdefault(lr, []).extend(p for p in self.trained.parameters() if id(p) not in seen)
        return [{"params": params, "lr": rate, "own_lr": rate} for rate, params in groups.items()]

    def loss(self, batch: Any, train: bool) -> Tensor:
        """Of one batch."""
        settings = self.settings
        self.student.train(train)
        inputs, targets = (batch[0], batch[1:]) if self.task is not None else (batch, ())
        output = self._answer(inputs)
        total: Tensor | float = 0.0
        soft = settings.soft if self.teacher is not None else 0.0
        if self.task is not None:
            total = (1 - soft) * self.task(output, *targets)
        else:
            soft = 1.0
        if self.teacher is not None and (soft or settings.hidden):
            with torch.no_grad():
                wanted = call(self.teacher, inputs)
            if soft:
                total = total + soft * self._likeness(output, wanted)
            for name, state in self.states["student"].items():
                theirs = self.states["teacher"][name]
                total = total + settings.hidden * (state - theirs).square().mean() / theirs.var().clamp_min(1e-12)
        assert isinstance(total, Tensor)
        return total

    def _answer(self, inputs: Any) -> Any:
        if self.rounding is None:
            return call(self.student, inputs)
        several = isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence)
        weights = self.rounding.weights(self.student)
        return torch.func.functional_call(self.student, weights, tuple(inputs) if several else (inputs,))

    def _likeness(self, output: Any, wanted: Any) -> Tensor:
        settings = self.settings
        if callable(settings.match):
            return settings.match(output, wanted)
        output, wanted = _first(output), _first(wanted)
        if settings.match == "mse":
            return (output - wanted).square().mean() / wanted.var().clamp_min(1e-12)
        t = settings.temperature
        ours, theirs = (F.log_softmax(part / t, -1).reshape(-1, part.shape[-1]) for part in (output, wanted))
        return t * t * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


def _is_recurrent(part: nn.Module) -> bool:
    return isinstance(part, (nn.RNNBase, nn.RNNCellBase, Recurrent))


def _first(output: Any) -> Tensor:
    while isinstance(output, (tuple, list)) and not isinstance(output, PackedSequence):
        output = output[0]
    tensor: Tensor = output.data if isinstance(output, PackedSequence) else output
    return tensor
