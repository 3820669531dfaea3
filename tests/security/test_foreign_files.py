"""Files of unknown origin ask for more memory than they have bytes: each is refused by name."""

import gzip
import io
import random
import resource
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots.parquet_process import read_parquet
from cairn.storage.snapshots.snapshot_manifest import (
    STARTS,
    DocumentRow,
    RowWriter,
    TokenSpan,
    documents_between,
)
from cairn.storage.snapshots.token_shard import ShardSchema, map_shard
from cairn.tasks.data.document import InvalidCorpus
from tests.tasks.corpus_files import open_sources

pytestmark = pytest.mark.linux
MEGABYTE = 1_000_000


def table_file(column: pa.Array, *, dictionary: bool) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(
        pa.table({"text": column}), sink, compression="zstd", use_dictionary=dictionary, write_statistics=False
    )
    return sink.getvalue()


def dictionary_of_one_long_value() -> bytes:
    """Ten gigabytes of text, five of them in a batch of 256 rows."""
    value = pa.array(["a" * 20 * MEGABYTE])
    return table_file(pa.DictionaryArray.from_arrays(pa.array([0] * 512, pa.int32()), value), dictionary=True)


@cache
def one_long_value() -> bytes:
    return table_file(pa.array(["a" * 70 * MEGABYTE]), dictionary=False)


def rows_of_nothing() -> bytes:
    return table_file(pa.nulls(4 * MEGABYTE, pa.string()), dictionary=True)


def far_too_long_footer() -> bytes:
    content = table_file(pa.array(["a"]), dictionary=False)
    return content[:-8] + struct.pack("<I", 2**31 - 1) + content[-4:]


TABLES = [
    dictionary_of_one_long_value,
    one_long_value,
    rows_of_nothing,
    far_too_long_footer,
]


def test_a_table_whose_footer_names_too_much_is_refused_before_a_page_is_read(tmp_path: Path) -> None:
    content = one_long_value()
    footer_bytes = struct.unpack("<I", content[-8:-4])[0] + 8
    without_pages = content[:4] + bytes(len(content) - 4 - footer_bytes) + content[-footer_bytes:]
    words = refusal(tmp_path / "a.parquet", without_pages)
    assert "bytes become more than" in words and "rule:" in words


def zstd_of_nothing(size: int) -> bytes:
    """Blocks of 128 KiB that are one byte each (RFC 8878, 3.1.1.2)."""
    blocks, block = size >> 17, (1 << 17) << 3 | 2
    head = b"\x28\xb5\x2f\xfd\x00\x48"  # a window of 512 KiB
    body = (block.to_bytes(3, "little") + b"a") * (blocks - 1)
    return head + body + (block | 1).to_bytes(3, "little") + b"a"


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(InvalidCorpus) as refused:
        for source in open_sources([path.name], path.parent):
            list(source.pieces())
    return str(refused.value)


@pytest.mark.parametrize("make", TABLES)
def test_a_table_that_asks_for_memory_is_refused_by_name_in_one_line(make: Callable[[], bytes], tmp_path: Path) -> None:
    content = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = refusal(tmp_path / "a.parquet", content)
    assert "a.parquet: cannot be read" in words and "rule:" in words and len(words.splitlines()) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "memory of this process, in kB"


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet.zst"),
        pytest.param("a.txt.gz", marks=pytest.mark.slow),  # quick witness: a.txt.zst and a.jsonl.gz
        pytest.param("a.parquet.gz", marks=pytest.mark.slow),  # quick witness: a.parquet.zst and a.jsonl.gz
    ],
)
def test_a_compressed_file_that_becomes_a_thousand_times_its_size_is_refused(name: str, tmp_path: Path) -> None:
    content = gzip.compress(b"a" * 2**23) * 12 if name.endswith("gz") else zstd_of_nothing(12 * 2**23)
    begun = b"PAR1" if "parquet" in name else b""  # a frame of its own before the long ones
    content = (gzip.compress(begun) if name.endswith("gz") else pa.compress(begun, "zstd", asbytes=True)) + content
    words = refusal(tmp_path / name, content)
    assert f"{name}: cannot be read" in words and "decompress it where you trust it" in words


def test_a_frame_that_asks_for_a_window_of_two_gigabytes_is_refused(tmp_path: Path) -> None:
    content = zstd_of_nothing(2**20)
    assert "a.txt.zst: cannot be read" in refusal(tmp_path / "a.txt.zst", content[:5] + b"\xa8" + content[6:])


def test_a_document_index_in_a_hostile_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "documents.parquet"
    with RowWriter(path) as index:
        index.extend([astuple(DocumentRow(source="a", offset_bytes=0, bytes=1, tokens=1, split="train", sha256="b"))])
    table = parquet.read_table(path)
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["a" * 20 * MEGABYTE]))
    rows = table.take([0] * 256).set_column(0, "source", long)
    with parquet.ParquetWriter(path, rows.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({STARTS: "[[0, 0]]"})
    assert path.stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError, match=r"documents\.parquet: .*rule:"):
        documents_between(path, [TokenSpan(split="train", start=0, stop=10)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "memory of this process, in kB"


def test_the_process_that_reads_a_table_has_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING", "ENTIRELY_UNSUSPICIOUS"):
        monkeypatch.setenv(name, "canary")
    (tmp_path / "a.parquet").write_bytes(table_file(pa.array(["a" * MEGABYTE] * 32), dictionary=False))
    before = set(psutil.Process().children())
    with (tmp_path / "a.parquet").open("rb") as file, closing(read_parquet(file, ["text"])) as batches:
        assert next(batches).num_rows == 0  # and it waits until somebody takes the next one
        (reader,) = set(psutil.Process().children()) - before
        environment = reader.environ()
    assert "PATH" in environment and "canary" not in environment.values()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_token_shard_is_refused(tmp_path: Path, codec: str) -> None:
    schema, tokens = ShardSchema(vocab_size=256, tokenizer_sha256="a"), np.zeros(20 * MEGABYTE, np.uint16)
    path, options = tmp_path / "shard.arrow", pa.ipc.IpcWriteOptions(compression=codec)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema.arrow(), options=options) as writer:
        writer.write_batch(pa.record_batch([pa.array(tokens)], schema=schema.arrow()))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(IntegrityError, match=r"my/shard: .* compressed; rule:"):
        map_shard(path, schema, where="my/shard")


def test_long_texts_in_an_ordinary_table_are_read(tmp_path: Path) -> None:
    texts = [random.Random(number).randbytes(100_000).hex() for number in range(32)]
    (tmp_path / "a.parquet").write_bytes(table_file(pa.array(texts), dictionary=True))
    (source,) = open_sources(["a.parquet"], tmp_path)
    assert [document.text for document in source.documents()] == texts
