"""Whole LSTMs: inference and a training step, beside torch.nn.LSTM and the LSTMs of tednet.

    python -m benchmarks.lstm [--quick] [--results FOLDER]

Clips of six frames. Inference is of frozen layers; of KCP, an ordinary one stands beside it. A training step is
forward, the sum of the outputs, and backward to all parameters. The dense LSTM of UCF50 has 2.1 GB of weights; it is
left out, with a note, where there is too little memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.peers import lstms
from benchmarks.results import Options, available_memory, machine, main, table, write
from benchmarks.shapes import GATES, MAIN, formats, small_formats
from benchmarks.timing import Call, inference, interleave, ratio, summary, threads, training

FRAMES = 6
FASTEST_PEER = "tednet Tucker2"


@dataclass(frozen=True)
class Group:
    """LSTMs that are timed in turn."""

    dataset: str
    batch: int
    frames: int
    grad: bool
    labels: tuple[str, ...]
    threads: int = 1
    peers: bool = False

    @property
    def title(self) -> str:
        """For people."""
        what = "training step" if self.grad else "inference"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.dataset}, batch {self.batch} x {self.frames} frames, {what}, {threads}"


def groups(quick: bool) -> list[Group]:
    """Everything that is measured."""
    if quick:
        return [Group("small", 2, 2, grad, ("TT", "KCP(4,4,2)")) for grad in (False, True)]
    every, ucf50 = (*formats("UCF11"),), ("KCP(6,2,2)", "TR", "HT")
    return [
        Group("UCF11", 16, FRAMES, False, every, peers=True),
        Group("UCF11", 16, FRAMES, True, every, peers=True),
        Group("UCF11", 16, FRAMES, False, ("KCP(4,4,2)",), threads=2),
        Group("UCF11", 16, FRAMES, True, ("KCP(4,4,2)",), threads=2),
        Group("UCF11", 1, 1, False, every, peers=True),
        Group("UCF50", 2, FRAMES, False, ucf50),
        Group("UCF50", 1, 1, False, ucf50),
    ]


def call_of(module: nn.Module, x: Tensor, grad: bool) -> Call:
    """Inference in eval mode, or a training step."""
    module.train(grad)
    return training(module, x) if grad else inference(lambda: module(x))


def dense_lstm(inputs: int, hidden: int) -> nn.LSTM:
    """torch.nn.LSTM, filled quickly: its own initialisation of 2 GB takes long."""
    lstm = nn.LSTM(inputs, hidden, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.fill_(0.001)
    return lstm


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Time one group: seconds, and ratios of the dense LSTM over each case (how many times faster)."""
    known = small_formats() if quick else formats(group.dataset)
    fmt = known["TT"]
    x = torch.randn(group.frames, group.batch, fmt.M)
    cases: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    gigabytes = 4 * GATES * fmt.N * (fmt.M + fmt.N) / 1e9
    if 3 * gigabytes < available_memory():  # torch packs the weights into a second copy at every call
        cases["nn.LSTM"] = call_of(dense_lstm(fmt.M, fmt.N), x, group.grad)
    else:
        reasons["nn.LSTM"] = f"needs {3 * gigabytes:.0f} GB of free memory"
    for label in group.labels:
        for shared in (False, True):
            lstm = kc.LSTM(fmt.M, fmt.N, input_format=known[label], shared=shared)
            name = f"{label} {'shared' if shared else 'unshared'}"
            if label.startswith("KCP") and not group.grad:
                cases[f"{name} ordinary"] = call_of(lstm, x, group.grad)
            ready = lstm if group.grad else kc.freeze(lstm, rows=(group.batch * group.frames,))
            cases[name] = call_of(ready, x, group.grad)
    if group.peers and not quick:
        for peer in lstms():
            if peer.module is None:
                reasons[peer.label] = peer.reason
            else:
                cases[peer.label] = call_of(peer.module, x, group.grad)
    full = [name for name in cases if name in ("nn.LSTM", FASTEST_PEER) or name.startswith(MAIN)]
    repeats = 1 if quick else 15
    if group.dataset == "UCF50" or group.threads > 1:
        repeats = min(repeats, 3 if group.frames > 1 else 2)  # a call of the dense LSTM takes up to five seconds
    samples = interleave(cases, repeats, case_seconds=0.0 if quick else 0.6, always=full)
    found = {}
    for name in cases:
        faster = ratio(samples, "nn.LSTM", name).as_dict() if "nn.LSTM" in samples else None
        found[name] = {**summary(samples[name]).as_dict(), "faster": faster}
    return {"title": group.title, **vars(group), "cases": found, "not run": reasons}


def run(options: Options) -> None:
    """Measure every group and report."""
    results = []
    for group in groups(options.quick):
        options.say(f"lstm: {group.title}")
        with threads(group.threads):
            results.append(measure(group, options.quick))
    text = f"""# Whole LSTMs

{machine((1, 2))} "Faster" is the time of torch.nn.LSTM of the same sizes over the time of the case, in the same round:
median and quartiles. One thread is timed in processor seconds, two in elapsed seconds.

"""
    for result in results:
        lines = []
        for name, case in result["cases"].items():
            f = case["faster"]
            shown = f"{f['seconds']:.1f} ({f['low']:.1f} to {f['high']:.1f})" if f else ""
            lines.append((name, shown, f"{case['seconds'] * 1e3:.2f}", case["repeats"]))
        text += f"## {result['title']}\n\n{table(('LSTM', 'faster', 'ms', 'repeats'), lines)}\n"
        text += "".join(f"- not run: {name}: {reason}\n" for name, reason in result["not run"].items())
        text += "\n" if result["not run"] else ""
    write(options, "lstm", {"groups": results}, text.rstrip() + "\n")


if __name__ == "__main__":
    main(run, __doc__)
