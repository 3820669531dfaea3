"""A file that a configuration names is read up to its limit, and no further."""

from pathlib import Path

import pytest

from cairn.storage.stores.regular_file import read_file


@pytest.mark.parametrize(("size_bytes", "is_read"), [(0, True), (7, True), (8, True), (9, False), (99, False)])
def test_a_file_is_read_up_to_its_limit_and_refused_beyond_it(tmp_path: Path, size_bytes: int, is_read: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size_bytes)
    if is_read:
        assert read_file(path, 8) == b"x" * size_bytes
    else:
        with pytest.raises(OSError, match="more than the 8 bytes that are read"):
            read_file(path, 8)
