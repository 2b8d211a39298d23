"""What a run shows: a live line on a terminal, plain lines on stderr elsewhere, TensorBoard if installed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kronecell.training.loop import Callbacks, Progress

EVERY = 5.0  # seconds between plain lines within an epoch


class Display(Callbacks):
    """Shows loss, accuracy, clips per second and the time left of one run."""

    def __init__(self, title: str, epochs: int, max_seconds: float = 0.0, show: bool = True) -> None:
        self.title, self.epochs, self.max_seconds, self.show = title, epochs, max_seconds, show
        self.last_line = time.monotonic()
        self.epoch, self.top1 = 0, ""
        self.spent = 0.0  # seconds of whole epochs, validation included
        self.epochs_timed = 0
        self.bar: Any = None
        self.task: Any = None
        if show and sys.stderr.isatty():
            self.bar, self.task = _bar(title, epochs)

    def on_step(self, progress: Progress, steps: int) -> None:
        self.epoch = progress.epoch
        loss, accuracy = progress.loss_sum / progress.seen, progress.correct / progress.seen
        speed = progress.seen / max(progress.epoch_seconds, 1e-9)
        text = f"loss {loss:.3f}, train {accuracy:.1%}{self.top1}, {speed:.1f} clips/s"
        done = progress.epoch + progress.step / steps
        if self.max_seconds:
            done = max(done, self.epochs * min(progress.seconds / self.max_seconds, 1.0))
        if self.bar is not None:
            self.bar.update(self.task, completed=done, facts=text)
        else:
            left = f", {self._left(progress, steps):.0f} s left"
            self._line(f"epoch {progress.epoch + 1}/{self.epochs}, step {progress.step}/{steps}: {text}{left}")

    def on_evaluation(self, done: int, total: int) -> None:
        if self.bar is None:
            self._line(f"epoch {self.epoch + 1}/{self.epochs}: validation, batch {done}/{total}")

    def note(self, text: str) -> None:
        """A line for people, at once."""
        self._line(text, always=True)

    def on_epoch(self, row: dict[str, Any], improved: bool) -> None:
        """A line for every epoch that was validated, and for others every few seconds; on a terminal above the bar."""
        self.spent += row["seconds"] + row["eval_seconds"]
        self.epochs_timed += 1
        if row["top1"] is not None:
            self.top1 = f", accuracy {row['top1']:.1%}"
        if row["top1"] is not None or time.monotonic() - self.last_line >= EVERY:
            score = "" if row["top1"] is None else f", accuracy {row['top1']:.1%}{' (best)' if improved else ''}"
            seconds = row["seconds"] + row["eval_seconds"]
            self._line(
                f"epoch {row['epoch'] + 1}/{self.epochs}: loss {row['loss']:.3f}, train {row['train_accuracy']:.1%}"
                f"{score}, {seconds:.1f} s",
                always=True,
            )

    def close(self) -> None:
        """Remove the live line."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _left(self, progress: Progress, steps: int) -> float:
        by_steps = progress.seconds / max(progress.steps, 1) * (steps * (self.epochs - progress.epoch) - progress.step)
        if self.epochs_timed:
            by_steps = self.spent / self.epochs_timed * (self.epochs - progress.epoch - progress.step / steps)
        return min(by_steps, max(self.max_seconds - progress.seconds, 0.0)) if self.max_seconds else by_steps

    def _line(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if not self.show or not (always or now - self.last_line >= EVERY):
            return
        if self.bar is not None:
            self.bar.console.print(f"{self.title}: {text}", highlight=False, markup=False)
        else:
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)
        self.last_line = now


def _bar(title: str, epochs: int) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # the bar is optional; plain lines say the same
        return None, None
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[facts]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task(title, total=epochs, facts="")


class TensorBoard(Callbacks):
    """The metrics of every epoch for TensorBoard; does nothing where it is not installed."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.writer = SummaryWriter(str(folder))

    def on_epoch(self, row: dict[str, Any], improved: bool) -> None:
        if self.writer is not None:
            for name in ("loss", "train_accuracy", "top1", "clips_per_second"):
                if row[name] is not None:
                    self.writer.add_scalar(name, row[name], row["epoch"])

    def close(self) -> None:
        """Flush the events."""
        if self.writer is not None:
            self.writer.close()
