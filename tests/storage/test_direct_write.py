"""Long streams past the page cache: the same bytes on every file system, and whatever the system calls answer."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.stores.local_store import BLOCK_BYTES, write_stream

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
    write, asked = os.write, list[int]()

    def refuse(descriptor: int, block: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            asked.append(len(block))
            if len(asked) == first_refused:
                raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, block)

    monkeypatch.setattr(os, "write", refuse)
    assert written(tmp_path / "stream") == LONG
    assert asked == [BLOCK_BYTES] * first_refused, "it is not asked again"


def test_a_direct_write_cut_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, block: write(descriptor, block[:300_001]))
    assert written(tmp_path / "stream") == LONG


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, block: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "stream")
