"""g2p_en in ONNX Runtime: as floats with GRU nodes, and as its dynamic int8, which knows MatMul but no GRU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.g2p_model import END, G2P, LONGEST, START, letters_of


class Encoder(nn.Module):
    """All letters of a word at once."""

    def __init__(self, model: G2P) -> None:
        super().__init__()
        self.letters, self.encoder = model.letters, model.encoder

    def forward(self, letters: Tensor) -> Tensor:
        """The last state."""
        state: Tensor = self.encoder(self.letters(letters))[1]
        return state


class Decoder(nn.Module):
    """One phoneme."""

    def __init__(self, model: G2P) -> None:
        super().__init__()
        self.phonemes, self.decoder, self.output = model.phonemes, model.decoder, model.output

    def forward(self, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the next one, and the state."""
        output, state = self.decoder(self.phonemes(last), state)
        return self.output(output), state


class Step(nn.Module):
    """One step of a GRU behind its table, as products of matrices, and the scores where there is a head."""

    def __init__(self, table: nn.Embedding, gru: nn.GRU, head: nn.Linear | None) -> None:
        super().__init__()
        self.table = table
        self.W, self.U = (nn.Parameter(w.detach().t().contiguous()) for w in (gru.weight_ih_l0, gru.weight_hh_l0))
        self.b, self.c = gru.bias_ih_l0, gru.bias_hh_l0
        self.V = None if head is None else nn.Parameter(head.weight.detach().t().contiguous())
        self.d = None if head is None else head.bias

    def forward(self, index: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """index (1,), h (1, width)."""
        x, y = self.table(index) @ self.W + self.b, h @ self.U + self.c
        (xr, xz, xn), (yr, yz, yn) = x.chunk(3, -1), y.chunk(3, -1)
        r, z = torch.sigmoid(xr + yr), torch.sigmoid(xz + yz)
        h = (1 - z) * torch.tanh(xn + r * yn) + z * h
        return (h,) if self.V is None else (h @ self.V + self.d, h)


class Runtime:
    """The model in ONNX Runtime, one word at a time, one thread."""

    def __init__(self, model: G2P, folder: Path, int8: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.int8 = int8
        one, state = torch.tensor([[25]]), torch.zeros(1, 1, 256)
        if int8:
            parts: list[tuple[str, nn.Module, Any, Any]] = [
                ("encoder", Step(model.letters, model.encoder, None), (one[0], state[0]), [{}, {}]),
                ("decoder", Step(model.phonemes, model.decoder, model.output), (one[0], state[0]), [{}, {}]),
            ]
        else:
            parts = [
                ("encoder", Encoder(model), one.expand(1, 9), [{1: "time"}]),
                ("decoder", Decoder(model), (one, state), [{}, {}]),
            ]
        self.bytes = 0
        for name, module, example, dynamic in parts:
            path = folder / f"{name}.onnx"
            kc.export_onnx(module.eval(), path, example, dynamic=dynamic)
            setattr(self, name, _session(_quantized(path) if int8 else path))
            self.bytes += _bytes(folder / (f"{name}.int8.onnx" if int8 else f"{name}.onnx"))

    def spoken(self, words: Sequence[str]) -> list[list[int]]:
        """Numbers of phonemes, greedily."""
        return [self._word(word) for word in words]

    def _word(self, word: str) -> list[int]:
        encoder: Any = self.encoder  # type: ignore[attr-defined]
        decoder: Any = self.decoder  # type: ignore[attr-defined]
        names = [entry.name for entry in encoder.get_inputs()]
        letters = letters_of([word])[0].numpy()
        if self.int8:
            state, last = np.zeros((1, 256), np.float32), np.array([START])
            for letter in letters[0]:
                (state,) = encoder.run(None, dict(zip(names, (letter[None], state), strict=True)))
        else:
            last = np.array([[START]])
            (state,) = encoder.run(None, {names[0]: letters})
        names = [entry.name for entry in decoder.get_inputs()]
        found: list[int] = []
        while len(found) < LONGEST:
            scores, state = decoder.run(None, dict(zip(names, (last, state), strict=True)))
            last = scores.argmax(-1)
            if last.item() == END:
                break
            found.append(last.item())
        return found


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _quantized(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = path.with_suffix(".int8.onnx")
    quantize_dynamic(path, target, weight_type=QuantType.QInt8)
    return target


def _bytes(path: Path) -> int:
    """Of the numbers of a graph."""
    import onnx

    graph = onnx.load(path).graph
    return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer)
