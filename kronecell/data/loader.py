"""Batches for training and validation, the same ones for the same (seed, epoch), for any number of processes.

One global order per epoch; global batch b is positions b*B .. (b+1)*B-1 of it, and rank r of R takes the r-th of R
equal slices. A sample's frames and flip depend on (seed, epoch, position) only. So R processes with batch B/R see
together exactly what one process with batch B sees, and a run continued in the middle of an epoch sees what it would
have seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kronecell.data.cache import Store
from kronecell.data.clips import frames_at, nearest, validation_frames
from kronecell.errors import DataError

SEGMENTS = 10


@dataclass(frozen=True)
class Batch:
    """``x`` uint8 (B, frames, H*W*3), or (B, 10, frames, H*W*3) to validate; ``y`` int64 (B,); ``names`` of the clips.

    ``valid`` is False for the samples that only fill the last validation batch, so that a score can leave them out.
    ``lengths`` (B,) says how many frames each of whole clips has; x is filled up with zeros to the longest.
    """

    x: torch.Tensor
    y: torch.Tensor
    names: tuple[str, ...]
    valid: torch.Tensor
    lengths: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)


class Loader:
    """Iterate over ``indices`` of a store in batches.

    ``batch_size`` is the global batch; each of ``world_size`` ranks gets ``batch_size / world_size`` samples of it.
    Training shuffles, jitters frames, flips if ``flip``, and fills the last batch from the start of the order;
    validation keeps the order, gives the 10 segments of each video, and marks what fills the last batch as not valid.
    A clip that cannot be read is replaced by the next one that can (of the same class, if possible) and reported once
    in ``replaced``: every rank makes the same number of steps whatever the files do. ``workers`` threads read ahead.
    ``frames=0`` gives whole clips: all stored frames, x (B, longest, H*W*C), or (B, 1, longest, H*W*C) to validate.
    """

    def __init__(
        self,
        store: Store,
        indices: Sequence[int],
        batch_size: int,
        seed: int,
        train: bool = True,
        flip: bool = False,
        rank: int = 0,
        world_size: int = 1,
        frames: int = 6,
        workers: int = 0,
        segments: int = SEGMENTS,
        spread: bool = True,
    ) -> None:
        self.indices = np.asarray(indices, dtype=np.int64)
        if self.indices.ndim != 1 or len(self.indices) == 0:
            raise DataError("a loader needs at least one clip; this fold or data set gives none")
        if self.indices.min() < 0 or self.indices.max() >= len(store):
            raise DataError(
                f"clip numbers must be 0 to {len(store) - 1}, got {self.indices.min()} to {self.indices.max()}"
            )
        if world_size < 1 or not 0 <= rank < world_size:
            raise DataError(f"rank must be 0 to world_size - 1, got rank {rank} of {world_size}")
        if batch_size < 1 or batch_size % world_size:
            raise DataError(f"batch_size {batch_size} must be a positive multiple of world_size {world_size}")
        if frames < 0 or workers < 0 or segments < 1:
            raise DataError(f"need frames >= 0, segments >= 1, workers >= 0; got {frames}, {segments}, {workers}")
        self.store, self.batch_size, self.seed, self.train, self.flip = store, batch_size, seed, train, flip
        self.rank, self.world_size, self.frames, self.workers, self.segments = (
            rank,
            world_size,
            frames,
            workers,
            segments,
        )
        self.spread = spread
        self.epoch, self.step = 0, 0
        self.replaced: dict[str, str] = {}  # clip name -> why it was replaced
        self._bad: set[int] = set()
        self._chance = np.empty((0, frames + 2))
        self._pin = torch.cuda.is_available()

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return -(-len(self.indices) // self.batch_size)

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Start epoch ``epoch`` at batch ``step``: 0, or the ``step`` that an interrupted run had reached."""
        if not 0 <= step <= len(self):
            raise DataError(f"step must be 0 to {len(self)}, got {step}")
        self.epoch, self.step = epoch, step

    def __iter__(self) -> Iterator[Batch]:
        """The rest of this epoch. When it ends, ``step`` is back at 0; ``set_epoch`` chooses the next."""
        order = self._order()
        steps = range(self.step, len(self))
        for step, batch in self._read_ahead(order, steps):
            self.step = step + 1  # before the yield: a checkpoint taken inside the loop body resumes after this batch
            yield batch
        self.step = 0

    def _order(self) -> np.ndarray:
        """Positions into ``indices`` for the whole epoch, filled up to whole batches; draws each position's chances."""
        size, filled = len(self.indices), len(self) * self.batch_size
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, self.epoch])))
        order = generator.permutation(size) if self.train else np.arange(size)
        self._chance = generator.random((filled, self.frames + 2))  # flip, window, one jitter per frame
        return np.resize(order, filled)  # repeats from the start

    def _read_ahead(self, order: np.ndarray, steps: range) -> Iterator[tuple[int, Batch]]:
        if self.workers == 0:
            for step in steps:
                yield step, self._batch(order, step)
            return
        # Threads, not processes: reading and copying release the interpreter lock, and nothing has to be pickled.
        with ThreadPoolExecutor(self.workers) as pool:
            ahead: list[Future[Batch]] = []
            upcoming = iter(steps)
            try:
                for step in steps:
                    while len(ahead) < self.workers + 1 and (following := next(upcoming, None)) is not None:
                        ahead.append(pool.submit(self._batch, order, following))
                    yield step, ahead.pop(0).result()
            finally:
                for future in ahead:
                    future.cancel()

    def _batch(self, order: np.ndarray, step: int) -> Batch:
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        size = self.store.width * self.store.height * self.store.channels
        if self.frames == 0:
            return self._batch_of_whole_clips(order, first, share, size)
        shape = (share, self.frames, size) if self.train else (share, self.segments, self.frames, size)
        x = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)
        pixels = x.numpy()
        clips = []
        for row in range(share):

            def read(i: int, position: int = first + row, out: np.ndarray = pixels[row]) -> None:
                self._read(i, position, out)

            clips.append(self._sample(order, first + row, read))
        return self._labelled(x, clips, first, None)

    def _batch_of_whole_clips(self, order: np.ndarray, first: int, share: int, size: int) -> Batch:
        found: list[np.ndarray] = []
        clips = []
        for row in range(share):

            def read(i: int, position: int = first + row) -> None:
                found.append(self._whole(i, position, size))

            clips.append(self._sample(order, first + row, read))
        lengths = torch.tensor([len(rows) for rows in found])
        x = torch.zeros(share, int(lengths.max()), size, dtype=torch.uint8, pin_memory=self._pin)
        for target, rows in zip(x.numpy(), found, strict=True):
            target[: len(rows)] = rows
        return self._labelled(x if self.train else x.unsqueeze(1), clips, first, lengths)

    def _labelled(self, x: torch.Tensor, clips: list[int], first: int, lengths: torch.Tensor | None) -> Batch:
        y = torch.tensor([self.store.clips[i].class_index for i in clips], dtype=torch.int64)
        valid = torch.arange(first, first + len(clips)) < len(self.indices)
        return Batch(x, y, tuple(self.store.clips[i].name for i in clips), valid, lengths)

    def _sample(self, order: np.ndarray, position: int, read: Callable[[int], None]) -> int:
        """Read the sample at a position of the global order by ``read``; returns which clip it came from."""
        clip = int(self.indices[order[position]])
        for i in self._candidates(clip):
            try:
                read(i)
                return i
            except DataError as error:
                self._report(i, error)
        raise DataError(f"{self.store.root}: not one clip can be read; first: {next(iter(self.replaced.values()))}")

    def _candidates(self, clip: int) -> Iterator[int]:
        """The clip, then its replacements: later ones of its class, then any other. The same on every rank."""
        if clip not in self._bad:
            yield clip
        start = int(np.flatnonzero(self.indices == clip)[0])
        ring = [int(i) for i in np.roll(self.indices, -start) if i != clip]
        label = self.store.clips[clip].class_index
        ring.sort(key=lambda i: self.store.clips[i].class_index != label)  # stable
        for i in ring:
            if i not in self._bad:
                yield i

    def _report(self, i: int, error: DataError) -> None:
        self._bad.add(i)
        name = self.store.clips[i].name
        if name not in self.replaced:
            self.replaced[name] = str(error)
            warnings.warn(f"clip replaced by another: {error}", RuntimeWarning, stacklevel=2)

    def _read(self, i: int, position: int, out: np.ndarray) -> None:
        stored, total = self.store.indices(i), self.store.num_frames(i)
        if not self.train:
            numbers = validation_frames(total, self.segments, self.frames, self.spread)
            rows = out.reshape(self.segments * self.frames, -1)
            self.store.read(i, self._positions(stored, total, numbers.ravel()), rows)
            return
        chance = self._chance[position]
        self.store.read(
            i, self._positions(stored, total, frames_at(total, chance[1:], self.segments, self.spread)), out
        )
        self._mirror(out, position)

    def _whole(self, i: int, position: int, size: int) -> np.ndarray:
        """All stored frames of a clip."""
        count = len(self.store.indices(i))
        out = np.empty((count, size), dtype=np.uint8)
        self.store.read(i, np.arange(count), out)
        if self.train:
            self._mirror(out, position)
        return out

    def _mirror(self, out: np.ndarray, position: int) -> None:
        if self.flip and self._chance[position][0] < 0.5:
            picture = out.reshape(len(out), self.store.height, self.store.width, self.store.channels)
            picture[:] = picture[:, :, ::-1].copy()

    def _positions(self, stored: np.ndarray, total: int, numbers: np.ndarray) -> np.ndarray:
        return numbers if len(stored) == total else nearest(stored, numbers)
