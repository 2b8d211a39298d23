"""Decoding: real files give what is known of them, and every fault is a DataError that names its file."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from kronecell import data
from kronecell.data import video as video_module
from kronecell.data.workers import run_jobs
from kronecell.errors import DataError
from tests.data.videos import pictures, write_video

REAL = {
    "ucf11_v_shooting_01_01.mpg": 108,
    "tv_v_SoccerJuggling_g23_c01.avi": 240,
    "trunc_v_SoccerJuggling_g23_c01_half.avi": 121,
    "tv_RATRACE_wave_f_nm_np1_fr_goo_37.avi": 72,
    "decord_corrupted.mp4": 28,
    "opencvdoc_tree.avi": 68,
    "carphone_pristine.mp4": 120,
    "decord_flipping_a_pancake.mkv": 310,
    "trunc_SOX5yA1l24A_half.mp4": None,
    "pixeltable_bad_video.mp4": None,
    "empty.avi": None,
}


@pytest.mark.parametrize("name", REAL)
def test_real_file_gives_what_its_row_says(shared: Path, name: str) -> None:
    path = shared / "videos" / name
    if REAL[name] is None:
        with pytest.raises(DataError, match=name):
            data.decode(path)
        return
    result = data.decode(path, choose=lambda count: [0, count // 2, count - 1])
    assert result.num_frames == REAL[name]
    assert result.frames.shape == (3, 120, 160, 3)
    assert (result.damage is not None) == (name == "decord_corrupted.mp4")


def test_every_shared_video_has_a_row(shared: Path) -> None:
    assert {path.name for path in (shared / "videos").iterdir()} == set(REAL)


def test_chosen_frames_equal_those_of_a_full_decode(video: Path) -> None:
    everything = data.decode(video, 32, 24)
    chosen = data.decode(video, 32, 24, lambda count: [3, 3, 29, 0])
    assert list(everything.indices) == list(range(30))
    assert list(chosen.indices) == [0, 3, 29]
    assert np.array_equal(chosen.frames, everything.frames[[0, 3, 29]])


def test_wrong_guess_of_the_length_is_made_good_by_a_second_pass(shared: Path) -> None:
    path = shared / "videos" / "decord_corrupted.mp4"  # 50 packets, 28 frames
    assert list(data.decode(path, choose=lambda count: [count - 1]).indices) == [27]


def test_resize_keeps_the_picture(tmp_path: Path) -> None:
    frame = np.zeros((240, 320, 3), np.uint8)
    frame[:120, :160] = (200, 30, 30)
    frame[120:, 160:] = (30, 30, 200)
    path = write_video(tmp_path / "a.avi", [frame] * 3, "ffv1", "bgr0")
    small = data.decode(path).frames[1].astype(int)
    assert abs(small[30, 40] - (200, 30, 30)).max() < 8
    assert abs(small[90, 120] - (30, 30, 200)).max() < 8
    assert small[30, 120].max() < 8


def _faulty(folder: Path, kind: str, good: Path) -> Path:
    path = folder / f"{kind}.mp4"
    content = good.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is not a video\n" * 50)
    elif kind == "playlist":
        path.write_text(f"ffconcat version 1.0\nfile {good}\n")
    elif kind == "live_playlist":
        path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nnext.ts\n")
    elif kind == "audio_only":
        with av.open(str(path), "w") as output:
            stream = output.add_stream("aac", rate=44100)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 44100
            output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
    elif kind == "truncated_before_index":
        whole = write_video(folder / "whole.mp4", pictures(30))
        path.write_bytes(whole.read_bytes()[:2000])
    elif kind == "header_only":
        path.write_bytes(content[:600])
    elif kind == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(20_000))
    elif kind == "link_to_itself":
        path.symlink_to(path.name)
    elif kind == "dangling_link":
        path.symlink_to("nothing_here")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "missing":
        pass
    return path


FAULTS = [
    *("empty", "text", "playlist", "live_playlist", "audio_only", "truncated_before_index", "header_only", "noise"),
    *("link_to_itself", "dangling_link", "folder", "pipe", "missing"),
]


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_is_a_data_error_that_names_the_file(tmp_path: Path, video: Path, kind: str) -> None:
    path = _faulty(tmp_path, kind, video)
    with pytest.raises(DataError, match=f"{kind}.mp4: ") as caught:
        data.decode(path, limits=data.Limits(time=20))
    assert "\n" not in str(caught.value)


def test_truncated_file_keeps_the_frames_that_decode(tmp_path: Path) -> None:
    path = write_video(tmp_path / "cut.avi", pictures(30, 160, 120))
    os.truncate(path, os.path.getsize(path) * 8 // 10)
    assert 1 <= data.decode(path).num_frames < 30


def test_corrupt_middle_is_survived_in_one_of_two_ways(tmp_path: Path, video: Path) -> None:
    content = bytearray(video.read_bytes())
    generator = np.random.default_rng(0)
    for trial in range(60):
        damaged = bytearray(content)
        start = int(generator.integers(0, len(content)))
        length = int(generator.integers(1, 400))
        damaged[start : start + length] = generator.bytes(len(damaged[start : start + length]))
        path = tmp_path / f"corrupt{trial}.avi"
        path.write_bytes(damaged)
        try:
            result = data.decode(path, 32, 24, limits=data.Limits(time=20))
            assert result.num_frames == len(result.frames) > 0
        except DataError as error:
            assert path.name in str(error)


def test_one_frame_is_a_video(tmp_path: Path) -> None:
    path = write_video(tmp_path / "one.avi", pictures(1))
    assert data.decode(path).num_frames == 1
    assert data.validation_frames(1).tolist() == [[0] * 6] * 10


def test_fewer_frames_than_asked_repeat(tmp_path: Path) -> None:
    path = write_video(tmp_path / "four.avi", pictures(4))
    count = data.decode(path).num_frames
    assert count == 4
    for row in data.validation_frames(count):
        assert row.tolist() == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("size", [(17, 13), (2, 2), (161, 119), (1, 1), (640, 2)])
def test_odd_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    path = write_video(tmp_path / "odd.avi", pictures(3, *size), "ffv1", "bgr0")
    result = data.decode(path)
    assert (result.width, result.height) == size
    assert result.frames.shape == (3, 120, 160, 3)


@pytest.mark.parametrize("width,height", [(1, 1), (7, 5), (161, 121), (50, 300)])
def test_any_target_size(video: Path, width: int, height: int) -> None:
    assert data.decode(video, width, height).frames.shape == (30, height, width, 3)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_rotation_flag_is_applied(tmp_path: Path, turns: int) -> None:
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:24, :32] = 200  # bright top left
    path = write_video(tmp_path / "turned.mp4", [frame] * 3, "mpeg4")
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40
    a, b = [(1, 0), (0, 1), (-1, 0), (0, -1)][turns]  # a clockwise quarter turn for the viewer
    content[at : at + 20] = struct.pack(">5i", a << 16, b << 16, 0, -b << 16, a << 16)
    path.write_bytes(content)
    shown = data.decode(path, 32, 24).frames[0].mean(-1) > 100
    assert np.array_equal(shown[6::12, 8::16], np.rot90(np.array([[True, False], [False, False]]), -turns))


@pytest.mark.parametrize(
    "codec,pix_fmt,container",
    [
        ("ffv1", "gray", "mkv"),
        ("ffv1", "yuv420p10le", "mkv"),
        ("ffv1", "yuva420p", "mkv"),
        ("ffv1", "yuv444p16le", "mkv"),
        ("rawvideo", "rgb24", "avi"),
        ("mjpeg", "yuvj420p", "avi"),
        ("mpeg1video", "yuv420p", "mpg"),
        ("gif", "rgb8", "gif"),
    ],
)
def test_pixel_formats_decode_to_rgb(tmp_path: Path, codec: str, pix_fmt: str, container: str) -> None:
    frames = pictures(5)
    path = write_video(tmp_path / f"clip.{container}", frames, codec, pix_fmt)
    result = data.decode(path, 64, 48)
    assert result.num_frames == 5
    assert abs(result.frames[0].astype(int).mean() - frames[0].mean()) < 12


def test_frame_size_may_change_in_the_middle(tmp_path: Path) -> None:
    small = write_video(tmp_path / "small.m2v", pictures(6, 64, 48), "mpeg1video", file_format="mpeg1video")
    large = write_video(tmp_path / "large.m2v", pictures(6, 96, 80), "mpeg1video", file_format="mpeg1video")
    both = tmp_path / "both.mpg"
    both.write_bytes(small.read_bytes() + large.read_bytes())
    result = data.decode(both)
    assert result.num_frames >= 11
    assert result.frames.shape[1:] == (120, 160, 3)
    with pytest.raises(DataError, match=r"both.mpg: .*96 x 80"):
        data.decode(both, limits=data.Limits(pixels=64 * 48))


def test_name_that_is_not_utf8(tmp_path: Path, video: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.avi"
    with open(name, "wb") as file:
        file.write(video.read_bytes())
    assert data.decode(os.fsdecode(name)).num_frames == 30
    os.truncate(name, 0)
    with pytest.raises(DataError) as caught:
        data.decode(os.fsdecode(name))
    assert "caf\\xe9.avi" in str(caught.value).encode("utf-8").decode()  # can be printed anywhere


def test_broken_text_in_the_metadata_does_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "title.avi"
    with av.open(str(path), "w") as output:
        output.metadata["title"] = "TITLETITLE"
        stream = output.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in pictures(3):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        output.mux(stream.encode(None))
    path.write_bytes(path.read_bytes().replace(b"TITLETITLE", b"\xff\xfe\x80TITLE\xc3\x28"))
    assert data.decode(path).num_frames == 3


def test_unreadable_file_is_named(tmp_path: Path, video: Path) -> None:
    path = tmp_path / "secret.avi"
    path.write_bytes(video.read_bytes())
    path.chmod(0)
    code = (
        "import os, sys\nfrom kronecell.data import decode\nfrom kronecell.errors import DataError\n"
        "if os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid(65534)\n    os.setuid(65534)\n"
        "try:\n    decode(sys.argv[1])\nexcept DataError as error:\n    print(error)\n"
    )
    for folder in [tmp_path, *tmp_path.parents][:-1]:  # nobody must be able to reach the file itself
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert "secret.avi: cannot be opened: Permission denied" in result.stdout


def test_pixel_cap_is_checked_before_decoding(video: Path) -> None:
    with pytest.raises(DataError, match=r"good.avi: has frames of 64 x 48, over the limit of 100 pixels"):
        data.decode(video, limits=data.Limits(pixels=100))


def test_duration_cap_is_checked_before_decoding(video: Path) -> None:
    with pytest.raises(DataError, match=r"good.avi: plays 1 s, the limit is 0 s"):
        data.decode(video, limits=data.Limits(seconds=0.5))


def test_frame_cap(video: Path) -> None:
    with pytest.raises(DataError, match=r"good.avi: has more than 10 frames"):
        data.decode(video, limits=data.Limits(frames=10))


def test_time_limit_in_this_process(video: Path) -> None:
    with pytest.raises(DataError, match=r"good.avi: "):
        data.decode(video, limits=data.Limits(time=0.0))


def test_decoder_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path, video: Path) -> None:
    """A stopped process is as stuck as a decoder can be: no code of its own runs any more."""
    many = write_video(tmp_path / "long.avi", pictures(20_000, 16, 16))
    jobs = [{"task": "inspect", "path": str(path)} for path in (many, video, video)]
    limits = data.Limits(time=3, seconds=1e6)
    stopped = []

    def stop_first_worker() -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        workers = [int(c) for c in children if b"kronecell.data.worker" in Path(f"/proc/{c}/cmdline").read_bytes()]
        os.kill(workers[0], 19)
        stopped.append(workers[0])

    answers = run_jobs([jobs[1], jobs[0], jobs[2]], 1, limits, patience=0.5)
    first = next(answers)
    assert first[1]["ok"]["frames"] == 30
    stop_first_worker()
    rest = dict(answers)
    assert stopped and "long.avi: takes longer than the time limit" in rest[1]["error"]
    assert rest[2]["ok"]["frames"] == 30


def test_decoder_that_crashes_costs_its_own_file_only(tmp_path: Path, video: Path) -> None:
    many = write_video(tmp_path / "long.avi", pictures(20_000, 16, 16))
    jobs = [{"task": "inspect", "path": str(path)} for path in (video, many, video)]
    answers = run_jobs(jobs, 1, data.Limits(seconds=1e6))
    assert next(answers)[1]["ok"]["frames"] == 30
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    worker = next(int(c) for c in children if b"kronecell.data.worker" in Path(f"/proc/{c}/cmdline").read_bytes())
    os.kill(worker, 11)
    rest = dict(answers)
    assert "long.avi: crashed its decoder (signal 11)" in rest[1]["error"]
    assert rest[2]["ok"]["frames"] == 30


def test_missing_pyav_says_how_to_get_it() -> None:
    code = (
        "import sys\nsys.modules['av'] = None\nfrom kronecell import data\n"
        "from kronecell.errors import KronecellError\n"
        "try:\n    data.video.import_av()\nexcept KronecellError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install kronecell[video]" in result.stdout
    assert video_module.printable("a") == "a"
