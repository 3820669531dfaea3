"""Files of token ids, known by a header, an index or an option; others are refused by name. Writes two kinds.

Sources: NEP 1 (.npy); llm.c, dev/data/data_common.py; Megatron-LM, megatron/core/datasets/indexed_dataset.py; the
magic numbers of file(1), RFC 1952 (gzip), RFC 8878 (Zstandard) and PEP 3154 (pickle).
"""

import codecs
import io
import os
import pickletools
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.storage.errors import restated
from cairn.storage.snapshots.token_shard import slices_between
from cairn.storage.stores.regular_file import open_file
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.text_format import foreign_kind

LLM_C_HEADER_BYTES = 256 * 4
LLM_C_FILE_TOKENS = 100_000_000
_HEAD_BYTES = 1 << 16
_PEEK_TOKENS = 1 << 20
_PICKLE_OPCODES = 12
_HEAD_OF_TEXT = 256
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")
_NPY = b"\x93NUMPY"
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, _UINT16), 20240801: (7, _UINT32)}
_OTHER_LLM_C = (20240326, 20240327, 20240328, 20240522, 20240527)
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

_SAVE = "Read its ids where you trust it, and numpy.save them"


class TokenFileFormat(StrEnum):
    """The trainer that reads what is written."""

    NANOGPT = "nanogpt"
    LLM_C = "llm.c"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """The ids in a file: their type, the bytes before them, their number, and where an index ends documents."""

    path: Path
    dtype: np.dtype[Any]
    header_bytes: int
    tokens: int
    document_ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    declared: bool = True

    def map(self) -> NDArray[Any]:
        """Return the tokens (N,) as a read-only memory map."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.header_bytes, shape=(self.tokens,))

    def require_ids(self, vocab_size: int, end_of_text_id: int) -> None:
        """Raise InvalidCorpus if the vocabulary does not fit the type, or if wider ids seem to be read as narrow ones.

        A header or an index is believed; zeros in equal distances are also documents of equal length that end with 0.
        """
        greatest = int(np.iinfo(self.dtype).max)
        if vocab_size - 1 > greatest:
            problem = f"{self.dtype.name} holds ids up to {greatest}, and the vocabulary has {vocab_size}"
            remedy = "Write its ids again in 32 bits" if self.declared else "Say the width that it has: --dtype uint32"
            raise InvalidCorpus(f"{self.path}: {problem}; rule: every id fits. {remedy}, or name the right vocabulary")
        if not self.declared and (every := _zero_stride(self.map(), most=2 if end_of_text_id == 0 else 4)):
            problem = f"every {every} id is 0, as if wider ids were read as {self.dtype.name}"
            remedy = "Say the width that it has (--dtype uint32, --dtype uint64); if zeros are meant, numpy.save them"
            raise InvalidCorpus(f"{self.path}: {problem}; rule: ids are read in their width. {remedy}")


def _zero_stride(tokens: NDArray[Any], most: int) -> str:
    """Return the stride of zeros, if nearly all tokens of one place in it are 0 and many of another are not, or all."""
    if len(tokens) >= 4 and (tokens[:_PEEK_TOKENS] == 0).mean() >= 0.99:
        return "single"
    for stride, name in islice(enumerate(("second", "third", "fourth"), 2), most - 1):
        rows = tokens[: min(len(tokens), _PEEK_TOKENS) // stride * stride].reshape(-1, stride)
        zeros = (rows == 0).mean(axis=0) if len(rows) >= 4 else np.zeros(1)
        if zeros.max() >= 0.99 and zeros.min() <= 0.75:
            return name
    return ""


def inspect_token_file(path: Path, dtype: str = "") -> TokenFile:
    """Return the file's layout; `dtype` is that of one without header and index (uint16).

    Raises InvalidCorpus for a file of another kind, one that is cut, and one whose header says another width.
    """
    try:
        with open_file(path) as file:
            size_bytes, head = os.fstat(file.fileno()).st_size, file.read(_HEAD_BYTES)
    except OSError as error:
        raise InvalidCorpus(f"{path}: cannot be read: {error.strerror}") from error
    if head.startswith(_NPY):
        found = _read_npy(path)
    elif int.from_bytes(head[:4], "little") in _LLM_C:
        magic, version, tokens = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
        known, kind = _LLM_C[magic]
        if version != known:
            raise InvalidCorpus(f"{path}: version {version} of llm.c's format {magic}; only {known} is read")
        found = TokenFile(path=path, dtype=kind, header_bytes=LLM_C_HEADER_BYTES, tokens=max(0, tokens))
    elif path.suffix == ".bin" and (index := _index_beside(path)) is not None:
        found = _read_index(path, index)
    else:
        found = _read_raw(path, head, size_bytes, np.dtype(dtype or "uint16").newbyteorder("<"))
    expected_bytes = found.header_bytes + found.tokens * found.dtype.itemsize
    if size_bytes != expected_bytes or not found.tokens:
        said = f"{found.tokens} tokens of {found.dtype.name} are in it, so it must have {expected_bytes} bytes"
        raise InvalidCorpus(f"{path}: {said}; it has {size_bytes}. Copy it, or make it again")
    if dtype and np.dtype(dtype).itemsize != found.dtype.itemsize:
        problem = f"--dtype {dtype}: {path} says {found.dtype.name} itself"
        raise InvalidCorpus(f"{problem}; rule: --dtype is for files that do not say it. Leave it out")
    return found


def _read_npy(path: Path) -> TokenFile:
    rule = "one dimension of little-endian integers; objects are never unpickled. Save ids.reshape(-1).astype('<u4')"
    broken = (ValueError, TypeError, OverflowError, SyntaxError, RecursionError, TokenError)
    with restated(broken, InvalidCorpus, f"{path}: a .npy file that is not read", rule=rule):
        array = np.lib.format.open_memmap(path, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.str.startswith(">"):
        raise InvalidCorpus(f"{path}: a .npy file of shape {array.shape} and type {array.dtype.str}; rule: {rule}")
    return TokenFile(path=path, dtype=array.dtype, header_bytes=array.offset, tokens=array.size)


def _index_beside(path: Path) -> NDArray[np.uint8] | None:
    """Return the bytes of Megatron's index of a data file, or None."""
    where = path.with_suffix(".idx")
    try:
        with open_file(where) as file:
            found = file.read(len(_INDEX_MAGIC)) == _INDEX_MAGIC
        return np.memmap(where, dtype=np.uint8, mode="r") if found else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidCorpus(f"{where}: cannot be read: {error.strerror}") from error


def _read_index(path: Path, index: NDArray[np.uint8]) -> TokenFile:
    """Return the layout that an index gives: lengths and offsets of sequences, and the borders between documents."""
    head = index[: _INDEX.size].tobytes().ljust(_INDEX.size, b"\0")
    _, version, code, sequences, documents = _INDEX.unpack(head)
    where = path.with_suffix(".idx")
    if version != 1 or code not in _INDEX_TYPES:
        rule = f"version 1, and integers ({', '.join(map(str, _INDEX_TYPES))})"
        raise InvalidCorpus(f"{where}: version {version}, and type {code} of Megatron's types; rule: {rule}")
    dtype = np.dtype(_INDEX_TYPES[code])
    if len(index) != (expected_bytes := _INDEX.size + 12 * sequences + 8 * documents):
        said = f"{sequences} sequences and {documents} borders of documents, so it must have {expected_bytes} bytes"
        raise InvalidCorpus(f"{where}: {said}; it has {len(index)}. Copy it, or make it again")
    lengths = np.frombuffer(index, "<i4", sequences, _INDEX.size)
    offsets = np.frombuffer(index, "<i8", sequences, _INDEX.size + 4 * sequences)
    borders = np.frombuffer(index, "<i8", documents, _INDEX.size + 12 * sequences)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    rising = documents and borders[0] == 0 and borders[-1] == sequences and (np.diff(borders) >= 0).all()
    if not rising or (lengths < 0).any() or (offsets != starts[:-1] * dtype.itemsize).any():
        rule = "sequences lie one after the other, and documents hold all of them"
        raise InvalidCorpus(f"{where}: an index that contradicts itself; rule: {rule}. Make it again")
    return TokenFile(path=path, dtype=dtype, header_bytes=0, tokens=int(starts[-1]), document_ends=starts[borders[1:]])


def _read_raw(path: Path, head: bytes, size_bytes: int, dtype: np.dtype[Any]) -> TokenFile:
    name, remedy = _name_foreign(path, head, size_bytes)
    if name:
        readable = "raw ids, .npy, llm.c's files, or Megatron's .bin beside its .idx"
        raise InvalidCorpus(f"{path}: {name}; rule: {readable}. {remedy}")
    if size_bytes < dtype.itemsize or size_bytes % dtype.itemsize:
        problem = f"{size_bytes} bytes are not a whole number of {dtype.name} tokens"
        raise InvalidCorpus(f"{path}: {problem}. Say the width that it has with --dtype")
    return TokenFile(path=path, dtype=dtype, header_bytes=0, tokens=size_bytes // dtype.itemsize, declared=False)


def _name_foreign(path: Path, head: bytes, size_bytes: int) -> tuple[str, str]:
    """Return what a file without ids is by its first bytes, and what to do with it; empty for one that may be ids."""
    if (magic := int.from_bytes(head[:4], "little")) in _OTHER_LLM_C:
        return f"an llm.c file, but not of tokens ({magic})", _SAVE
    if (known := foreign_kind(head, "ids"))[0]:
        return known
    if head.startswith(b'{"', 8) and int.from_bytes(head[:8], "little") <= size_bytes - 8:
        return "a safetensors file", _SAVE
    if b'{"column_encodings": [' in head:
        return "a shard of Streaming (MDS)", _SAVE
    if _is_text(head, whole=len(head) == size_bytes):
        return "text, not ids", "Name it in data.sources, which is tokenized"
    return ("a pickle, which is never read", _SAVE) if _is_pickle(path, head, size_bytes) else ("", "")


def _is_pickle(path: Path, head: bytes, size_bytes: int) -> bool:
    """Return whether it begins and ends as a pickle of protocol 2 or newer; opcodes are parsed, and nothing is run."""
    if head[:1] != b"\x80" or head[1:2] > b"\x05":
        return False
    stream, places = io.BytesIO(head), list[int | None]()
    with suppress(ValueError):  # of a byte that is no opcode, and of an argument that is longer than the head
        places.extend(place for _, _, place in islice(pickletools.genops(stream), _PICKLE_OPCODES))
    too_long = stream.tell() == len(head) < size_bytes
    if not too_long and len(places) < _PICKLE_OPCODES and places[-1:] != [size_bytes - 1]:
        return False
    with path.open("rb") as file:
        file.seek(size_bytes - 1)
        return file.read(1) == b"."


def _is_text(head: bytes, *, whole: bool) -> bool:
    """Return whether the bytes are UTF-8 or UTF-16 without NUL, or many without a control character."""
    if len(head) >= _HEAD_OF_TEXT and not any(head[1::2]) and not _controls_of(head[::2]):
        return True  # UTF-16 without a byte order mark: ids that are all printable characters
    encoding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    try:
        characters = codecs.getincrementaldecoder(encoding)().decode(head, final=whole)
    except UnicodeDecodeError:
        return len(head) >= _HEAD_OF_TEXT and not _controls_of(head)
    return bool(head) and "\0" not in characters


def _controls_of(head: bytes) -> bytes:
    return head.translate(None, bytes(range(32, 256)) + b"\t\n\v\f\r\x1b")


def write_token_files(
    folder: Path, split: str, shards: Sequence[NDArray[Any]], form: TokenFileFormat, *, vocab_size: int
) -> list[TokenFile]:
    """Write the tokens as `form` names them, as uint32 if uint16 is too small; InvalidCorpus for a file that exists."""
    tokens, dtype = sum(map(len, shards)), _UINT16 if vocab_size <= 2**16 else _UINT32
    if form is TokenFileFormat.NANOGPT:
        return [_write(folder / f"{split}.bin", b"", shards, tokens, dtype)]
    written = []
    magic, version = next((magic, version) for magic, (version, known) in _LLM_C.items() if known == dtype)
    for number, first in enumerate(range(0, tokens, LLM_C_FILE_TOKENS)):
        count = min(LLM_C_FILE_TOKENS, tokens - first)
        header = struct.pack("<3i", magic, version, count).ljust(LLM_C_HEADER_BYTES, b"\0")
        path = folder / f"{split}_{number:06d}.bin"
        written.append(_write(path, header, slices_between(shards, first, first + count), count, dtype))
    return written


def _write(path: Path, header: bytes, pieces: Iterable[NDArray[Any]], tokens: int, dtype: np.dtype[Any]) -> TokenFile:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, dtype=dtype).data)
        os.link(temporary, path)
    except FileExistsError as error:
        raise InvalidCorpus(f"{path}: exists already; name another folder or delete it") from error
    finally:
        temporary.unlink(missing_ok=True)
    return TokenFile(path=path, dtype=dtype, header_bytes=len(header), tokens=tokens)
