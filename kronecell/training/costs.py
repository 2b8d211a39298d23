"""What a trained classifier costs: parameters, multiply-adds by the paper's order and as executed, latency."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from kronecell.formats.paper_counting import paper_macs
from kronecell.nn.linear import TensorLinear
from kronecell.ops.choose import executed_macs
from kronecell.training.classifier import VideoClassifier

LATENCY_RUNS = 7


def costs(model: VideoClassifier, frames: int, batch_size: int) -> dict[str, Any]:
    """Parameters and multiply-adds per clip. Both ratios: that of W alone, and that of the whole model.

    `macs_paper` follows the paper's convention (formats.paper_counting), `macs_executed` is what this model does for a
    batch of `batch_size` clips; bias and element-wise work are in neither, work done once per weight update is
    `macs_hoisted`.
    """
    rnn = model.rnn
    weight: Any = rnn.weight_ih_l0
    gates, hidden, width = rnn.GATES, rnn.hidden_size, rnn.input_size
    dense_w = gates * hidden * width
    params_w = sum(p.numel() for p in weight.parameters()) if isinstance(weight, TensorLinear) else weight.numel()
    params_model = sum(p.numel() for p in model.parameters())
    rest = frames * gates * hidden * rnn.output_size + hidden * model.classifier.out_features  # U and the classifier
    if isinstance(weight, TensorLinear):
        theirs = paper_macs(weight.format, gates, weight.shared)
        with torch.enable_grad():  # a training step differentiates, which may choose another plan
            plan = weight.plan(frames * batch_size)
        ours, hoisted = executed_macs(plan), plan.hoisted_macs
    else:
        theirs, ours, hoisted = dense_w, dense_w, 0
    return {
        "params_w": params_w,
        "params_model": params_model,
        "ratio_w": dense_w / params_w,
        "ratio_model": (params_model - params_w + dense_w) / params_model,
        "macs_paper": frames * theirs + rest,
        "macs_executed": frames * ours + rest,
        "macs_hoisted": hoisted,
    }


@torch.no_grad()
def latency_ms(model: VideoClassifier, frames: int) -> float:
    """Median time for one clip, batch size 1, in milliseconds."""
    device = model.classifier.weight.device
    clip = torch.zeros(1, frames, model.rnn.input_size, dtype=torch.uint8, device=device)
    model.eval()
    times = []
    for _ in range(LATENCY_RUNS + 1):
        started = time.perf_counter()
        model(clip).sum().item()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[1:])  # the first call is slower: plans are made and caches are cold
