"""Token shards: one column of token ids in an Arrow IPC file with one record batch, read lazily by memory map."""

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cairn.storage.errors import IntegrityError, SnapshotDamaged, StorageError, restated
from cairn.storage.stores.codec import sha256

SHARD_VERSION = 1
SHARD_SUFFIX = ".arrow"
DEFAULT_SHARD_TOKENS = 8 * 1024 * 1024
MAX_VOCAB_SIZE = 2**32
_UNREADABLE = (pa.ArrowException, OSError, ValueError, struct.error)
_MAGIC_BYTES = 8


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token width: uint16 if every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSchema:
    """The tokenizer and vocabulary of a shard; the vocabulary decides the token width.

    That of a mask has a bit for each token instead, which says whether it is an answer's.
    """

    tokenizer_sha256: str
    vocab_size: int
    is_mask: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size = {self.vocab_size}: must lie in 1 to {MAX_VOCAB_SIZE}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token width."""
        return np.dtype(np.bool_) if self.is_mask else token_dtype(self.vocab_size)

    def labels(self) -> dict[str, str]:
        """Return the metadata of a shard file, in key order."""
        version, tokenizer, vocab_size = str(SHARD_VERSION), self.tokenizer_sha256, str(self.vocab_size)
        return {"cairn.shard_version": version, "cairn.tokenizer_sha256": tokenizer, "cairn.vocab_size": vocab_size}

    def arrow(self) -> pa.Schema:
        """Return the Arrow schema of a shard file."""
        column = pa.field("answer" if self.is_mask else "token", pa.from_numpy_dtype(self.dtype), nullable=False)
        return pa.schema([column], metadata=self.labels())


class ShardWriter:
    """Context manager: a token stream as `<prefix>-00000.arrow`, … of `shard_tokens` each, the last one shorter."""

    def __init__(
        self, folder: Path, prefix: str, schema: ShardSchema, *, shard_tokens: int = DEFAULT_SHARD_TOKENS
    ) -> None:
        self._folder, self._prefix, self._schema = folder, prefix, schema
        self._buffer: NDArray[Any] = np.empty(shard_tokens, dtype=schema.dtype)
        self._filled = self._written = self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._filled:
            self._flush()

    def append(self, tokens: NDArray[Any]) -> None:
        """Add token ids (N,); raises StorageError for an id outside the vocabulary."""
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._schema.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._schema.vocab_size)][0]
            raise StorageError(f"token id {bad}: must lie in 0 to {self._schema.vocab_size - 1} (vocab_size - 1)")
        self.tokens += len(tokens)
        while len(tokens):
            piece = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            tokens = tokens[len(piece) :]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        path = self._folder / f"{self._prefix}-{self._written:05d}{SHARD_SUFFIX}"
        write_shard(path, self._buffer[: self._filled], self._schema)
        self._filled, self._written = 0, self._written + 1


def write_shard(path: Path, tokens: NDArray[Any], schema: ShardSchema) -> None:
    """Write tokens (N,) of the schema's width as one shard file, without a copy."""
    arrow, stored = schema.arrow(), np.packbits(tokens, bitorder="little") if schema.is_mask else tokens
    column = pa.Array.from_buffers(arrow.field(0).type, len(tokens), [None, pa.py_buffer(stored)])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, arrow) as writer:
        writer.write_batch(pa.record_batch([column], schema=arrow))


def count_tokens(path: Path) -> int:
    """Return the number of tokens in a shard file of any schema; raises IntegrityError if it is not one."""
    unreadable = restated((pa.ArrowException, OSError), IntegrityError, f"{path}: not a readable Arrow shard")
    with unreadable, pa.memory_map(str(path), "r") as mapped, pa.ipc.open_file(mapped) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def map_shard(path: Path, schema: ShardSchema, *, where: str) -> NDArray[Any]:
    """Return the tokens (N,) of a shard file as a read-only memory map.

    Raises IntegrityError for a missing file, other bytes, and other columns, tokenizers or versions.
    """
    with restated(_UNREADABLE, IntegrityError, f"{where}: not a readable Arrow shard"):
        with pa.memory_map(str(path), "r") as mapped:
            buffer = mapped.read_buffer()
        with pa.ipc.open_file(buffer) as reader:
            found, expected = reader.schema, schema.arrow()
            if not found.equals(expected):
                raise IntegrityError(f"{where}: columns are [{_columns(found)}], expected [{_columns(expected)}]")
            metadata = {key: value.decode("utf-8", "replace") for key, value in (found.metadata or {}).items()}
            for name, value in schema.labels().items():
                if (label := metadata.get(name.encode())) != value:
                    problem = f"{name} is {label!r}, expected {value!r}"
                    raise IntegrityError(f"{where}: {problem}: the shard belongs to another snapshot")
            if reader.num_record_batches != 1:
                raise IntegrityError(f"{where}: {reader.num_record_batches} record batches; a shard has exactly one")
        batch = next(_uncompressed_batches(buffer.slice(_MAGIC_BYTES), schema.arrow()))
        tokens: NDArray[Any] = batch.column(0).to_numpy(zero_copy_only=not schema.is_mask)
        if tokens.dtype != schema.dtype:  # as those of a mask with nulls, which is copied
            raise ValueError(f"its column has {tokens.dtype} values; rule: {schema.dtype}")
    return tokens


def read_batches(path: Path, schema: pa.Schema, *, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file of any origin, one at a time in memory; raises IntegrityError."""
    with restated(_UNREADABLE, IntegrityError, f"{where}: not a readable Arrow file"), pa.OSFile(str(path)) as file:
        file.seek(_MAGIC_BYTES)
        yield from _uncompressed_batches(file, schema)


def _uncompressed_batches(source: pa.Buffer | pa.NativeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the record batches, checked; raises ValueError for other columns."""
    messages = pa.ipc.MessageReader.open_stream(source)
    if (found := pa.ipc.read_schema(next(messages))) != schema:
        raise ValueError(f"columns are [{_columns(found)}], expected [{_columns(schema)}]")
    for message in messages:
        _require_uncompressed(message.metadata.to_pybytes())
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        yield batch


def _require_uncompressed(data: bytes) -> None:
    """Raise ValueError if the batch with this header is compressed: a few bytes become gigabytes.

    Sources: format/Message.fbs of Arrow (RecordBatch.compression); "FlatBuffers Internals" (vtables).
    """

    def follow(place: int) -> int:
        return place + int(struct.unpack_from("<i", data, place)[0])

    def field(table: int, number: int) -> int:
        vtable = table - int(struct.unpack_from("<i", data, table)[0])
        size_bytes, slot = struct.unpack_from("<H", data, vtable)[0], 4 + 2 * number
        return int(struct.unpack_from("<H", data, vtable + slot)[0]) if slot < size_bytes else 0

    root = follow(0)
    if field(follow(root + field(root, 2)), 3):
        raise ValueError("its record batch is compressed; rule: a shard lies in its file as it lies in memory")


def slices_between(rows: "Iterable[NDArray[Any] | VerifiedShard]", start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Yield tokens [start, stop) of the concatenated rows; reads no other row."""
    for row in rows:
        if start < len(row) and stop > 0:
            yield row[max(0, start) : stop]
        start, stop = start - len(row), stop - len(row)


class VerifiedShard:
    """Tokens (N,) of a shard, fetched, hashed and mapped read-only at the first use; thread-safe."""

    def __init__(self, fetch: Callable[[], Path], schema: ShardSchema, *, tokens: int, where: str) -> None:
        """`fetch` verifies the file and returns its path; `tokens` is the number it must hold."""
        self._fetch, self._schema, self._length, self._where = fetch, schema, tokens, where
        self._lock = threading.Lock()
        self._tokens: NDArray[Any] | None = None

    def tokens(self) -> NDArray[Any]:
        """Return the tokens; the first call verifies the file. Every call raises SnapshotDamaged for a damaged one."""
        if self._tokens is None:
            with self._lock:
                if self._tokens is None:
                    try:
                        tokens = map_shard(self._fetch(), self._schema, where=self._where)
                    except IntegrityError as error:
                        raise SnapshotDamaged(str(error)) from error
                    if len(tokens) != self._length:
                        problem = f"holds {len(tokens)} tokens, its manifest says {self._length}"
                        raise SnapshotDamaged(f"{self._where}: {problem}")
                    self._tokens = tokens
        return self._tokens

    def place_of(self, position: int) -> tuple[Path, int]:
        """Return the shard's verified file and the byte in it at which the token at `position` begins."""
        path = self._fetch()
        with pa.memory_map(str(path), "r") as mapped:
            content = mapped.read_buffer()
            with pa.ipc.open_file(content) as reader:
                column = reader.get_batch(0).column(0)
                return path, column.buffers()[1].address - content.address + position * self._schema.dtype.itemsize

    def __len__(self) -> int:
        return self._length  # needs no file

    def __getitem__(self, place: Any) -> Any:
        return self.tokens()[place]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.tokens(), dtype=dtype, copy=copy)


def flip_token(shards: Sequence[VerifiedShard], position: int, folder: Path) -> list[VerifiedShard]:
    """Return the shards, one read from a copy in `folder`, named by its SHA-256, with a bit of one token flipped."""
    starts = np.cumsum([0, *map(len, shards)])
    number = int(np.searchsorted(starts, position, side="right")) - 1
    old = shards[number]
    path, end_byte = old.place_of(position + 1 - int(starts[number]))
    sound = path.read_bytes()
    content, copy = bytearray(sound), folder / sha256(sound)
    content[end_byte - 1] ^= 0x80  # the highest bit
    copy.write_bytes(content)
    new = VerifiedShard(lambda: copy, old._schema, tokens=len(old), where=old._where)
    return [*shards[:number], new, *shards[number + 1 :]]


def prefetch_shards(shards: Iterable[VerifiedShard], *, threads: int) -> None:
    """Verify the shards ahead in daemon threads (a shuffled order needs all soon); their next use raises the errors."""
    waiting = deque(shard for shard in shards if shard._tokens is None)

    def verify() -> None:
        while True:
            try:
                shard = waiting.popleft()
            except IndexError:
                return
            with suppress(StorageError, OSError):
                shard.tokens()

    for number in range(min(threads, len(waiting))):
        threading.Thread(target=verify, name=f"prefetch-{number}", daemon=True).start()


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
