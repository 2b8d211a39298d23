"""Unpack a data set's archive (zip, tar, rar), or refuse it before a single byte is written.

Refused: a member that would land outside the target, a link, a device, and an archive larger than the free disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from kronecell.errors import DataError, printable

RESERVE = 64 << 20  # bytes of disk that are left free


def extract(archive: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Unpack ``archive`` into the new or empty folder ``target`` and return it.

    Everything is unpacked into a temporary folder beside the target and moved there at the end, so an interrupted
    extraction leaves no half of a data set behind.
    """
    source, folder = Path(archive), Path(target)
    if not source.is_file():
        raise DataError(f"{printable(source)}: is not a file; give a zip, tar or rar archive")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{printable(folder)}: exists and is not an empty folder; give a new one")
    unpack = _unpacker(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".extract-", dir=folder.parent) as temporary:
            inner = Path(temporary) / "content"
            inner.mkdir()
            unpack(source, inner)
            if folder.exists():
                folder.rmdir()
            inner.rename(folder)
    # zipfile raises RuntimeError for a password, and NotImplementedError for a compression that it does not know.
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"{printable(source)}: cannot be unpacked: {getattr(error, 'strerror', None) or error}"
        ) from None
    return folder


def _unpacker(source: Path) -> Callable[[Path, Path], None]:
    """The function for this kind of archive, by its content and not by its name."""
    try:
        if zipfile.is_zipfile(source):
            return _unzip
        with open(source, "rb") as file:
            if file.read(4) == b"Rar!":
                return _unrar
        if tarfile.is_tarfile(source):
            return _untar
    except OSError as error:
        raise DataError(f"{printable(source)}: cannot be read: {error.strerror or error}") from None
    raise DataError(f"{printable(source)}: is not a zip, tar or rar archive")


def check_members(source: Path, members: Iterable[tuple[str, int]], target: Path) -> None:
    """Refuse the archive if any (name, size) would leave the target, or all sizes together fill the disk."""
    total = 0
    for name, size in members:
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or (len(parts[0]) > 1 and parts[0][1] == ":") or "\0" in name:
            raise DataError(
                f"{printable(source)}: refused, its member '{printable(name)}' would leave the target folder"
            )
        total += max(size, 0)
    free = shutil.disk_usage(target).free - RESERVE
    if total > free:
        raise DataError(
            f"{printable(source)}: refused, unpacks to {total} bytes but {max(free, 0)} are free on the disk"
        )


def _unzip(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        check_members(source, [(member.filename, member.file_size) for member in members], target)
        for member in members:
            if (member.external_attr >> 16) & 0o170000 == 0o120000:
                raise DataError(f"{printable(source)}: refused, its member '{printable(member.filename)}' is a link")
            if member.is_dir():
                (target / member.filename).mkdir(parents=True, exist_ok=True)
            else:
                with archive.open(member) as content:
                    _copy(source, content, target / member.filename, member.file_size)


def _untar(source: Path, target: Path) -> None:
    with tarfile.open(source) as archive:
        members = archive.getmembers()
        check_members(source, [(member.name, member.size) for member in members], target)
        for member in members:
            if not (member.isreg() or member.isdir()):
                kind = "a link" if member.issym() or member.islnk() else "not a file or folder"
                raise DataError(f"{printable(source)}: refused, its member '{printable(member.name)}' is {kind}")
        for member in members:
            if member.isdir():
                (target / member.name).mkdir(parents=True, exist_ok=True)
            else:
                content = archive.extractfile(member)
                assert content is not None
                _copy(source, content, target / member.name, member.size)


def _copy(source: Path, content: IO[bytes], path: Path, size: int) -> None:
    """Write at most the declared size: a header that understates it must not fill the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = size
    with open(path, "wb") as file:
        while block := content.read(1 << 20):
            left -= len(block)
            if left < 0:
                raise DataError(f"{printable(source)}: refused, '{printable(path.name)}' is longer than declared")
            file.write(block)


def _unrar(source: Path, target: Path) -> None:
    """Python cannot read rar; bsdtar can, and it lists what is inside in forms that can be checked first."""
    tool = shutil.which("bsdtar")
    if tool is None:
        raise DataError(f"{printable(source)}: rar needs bsdtar; install libarchive-tools or unpack it yourself")
    path = str(source.resolve())
    # Names from the plain list, because mtree tidies "../x" to "./x"; sizes and types from mtree.
    names = [(name, 0) for name in _run([tool, "-t", "-f", path], source).splitlines()]
    check_members(source, names, target)
    listing = _run([tool, "-c", "-f", "-", "--format=mtree", "--options=!all,size,type", f"@{path}"], source)
    sizes = []
    for line in listing.splitlines():  # ./path/name type=file size=123
        if not line or line.startswith(("#", "/set")):
            continue
        name, *words = line.split(" ")
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        if facts.get("type") not in ("file", "dir"):
            raise DataError(f"{printable(source)}: refused, its member '{name}' is a {facts.get('type', 'mystery')}")
        sizes.append((name.removeprefix("./"), int(facts.get("size", 0))))
    check_members(source, sizes, target)
    _run([tool, "-x", "-f", path, "-C", str(target)], source)


def _run(command: list[str], source: Path) -> str:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="surrogateescape")
    if result.returncode:
        reason = " ".join(result.stderr.split())[:200] or f"exit code {result.returncode}"
        raise DataError(f"{printable(source)}: {command[0]} cannot read it: {reason}")
    return result.stdout
