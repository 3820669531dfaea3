"""The entries of a run as tests fabricate them: one place for every field, each with a value of its own.

No two fields are equal, none is zero, empty or its default, so that no column can stand in for another (test_entries).
A test names what its claim is about; everything else is here.
"""

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.log_entry import Arithmetic, CheckpointReference, DevicePeak, Writer
from cairn.storage.logs.registry import MODEL_KINDS, DatedDecision, ModelDecision, Promoted, Refused, RegistryState
from cairn.storage.logs.run_entries import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointSuperseded,
    DataQuarantined,
    Decision,
    EvaluationRecorded,
    Placement,
    RunFinished,
    RunOpened,
)
from cairn.storage.logs.run_note import RunNoted
from cairn.storage.logs.step_log import StepRecord
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.machine.placement import this_placement

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CONFIG = RunConfig.model_validate({"data": {"sources": ["a.txt"]}, "training": {"steps": 100}}).document()


def writer(attempt: int | None = None) -> Writer:
    return Writer(host="here", pid=1, attempt=attempt)


def placement(**changes: Any) -> Placement:
    defaults = {"host": "here", "boot_id": "b", "pid_namespace": "pid:[4]", "pid": 11, "start_ticks": 1250}
    defaults |= {"device": "cpu", "world_size": 2, "threads": 3, "device_name": "a CPU", "cores": 7, "nodes": 5}
    defaults |= {"nodes_wanted": 6, "continued_by": "prefect deployment train-gpt/weekly", "hosts": ("here", "n1")}
    return Placement(**{**defaults, **changes})


def refusals(state: RegistryState) -> list[Refused]:
    """Return what the gates of an alias refused, oldest first."""
    return [item.refused for item in state.history if item.refused is not None]


def gone_placement() -> Placement:
    """Return a placement on this machine whose process is gone: another one has its pid now."""
    return replace(this_placement(device="cpu", threads=1), start_ticks=0)


def opened(run_id: str, **changes: Any) -> RunOpened:
    defaults: dict[str, Any] = {
        "model_family": "tiny",
        "config": {"lr": 0.1},
        "config_sha256": "c",
        "data_snapshot": "d",
        "total_steps": 100,
        "code_version": "1",
        "initial_weights_sha256": None,
        "nodes_wanted": 6,
        "continued_by": "prefect deployment train-gpt/weekly",
    }
    return RunOpened(run_id=run_id, **{**defaults, **changes})


def opened_with(config: RunConfig, run_id: str, data_snapshot: str, **changes: Any) -> RunOpened:
    """The opening of a run with this configuration."""
    own = {"config": config.frozen(), "config_sha256": config.frozen_sha256(), "data_snapshot": data_snapshot}
    own |= {"model_family": config.model_family or "gpt2-tiny", "total_steps": config.training.steps}
    return opened(run_id, **{**own, **changes})


def started(attempt: int, **changes: Any) -> AttemptStarted:
    defaults: dict[str, Any] = {
        "placement": placement(),
        "config": CONFIG,
        "config_sha256": "c",
        "code_version": "1",
        "micro_batch": 4,
        "resumed_from": None,
        "quarantined_samples": 5,
        "changed": "after lost: nothing",
        "gathering_seconds": 0.5,
        "versions": {"python": "3.11", "torch": "2.13"},
    }
    return AttemptStarted(attempt=attempt, **{**defaults, **changes})


def started_with(config: RunConfig, attempt: int, **changes: Any) -> AttemptStarted:
    """The start of an attempt with this configuration."""
    own = {"config": config.document(), "config_sha256": config.frozen_sha256(), "micro_batch": 2}
    return started(attempt, **{**own, **changes})


def decided(**changes: Any) -> Decision:
    defaults: dict[str, Any] = {
        "action": "resume",
        "reason": "so it was decided",
        "left": {"retries": 3},
        "delay_seconds": 4.25,
        "changed": "nothing",
    }
    return Decision(**{**defaults, **changes})


def ended(attempt: int, reason: str = "lost", **changes: Any) -> AttemptEnded:
    """A receipt whose numbers all differ, so that no column can stand in for another."""
    defaults: dict[str, Any] = {
        "detail": f"{reason} it was",
        "fingerprint": "f",
        "last_step": 12,
        "tokens": 7,
        "gpu_seconds": 2.0,
        "useful_gpu_seconds": 1.5,
        "wasted_gpu_seconds": 0.5,
        "stderr_tail": ("its last line",),
        "decision": decided(),
        "evidence": {"exit_code": 9},
        "peak": DevicePeak(flops=3e12, source="measured"),
        "arithmetic": Arithmetic(
            digest="d1", name="native", processor="p1", instructions="i1", libraries="l1", flags="f1"
        ),
        "starting_seconds": 2.25,
        "last_seen_at": NOON + timedelta(seconds=2),
    }
    return AttemptEnded(attempt=attempt, reason=reason, **{**defaults, **changes})


def step_record(step: int, attempt: int, **changes: Any) -> StepRecord:
    """The record of a step."""
    usual: dict[str, Any] = {"train_loss": 3.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 100.0, "mfu": 0.1}
    rest: dict[str, Any] = {"memory_bytes": 1, "seconds": 0.5, "probe_loss": None, "sample": None}
    return StepRecord(step=step, attempt=attempt, **{**usual, **rest, **changes})


def spoiled(*windows: int, detail: str = "token ids out of range", attempt: int = 1) -> DataQuarantined:
    return DataQuarantined(attempt=attempt, reason="bad-data", windows=windows, detail=detail)


def superseded(reference: CheckpointReference, why: str = "keep_last") -> CheckpointSuperseded:
    return CheckpointSuperseded(**asdict(reference), why=why)


def damaged(reference: CheckpointReference, detail: str) -> CheckpointQuarantined:
    return CheckpointQuarantined(**asdict(reference), detail=detail)


def finished(reference: CheckpointReference) -> RunFinished:
    return RunFinished(
        attempt=reference.attempt,
        step=reference.step,
        manifest_sha256=reference.manifest_sha256,
        state_sha256="s" * 64,
    )


def evaluated(step: int, val_loss: float, **changes: Any) -> EvaluationRecorded:
    defaults: dict[str, Any] = {
        "manifest_sha256": f"{step:064x}",
        "suite": "held-out",
        "suite_sha256": "s",
        "data_snapshot": "d",
        "metrics": {"val_loss": val_loss, "perplexity": 31.5, "bits_per_byte": 1.75},
        "samples": ("a",),
        "evaluator_version": "2",
        "started_at": NOON,
        "seconds": 6.5,
        "boundary": "a wall",
    }
    return EvaluationRecorded(step=step, **{**defaults, **changes})


def noted(**changes: Any) -> RunNoted:
    """A note with tags."""
    defaults: dict[str, Any] = {"text": "the rate was too high", "tags": ("baseline", "old"), "untagged": ("new",)}
    return RunNoted(by="me@here", **{**defaults, **changes})


def promoted(**changes: Any) -> Promoted:
    defaults: dict[str, Any] = {
        "alias": "champion",
        "run_id": "bard",
        "step": 5,
        "prefix": "p",
        "manifest_sha256": "m",
        "suite_sha256": "s",
        "data_snapshot": "d",
        "metrics": {"val_loss": 1.0},
        "by": "me",
        "why": "better",
        "previous": None,
    }
    return Promoted(**{**defaults, **changes})


def refused(**changes: Any) -> Refused:
    defaults: dict[str, Any] = {
        "alias": "champion",
        "run_id": "bard",
        "step": 30,
        "manifest_sha256": "m",
        "gate": "better",
        "detail": "it is worse",
        "by": "me",
    }
    return Refused(**{**defaults, **changes})


def registry_of(*decisions: tuple[datetime, ModelDecision]) -> RegistryState:
    """Return the state of an alias with this history alone."""
    fields = {kind: name.replace("-", "_") for name, kind in MODEL_KINDS.items()}
    dated = (DatedDecision(at=at, **{fields[type(body)]: body}) for at, body in decisions)
    return RegistryState(history=History(dated))
