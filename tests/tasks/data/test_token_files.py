"""What each kind of token file is read as, and what two kinds are written as."""

from pathlib import Path

import numpy as np
import pytest

from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.token_files import TokenFileFormat, inspect_token_file, write_token_files
from tests.tasks.data.token_file_bytes import llm_c, megatron_index, npy

TOKENS = np.arange(1000, dtype=np.uint16)
SHARDS = (TOKENS[:300], TOKENS[300:301], TOKENS[301:])
WIDE = np.arange(65_000, 66_000, dtype=np.uint32)


def test_a_nanogpt_file_is_nothing_but_its_tokens(tmp_path: Path) -> None:
    (file,) = write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.NANOGPT, vocab_size=65536)
    assert (file.path.name, file.path.read_bytes()) == ("train.bin", TOKENS.astype("<u2").tobytes())


def test_an_llm_c_file_has_its_header_before_its_tokens(tmp_path: Path) -> None:
    (file,) = write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.LLM_C, vocab_size=65536)
    assert (file.path.name, file.path.read_bytes()) == ("train_000000.bin", llm_c(TOKENS))


def test_a_vocabulary_above_16_bits_is_written_in_32(tmp_path: Path) -> None:
    (raw,) = write_token_files(tmp_path, "train", [WIDE], TokenFileFormat.NANOGPT, vocab_size=65537)
    (headed,) = write_token_files(tmp_path, "train", [WIDE], TokenFileFormat.LLM_C, vocab_size=65537)
    assert (raw.dtype.name, raw.path.read_bytes()) == ("uint32", WIDE.astype("<u4").tobytes())
    assert headed.path.read_bytes() == llm_c(WIDE)


def test_llm_c_gets_more_files_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.tasks.data.token_files.LLM_C_FILE_TOKENS", 301)
    files = write_token_files(tmp_path, "val", SHARDS, TokenFileFormat.LLM_C, vocab_size=1000)
    assert [file.tokens for file in files] == [301, 301, 301, 97]
    assert np.array_equal(np.concatenate([inspect_token_file(file.path).map() for file in files]), TOKENS)


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize("form", list(TokenFileFormat))
def test_what_was_written_is_read_as_it_was(tmp_path: Path, form: TokenFileFormat, vocab_size: int) -> None:
    (written,) = write_token_files(tmp_path, "train", SHARDS, form, vocab_size=vocab_size)
    found = inspect_token_file(written.path, written.dtype.name)
    assert (found.dtype, found.tokens, np.array_equal(found.map(), TOKENS)) == (written.dtype, 1000, True)


READ = {
    "nanoGPT's": ("x.bin", TOKENS.astype("<u2").tobytes(), "", "uint16"),
    "raw of 32 bits": ("x.bin", TOKENS.astype("<u4").tobytes(), "uint32", "uint32"),
    "raw of 64 bits": ("x.bin", TOKENS.astype("<u8").tobytes(), "uint64", "uint64"),
    "Dolma's, which has no header": ("x.npy", TOKENS.astype("<u2").tobytes(), "", "uint16"),
    "llm.c's for GPT-2": ("x.bin", llm_c(TOKENS), "", "uint16"),
    "llm.c's for Llama 3": ("x.bin", llm_c(TOKENS.astype("<u4")), "", "uint32"),
    "llm.c's under another name": ("x.tokens", llm_c(TOKENS), "", "uint16"),
    ".npy of 16 bits": ("x.npy", npy(TOKENS), "", "uint16"),
    ".npy of 32 bits": ("x.npy", npy(TOKENS.astype("<u4")), "", "uint32"),
    ".npy of signed 64 bits": ("x.npy", npy(TOKENS.astype("<i8")), "", "int64"),
    ".npy under another name": ("x.bin", npy(TOKENS.astype("<i4")), "", "int32"),
    ".npy of the width that is said too": ("x.npy", npy(TOKENS.astype("<i4")), "uint32", "int32"),
}


@pytest.mark.parametrize("kind", READ)
def test_a_known_kind_is_read_in_its_width(tmp_path: Path, kind: str) -> None:
    name, content, given, dtype = READ[kind]
    (tmp_path / name).write_bytes(content)
    found = inspect_token_file(tmp_path / name, given)
    found.require_ids(1000, 999)
    assert (found.dtype.name, found.map().tolist()) == (dtype, TOKENS.tolist())


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", "<u2", "<i4", "<i8"])
def test_megatrons_data_has_the_type_and_the_documents_of_its_index(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(100, dtype=dtype)
    (tmp_path / "x.bin").write_bytes(tokens.tobytes())
    (tmp_path / "x.idx").write_bytes(megatron_index([10, 20, 0, 70], [0, 2, 3, 4], tokens.dtype))
    found = inspect_token_file(tmp_path / "x.bin")
    assert found.map().tolist() == tokens.tolist() and found.dtype == tokens.dtype
    assert found.document_ends.tolist() == [30, 30, 100]


def test_an_index_of_something_else_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "x.idx").write_bytes(b"an index of my own")
    assert inspect_token_file(tmp_path / "x.bin").tokens == 1000


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match=r"absent\.bin: cannot be read: No such file"):
        inspect_token_file(tmp_path / "absent.bin")


def test_nothing_is_written_over_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"mine")
    with pytest.raises(InvalidCorpus, match=r"train\.bin: exists already"):
        write_token_files(tmp_path, "train", SHARDS, TokenFileFormat.NANOGPT, vocab_size=1000)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
