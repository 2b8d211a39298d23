"""Folders of clips, and lists of clips, as data sets: the files, and the class and the group of each.

A group is what clips of one source video or of one person have in common.

Clips of one group look alike, so a group must never be split between training and validation; see ``folds``.
A group's name starts with its class, so no group is in two classes.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kronecell.data.stills import ARRAY_SUFFIXES, is_picture, natural
from kronecell.errors import DataError, printable

VIDEO_SUFFIXES = frozenset(
    {".avi", ".mpg", ".mpeg", ".mp4", ".m4v", ".mkv", ".mov", ".webm", ".wmv", ".flv"}
    | {".3gp", ".mts", ".m2ts", ".ts", ".ogv", ".divx", ".vob", ".gif"}
)
CLIP_SUFFIXES = VIDEO_SUFFIXES | ARRAY_SUFFIXES
ARCHIVE_SUFFIXES = (".zip", ".rar", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LIST_SUFFIXES = (".csv", ".tsv")
HEADINGS = {"path": ("path", "file", "clip", "video"), "class": ("class", "label"), "group": ("group", "recording")}
SKIPPED_FOLDERS = frozenset({"annotation", "annotations", "__macosx"})  # UCF11 keeps boxes beside the videos

UCF11_GROUP = re.compile(r"v_.+_\d+")  # v_walk_dog_07
UCF50_FILE = re.compile(r"v_(?P<label>.+)_(?P<group>g\d+)_c\d+", re.IGNORECASE)  # v_BaseballPitch_g01_c04
YCF_FILE = re.compile(r"\d+_(?P<video>\d+)_\d+_(?P<person>\D.*)")  # 0193_01_004_bill_clinton
AVLETTERS_FILE = re.compile(r"(?P<talker>[^\W\d_]+)_\d+")  # A/Anya_1


@dataclass(frozen=True)
class Clip:
    """One video: where it is, what it shows, and which other clips it looks like.

    ``name`` is the path below the root of its data set; ``class_index`` is the position of ``label`` in the classes.
    """

    path: Path
    label: str
    group: str
    class_index: int
    name: str


@dataclass(frozen=True)
class Dataset:
    """A folder of labelled clips. ``classes`` are in alphabetical order, ``clips`` in order of their names.

    ``skipped`` are folders at the top that hold no clip, and why: perhaps a class in a form that is not known here.
    """

    name: str
    root: Path
    layout: str
    classes: tuple[str, ...]
    clips: tuple[Clip, ...]
    skipped: tuple[str, ...] = ()


def clips_in(path: str | os.PathLike[str]) -> list[Path]:
    """The clips that a path names: a file or a folder of pictures is one, any other folder holds them."""
    root = Path(path)
    if not root.exists():
        raise DataError(f"{printable(root)}: does not exist")
    if not root.is_dir() or _holds_pictures(os.fspath(root)):
        return [root]
    found = [root / name for name in sorted(_walk(root), key=natural)]
    if not found:
        raise DataError(f"{printable(root)}: holds no video, no folder of pictures and no .npy file")
    return found


def find_dataset(path: str | os.PathLike[str], layout: str = "auto") -> Dataset:
    """The data set in a folder or in a CSV list; nothing is opened, so a damaged video is still a clip here.

    A clip is a video, a .npy or .npz file, or a folder of pictures. Layouts: ``ucf11`` (class/v_x_GG/clip), ``ucf50``
    (Class/v_Class_gGG_cCC, also UCF101), ``ycf`` (flat, SSSS_VV_CCC_name), ``avletters`` (letter/Talker_repetition),
    ``folder`` (class/clip or class/group/clip), ``auto`` (the first of these that fits).
    """
    root = Path(path)
    if layout != "auto" and layout not in LAYOUTS:
        raise DataError(f"unknown layout '{layout}'; use auto, {', '.join(LAYOUTS)}")
    if root.is_file() and root.name.lower().endswith(ARCHIVE_SUFFIXES):
        raise DataError(f"{printable(root)}: is an archive; unpack it first: kronecell data extract ARCHIVE FOLDER")
    if root.is_file() and root.suffix.lower() in LIST_SUFFIXES:
        return read_list(root)
    if not root.is_dir():
        raise DataError(
            f"{printable(root)}: is not a folder; give the folder that holds the classes, or a .csv list of paths "
            f"and classes"
        )
    root = _without_wrapper(root)
    names = sorted(_walk(root))
    if not names:
        raise DataError(
            f"{printable(root)}: holds no video ({', '.join(sorted(VIDEO_SUFFIXES))}), no .npy or .npz file and no "
            f"folder of pictures{_found_instead(root)}"
        )
    chosen = layout if layout != "auto" else next(key for key, rule in LAYOUTS.items() if _fits(rule, names))
    labelled = []
    for name in names:
        found = LAYOUTS[chosen](tuple(name.split("/")))
        if found is None:
            if (root / name).is_dir():
                raise DataError(
                    f"{printable(root / name)}: holds pictures itself; one folder is one clip: class/clip/picture.png"
                )
            other = " or use --layout folder" if chosen != "folder" else ", or into a folder named like its class"
            raise DataError(f"{printable(root / name)}: does not fit layout '{chosen}'; move it away{other}")
        labelled.append((name, *found))
    classes = tuple(sorted({label for _, label, _ in labelled}))
    index = {label: number for number, label in enumerate(classes)}
    clips = tuple(Clip(root / name, label, f"{label}/{group}", index[label], name) for name, label, group in labelled)
    return Dataset(root.resolve().name, root, chosen, classes, clips, tuple(_without_clips(root, names)))


def read_list(path: Path) -> Dataset:
    """A CSV list: path, class and perhaps group in columns of these names, or in this order without a first line.

    Paths are relative to the list. Clips of one group (a recording, a person) stay on one side of a fold.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            sample = file.read(4096)
            file.seek(0)
            separator = next((mark for mark in ("\t", ";", ",") if mark in sample.partition("\n")[0]), ",")
            rows = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=separator), 1) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{printable(path)}: cannot be read as CSV: {error}") from None
    if not rows:
        raise DataError(f"{printable(path)}: is empty; expected lines such as clips/one.mp4,walking")
    header = [cell.strip().lower() for cell in rows[0][1]]
    columns = {"path": 0, "class": 1, "group": 2}
    if any(name in header for name in HEADINGS["path"]):
        columns = {key: header.index(name) for key, names in HEADINGS.items() for name in names if name in header}
        rows = rows[1:]
    if "class" not in columns:
        raise DataError(f"{printable(path)}: has no column 'class' (or label); its columns are {', '.join(header)}")
    found: dict[str, tuple[str, str]] = {}
    for number, row in rows:
        cells = {key: row[i].strip() for key, i in columns.items() if i < len(row)}
        name, label = cells.get("path", ""), cells.get("class", "")
        if not name or not label:
            raise DataError(f"{printable(path)}, line {number}: expected a path and a class, got {','.join(row)!r}")
        if name in found:
            raise DataError(f"{printable(path)}, line {number}: {name} is listed twice")
        if not (path.parent / name).exists():
            raise DataError(f"{printable(path)}, line {number}: {printable(path.parent / name)} does not exist")
        found[name] = label, cells.get("group") or name
    classes = tuple(sorted({label for label, _ in found.values()}))
    index = {label: number for number, label in enumerate(classes)}
    clips = tuple(
        Clip(path.parent / name, label, f"{label}/{group}", index[label], name)
        for name, (label, group) in sorted(found.items())
    )
    return Dataset(path.stem, path.parent, "list", classes, clips)


def _without_clips(root: Path, names: list[str]) -> Iterator[str]:
    """Top folders of which no clip was found, with what they hold instead."""
    used = {name.split("/")[0] for name in names}
    for folder in _entries(root)[0]:
        if folder not in used:
            yield f"{printable(folder)}: no clip inside{_found_instead(root / folder)}"


def _found_instead(folder: Path) -> str:
    """What kinds of files a folder holds, for a message."""
    kinds: Counter[str] = Counter()
    for _, _, files in os.walk(folder):
        kinds.update(os.path.splitext(name)[1].lower() or "no ending" for name in files if not name.startswith("."))
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    return f"; it holds {shown}" if shown else "; it is empty"


# A layout maps the parts of a relative path to (class, group within the class), or to None if the path does not fit.


def _ucf11(parts: tuple[str, ...]) -> tuple[str, str] | None:
    if len(parts) == 3 and UCF11_GROUP.fullmatch(parts[1]):
        return parts[0], parts[1]
    return None


def _ucf50(parts: tuple[str, ...]) -> tuple[str, str] | None:
    match = UCF50_FILE.fullmatch(_stem(parts[-1]))
    if match is None or len(parts) > 2:
        return None
    # The folder names the class; a file name may abbreviate it (UCF101 writes HandStandPushups for two spellings).
    return (parts[0] if len(parts) == 2 else match["label"]), match["group"].lower()


def _ycf(parts: tuple[str, ...]) -> tuple[str, str] | None:
    match = YCF_FILE.fullmatch(_stem(parts[-1]))
    if match is None or len(parts) > 2:
        return None
    # The first number counts clips; person and video number together name the source video.
    return match["person"].lower(), match["video"]


def _avletters(parts: tuple[str, ...]) -> tuple[str, str] | None:
    match = AVLETTERS_FILE.fullmatch(_stem(parts[-1]))
    # One letter: a folder of own videos named clip_1, clip_2 is no group of one talker.
    if match is None or len(parts) != 2 or not re.fullmatch("[A-Za-z]", parts[0]):
        return None
    return parts[0], match["talker"]


def _folder(parts: tuple[str, ...]) -> tuple[str, str] | None:
    if len(parts) < 2:
        return None
    # A folder below the class is a group; a clip directly in its class counts as its own source.
    return parts[0], "/".join(parts[1:-1]) or parts[-1]


LAYOUTS: dict[str, Callable[[tuple[str, ...]], tuple[str, str] | None]] = {
    "ucf11": _ucf11,
    "ucf50": _ucf50,
    "ycf": _ycf,
    "avletters": _avletters,
    "folder": _folder,
}


def _fits(rule: Callable[[tuple[str, ...]], tuple[str, str] | None], names: list[str]) -> bool:
    return rule is _folder or all(rule(tuple(name.split("/"))) is not None for name in names)


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _without_wrapper(root: Path) -> Path:
    """Step into the one folder that many archives put around the classes (UCF11_updated_mpg, UCF-101)."""
    while True:
        folders, videos = _entries(root)
        if videos or len(folders) != 1:
            return root
        inner = root / folders[0]
        inner_folders, inner_videos = _entries(inner)
        flat = bool(inner_videos) and all(_ycf((video,)) for video in inner_videos)
        classes = not inner_videos and len(inner_folders) > 1 and not all(map(UCF11_GROUP.fullmatch, inner_folders))
        if not flat and not classes:
            return root
        root = inner


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the sub-folders and of the clips of a folder; hidden names (.DS_Store, ._clip.avi) are left out.

    A sub-folder that holds pictures is a clip, not a sub-folder.
    """
    folders: list[str] = []
    videos: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    if entry.name.lower() not in SKIPPED_FOLDERS:
                        (videos if _holds_pictures(entry.path) else folders).append(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in CLIP_SUFFIXES:
                    videos.append(entry.name)
    except OSError as error:  # going on would silently lose every clip below
        raise DataError(f"{printable(folder)}: cannot be listed: {error.strerror or error}") from None
    return sorted(folders), sorted(videos)


def _holds_pictures(folder: str) -> bool:
    """Whether a folder is a clip: pictures in it, and no video."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:  # listed as a folder, which says why it cannot be
        return False
    videos = any(os.path.splitext(name)[1].lower() in CLIP_SUFFIXES for name in names)
    return not videos and any(map(is_picture, names))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself is no folder; as a video it is reported as bad
        return False


def _walk(root: Path, prefix: str = "", above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Relative paths of all videos. Links are followed, but never back into a folder that is already open above."""
    here = root / prefix if prefix else root
    try:
        status = here.stat()
    except OSError as error:
        raise DataError(f"{printable(here)}: cannot be read: {error.strerror or error}") from None
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    folders, videos = _entries(here)
    for name in videos:
        yield f"{prefix}{name}"
    for name in folders:
        yield from _walk(root, f"{prefix}{name}/", above | {identity})
