"""The .bin files of uint16 tokens of nanoGPT (data/openwebtext/prepare.py) and llm.c (dev/data/data_common.py)."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.storage.errors import StorageError
from cairn.storage.snapshots.token_shard import slices_between

LLM_C_MAGIC = 20240520
LLM_C_VERSION = 1
LLM_C_HEADER_BYTES = 256 * 4
LLM_C_FILE_TOKENS = 100_000_000
TOKEN = np.dtype("<u2")
MAX_TOKEN_ID = 2**16 - 1


class TokenFileFormat(StrEnum):
    """The trainer that reads and writes the format."""

    NANOGPT = "nanogpt"
    LLM_C = "llm.c"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A token file: its format, the bytes before its tokens, and their number."""

    path: Path
    format: TokenFileFormat
    header_bytes: int
    tokens: int

    def map(self) -> NDArray[Any]:
        """Return the tokens (N,) as a read-only memory map."""
        return np.memmap(self.path, dtype=TOKEN, mode="r", offset=self.header_bytes, shape=(self.tokens,))


def inspect_token_file(path: Path) -> TokenFile:
    """Return the file's format by its header; raises StorageError for a file of neither."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(LLM_C_HEADER_BYTES)[:12].ljust(12, b"\0"), dtype="<i4")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    magic, version, tokens = header.tolist()
    if magic == 20240801:  # llm.c's magic for files of uint32, for Llama 3
        raise StorageError(f"{path}: an llm.c file of 32-bit tokens; only those of 16 bits are read")
    if magic != LLM_C_MAGIC:
        if size_bytes < TOKEN.itemsize or size_bytes % TOKEN.itemsize:
            raise StorageError(f"{path}: {size_bytes} bytes are not a whole number of 16-bit tokens")
        tokens = size_bytes // TOKEN.itemsize
        return TokenFile(path=path, format=TokenFileFormat.NANOGPT, header_bytes=0, tokens=tokens)
    if version != LLM_C_VERSION:
        raise StorageError(f"{path}: version {version} of llm.c's format; only {LLM_C_VERSION} is read")
    expected_bytes = LLM_C_HEADER_BYTES + tokens * TOKEN.itemsize
    if size_bytes != expected_bytes or tokens < 1:
        problem = f"must have {expected_bytes} bytes; it has {size_bytes}"
        raise StorageError(f"{path}: its llm.c header says {tokens} tokens, so it {problem}")
    return TokenFile(path=path, format=TokenFileFormat.LLM_C, header_bytes=LLM_C_HEADER_BYTES, tokens=tokens)


def write_token_files(folder: Path, split: str, shards: Sequence[NDArray[Any]], form: TokenFileFormat) -> list[Path]:
    """Write the tokens into files as `form` names them, and return those; raises StorageError if one exists."""
    tokens = sum(map(len, shards))
    if form is TokenFileFormat.NANOGPT:
        return [_write(folder / f"{split}.bin", b"", shards)]
    written = []
    for number, first in enumerate(range(0, tokens, LLM_C_FILE_TOKENS)):
        count = min(LLM_C_FILE_TOKENS, tokens - first)
        header = np.zeros(LLM_C_HEADER_BYTES // 4, dtype="<i4")
        header[:3] = LLM_C_MAGIC, LLM_C_VERSION, count
        path = folder / f"{split}_{number:06d}.bin"
        written.append(_write(path, header.tobytes(), slices_between(shards, first, first + count)))
    return written


def _write(path: Path, header: bytes, pieces: Iterable[NDArray[Any]]) -> Path:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, dtype=TOKEN).data)
        os.link(temporary, path)
    except FileExistsError as error:
        raise StorageError(f"{path}: exists already; name another folder or delete it") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
