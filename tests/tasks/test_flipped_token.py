from pathlib import Path

import numpy as np
import pytest

from cairn.storage.snapshots.token_shard import ShardSchema, ShardWriter, VerifiedShard, flip_token, map_shard

SHARD_TOKENS = 10


@pytest.mark.parametrize("vocab_size", [257, 70_000], ids=["16 bits", "32 bits"])
def test_exactly_the_token_at_the_position_is_flipped_in_a_text_that_repeats_itself(
    tmp_path: Path, vocab_size: int
) -> None:
    schema = ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=vocab_size)
    tokens = np.tile(np.array([7, 8], dtype=schema.dtype), 15)
    with ShardWriter(tmp_path, "train", schema, shard_tokens=SHARD_TOKENS) as writer:
        writer.append(tokens)
    paths = sorted(tmp_path.iterdir())
    shards = flip_token([shard(path, schema) for path in paths], 13, tmp_path)
    found = np.concatenate([row.tokens() for row in shards])
    assert np.flatnonzero(found != tokens).tolist() == [13] and found[13] >= vocab_size
    stored = [map_shard(path, schema, where=path.name) for path in paths]
    assert np.array_equal(np.concatenate(stored), tokens), "the shards that other runs read are as before"


def shard(path: Path, schema: ShardSchema) -> VerifiedShard:
    return VerifiedShard(lambda: path, schema, tokens=SHARD_TOKENS, where=path.name)
