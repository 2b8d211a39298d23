"""Which frames: inside the video, in order, one from each part, each tenth of the video used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronecell import data
from kronecell.data.clips import nearest, stored_frames
from kronecell.errors import DataError


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 20))
def test_training_frames_ascend_inside_a_window_of_one_segment(
    total: int, seed: int, count: int, segments: int
) -> None:
    frames = data.training_frames(total, np.random.default_rng(seed), count, segments)
    assert frames.shape == (count,)
    assert frames.min() >= 0 and frames.max() < total
    assert (np.diff(frames) >= 0).all()
    short = total / 2 if total < segments * count else 0  # too short to be cut: a window of half of it
    assert frames[-1] - frames[0] <= max(total / segments, min(count, total), short)
    if total >= count:
        assert len(set(frames.tolist())) >= min(count, 2)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000))
def test_validation_frames_cut_the_video_evenly(total: int) -> None:
    frames = data.validation_frames(total)
    assert frames.shape == (10, 6)
    assert frames.min() >= 0 and frames.max() < total
    assert (np.diff(frames, axis=1) >= (1 if total >= 6 else 0)).all()
    assert (np.diff(frames[:, 0]) >= 0).all()
    if total >= 60:
        assert ((frames * 10 + 9) // total >= np.arange(10)[:, None]).all()
        assert (frames < np.arange(1, 11)[:, None] * total / 10).all()


def test_validation_frames_of_sixty_are_all_sixty() -> None:
    assert data.validation_frames(60).ravel().tolist() == list(range(60))


def test_training_windows_reach_every_frame() -> None:
    generator = np.random.default_rng(0)
    seen = {int(f) for _ in range(3000) for f in data.training_frames(97, generator)}
    assert seen == set(range(97))


def test_training_window_of_just_six_frames_is_six_in_a_row() -> None:
    generator = np.random.default_rng(0)
    assert all((np.diff(data.training_frames(60, generator)) == 1).all() for _ in range(100))
    assert all((np.diff(data.training_frames(30, generator, spread=False)) == 1).all() for _ in range(100))


def test_samples_of_a_short_video_reach_over_half_of_it_and_the_whole_is_covered() -> None:
    frames = data.validation_frames(30)
    assert (frames[:, -1] - frames[:, 0] >= 12).all() and frames.min() <= 1 and frames.max() >= 28
    neighbours = data.validation_frames(30, spread=False)
    assert (np.diff(neighbours, axis=1) == 1).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 300))
def test_store_keeps_every_validation_frame(total: int, limit: int) -> None:
    kept = stored_frames(total, limit)
    assert (np.diff(kept) > 0).all()
    assert np.isin(data.validation_frames(total), kept).all()
    assert len(kept) == (total if total <= limit else max(limit, len(np.unique(data.validation_frames(total)))))


def test_nearest_is_nearest() -> None:
    stored = np.array([0, 4, 10, 11, 30])
    wanted = np.arange(31)
    found = stored[nearest(stored, wanted)]
    assert np.array_equal(np.abs(found - wanted), np.abs(stored[:, None] - wanted).min(0))


def test_no_frames_is_an_error() -> None:
    with pytest.raises(DataError, match="from 0 frames"):
        data.validation_frames(0)
