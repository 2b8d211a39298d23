"""Archives: unpacked whole, or refused before anything is written outside the target."""

from __future__ import annotations

import io
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from kronecell import data
from kronecell.data import archives
from kronecell.errors import DataError

ESCAPES = ["../evil.avi", "a/../../evil.avi", "/tmp/evil.avi", "..\\evil.avi", "C:\\evil.avi"]


def make_tar(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_rar(path: Path, members: dict[str, bytes]) -> Path:
    """RAR 4 with stored members: small enough to write by hand, and there is no free program that writes it."""

    def block(body: bytes) -> bytes:
        return struct.pack("<H", zlib.crc32(body) & 0xFFFF) + body

    if shutil.which("bsdtar") is None:
        pytest.skip("rar needs the program bsdtar")
    content = b"Rar!\x1a\x07\x00" + block(struct.pack("<BHH", 0x73, 0, 13) + bytes(6))
    for name, data_bytes in members.items():
        size, checksum, text = len(data_bytes), zlib.crc32(data_bytes), name.encode()
        head = (0x74, 0x8000, 32 + len(text), size, size, 3, checksum, 0x5A210000, 20, 0x30, len(text), 0o100644)
        content += block(struct.pack("<BHHIIBIIBBHI", *head) + text) + data_bytes
    path.write_bytes(content + block(struct.pack("<BHH", 0x7B, 0x4000, 7)))
    return path


@pytest.mark.parametrize("make", [make_zip, make_tar, make_rar])
def test_archive_becomes_a_data_set(tmp_path: Path, make: object) -> None:
    members = {"UCF/A/v_A_g01_c01.avi": b"1", "UCF/B/v_B_g01_c01.avi": b"22"}
    archive = make(tmp_path / "set.archive", members)  # type: ignore[operator]
    root = data.extract(archive, tmp_path / "out")
    assert data.find_dataset(root).classes == ("A", "B")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "set.archive"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("make", [make_zip, make_tar, make_rar])
def test_member_that_would_escape_is_refused_and_nothing_is_written(tmp_path: Path, make: object, name: str) -> None:
    archive = make(tmp_path / "set.archive", {"good.avi": b"1", name: b"evil"})  # type: ignore[operator]
    with pytest.raises(DataError, match="would leave the target folder"):
        data.extract(archive, tmp_path / "in" / "out")
    assert not list(tmp_path.rglob("*.avi"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        info = tarfile.TarInfo("a/link")
        info.type, info.linkname = kind, "/etc"
        archive.addfile(info)
    with pytest.raises(DataError, match="refused, its member 'a/link'"):
        data.extract(tmp_path / "set.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc")
    with pytest.raises(DataError, match="is a link"):
        data.extract(tmp_path / "set.zip", tmp_path / "out")


def test_archive_larger_than_the_free_disk_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(DataError, match="are free on the disk"):
        archives.check_members(tmp_path / "set.zip", [("a", free // 2), ("b", free // 2 + 1)], tmp_path)


def test_zip_that_understates_its_size_is_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "set.zip", {"a.avi": b"x" * 10_000})
    content = path.read_bytes()
    size = (10_000).to_bytes(4, "little")
    path.write_bytes(content.replace(size, (10).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"set\.zip"):
        data.extract(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04broken", b"Rar!\x1a\x07\x00broken"])
def test_what_is_no_archive_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "set.rar").write_bytes(content)
    with pytest.raises(DataError, match=r"set\.rar"):
        data.extract(tmp_path / "set.rar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_target_that_holds_something_is_kept(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "set.zip", {"a.avi": b"1"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(DataError, match="not an empty folder"):
        data.extract(archive, tmp_path / "out")
    with pytest.raises(DataError, match="is not a file"):
        data.extract(tmp_path / "missing.zip", tmp_path / "new")
