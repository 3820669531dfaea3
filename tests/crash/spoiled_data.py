"""A snapshot in which one sample is bad though every hash is right, and a run opened on it: a sure quarantine."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_entries import RunOpened
from cairn.storage.logs.run_log import RunLog
from cairn.storage.snapshots.data_snapshot import open_snapshot, read_manifest
from cairn.storage.snapshots.token_shard import VerifiedShard
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_build import build_snapshot

ARITHMETIC = ("training.precision=fp32", "training.kernels=stock")
"""Who opens a run decides it; nothing is left open in a log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoiledData:
    """The window with one token outside the vocabulary, which is in no other window, and the snapshot that has it."""

    window: int
    snapshot_id: str


def spoil(store: ObjectStore, config: RunConfig, folder: Path, *, step: int) -> SpoiledData:
    """Build the run's snapshot, spoil the first sample drawn after `step` steps, and publish it as it is."""
    sound = build_snapshot(store, config.data, folder).snapshot_id
    snapshot = open_snapshot(store, sound, folder / "cache" / "snapshots")
    windows = TokenWindows(snapshot.train, config.model.block_size, snapshot.manifest.vocab_size)
    order = SampleOrder(
        window_count=windows.window_count,
        seed=config.training.seed,
        global_batch=config.training.global_batch,
        block_size=config.model.block_size,
    )
    window = int(order.windows_of(step)[0])
    second_token = window * windows.block_size + 1  # the first is also the last of the window before
    return SpoiledData(window=window, snapshot_id=_publish_spoiled(store, sound, snapshot.train, second_token))


def open_run(log: RunLog, config: RunConfig, snapshot_id: str) -> None:
    """Open a run on that snapshot, as `cairn train` opens one on the snapshot it builds."""
    config = config.with_mode(precision="fp32", kernels="fused")
    opened = RunOpened(
        run_id=log.run_id,
        model_family=config.model_family or "gpt2-tiny",
        config=config.frozen(),
        config_sha256=config.frozen_sha256(),
        data_snapshot=snapshot_id,
        total_steps=config.training.steps,
        code_version="test",
    )
    log.append(lambda state: opened, writer=this_writer())


def _publish_spoiled(store: ObjectStore, snapshot_id: str, shards: tuple[VerifiedShard, ...], position: int) -> str:
    """Publish the snapshot again with the train token at `position` too great, every object under its own hash."""
    manifest = read_manifest(store, snapshot_id)
    found = {item.key: bytearray(store.read(f"data/{snapshot_id}/{item.key}")) for item in manifest.objects}
    keys = sorted(key for key in found if key.startswith("train-"))
    starts = list(accumulate(map(len, shards), initial=0))
    number = bisect_right(starts, position) - 1
    _, first_byte = shards[number].place_of(position - starts[number])
    found[keys[number]][first_byte + 1] ^= 0x80
    objects = tuple(replace(item, sha256=sha256(bytes(found[item.key]))) for item in manifest.objects)
    data = encode(replace(manifest, objects=objects))
    for key, content in found.items():
        store.write(f"data/{sha256(data)}/{key}", bytes(content))
    store.write(f"data/{sha256(data)}/snapshot.json", data)
    return sha256(data)
