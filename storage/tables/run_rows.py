"""From a folded run and its step records to the rows of the tables. Pure.

Owns which value goes into which column. The state of a run is the caller's word: whether an owner is gone is not in
the log. Refuses to know SQL and files.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from storage.logs.run_state import AttemptRecord, RunState
from storage.logs.step_curve import splice
from storage.logs.step_log import StepRecord
from storage.tables.run_tables import (
    CheckpointRow,
    EvaluationRow,
    JsonText,
    RunRow,
    StepRow,
    TrainingAttemptRow,
)


def log_rows(run_id: str, state: RunState, standing: str) -> dict[str, list[Any]]:
    """Return the rows of one run in every table that follows from its log."""
    return {
        "runs": [run_row(run_id, state, standing)],
        "training_attempts": attempt_rows(run_id, state),
        "checkpoints": checkpoint_rows(run_id, state),
        "evaluations": evaluation_rows(run_id, state),
    }


def attempt_rows(run_id: str, state: RunState) -> list[TrainingAttemptRow]:
    """Return the receipts, oldest first."""
    return [_attempt_row(run_id, state, record) for record in state.attempts]


def _attempt_row(run_id: str, state: RunState, record: AttemptRecord) -> TrainingAttemptRow:
    opened, started, ended = state.opened, record.started, record.ended
    placement, resumed = started.placement, started.resumed_from
    decision = ended.decision if ended else None
    return TrainingAttemptRow(
        run_id=run_id,
        model_family=opened.model_family if opened else None,
        attempt=started.attempt,
        started_at=record.started_at,
        ended_at=record.ended_at,
        termination_reason=ended.reason if ended else None,
        detail=ended.detail if ended else None,
        fingerprint=ended.fingerprint if ended else None,
        config_sha256=started.config_sha256,
        data_snapshot=opened.data_snapshot if opened else "",
        code_version=started.code_version,
        placement_host=placement.host,
        placement_pid=placement.pid,
        placement_device=placement.device,
        placement_world_size=placement.world_size,
        flow_run_id=started.flow_run_id,
        resumed_from_step=resumed.step if resumed else None,
        resumed_from_manifest=resumed.manifest_sha256 if resumed else None,
        first_step=started.first_step,
        last_step=record.last_known_step,
        last_committed_step=record.last_committed_step,
        total_steps=opened.total_steps if opened else None,
        tokens=ended.tokens if ended else 0,
        gpu_seconds=ended.gpu_seconds if ended else 0.0,
        useful_gpu_seconds=ended.useful_gpu_seconds if ended else None,
        wasted_gpu_seconds=ended.wasted_gpu_seconds if ended else None,
        micro_batch=started.micro_batch,
        activation_checkpointing=started.activation_checkpointing,
        quarantined_samples=started.quarantined_samples,
        changed=started.changed,
        made_progress=record.made_progress,
        decision_action=decision.action if decision else None,
        decision_reason=decision.reason if decision else None,
        decision_charged=decision.charged if decision else None,
        decision_left=decision.left if decision else None,
        decision_delay_seconds=decision.delay_seconds if decision else None,
        config=_json(started.config),
    )


def checkpoint_rows(run_id: str, state: RunState) -> list[CheckpointRow]:
    """Return every checkpoint the log names, in commit order."""
    family = state.opened.model_family if state.opened else None
    return [
        CheckpointRow(
            run_id=run_id,
            model_family=family,
            attempt=record.committed.attempt,
            step=record.committed.step,
            state=record.state,
            prefix=record.committed.prefix,
            manifest_sha256=record.committed.manifest_sha256,
            state_sha256=record.committed.state_sha256,
            bytes=record.committed.bytes,
            tokens=record.committed.tokens,
            gpu_seconds=record.committed.gpu_seconds,
            committed_at=record.committed_at,
            detail=record.detail,
        )
        for record in state.checkpoints
    ]


def evaluation_rows(run_id: str, state: RunState) -> list[EvaluationRow]:
    """Return recorded and failed evaluations in the order they were started."""
    attempts = {record.committed.manifest_sha256: record.committed.attempt for record in state.checkpoints}
    family = state.opened.model_family if state.opened else None
    items: list[EvaluationRecorded | EvaluationFailed] = [*state.evaluations, *state.failed_evaluations]
    items.sort(key=lambda item: item.started_at)
    return [_evaluation_row(run_id, family, attempts.get(item.manifest_sha256), item) for item in items]


def _evaluation_row(
    run_id: str, family: str | None, attempt: int | None, item: EvaluationRecorded | EvaluationFailed
) -> EvaluationRow:
    recorded = item if isinstance(item, EvaluationRecorded) else None
    metrics = recorded.metrics if recorded else {}
    verdict = recorded.verdict if recorded else None
    return EvaluationRow(
        run_id=run_id,
        model_family=family,
        attempt=attempt,
        step=item.step,
        manifest_sha256=item.manifest_sha256,
        suite=item.suite,
        suite_sha256=item.suite_sha256,
        data_snapshot=item.data_snapshot,
        status="recorded" if recorded else "failed",
        val_loss=metrics.get("val_loss"),
        perplexity=metrics.get("perplexity"),
        bits_per_byte=metrics.get("bits_per_byte"),
        metrics=metrics,
        samples=recorded.samples if recorded else (),
        evaluator_version=recorded.evaluator_version if recorded else None,
        verdict_kind=verdict.kind if verdict else None,
        verdict_why=verdict.why if verdict else None,
        detail=item.detail if isinstance(item, EvaluationFailed) else None,
        started_at=item.started_at,
        seconds=item.seconds,
    )


def run_row(run_id: str, state: RunState, standing: str) -> RunRow:
    """Return the run's own row; `standing` is its state as the caller sees it."""
    opened, newest, finished = state.opened, state.newest_committed, state.finished
    config = opened.config if opened else {}
    ends = [record.ended for record in state.attempts if record.ended]
    committed_at = {record.committed.manifest_sha256: record.committed_at for record in state.checkpoints}
    evaluated = [item for item in state.evaluations if "val_loss" in item.metrics]
    farthest = max(evaluated, key=lambda item: (item.step, item.started_at), default=None)
    return RunRow(
        run_id=run_id,
        model_family=opened.model_family if opened else None,
        state=standing,
        step=newest.committed.step if newest else 0,
        total_steps=opened.total_steps if opened else None,
        newest_committed_step=newest.committed.step if newest else None,
        attempts=len(state.attempts),
        tokens=sum(ended.tokens for ended in ends),
        gpu_seconds=sum(ended.gpu_seconds for ended in ends),
        useful_gpu_seconds=sum(ended.useful_gpu_seconds for ended in ends),
        wasted_gpu_seconds=sum(ended.wasted_gpu_seconds for ended in ends),
        opened_at=state.opened_at,
        finished_at=committed_at.get(finished.manifest_sha256) if finished else None,
        stopped=(finished.stopped or None) if finished else None,
        state_sha256=finished.state_sha256 if finished else None,
        val_loss=farthest.metrics["val_loss"] if farthest else None,
        quarantined_windows=len(state.quarantined_windows),
        refused_entries=len(state.refused),
        data_snapshot=opened.data_snapshot if opened else None,
        config_sha256=opened.config_sha256 if opened else None,
        code_version=opened.code_version if opened else None,
        lr=_number(config, "training", "lr"),
        global_batch=_whole(config, "training", "global_batch"),
        seed=_whole(config, "training", "seed"),
        precision=_text(config, "training", "precision"),
        n_layer=_whole(config, "model", "n_layer"),
        n_head=_whole(config, "model", "n_head"),
        n_embd=_whole(config, "model", "n_embd"),
        block_size=_whole(config, "model", "block_size"),
        dropout=_number(config, "model", "dropout"),
        tokenizer=_text(config, "data", "tokenizer"),
        detail=None,
        config=_json(config),
    )


def unreadable_row(run_id: str, why: str) -> RunRow:
    """Return the row of a run whose log cannot be believed."""
    nothing: dict[str, Any] = dict.fromkeys(RunRow.__slots__)
    return RunRow(**{**nothing, "run_id": run_id, "state": "unreadable", "detail": why})


def step_rows(run_id: str, state: RunState, lines: Iterable[StepRecord]) -> list[StepRow]:
    """Return the surviving line: every step once, in order."""
    opened = state.opened
    config = opened.config if opened else {}
    batch, block = _whole(config, "training", "global_batch"), _whole(config, "model", "block_size")
    step_tokens = batch * block if batch and block else None
    return [
        StepRow(
            run_id=run_id,
            model_family=opened.model_family if opened else None,
            step=point.record.step,
            attempt=point.record.attempt,
            replays=point.replays,
            tokens=point.record.step * step_tokens if step_tokens else None,
            train_loss=point.record.train_loss,
            probe_loss=point.record.probe_loss,
            lr=point.record.lr,
            grad_norm=point.record.grad_norm,
            tokens_per_second=point.record.tokens_per_second,
            mfu=point.record.mfu,
            memory_bytes=point.record.memory_bytes,
            seconds=point.record.seconds,
            sample=point.record.sample,
        )
        for point in splice(lines, state.attempts)
    ]


def _json(document: Mapping[str, Any]) -> JsonText:
    return JsonText(msgspec.json.encode(document, order="sorted").decode())


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def _number(config: Mapping[str, Any], section: str, key: str) -> float | None:
    value = _value(config, section, key)
    return float(value) if isinstance(value, int | float) else None


def _whole(config: Mapping[str, Any], section: str, key: str) -> int | None:
    value = _value(config, section, key)
    return value if isinstance(value, int) else None


def _text(config: Mapping[str, Any], section: str, key: str) -> str | None:
    value = _value(config, section, key)
    return value if isinstance(value, str) else None
