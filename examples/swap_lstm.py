"""Swap the LSTM of a video classifier for a compressed one, train it, save it, load it, export it.

A frame of 32 x 48 pixels in three colours has 4,608 numbers; the matrix that reads it is nearly the whole model.
One line changes: nn.LSTM(...) becomes kc.LSTM(..., input_format=...).

    python examples/swap_lstm.py [folder for the files]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import kronecell as kc

HEIGHT, WIDTH, COLOURS, FRAMES, HIDDEN, CLASSES = 32, 48, 3, 6, 256, 4


class VideoClassifier(nn.Module):
    """Frames, flattened, through a recurrent layer; the last state through a linear one."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, video: Tensor) -> Tensor:  # (batch, frames, pixels)
        output, _ = self.rnn(video)
        return self.head(output[:, -1])


def moving_bars(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Videos of a bright bar that moves right, left, down or up through noise; the direction is the class."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    videos = 0.3 * torch.randn(count, FRAMES, HEIGHT, WIDTH, COLOURS, generator=generator)
    for video, label in zip(videos, labels.tolist(), strict=True):
        for t in range(FRAMES):
            step = t if label % 2 == 0 else FRAMES - 1 - t
            if label < 2:
                video[t, :, step * 8 : step * 8 + 8] += 1.0
            else:
                video[t, step * 5 : step * 5 + 5, :] += 1.0
    return videos.flatten(2), labels


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    pixels = HEIGHT * WIDTH * COLOURS

    # 1. The swap. The recipe has no modes: they are chosen from the sizes of the layer.
    dense = VideoClassifier(nn.LSTM(pixels, HIDDEN, batch_first=True))
    model = VideoClassifier(kc.LSTM(pixels, HIDDEN, batch_first=True, input_format="kcp:K=4,CA=4,CB=2"))
    print(model.rnn)
    print(f"W: {dense.rnn.weight_ih_l0.numel():,} parameters became {count(model.rnn.weight_ih_l0):,}")
    print(f"whole model: {count(dense):,} became {count(model):,}\n")

    # 2. Training is unchanged.
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(16):
        videos, labels = moving_bars(32, generator)
        loss = nn.functional.cross_entropy(model(videos), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2d}: loss {loss.item():.3f}")
    model.eval()
    videos, labels = moving_bars(64, generator)
    with torch.no_grad():
        right = (model(videos).argmax(1) == labels).float().mean().item()
    print(f"accuracy on new videos: {right:.0%}\n")

    # 3. Save and load: safetensors and a config, no pickle.
    kc.save(model.rnn, folder / "rnn")  # one of our layers is rebuilt from its files alone
    kc.save(model, folder / "model")  # any other model is filled
    rebuilt = VideoClassifier(kc.load(folder / "rnn"))
    kc.load(folder / "model", into=rebuilt)
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(videos), model(videos))
    print(f"saved to and loaded from {folder / 'model'}: bit for bit the same\n")

    # 4. Export, and run somewhere else. The file was compared with the model before it got its name.
    try:
        import onnxruntime
    except ImportError:
        print("ONNX is left out: pip install 'kronecell[export]'")
        return
    print(kc.export_onnx(model, folder / "model.onnx", videos[:2]))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: videos.numpy()})
    same = (torch.from_numpy(scores).argmax(1) == model(videos).argmax(1)).all().item()
    print(f"ONNX Runtime gives the same classes: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
