"""Train a small bidirectional LSTM, compress its matrices ten times, fine-tune: accuracy before, after, and recovered.

    python examples/compress_and_finetune.py [--distill] [--json]

The task: two of four patterns appear at random times in noise; the class is which came first and which second. With
--distill the fine-tuned model also learns from the original's outputs (knowledge distillation, Hinton et al. 2015).
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronecell as kc
from kronecell.compress import Report

WIDTH, STEPS, PATTERNS, HIDDEN = 24, 16, 4, 48
CLASSES = PATTERNS * (PATTERNS - 1)


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, STEPS, WIDTH) inputs and their classes."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(PATTERNS, WIDTH, generator=torch.Generator().manual_seed(0))
    x = 0.7 * torch.randn(count, STEPS, WIDTH, generator=generator)
    first = torch.randint(PATTERNS, (count,), generator=generator)
    second = (first + 1 + torch.randint(PATTERNS - 1, (count,), generator=generator)) % PATTERNS
    times = torch.rand(count, STEPS, generator=generator).topk(2).indices.sort(1).values
    rows = torch.arange(count)
    x[rows, times[:, 0]] += patterns[first]
    x[rows, times[:, 1]] += patterns[second]
    return x, first * (PATTERNS - 1) + (second - first) % PATTERNS - 1


class Classifier(nn.Module):
    """Two bidirectional LSTM layers, mean over time, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


def train(model: nn.Module, epochs: int, rate: float, teacher: nn.Module | None = None, seed: int = 0) -> None:
    """Adam with a cosine schedule; with a teacher half of the loss is the distance to its softened outputs."""
    x, y = sequences(3000, seed=1)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    generator = torch.Generator().manual_seed(seed)
    batches = -(-len(x) // 50)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * batches)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(50):
            output = model(x[index])
            loss = F.cross_entropy(output, y[index])
            if teacher is not None:
                with torch.no_grad():
                    wanted = F.log_softmax(teacher(x[index]) / 2, 1)
                loss = 0.5 * loss + 2.0 * F.kl_div(
                    F.log_softmax(output / 2, 1), wanted, log_target=True, reduction="batchmean"
                )
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """On 2,000 fresh sequences."""
    x, y = sequences(2000, seed=2)
    return float((model(x).argmax(1) == y).float().mean())


def run(
    distill: bool = False, epochs: int = 8, tuning_epochs: int = 5
) -> tuple[dict[str, float], Report, nn.Module, nn.Module]:
    """Accuracies, the report, the original and the compressed model."""
    torch.manual_seed(0)
    model = Classifier()
    train(model, epochs, rate=5e-3)
    calibration, _ = sequences(200, seed=3)
    small, report = kc.compress(
        model, {"rnn": "lowrank|tt", "rnn.weight_hh_l*": "lowrank|tt"}, budget=0.1, calibration=calibration
    )
    results = {"original": accuracy(model), "compressed": accuracy(small)}
    train(small, tuning_epochs, rate=5e-3, teacher=model if distill else None)
    results["fine-tuned"] = accuracy(small)
    return results, report, model, small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distill", action="store_true", help="learn from the original's outputs too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results, report, _, _ = run(arguments.distill)
    if arguments.json:
        print(json.dumps({"accuracy": results, "report": report.record()}, indent=1))
        return
    print(report)
    for name, value in results.items():
        print(f"{name:12} {value:.1%}")


if __name__ == "__main__":
    main()
