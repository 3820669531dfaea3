import struct
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.errors import StorageError
from cairn.storage.snapshots.token_shard import TokenFileFormat, inspect_token_file, write_token_files

TOKENS = np.arange(1000, dtype=np.uint16)
SHARDS = (TOKENS[:300], TOKENS[300:301], TOKENS[301:])


def llm_c(*, magic: int = 20240520, version: int = 1, tokens: int = 1000, content: bytes = TOKENS.tobytes()) -> bytes:
    """The file as llm.c's dataloader expects it, made without the code under test."""
    return struct.pack("<256i", magic, version, tokens, *[0] * 253) + content


def test_a_nanogpt_file_is_nothing_but_its_tokens(tmp_path: Path) -> None:
    (path,) = write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.NANOGPT)
    assert (path.name, path.read_bytes()) == ("train.bin", TOKENS.astype("<u2").tobytes())


def test_an_llm_c_file_has_its_header_before_its_tokens(tmp_path: Path) -> None:
    (path,) = write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.LLM_C)
    assert (path.name, path.read_bytes()) == ("train_000000.bin", llm_c())


def test_llm_c_gets_more_files_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.token_shard.LLM_C_FILE_TOKENS", 301)
    paths = write_token_files(tmp_path, "val", SHARDS, TokenFileFormat.LLM_C)
    assert [inspect_token_file(path).tokens for path in paths] == [301, 301, 301, 97]
    assert np.array_equal(np.concatenate([inspect_token_file(path).map() for path in paths]), TOKENS)


@pytest.mark.parametrize("form", list(TokenFileFormat))
def test_the_layout_is_recognised(tmp_path: Path, form: TokenFileFormat) -> None:
    (path,) = write_token_files(tmp_path, "train", SHARDS, form)
    found = inspect_token_file(path)
    assert (found.format, found.tokens, np.array_equal(found.map(), TOKENS)) == (form, 1000, True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes are not a whole number of 16-bit tokens"),
        (b"odd", "3 bytes are not a whole number of 16-bit tokens"),
        (llm_c(version=7), "version 7 of llm.c's format; only 1 is read"),
        (llm_c(magic=20240801, version=7), "32-bit tokens; only those of 16 bits are read"),
        (llm_c(tokens=1001), "says 1001 tokens, so it must have 3026 bytes; it has 3024"),
        (llm_c()[:2000], "says 1000 tokens, so it must have 3024 bytes; it has 2000"),
        (llm_c(tokens=0, content=b""), "says 0 tokens"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused_by_name(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(StorageError, match=rf"x\.bin: .*{why}"):
        inspect_token_file(tmp_path / "x.bin")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent\.bin: cannot be read: No such file"):
        inspect_token_file(tmp_path / "absent.bin")


def test_nothing_is_written_over_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"train\.bin: exists already"):
        write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.NANOGPT)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
