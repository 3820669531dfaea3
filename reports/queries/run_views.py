"""What readers see of a run: receipts, checkpoints, evaluations, as CONTRACT names their fields.

Owns the field names. Pure but for the store's listing; refuses torch, the orchestrator and validation libraries, so
that the reading verbs answer at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from storage.logs.heartbeat import read_heartbeat
from storage.logs.run_entries import CurveVerdict, Decision, EvaluationFailed, EvaluationRecorded, Placement
from storage.logs.run_log import RunLog
from storage.logs.run_state import AttemptRecord, CheckpointRecord, RunState
from storage.stores.object_store import ObjectStore

_CHECKPOINT_FOLDER = re.compile(r"step-(\d+)-attempt-(\d+)\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementView:
    """Where an attempt runs or ran."""

    host: str
    pid: int
    device: str
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionView:
    """What was decided when the attempt ended, what paid for it and what is left."""

    action: str
    reason: str
    charged: str | None
    left: Mapping[str, int | None]
    delay_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """A receipt; in an open one the reason is None and progress is what its heartbeat last said.

    `first_step` is the step the attempt set out from: 0, or where it resumed.
    """

    run_id: str
    attempt: int
    started_at: datetime
    ended_at: datetime | None
    termination_reason: str | None
    detail: str | None
    fingerprint: str | None
    config_sha256: str
    data_snapshot: str
    code_version: str
    placement: PlacementView
    flow_run_id: str | None
    resumed_from_step: int | None
    resumed_from_manifest: str | None
    first_step: int
    last_step: int
    last_committed_step: int | None
    tokens: int
    gpu_seconds: float
    useful_gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    micro_batch: int
    decision: DecisionView | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointView:
    """A checkpoint in one of its states; one that is still *writing* has no digests and no commit time."""

    run_id: str
    attempt: int
    step: int
    state: str
    prefix: str
    manifest_sha256: str | None
    state_sha256: str | None
    bytes: int
    committed_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationView:
    """What one evaluation of exact weights under an exact suite gave; `status` is recorded or failed."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    status: str
    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str | None
    started_at: datetime
    seconds: float
    detail: str | None
    verdict: CurveVerdict | None = None


def view_placement(placement: Placement) -> PlacementView:
    """Return what people and scripts are told of a placement."""
    return PlacementView(
        host=placement.host, pid=placement.pid, device=placement.device, world_size=placement.world_size
    )


def view_attempts(log: RunLog) -> tuple[AttemptView, ...]:
    """Return the receipts of a run that was read, oldest first."""
    return tuple(view_attempt(log, record) for record in log.state.attempts)


def view_attempt(log: RunLog, record: AttemptRecord) -> AttemptView:
    """Return the receipt of one attempt of a run that was read."""
    started, resumed = record.started, record.started.resumed_from
    view = AttemptView(
        run_id=log.run_id,
        attempt=started.attempt,
        started_at=record.started_at,
        ended_at=record.ended_at,
        termination_reason=None,
        detail=None,
        fingerprint=None,
        config_sha256=started.config_sha256,
        data_snapshot=log.state.opened.data_snapshot if log.state.opened else "",
        code_version=started.code_version,
        placement=view_placement(started.placement),
        flow_run_id=started.flow_run_id,
        resumed_from_step=resumed.step if resumed else None,
        resumed_from_manifest=resumed.manifest_sha256 if resumed else None,
        first_step=started.first_step,
        last_step=record.last_known_step,
        last_committed_step=record.last_committed_step,
        tokens=0,
        gpu_seconds=0.0,
        useful_gpu_seconds=None,
        wasted_gpu_seconds=None,
        micro_batch=started.micro_batch,
        decision=None,
    )
    return _with_end(view, record) if record.ended else _with_heartbeat(view, log)


def _with_end(view: AttemptView, record: AttemptRecord) -> AttemptView:
    ended = record.ended
    assert ended is not None
    return replace(
        view,
        termination_reason=ended.reason,
        detail=ended.detail,
        fingerprint=ended.fingerprint,
        tokens=ended.tokens,
        gpu_seconds=ended.gpu_seconds,
        useful_gpu_seconds=ended.useful_gpu_seconds,
        wasted_gpu_seconds=ended.wasted_gpu_seconds,
        decision=_view_decision(ended.decision),
    )


def _view_decision(decision: Decision) -> DecisionView:
    return DecisionView(
        action=decision.action,
        reason=decision.reason,
        charged=decision.charged,
        left=decision.left,
        delay_seconds=decision.delay_seconds,
    )


def _with_heartbeat(view: AttemptView, log: RunLog) -> AttemptView:
    heartbeat = read_heartbeat(log.store, log.prefix, view.attempt)
    if heartbeat is None:
        return view
    last_step = max(heartbeat.step, view.last_step)
    return replace(view, last_step=last_step, tokens=heartbeat.tokens, gpu_seconds=heartbeat.gpu_seconds)


def view_checkpoints(log: RunLog) -> tuple[CheckpointView, ...]:
    """Return every checkpoint of the run in commit order, then the staged ones that no entry names yet.

    Reads the log again after listing: what is committed meanwhile is not mistaken for staged.
    """
    staged = _staged_folders(log.store, f"{log.prefix}/checkpoints")
    known = tuple(_view_checkpoint(log.run_id, record) for record in log.refresh().checkpoints)
    names = {view.prefix for view in known}
    writing = [_view_staged(log, prefix, keys) for prefix, keys in sorted(staged.items()) if prefix not in names]
    return (*known, *writing)


def _view_checkpoint(run_id: str, record: CheckpointRecord) -> CheckpointView:
    committed = record.committed
    return CheckpointView(
        run_id=run_id,
        attempt=committed.attempt,
        step=committed.step,
        state=record.state,
        prefix=committed.prefix,
        manifest_sha256=committed.manifest_sha256,
        state_sha256=committed.state_sha256,
        bytes=committed.bytes,
        committed_at=record.committed_at,
    )


def _staged_folders(store: ObjectStore, folder: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in store.keys(folder):
        prefix, _, _ = key.rpartition("/")
        if _CHECKPOINT_FOLDER.search(prefix):
            found.setdefault(prefix, []).append(key)
    return found


def _view_staged(log: RunLog, prefix: str, keys: list[str]) -> CheckpointView:
    named = _CHECKPOINT_FOLDER.search(prefix)
    assert named is not None
    return CheckpointView(
        run_id=log.run_id,
        attempt=int(named[2]),
        step=int(named[1]),
        state="writing",
        prefix=prefix,
        manifest_sha256=None,
        state_sha256=None,
        bytes=sum(log.store.size(key) or 0 for key in keys),
        committed_at=None,
    )


def view_evaluations(state: RunState) -> tuple[EvaluationView, ...]:
    """Return recorded and failed evaluations in the order they were started."""
    views = [view_evaluation(item) for item in state.evaluations]
    views += [view_evaluation(item) for item in state.failed_evaluations]
    return tuple(sorted(views, key=lambda view: view.started_at))


def view_evaluation(item: EvaluationRecorded | EvaluationFailed) -> EvaluationView:
    """Return one evaluation; a failed one has no metrics but a detail."""
    recorded = item if isinstance(item, EvaluationRecorded) else None
    return EvaluationView(
        step=item.step,
        manifest_sha256=item.manifest_sha256,
        suite=item.suite,
        suite_sha256=item.suite_sha256,
        data_snapshot=item.data_snapshot,
        status="recorded" if recorded else "failed",
        metrics=recorded.metrics if recorded else {},
        samples=recorded.samples if recorded else (),
        evaluator_version=recorded.evaluator_version if recorded else None,
        started_at=item.started_at,
        seconds=item.seconds,
        detail=item.detail if isinstance(item, EvaluationFailed) else None,
        verdict=recorded.verdict if recorded else None,
    )
