"""A run as the reading commands find it, made of entries alone: no tensors, no orchestrator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.storage.checkpoints.checkpoint import (
    TensorGroup,
    checkpoint_target,
    commit_checkpoint,
    stage_checkpoint,
)
from cairn.storage.checkpoints.payload import TensorRecord, TrainerDocument
from cairn.storage.logs.log_entry import Arithmetic, CheckpointReference, DevicePeak, EntryLog, Writer
from cairn.storage.logs.registry import Promoted, Registry, RegistryState
from cairn.storage.logs.run_entries import (
    RUN_KINDS,
    AttemptStarted,
    CheckpointCommitted,
    EvaluationFailed,
    EvaluationRecorded,
    Placement,
)
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import Heartbeat, step_log_key, write_heartbeat
from cairn.storage.logs.window_losses import WindowLosses, write_losses
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from tests import entries
from tests.entries import NOON

DOCUMENT: dict[str, Any] = {
    "data": {"sources": ["text.txt"], "tokenizer": "bytes"},
    "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8},
    "training": {"steps": 40, "global_batch": 2, "device": "cpu", "precision": "fp32", "kernels": "stock"},
}
HUMAN = Writer(host="here", pid=1)


def configuration(overrides: Sequence[str] = ()) -> RunConfig:
    """A small configuration."""
    return parse_configuration(DOCUMENT, overrides=overrides, environment={}, name="test")


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricatedRun:
    """Writes the entries of a run one by one."""

    log: RunLog
    nodes_wanted: int = 6

    def open(self, *, opener: Writer = HUMAN, overrides: Sequence[str] = ()) -> None:
        """Open the run."""
        config, run_id = configuration(overrides), self.log.run_id
        body = entries.opened_with(config, run_id, "d" * 64, total_steps=40, nodes_wanted=self.nodes_wanted)
        self.log.append(lambda state: body, writer=opener)

    def start(
        self,
        *,
        host: str = "elsewhere",
        overrides: Sequence[str] = (),
        placement: Placement | None = None,
        activation_checkpointing: bool = False,
        faults: str = "",
    ) -> int:
        """Start the next attempt on `host`, or where `placement` says; returns its number."""
        placement = placement or entries.placement(host=host, nodes_wanted=self.nodes_wanted)
        config = configuration(overrides)

        def decide(state: RunState) -> AttemptStarted:
            newest = state.newest_committed
            return entries.started_with(
                config,
                state.latest_attempt + 1,
                placement=placement,
                activation_checkpointing=activation_checkpointing,
                resumed_from=newest.committed.reference if newest else None,
                faults=faults,
            )

        return self.log.append(decide, writer=HUMAN).latest_attempt

    def commit(self, step: int) -> CheckpointReference:
        """Stage and commit a real, small checkpoint of the open attempt."""
        attempt = self.log.state.latest_attempt
        weights = TensorRecord(name="w", dtype="U8", shape=(4,), data=memoryview(step.to_bytes(4, "little")))
        staged = stage_checkpoint(
            self.log.store,
            target=checkpoint_target(self.log.run_id, step=step, attempt=attempt),
            groups=(TensorGroup(name="weights", records=(weights,)),),
            trainer=TrainerDocument(version=1, step=step, cursor=step, learning_rate=0.1, versions={}, tensors=()),
        )
        writer = Writer(host="here", pid=1, attempt=attempt)
        state = commit_checkpoint(self.log, staged, writer=writer, tokens=3 * step, gpu_seconds=step / 10)
        newest: CheckpointCommitted = state.checkpoints[-1].committed
        return newest.reference

    def end(
        self, reason: str, *, action: str, charged: str | None = None, delay_seconds: float = 4.25, **changes: Any
    ) -> None:
        """End the open attempt; `changes` are to its receipt."""
        decision = entries.decided(action=action, charged=charged, delay_seconds=delay_seconds)
        body = entries.ended(self.log.state.latest_attempt, reason, decision=decision, **changes)
        self.log.append(lambda state: body, writer=HUMAN)

    def finish(self, reference: CheckpointReference) -> None:
        """Say that the last step is committed."""
        body = entries.finished(reference)
        self.log.append(lambda state: body, writer=Writer(host="here", pid=1, attempt=reference.attempt))

    def complete(self, step: int = 40) -> CheckpointReference:
        """Commit the last step, finish the run and end its open attempt."""
        last = self.commit(step)
        self.finish(last)
        self.end("completed", action="finish")
        return last

    def evaluate(
        self,
        reference: CheckpointReference,
        *,
        loss: float | None,
        suite_sha256: str = "5" * 64,
        losses: Sequence[float] = (),
    ) -> None:
        """Record an evaluation, with losses by window where there are any, or a failed one where there is no loss."""
        shared: dict[str, Any] = {
            "step": reference.step,
            "manifest_sha256": reference.manifest_sha256,
            "suite": "held-out",
            "suite_sha256": suite_sha256,
            "data_snapshot": "d" * 64,
            "started_at": NOON + timedelta(seconds=self.log.seq + 1),
            "seconds": 6.5,
        }
        body: EvaluationRecorded | EvaluationFailed
        if loss is None:
            body = EvaluationFailed(**shared, detail="it exited with 1", refused=True)
        else:
            metrics = {"val_loss": loss, "perplexity": 31.5, "bits_per_byte": 1.75}
            kept = WindowLosses(window_tokens=8, losses={"val_loss": tuple(losses)})
            body = EvaluationRecorded(
                **shared,
                metrics=metrics,
                samples=("The end",),
                evaluator_version="2",
                boundary="a wall",
                window_losses_sha256=write_losses(self.log.store, self.log.prefix, kept) if losses else None,
            )
        self.log.append(lambda state: body, writer=HUMAN)

    def beat(self, step: int) -> None:
        """Write the open attempt's heartbeat."""
        heartbeat = Heartbeat(
            attempt=self.log.state.latest_attempt,
            beat=2,
            step=step,
            train_loss=1.25,
            tokens=9,
            gpu_seconds=0.75,
            at=NOON,
            peak=DevicePeak(flops=4e12, source="data sheet"),
            arithmetic=Arithmetic(
                digest="d2", name="native", processor="p2", instructions="i2", libraries="l2", flags="f2"
            ),
            starting_seconds=1.75,
            symptom="it crawls",
            tokens_per_second=8.0,
        )
        write_heartbeat(self.log.store, self.log.prefix, heartbeat)


def write_steps(log: RunLog, attempt: int, steps: Iterable[int], **changes: Any) -> None:
    """Append records of an attempt's steps as a trainer does; a change may be a function of the step."""
    key, store = step_log_key(log.prefix, attempt), log.store
    before = store.read(key) if store.size(key) else b""
    lines = (
        entries.step_record(
            step, attempt, **{name: made(step) if callable(made) else made for name, made in changes.items()}
        )
        for step in steps
    )
    store.write(key, before + b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def fabricate(
    store: ObjectStore,
    run_id: str,
    *,
    opener: Writer = HUMAN,
    opened_at: datetime = NOON,
    nodes_wanted: int = 6,
    overrides: Sequence[str] = (),
) -> FabricatedRun:
    """Open a run whose clock ticks one second an entry."""
    seconds = count()
    entries = EntryLog(
        store=store,
        prefix=f"runs/{run_id}/log",
        kinds=RUN_KINDS,
        clock=lambda: opened_at + timedelta(seconds=next(seconds)),
    )
    run = FabricatedRun(log=RunLog(store, run_id, log=entries), nodes_wanted=nodes_wanted)
    run.open(opener=opener, overrides=overrides)
    return run


def promote(store: ObjectStore, run_id: str, reference: CheckpointReference, *, loss: float, alias: str) -> None:
    """Point an alias at a checkpoint."""

    def decide(state: RegistryState) -> Promoted:
        return entries.promoted(
            alias=alias,
            run_id=run_id,
            step=reference.step,
            prefix=reference.prefix,
            manifest_sha256=reference.manifest_sha256,
            suite_sha256="5" * 64,
            data_snapshot="d" * 64,
            metrics={"val_loss": loss},
            by="a test",
            why="it is better",
            previous=state.champion.manifest_sha256 if state.champion else None,
        )

    Registry(store, alias).append(decide)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty store in a folder."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
def fresh(store: LocalStore) -> FabricatedRun:
    """A run that was only opened."""
    return fabricate(store, "fresh")


def store_bard(store: ObjectStore) -> FabricatedRun:
    """A run with a preempted attempt, a running one, commits at 10, 20 and 30, and evaluations; 20 is champion."""
    run = fabricate(store, "bard")
    run.start()
    first = run.commit(10)
    second = run.commit(20)
    run.evaluate(first, loss=3.0)
    run.evaluate(second, loss=2.0)
    run.end("preempted", action="resume", charged="preempted")
    run.start()
    third = run.commit(30)
    run.evaluate(third, loss=None)
    run.beat(33)
    store.write("runs/bard/checkpoints/step-00000040-attempt-0002/weights-00001-of-00001.safetensors", b"half")
    promote(store, "bard", first, loss=3.0, alias="champion")
    promote(store, "bard", second, loss=2.0, alias="champion")
    return run


@pytest.fixture
def bard(store: LocalStore) -> FabricatedRun:
    """The run of `store_bard`."""
    return store_bard(store)
