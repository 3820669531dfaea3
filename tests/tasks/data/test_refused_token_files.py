"""Files that are no token files, or not of the width or vocabulary they are read with, are refused by name."""

import array
import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save

from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.token_files import inspect_token_file
from tests.tasks.data.token_file_bytes import llm_c, megatron_index, npy

TOKENS = np.arange(1000, dtype="<u2")
RAW = TOKENS.tobytes()
GPT2 = np.random.default_rng(0).zipf(1.3, 20_000).clip(0, 50_256)  # mostly small ids, as a tokenizer gives


def packed(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zipped(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.bin", RAW)


def tarred(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("train.bin"))


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table tokens (id integer)")
    return connection.serialize()


def arrow(file: io.BytesIO) -> None:
    table = pa.table({"ids": TOKENS})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


PICKLED = {
    "a list": TOKENS.tolist(),
    "a short list": [1, 2, 3],
    "an array": TOKENS,
    "a long array": array.array("H", bytes(RAW) * 99),
    "bytes that are longer than the head": bytes(99_999),
}
PROSE = "It was the best of times, it was the worst of times.\n"
FOREIGN: dict[str, tuple[bytes, str]] = {
    "text": (PROSE.encode(), "text, not ids.*data.sources"),
    "long text": (PROSE.encode() * 5000, "text, not ids"),
    "Chinese text": (("漢字仮名" * 9000).encode(), "text, not ids"),
    "text in Latin-1": (("Übermäßig große Bücher für Höflinge. " * 30).encode("latin-1"), "text, not ids"),
    "text in UTF-16": (PROSE.encode("utf-16"), "text, not ids"),
    "text in UTF-16 without a mark": ((PROSE * 9).encode("utf-16-le"), "text, not ids"),
    "lines of JSON": (json.dumps({"text": PROSE}).encode() + b"\n", "text, not ids"),
    "coloured output": (b"\x1b[31mred\x1b[0m\n", "text, not ids"),
    "gzip": (gzip.compress(RAW), "a gzip file.*Decompress it first"),
    "Zstandard": (pa.compress(RAW, "zstd", asbytes=True), "a Zstandard file.*Decompress"),
    "LZ4": (pa.compress(RAW, "lz4", asbytes=True), "an LZ4 file.*Decompress"),
    "bzip2": (bz2.compress(RAW), "a bzip2 file.*Decompress"),
    "xz": (lzma.compress(RAW), "an xz file.*Decompress"),
    "zip": (packed(zipped), "a zip file.*Unpack it"),
    ".npz": (packed(lambda file: np.savez(file, ids=TOKENS)), "a zip file .*npz and torch.save"),
    "tar": (packed(tarred), "a tar file.*Unpack it"),
    "Parquet": (packed(lambda file: parquet.write_table(pa.table({"ids": TOKENS}), file)), "a Parquet file"),
    "Arrow": (packed(arrow), "an Arrow file"),
    "SQLite": (database(), "a database of SQLite"),
    "safetensors": (save({"ids": TOKENS}), "a safetensors file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + RAW, "an HDF5 file"),
    "LitGPT's packed dataset": (b"LITPKDS" + struct.pack("<QBQ", 1, 8, 1000) + RAW, "a packed dataset of LitGPT"),
    "Megatron's index": (megatron_index([1000], [0, 1], TOKENS.dtype), r"Megatron's index.*\.bin file beside it"),
    "fairseq's old index": (b"TNTIDX\0\0" + struct.pack("<QQ", 1, 8) + RAW, "an index of fairseq"),
    "llm.c's evaluation": (llm_c(TOKENS, magic=20240522), r"an llm\.c file, but not of tokens \(20240522\)"),
    "a shard of Streaming": (
        struct.pack("<3I", 1, 99, 2099) + b'{"column_encodings": ["ndarray"]}' + RAW,
        "a shard of",
    ),
    "torch.save's of old": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + RAW, r"a file of torch\.save"),
    **{
        f"pickle {protocol} of {name}": (pickle.dumps(value, protocol), "a pickle, which is never read")
        for protocol in (2, 3, 4, 5)
        for name, value in PICKLED.items()
    },
    ".npy of objects": (
        npy(np.array([1, "a"], object), allow_pickle=True),
        r"a \.npy file.*Python objects.*never unpickled",
    ),
    ".npy of big-endian numbers": (
        npy(TOKENS.astype(">u2")),
        "type >u2; rule: .*little-endian",
    ),
    ".npy of floating-point numbers": (npy(TOKENS.astype("<f4")), "type <f4; rule: one dimension of .*integers"),
    ".npy of rows": (npy(TOKENS.reshape(10, 100)), r"of shape \(10, 100\).*rule: one dimension"),
    ".npy of one number": (npy(np.array(7)), r"of shape \(\)"),
    ".npy that is cut": (npy(TOKENS)[:-1], r"a \.npy file that is not read: mmap length"),
    ".npy cut in its header": (npy(TOKENS)[:40], r"a \.npy file that is not read: EOF"),
    ".npy whose header is nonsense": (npy(TOKENS).replace(b"'descr'", b"'desc("), r"a \.npy file that is not read"),
    "two arrays in one .npy": (
        npy(TOKENS) * 2,
        "1000 tokens .* must have 2128 bytes; it has 4256",
    ),
    ".npy of nothing": (npy(TOKENS[:0]), "0 tokens of uint16 are in it"),
    "llm.c's of another version": (llm_c(TOKENS, version=7), "version 7 of llm.c's format 20240520; only 1 is read"),
    "llm.c's for Llama 3 of another version": (llm_c(TOKENS.astype("<u4"), version=1), "version 1 .*; only 7 is read"),
    "llm.c's with too few tokens": (llm_c(TOKENS, count=1001), "1001 tokens .* must have 3026 bytes; it has 3024"),
    "llm.c's that is cut": (llm_c(TOKENS)[:2000], "1000 tokens .* must have 3024 bytes; it has 2000"),
    "llm.c's of nothing": (llm_c(TOKENS[:0]), "0 tokens of uint16"),
    "llm.c's of fewer than none": (
        llm_c(TOKENS, count=2**31 - 1).replace(b"\xff\xff\xff\x7f", b"\xff" * 4),
        "0 tokens of uint16",
    ),
    "an empty file": (b"", "0 bytes are not a whole number of uint16 tokens"),
    "an odd number of bytes": (RAW + b"\0", "2001 bytes are not a whole number of uint16 tokens"),
}


@pytest.mark.parametrize("suffix", ["bin", "npy"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_token_file_is_refused_by_its_name(tmp_path: Path, kind: str, suffix: str) -> None:
    content, why = FOREIGN[kind]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InvalidCorpus, match=rf"^{re.escape(str(path))}: .*{why}"):
        inspect_token_file(path)


def refusal(tmp_path: Path, content: bytes, *, dtype: str = "", vocab_size: int = 50_257, end: int = 50_256) -> str:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(InvalidCorpus) as caught:
        inspect_token_file(tmp_path / "x.bin", dtype).require_ids(vocab_size, end)
    return str(caught.value)


@pytest.mark.parametrize("end", [0, 50_256])
@pytest.mark.parametrize(
    ("width", "given"), [("<u4", ""), ("<u8", ""), ("<i8", "uint32"), (">u4", ""), (">u8", "uint32")]
)
def test_wider_ids_read_as_narrow_ones_are_refused_with_the_option(
    tmp_path: Path, width: str, given: str, end: int
) -> None:
    why = refusal(tmp_path, GPT2.astype(width).tobytes(), dtype=given, end=end)
    assert re.search("every (second|fourth) id is 0, as if wider ids were read as .*--dtype uint32", why)


@pytest.mark.parametrize("stride", [3, 4])
def test_zeros_in_equal_distances_are_refused_unless_0_ends_documents(tmp_path: Path, stride: int) -> None:
    content = np.tile(np.array([7, 8, 9, 0], "<u2")[-stride:], 99).tobytes()
    assert f"every {'third' if stride == 3 else 'fourth'} id is 0" in refusal(tmp_path, content)
    inspect_token_file(tmp_path / "x.bin").require_ids(50_257, 0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_that_are_all_zero_are_refused(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "x.bin").write_bytes(np.zeros(5000, dtype).tobytes())
    with pytest.raises(InvalidCorpus, match="every single id is 0"):
        inspect_token_file(tmp_path / "x.bin").require_ids(50_257, 0)


@pytest.mark.parametrize("vocab_size", [65_537, 128_256])
@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (RAW, "Say the width that it has: --dtype uint32"),
        (npy(TOKENS), "again in 32 bits"),
        (llm_c(TOKENS), "again in 32 bits"),
    ],
    ids=["raw", ".npy", "llm.c"],
)
def test_a_vocabulary_that_does_not_fit_the_width_is_refused(
    tmp_path: Path, content: bytes, remedy: str, vocab_size: int
) -> None:
    why = refusal(tmp_path, content, vocab_size=vocab_size)
    assert f"uint16 holds ids up to 65535, and the vocabulary has {vocab_size}" in why and remedy in why


def test_a_width_that_a_header_contradicts_is_refused_with_both(tmp_path: Path) -> None:
    assert re.search(
        r"--dtype uint32: .*x\.bin says uint16 itself.*Leave it out", refusal(tmp_path, npy(TOKENS), dtype="uint32")
    )


SOUND = {"lengths": [400, 600], "borders": [0, 1, 2], "dtype": TOKENS.dtype}
CONTRADICTIONS = {
    "another version": ({"version": 2}, "version 2, and type 8"),
    "floating-point numbers": ({"dtype": np.dtype("<f4")}, "type 7 of Megatron's types"),
    "too few tokens": (
        {"lengths": [400, 601]},
        "1001 tokens of uint16 are in it, so it must have 2002 bytes; it has 2000",
    ),
    "another width": ({"dtype": np.dtype("<i4")}, "1000 tokens of int32 .* must have 4000 bytes"),
    "a negative length": ({"lengths": [1400, -400]}, "an index that contradicts itself"),
    "offsets that are not the lengths'": ({"shift": 2}, "an index that contradicts itself"),
    "no documents": ({"borders": []}, "an index that contradicts itself"),
    "documents that do not begin": ({"borders": [1, 2]}, "an index that contradicts itself"),
    "documents that do not end": ({"borders": [0, 1]}, "an index that contradicts itself"),
    "documents that go back": ({"borders": [0, 2, 1, 2]}, "an index that contradicts itself"),
    "documents of sequences that are not there": ({"borders": [0, 9, 2]}, "an index that contradicts itself"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_an_index_that_is_not_of_its_data_is_refused(tmp_path: Path, kind: str) -> None:
    change, why = CONTRADICTIONS[kind]
    arguments = SOUND | change
    (tmp_path / "x.idx").write_bytes(megatron_index(**arguments))
    assert re.search(why, refusal(tmp_path, RAW))


@pytest.mark.parametrize("length", [9, 20, 33, 34, 50, -1])
def test_an_index_that_is_cut_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.idx").write_bytes(megatron_index(**SOUND)[:length])
    assert re.search(r"x\.idx: ", refusal(tmp_path, RAW))


def test_no_stream_of_ids_is_taken_for_something_else(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    for vocab_size in (65, 257, 2000, 50_257, 65_536):
        for tokens in (100, 5000):
            (tmp_path / "x.bin").write_bytes(numbers.integers(0, vocab_size, tokens).astype("<u2").tobytes())
            inspect_token_file(tmp_path / "x.bin").require_ids(vocab_size, vocab_size - 1)
