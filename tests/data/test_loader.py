"""Batches: the same for the same seed and epoch, shared out over ranks without change, resumable, never short."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kronecell import data
from kronecell.errors import DataError


def epoch_of(loader: data.Loader, epoch: int = 0) -> list[data.Batch]:
    loader.set_epoch(epoch)
    return list(loader)


def same(left: list[data.Batch], right: list[data.Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and a.names == b.names for a, b in zip(left, right, strict=True)
    )


@pytest.fixture
def own_store(store: data.Store, tmp_path: Path) -> data.Store:
    """A copy that a test may damage."""
    shutil.copytree(store.root, tmp_path / "store")
    return data.open_store(tmp_path / "store")


def test_shapes_types_and_labels(store: data.Store) -> None:
    batch = next(iter(data.Loader(store, range(44), 4, 0)))
    assert (batch.x.shape, batch.x.dtype, batch.y.dtype) == ((4, 6, 32 * 24 * 3), torch.uint8, torch.int64)
    assert [store.classes[y] for y in batch.y] == [name.split("/")[0] for name in batch.names]
    batch = next(iter(data.Loader(store, range(44), 4, 0, train=False)))
    assert batch.x.shape == (4, 10, 6, 32 * 24 * 3)
    i = next(i for i, clip in enumerate(store.clips) if clip.name == batch.names[1])
    expected = store.frames(i)[data.validation_frames(12)].reshape(10, 6, -1)
    assert np.array_equal(batch.x[1].numpy(), expected)


def test_an_epoch_has_every_clip_once(store: data.Store) -> None:
    names = [name for batch in epoch_of(data.Loader(store, range(44), 11, 0)) for name in batch.names]
    assert sorted(names) == [clip.name for clip in store.clips]


def test_last_batch_is_filled_not_shortened(store: data.Store) -> None:
    batches = epoch_of(data.Loader(store, range(10), 4, 0, train=False))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    names = [n for batch in batches for n, ok in zip(batch.names, batch.valid, strict=True) if ok]
    assert names == [clip.name for clip in store.clips[:10]]


def test_order_depends_on_seed_and_epoch(store: data.Store) -> None:
    loader = data.Loader(store, range(44), 8, 5)
    assert same(epoch_of(loader, 2), epoch_of(data.Loader(store, range(44), 8, 5), 2))
    assert not same(epoch_of(loader, 2), epoch_of(loader, 3))
    assert not same(epoch_of(loader, 2), epoch_of(data.Loader(store, range(44), 8, 6), 2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("train", [True, False])
def test_ranks_together_see_what_one_process_sees(store: data.Store, world_size: int, train: bool) -> None:
    single = epoch_of(data.Loader(store, range(44), 12, 1, train, flip=True), 1)
    ranks = [
        epoch_of(data.Loader(store, range(44), 12, 1, train, True, rank, world_size), 1) for rank in range(world_size)
    ]
    for step, batch in enumerate(single):
        assert torch.equal(torch.cat([rank[step].x for rank in ranks]), batch.x)
        assert torch.equal(torch.cat([rank[step].y for rank in ranks]), batch.y)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_in_the_middle_of_an_epoch(store: data.Store, workers: int, stop: int) -> None:
    whole = epoch_of(data.Loader(store, range(44), 8, 0, workers=workers), 4)
    loader = data.Loader(store, range(44), 8, 0, workers=workers)
    loader.set_epoch(4)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    epoch, step = loader.epoch, loader.step
    iterator.close()  # type: ignore[attr-defined]
    fresh = data.Loader(store, range(44), 8, 0)
    fresh.set_epoch(epoch, step)
    assert same(list(fresh), whole[stop:])
    assert fresh.step == 0


def test_the_step_is_independent_of_the_world_size(store: data.Store) -> None:
    loader = data.Loader(store, range(44), 8, 0, rank=1, world_size=2)
    next(iter(loader))
    other = data.Loader(store, range(44), 8, 0, rank=3, world_size=4)
    other.set_epoch(loader.epoch, loader.step)
    assert len(list(other)) == 5
    with pytest.raises(DataError, match="step must be 0 to 6, got 7"):
        other.set_epoch(0, 7)


def test_worker_threads_change_nothing(store: data.Store) -> None:
    assert same(epoch_of(data.Loader(store, range(44), 8, 0)), epoch_of(data.Loader(store, range(44), 8, 0, workers=3)))


def test_flip_mirrors_left_and_right(store: data.Store) -> None:
    plain = epoch_of(data.Loader(store, range(44), 44, 0))[0].x.view(44, 6, 24, 32, 3)
    flipped = epoch_of(data.Loader(store, range(44), 44, 0, flip=True))[0].x.view(44, 6, 24, 32, 3)
    untouched = {i for i in range(44) if torch.equal(flipped[i], plain[i])}
    mirrored = {i for i in range(44) if torch.equal(flipped[i], plain[i].flip(2))} - untouched
    assert len(mirrored) + len(untouched) == 44
    assert min(len(mirrored), len(untouched)) > 8


def test_clip_that_vanishes_during_the_epoch_is_replaced(own_store: data.Store) -> None:
    loader = data.Loader(own_store, range(44), 8, 0)
    iterator = iter(loader)
    seen = list(next(iterator).names)
    victim = next(i for i, clip in enumerate(own_store.clips) if clip.name not in seen)
    (own_store.root / "clips" / own_store.files[victim]).unlink()
    with pytest.warns(RuntimeWarning, match=own_store.files[victim]):
        rest = list(iterator)
    assert [len(batch) for batch in rest] == [8] * 5
    assert own_store.clips[victim].name not in [name for batch in rest for name in batch.names]


def test_bad_clip_is_replaced_by_one_of_its_class_and_ranks_still_agree(own_store: data.Store) -> None:
    path = own_store.root / "clips" / own_store.files[5]
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)

    def run(rank: int, world_size: int) -> tuple[list[data.Batch], data.Loader]:
        loader = data.Loader(data.open_store(own_store.root), range(44), 8, 0, rank=rank, world_size=world_size)
        return epoch_of(loader), loader

    with pytest.warns(RuntimeWarning, match="checksum"):
        single, loader = run(0, 1)
        ranks = [run(rank, 2)[0] for rank in range(2)]
    assert list(loader.replaced) == [own_store.clips[5].name]
    names = [name for batch in single for name in batch.names]
    assert own_store.clips[5].name not in names and len(names) == 48
    counts = torch.bincount(torch.cat([batch.y for batch in single])[:44])
    assert counts.tolist() == [4] * 11  # the replacement has the same label
    for step, batch in enumerate(single):
        assert torch.equal(torch.cat([rank[step].x for rank in ranks]), batch.x)


def test_store_of_which_nothing_is_left_is_an_error_not_a_loop(own_store: data.Store) -> None:
    shutil.rmtree(own_store.root / "clips")
    with pytest.warns(RuntimeWarning), pytest.raises(DataError, match="not one clip can be read"):
        epoch_of(data.Loader(own_store, range(44), 8, 0))


def test_wrong_use_is_explained(store: data.Store) -> None:
    with pytest.raises(DataError, match="at least one clip"):
        data.Loader(store, [], 4, 0)
    with pytest.raises(DataError, match="multiple of world_size 3"):
        data.Loader(store, range(44), 8, 0, world_size=3)
    with pytest.raises(DataError, match="rank 2 of 2"):
        data.Loader(store, range(44), 8, 0, rank=2, world_size=2)
    with pytest.raises(DataError, match="0 to 43"):
        data.Loader(store, [44], 8, 0)


def test_pixel_scale_can_be_fused_into_a_linear_layer(store: data.Store) -> None:
    x = next(iter(data.Loader(store, range(44), 4, 0))).x.double()
    weight = torch.randn(x.shape[-1], 5, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose((x * data.PIXEL_SCALE) @ weight, x @ (weight * data.PIXEL_SCALE))
