"""The training loop, in one visible function: `fit`, and `evaluate`, for one process or for those of a World.

The loop writes no files: it calls `save` when a checkpoint is due, and `callbacks` after every step and epoch. An
interrupted run continues with the same numbers, because everything in a step follows from (seed, epoch, step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kronecell.data import Batch, Loader
from kronecell.errors import KronecellError
from kronecell.nn.rates import param_groups
from kronecell.nn.sparse import SparseMatrix
from kronecell.training.distributed import World
from kronecell.training.sparsity import Sparsity, SparsitySchedule, train_sparsity

PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("constant", "cosine")
RATES = ("uniform", "structure")
LARGEST_RATE = 1e30  # torch refuses steps that float32 cannot hold, without saying why
WARM_UP = 0.1  # of max_seconds
CHOICES = 40  # of places, while a sparse part gets sparse


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is saved and running again continues it."""


class Diverged(KronecellError):
    """The loss or a gradient became NaN or infinite."""

    exit_code = 1


@dataclass(frozen=True)
class TrainSettings:
    """How to train. The paper's: Adam, learning rate 0.001, 400 or 200 epochs, nothing else but weight decay 0.01."""

    epochs: int = 400
    learning_rate: float = 1e-3
    rates: str = "uniform"  # structure: W, or each factor of it, at a rate of its own, see kronecell.nn.rates
    weight_decay: float = 0.0  # decoupled, as in AdamW; the paper does not say which kind it used
    clip_norm: float = 0.0  # 0 is off
    schedule: str = "constant"
    precision: str = "float32"
    early_stop: int = 0  # epochs without a better top-1 before the end; 0 is off
    eval_every: int = 1  # epochs between validations; the last epoch is always validated
    max_seconds: float = 0.0  # of training steps; 0 is no limit. The epoch under way is cut short and validated
    checkpoint_seconds: float = 60.0
    sparse_from: float = 0.1  # of a doped format, in parts of all steps: until then S is dense,
    sparse_at: float = 0.6  # and from then on it has the density of the format; 0: its places are those it starts with
    codropout: float = 0.5
    seed: int = 0


@dataclass
class Progress:
    """Where a run is: all of its state that is not a tensor, as plain numbers."""

    epoch: int = 0  # epochs finished
    step: int = 0  # steps done of the epoch under way
    loss_sum: float = 0.0  # over the clips seen in the epoch under way
    correct: float = 0.0
    seen: float = 0.0
    epoch_seconds: float = 0.0
    seconds: float = 0.0  # in training steps, all epochs
    steps: int = 0  # all epochs
    top1: float = 0.0  # best so far
    best_epoch: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def close_epoch(self, top1: float | None, eval_seconds: float) -> dict[str, Any]:
        """The epoch's line of metrics from its sums; the next epoch starts."""
        row = {
            "epoch": self.epoch,
            "loss": self.loss_sum / max(self.seen, 1.0),
            "train_accuracy": self.correct / max(self.seen, 1.0),
            "top1": top1,
            "seconds": round(self.epoch_seconds, 4),
            "clips_per_second": round(self.seen / max(self.epoch_seconds, 1e-9), 2),
            "steps": self.step,
            "eval_seconds": round(eval_seconds, 4),
        }
        self.history.append(row)
        if top1 is not None and (self.best_epoch < 0 or top1 > self.top1):
            self.top1, self.best_epoch = top1, self.epoch
        self.epoch, self.step = self.epoch + 1, 0
        self.loss_sum = self.correct = self.seen = self.epoch_seconds = 0.0
        return row


class Callbacks:
    """What `fit` calls as it goes; a subclass overrides the methods it needs."""

    def on_step(self, progress: Progress, steps: int) -> None:
        """After a step; `steps` is how many the epoch has."""

    def on_evaluation(self, done: int, total: int) -> None:
        """After a batch of the validation."""

    def on_epoch(self, row: dict[str, Any], improved: bool) -> None:
        """After the validation of an epoch."""


def make_optimiser(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Adam as the paper has it; weight decay is decoupled from the gradient (AdamW)."""
    rate, decay = settings.learning_rate, settings.weight_decay
    parameters = model.parameters() if settings.rates == "uniform" else param_groups(model, rate, decay)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, foreach=False)


def make_sparsity(
    model: nn.Module, settings: TrainSettings, epoch_steps: int, progress: Progress | None = None
) -> Sparsity | None:
    """What trains the sparse parts of a model, from dense to the densities of their formats; None if it has none.

    To be called before the optimiser is made. With `progress` there is room for the entries of a checkpoint.
    """
    parts = [part for part in model.modules() if isinstance(part, SparseMatrix)]
    if not parts or not settings.sparse_at:
        return None
    total = settings.epochs * epoch_steps
    begin = int(settings.sparse_from * total)
    end = max(begin + 1, int(settings.sparse_at * total))
    every = max(1, (end - begin) // CHOICES)
    sparsity = train_sparsity(model, SparsitySchedule(end, begin, every, dropout=settings.codropout))
    if progress is not None:
        cut = end if _out_of_time(progress, settings) else 0
        sparsity.load_state_dict({"steps": max(progress.steps, cut)})
    return sparsity


def fit(
    model: nn.Module,
    train: Loader,
    valid: Loader,
    settings: TrainSettings,
    *,
    optimiser: torch.optim.Optimizer | None = None,
    sparsity: Sparsity | None = None,
    progress: Progress | None = None,
    world: World | None = None,
    save: Callable[[Progress], object] | None = None,
    callbacks: Callbacks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train until the epochs, the time or the patience of `settings` are used up; continues from `progress`.

    `save(progress)` is called on every rank whenever a checkpoint is due. `should_stop` is called after every step: if
    it returns True on any rank, the checkpoint is saved and Interrupted is raised on all of them. With `sparsity`, of
    make_sparsity, an epoch is validated only if the sparse parts have their density at its end.
    """
    check_settings(settings)
    world, callbacks, progress = world or World(), callbacks or Callbacks(), progress or Progress()
    save = save or (lambda progress: None)
    optimiser = optimiser or make_optimiser(model, settings)
    replica = world.wrap(model)
    saved_at = time.monotonic()
    while progress.epoch < settings.epochs and not _finished(progress, settings):
        train.set_epoch(progress.epoch, progress.step)
        started = time.monotonic()
        for batch in train if progress.step < len(train) and not _out_of_time(progress, settings) else ():
            sums = _train_step(replica, optimiser, batch, progress, settings, world, len(train), should_stop())
            now = time.monotonic()
            # Time is averaged over the ranks, because every rank must decide the same from it.
            elapsed, due = world.totals([(now - started) / world.size, now - saved_at >= settings.checkpoint_seconds])
            _add(progress, sums, elapsed)
            if sparsity is not None and sparsity.step(optimiser, end=_out_of_time(progress, settings)):
                replica = world.wrap(model)  # its parameters are others now
            callbacks.on_step(progress, len(train))
            stop = sums[3] > 0
            if stop or due:
                save(progress)
                saved_at = time.monotonic()
            if stop:
                raise Interrupted
            if _out_of_time(progress, settings):
                break
            started = time.monotonic()  # reading the next batch counts, writing a checkpoint does not
        started = time.monotonic()
        last = progress.epoch + 1 == settings.epochs or _out_of_time(progress, settings)
        top1 = None
        settled = sparsity is None or sparsity.finished
        if last or ((progress.epoch + 1) % settings.eval_every == 0 and settled):
            try:
                top1 = evaluate(
                    model, valid, train.batch_size, settings.precision, world, callbacks.on_evaluation, should_stop
                )
            except Interrupted:
                save(progress)  # with all steps of the epoch done: only the validation is repeated
                raise
        best = progress.best_epoch
        row = progress.close_epoch(top1, time.monotonic() - started)
        callbacks.on_epoch(row, progress.best_epoch != best)
    save(progress)
    return progress


def _train_step(
    replica: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    progress: Progress,
    settings: TrainSettings,
    world: World,
    steps: int,
    stop: bool,
) -> list[float]:
    """One step; returns the sums over all ranks of loss, correct answers, clips, and ranks that should stop."""
    replica.train()
    # Drawn from (seed, epoch, step, rank): dropout is the same after a resume, with no state to save.
    torch.manual_seed(mix(settings.seed, progress.epoch, progress.step, world.rank))
    rate = settings.learning_rate * _schedule(settings, progress, steps)
    for group in optimiser.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
    x, y = batch.x.to(world.device, non_blocking=True), batch.y.to(world.device, non_blocking=True)
    optimiser.zero_grad(set_to_none=True)
    with _kernels(settings.precision, world.device):
        with _precision(settings.precision, world.device):
            scores = replica(x) if batch.lengths is None else replica(x, batch.lengths)
        loss = F.cross_entropy(scores.float(), y)
        loss.backward()
    limit = settings.clip_norm if settings.clip_norm > 0 else math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(replica.parameters(), limit, foreach=False))
    value = float(loss.detach())
    correct = int((scores.argmax(-1) == y).sum())
    sums = world.totals(
        [value * len(batch), correct, len(batch), stop, not math.isfinite(value), not math.isfinite(norm)]
    )
    if sums[4] or sums[5]:
        _diverged(batch, value, norm, progress, world)
    optimiser.step()  # only after the check: weights, and every checkpoint of them, stay finite
    return sums


def _diverged(batch: Batch, loss: float, norm: float, progress: Progress, world: World) -> None:
    own = "" if math.isfinite(loss) and math.isfinite(norm) else ", ".join(batch.names)
    names = "; ".join(text for text in world.texts(own) if text)
    raise Diverged(
        f"epoch {progress.epoch}, step {progress.step}: the loss is {loss:g} and the gradient norm {norm:g}; "
        f"clips of this batch: {names}. The last good checkpoint is kept; try a smaller learning_rate or clip_norm=1"
    )


def _add(progress: Progress, sums: list[float], seconds: float) -> None:
    progress.loss_sum += sums[0]
    progress.correct += sums[1]
    progress.seen += sums[2]
    progress.step += 1
    progress.steps += 1
    progress.epoch_seconds += seconds
    progress.seconds += seconds


def _schedule(settings: TrainSettings, progress: Progress, steps: int) -> float:
    """The factor of the learning rate: a function of the step, or of the time where that runs out first; without state.

    The first WARM_UP of the time is not compared with the steps: first calls are slow, and a run that has time enough
    would otherwise be another one on every machine and at every start.
    """
    if settings.schedule == "constant":
        return 1.0
    done = (progress.epoch * steps + progress.step) / (settings.epochs * steps)
    if settings.max_seconds and progress.seconds >= WARM_UP * settings.max_seconds:
        done = max(done, min(progress.seconds / settings.max_seconds, 1.0))
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _finished(progress: Progress, settings: TrainSettings) -> bool:
    patience = settings.early_stop > 0 and progress.epoch - 1 - progress.best_epoch >= settings.early_stop
    return (patience and progress.best_epoch >= 0) or (_out_of_time(progress, settings) and progress.step == 0)


def _out_of_time(progress: Progress, settings: TrainSettings) -> bool:
    return 0 < settings.max_seconds <= progress.seconds


def stopped_by(progress: Progress, settings: TrainSettings, steps: int) -> str:
    """What ended a run before the last of its epochs of `steps` steps: "time", "patience", or "" for nothing."""
    if progress.steps >= settings.epochs * steps:
        return ""
    return "time" if _out_of_time(progress, settings) else "patience"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    batch_size: int = 16,
    precision: str = "float32",
    world: World | None = None,
    on_batch: Callable[[int, int], object] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> float:
    """Top-1: a video's answer is the class with the largest mean probability over its 10 segments.

    Segments go through the model `batch_size` at a time, whatever the number of videos in a batch of the loader.
    """
    world = world or World()
    model.eval()
    loader.set_epoch(0)
    correct = total = 0.0
    for done, batch in enumerate(loader, 1):
        segments = batch.x.flatten(0, 1).split(batch_size)
        lengths = [()] * len(segments) if batch.lengths is None else [(n,) for n in batch.lengths.split(batch_size)]
        with _kernels(precision, world.device), _precision(precision, world.device):
            parts = zip(segments, lengths, strict=True)  # whole clips are one segment each
            scores = torch.cat([model(part.to(world.device), *counts).float() for part, counts in parts])
        chance = scores.softmax(-1).reshape(*batch.x.shape[:2], -1).mean(1)  # (videos, classes)
        right = (chance.argmax(-1).cpu() == batch.y) & batch.valid
        sums = world.totals([float(right.sum()), float(batch.valid.sum()), float(should_stop())])
        correct, total = correct + sums[0], total + sums[1]
        if sums[2]:
            raise Interrupted
        on_batch(done, len(loader))
    return correct / max(total, 1.0)


def average_over(epochs: int) -> int:
    """Over how many last epochs "Avg" is taken: the paper's 100, or a quarter of a run too short for that."""
    return 100 if epochs >= 200 else max(1, epochs // 4)


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that make no sense, by name."""
    for name, least in (("epochs", 1), ("eval_every", 1), ("early_stop", 0)):
        if getattr(settings, name) < least:
            raise KronecellError(f"{name} must be at least {least}, got {getattr(settings, name)}")
    for name in ("weight_decay", "clip_norm", "max_seconds", "checkpoint_seconds"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise KronecellError(f"{name} must be a finite number of at least 0, got {getattr(settings, name)}")
    if not 0 <= settings.sparse_from < 1 or not 0 <= settings.sparse_at <= 1 or not 0 <= settings.codropout < 1:
        raise KronecellError(
            f"sparse_from and codropout must be from 0 to below 1, sparse_at from 0 to 1; got {settings.sparse_from}, "
            f"{settings.codropout}, {settings.sparse_at}"
        )
    if 0 < settings.sparse_at <= settings.sparse_from:
        raise KronecellError(
            f"sparse_at must be 0, or above sparse_from = {settings.sparse_from}, got {settings.sparse_at}"
        )
    if not 0 < settings.learning_rate <= LARGEST_RATE:
        raise KronecellError(
            f"learning_rate must be above 0 and at most {LARGEST_RATE:g}, got {settings.learning_rate:g}; try 0.001"
        )
    for name, choices in (("precision", PRECISIONS), ("schedule", SCHEDULES), ("rates", RATES)):
        if getattr(settings, name) not in choices:
            raise KronecellError(f"{name} must be one of {', '.join(choices)}, got {getattr(settings, name)!r}")


def _precision(precision: str, device: torch.device) -> Any:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


@contextmanager
def _kernels(precision: str, device: torch.device) -> Iterator[None]:
    """oneDNN's bfloat16 kernels end the process on some processors (illegal instruction); torch's own do not."""
    if precision == "float32" or device.type != "cpu":
        yield
        return
    before = torch.backends.mkldnn.set_flags(False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def mix(*numbers: int) -> int:
    """One seed from several numbers (FNV-1a over the numbers)."""
    seed = 0xCBF29CE484222325
    for number in numbers:
        seed = ((seed ^ (number & 0xFFFFFFFF)) * 0x100000001B3) & 0x7FFFFFFFFFFFFFFF
    return seed
