"""Long streams past the page cache: the same bytes on every file system, and whatever the system calls answer."""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.stores.local_store import BLOCK_BYTES, write_stream

LONG = bytes(range(251)) * (2 * BLOCK_BYTES // 251 + 77)
"""More than two blocks, and no whole number of them."""


def pieces() -> Iterator[bytes | memoryview]:
    """Pieces that no block boundary fits."""
    yield LONG[:123]
    yield b""
    view = memoryview(LONG)[123:]
    yield from (view[begin : begin + 1_000_003] for begin in range(0, len(view), 1_000_003))


def written(path: Path) -> bytes:
    with path.open("xb") as file:
        assert write_stream(file.fileno(), pieces()) == len(LONG)
    return path.read_bytes()


def test_a_stream_of_several_blocks_arrives_whole(tmp_path: Path) -> None:
    assert written(tmp_path / "stream") == LONG


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct writes are Linux's")
@pytest.mark.parametrize("first_refused", [1, 2])
def test_a_file_system_that_refuses_direct_writes_gets_the_same_bytes(
    first_refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked = os.writev, list[int]()

    def refuse(descriptor: int, parts: Sequence[memoryview]) -> int:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        asked.append(sum(map(len, parts)))
        if len(asked) == first_refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, parts)

    monkeypatch.setattr(os, "writev", refuse)
    assert written(tmp_path / "stream") == LONG
    assert asked == [BLOCK_BYTES] * first_refused, "it is not asked again"


def cut_short(parts: Sequence[memoryview], left: int) -> list[memoryview]:
    """The first bytes of these parts, so many of them."""
    return [part[: max(0, left - sum(map(len, parts[:number])))] for number, part in enumerate(parts)]


def test_a_direct_write_cut_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, write_parts = os.write, os.writev
    monkeypatch.setattr(os, "write", lambda descriptor, block: write(descriptor, block[:300_001]))
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: write_parts(descriptor, cut_short(parts, 409_600)))
    assert written(tmp_path / "stream") == LONG


def whole_pages() -> tuple[bytes, memoryview]:
    """A header of one page, and a million bytes and more in memory of their own pages."""
    memory = mmap.mmap(-1, 300 * mmap.PAGESIZE)
    memory[:] = (LONG[: len(memory)]).ljust(len(memory))
    return LONG[: mmap.PAGESIZE], memoryview(memory)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct writes are Linux's")
def test_whole_pages_are_written_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, places = os.writev, list[int]()

    def note(descriptor: int, parts: Sequence[memoryview]) -> int:
        places.extend(np.frombuffer(part, np.uint8).ctypes.data for part in parts if part)
        return write(descriptor, parts)

    monkeypatch.setattr(os, "writev", note)
    header, pages = whole_pages()
    with (tmp_path / "stream").open("xb") as file:
        write_stream(file.fileno(), [header, pages])
    assert places[1:] == [np.frombuffer(pages, np.uint8).ctypes.data]


@pytest.mark.parametrize("taken", [0, 4096, 8192, 409_600])
def test_whole_pages_of_which_the_disk_takes_some_arrive_whole(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(descriptor: int, parts: Sequence[memoryview]) -> int:
        if not taken:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, cut_short(parts, taken))

    write = os.writev
    monkeypatch.setattr(os, "writev", take)
    header, pages = whole_pages()
    with (tmp_path / "stream").open("xb") as file:
        assert write_stream(file.fileno(), [header, pages, b"more", pages]) == 601 * mmap.PAGESIZE + 4
    assert (tmp_path / "stream").read_bytes() == b"".join((header, pages, b"more", pages))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, block: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "stream")
