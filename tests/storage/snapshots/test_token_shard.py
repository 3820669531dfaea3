from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.snapshots.token_shard import (
    ShardSchema,
    ShardWriter,
    count_tokens,
    map_shard,
    slices_between,
    write_shard,
)

SCHEMA = ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=1000)
TOKENS = np.arange(1000, dtype=np.uint16)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_shard(tmp_path / "train-00000.arrow", TOKENS, SCHEMA)
    return tmp_path / "train-00000.arrow"


def test_a_mapped_shard_lies_in_the_map_and_not_in_the_heap(shard: Path) -> None:
    allocated = pa.total_allocated_bytes()
    tokens = map_shard(shard, SCHEMA, where="shard")
    assert pa.total_allocated_bytes() == allocated
    assert not tokens.flags.owndata
    assert np.array_equal(tokens, TOKENS)


def test_a_mapped_shard_sees_the_file_it_maps(shard: Path) -> None:
    tokens = map_shard(shard, SCHEMA, where="shard")
    at = shard.read_bytes().index(TOKENS.tobytes())
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(np.uint16(77).tobytes())
    assert tokens[0] == 77


def test_a_mapped_shard_cannot_be_written(shard: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        map_shard(shard, SCHEMA, where="shard")[0] = 1


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32), (2**32, np.uint32)])
def test_the_vocabulary_decides_the_width(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    schema = ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=vocab_size)
    with ShardWriter(tmp_path, "val", schema, shard_tokens=8) as writer:
        writer.append(np.asarray([0, vocab_size - 1]))
    tokens = map_shard(tmp_path / "val-00000.arrow", schema, where="shard")
    assert tokens.dtype == dtype
    assert tokens.tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_a_vocabulary_no_width_holds_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=rf"vocab_size = {vocab_size}: must lie in"):
        ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=vocab_size)


def test_a_stream_is_cut_into_full_shards_and_a_rest(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", SCHEMA, shard_tokens=64) as writer:
        for piece in np.split(TOKENS, [1, 100, 100, 500]):
            writer.append(piece)
    shards = [map_shard(path, SCHEMA, where=path.name) for path in sorted(tmp_path.iterdir())]
    assert [len(shard) for shard in shards] == [64] * 15 + [40]
    assert np.array_equal(np.concatenate(shards), TOKENS)


def test_a_stream_that_fills_its_shards_leaves_no_empty_one(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", SCHEMA, shard_tokens=500) as writer:
        writer.append(TOKENS)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["train-00000.arrow", "train-00001.arrow"]


@pytest.mark.parametrize("token", [-1, 1000, 70000])
def test_a_token_outside_the_vocabulary_is_never_written(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(StorageError, match=f"token id {token}: must lie in 0 to 999"),
        ShardWriter(tmp_path, "train", SCHEMA, shard_tokens=8) as writer,
    ):
        writer.append(np.asarray([1, token]))
    assert not list(tmp_path.iterdir())


def test_equal_tokens_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shard(tmp_path / name, TOKENS, SCHEMA)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("expected", "difference"),
    [
        (ShardSchema(tokenizer_sha256="cd" * 32, vocab_size=1000), "cairn.tokenizer_sha256 is '(ab){32}', expected"),
        (ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=999), "cairn.vocab_size is '1000', expected '999'"),
        (ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=70000), "columns are .token uint16 not null., expected"),
    ],
)
def test_a_shard_made_for_something_else_is_refused(shard: Path, expected: ShardSchema, difference: str) -> None:
    with pytest.raises(IntegrityError, match=f"my/shard: {difference}"):
        map_shard(shard, expected, where="my/shard")


def test_a_shard_of_another_version_is_refused(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.token_shard.SHARD_VERSION", 2)
    with pytest.raises(IntegrityError, match=r"cairn\.shard_version is '1', expected '2'"):
        map_shard(shard, SCHEMA, where="shard")


@pytest.mark.parametrize("kept_bytes", [0, 1, 100, 1000, -1])
def test_a_torn_shard_is_refused_by_name(shard: Path, kept_bytes: int) -> None:
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    with pytest.raises(IntegrityError, match="my/shard: "):
        map_shard(shard, SCHEMA, where="my/shard")


def test_a_shard_in_several_batches_is_refused(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "shard"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA.arrow()) as writer:
        for _ in range(2):
            writer.write_batch(pa.record_batch([pa.array(TOKENS)], schema=SCHEMA.arrow()))
    with pytest.raises(IntegrityError, match="2 record batches; a shard has exactly one"):
        map_shard(tmp_path / "shard", SCHEMA, where="shard")


def test_a_missing_shard_is_an_integrity_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="my/shard: not a readable Arrow shard"):
        map_shard(tmp_path / "absent", SCHEMA, where="my/shard")


def test_tokens_are_counted_whatever_the_shard_was_made_for(shard: Path) -> None:
    assert count_tokens(shard) == len(TOKENS)


def test_the_tokens_of_what_is_no_shard_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"ARROW1")
    with pytest.raises(IntegrityError, match="shard: not a readable Arrow shard"):
        count_tokens(tmp_path / "shard")


def test_slices_between_two_tokens_touch_no_other_row() -> None:
    rows = [TOKENS[:300], TOKENS[300:301], TOKENS[301:]]
    for start, stop in ((0, 10), (299, 302), (300, 301), (0, len(TOKENS)), (500, 500)):
        assert np.concatenate([*slices_between(rows, start, stop), TOKENS[:0]]).tolist() == TOKENS[start:stop].tolist()
    assert len(list(slices_between(rows, 300, 301))) == 1
