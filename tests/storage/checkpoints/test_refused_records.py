"""Records with numbers that no program writes are refused where they are read, and the field is named."""

from collections.abc import Callable
from typing import Any

import pytest

from cairn.storage.checkpoints.payload import MAX_HEADER_BYTES, ManifestShard, TensorSpec
from cairn.storage.errors import StorageError
from cairn.storage.logs.run_entries import CheckpointPinned, DataQuarantined
from cairn.storage.snapshots.snapshot_manifest import SnapshotObject, SplitSize
from tests.entries import placement
from tests.storage.builders import manifest_of


def shard(header_bytes: int = 8) -> ManifestShard:
    return ManifestShard(name="weights", bytes=header_bytes, sha256="", header_bytes=header_bytes, tensors=())


def pin(**purposes: str) -> CheckpointPinned:
    reference: dict[str, Any] = {"step": 5, "attempt": 1, "prefix": "p5", "manifest_sha256": "m5"}
    return CheckpointPinned(**reference, pin_id="a", pinned_by=placement(), **purposes)


def quarantined(*windows: int) -> DataQuarantined:
    return DataQuarantined(attempt=1, reason="bad-data", windows=windows, detail="")


RECORDS: dict[str, tuple[Callable[[], object], str]] = {
    "a header that is too large": (lambda: shard(MAX_HEADER_BYTES + 9), "header_bytes 67108873: no header has this"),
    "a tensor of 65 dimensions": (lambda: TensorSpec(name="w", dtype="F32", shape=(1,) * 65), "65 dimensions, at most"),
    "two shards of one name": (lambda: manifest_of(shards=(shard(), shard())), "'weights' is named twice"),
    "a split without tokens": (lambda: SplitSize(documents=1, tokens=0, bytes=1), "tokens = 0: a split holds at least"),
    "a shard with less than no tokens": (
        lambda: SnapshotObject(key="a.arrow", bytes=1, sha256="", tokens=-1), "tokens -1: must not be negative"
    ),
    "a quarantine of no window": (quarantined, r"windows \(\): must be at least one"),
    "a quarantine of a negative window": (lambda: quarantined(3, -1), r"windows \(3, -1\): .* none negative"),
    "a pin for nothing": (pin, "exactly one must be named"),
    "a pin for two purposes": (lambda: pin(alias="champion", fork="twin"), "exactly one must be named"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_no_program_writes_is_refused_with_the_field(case: str) -> None:
    make, problem = RECORDS[case]
    with pytest.raises((ValueError, StorageError), match=problem):
        make()
