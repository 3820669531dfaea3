"""The SQL rows of one run: its receipts, checkpoints and evaluations with the columns that SQL adds, and its steps."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from reports.queries.checkpoints import summarize_checkpoint
from reports.queries.evaluations import EvaluationSummary, list_evaluations
from reports.queries.receipts import DecisionSummary, PlacementSummary, make_receipt, with_earlier
from reports.queries.run_status import RunPhase, summarize_run
from reports.queries.run_tables import ROWS, SETTINGS, JsonText
from storage.logs.run_entries import DevicePeak
from storage.logs.run_state import AttemptRecord, RunState
from storage.logs.step_log import StepRecord, splice
from storage.stores.document import project
from tasks.configuration.flat_document import stored_value


def make_log_rows(run_id: str, state: RunState, standing: RunPhase) -> dict[str, list[Any]]:
    """Return the rows of one run in every table that follows from its log."""
    return {
        "runs": [make_run_row(run_id, state, standing)],
        "training_attempts": [make_attempt_row(run_id, state, *attempts) for attempts in with_earlier(state)],
        "checkpoints": _checkpoint_rows(run_id, state),
        "evaluations": _evaluation_rows(run_id, state),
    }


def make_attempt_row(run_id: str, state: RunState, before: AttemptRecord | None, record: AttemptRecord) -> Any:
    """Return a receipt as a row: placement, peak and decision become columns."""
    receipt, started = make_receipt(run_id, state, record, before), record.started
    return project(
        receipt,
        ROWS["training_attempts"],
        **_columns("placement_", PlacementSummary, receipt.placement),
        **_columns("decision_", DecisionSummary, receipt.decision),
        **_columns("peak_", DevicePeak, receipt.peak),
        model_family=state.opened.model_family if state.opened else None,
        total_steps=state.opened.total_steps if state.opened else None,
        activation_checkpointing=started.activation_checkpointing,
        quarantined_samples=started.quarantined_samples,
        changed=started.changed,
        made_progress=record.made_progress,
        config=_json(started.config),
    )


def _columns(prefix: str, record_type: type, record: object) -> dict[str, Any]:
    """Return the columns of a nested record, all None where there is none."""
    return {f"{prefix}{name}": getattr(record, name, None) for name in record_type.__annotations__}


def _checkpoint_rows(run_id: str, state: RunState) -> list[Any]:
    family = state.opened.model_family if state.opened else None
    return [
        project(
            summarize_checkpoint(run_id, record),
            ROWS["checkpoints"],
            model_family=family,
            tokens=record.committed.tokens,
            gpu_seconds=record.committed.gpu_seconds,
            detail=record.detail,
        )
        for record in state.checkpoints
    ]


def _evaluation_rows(run_id: str, state: RunState) -> list[Any]:
    attempts = {record.committed.manifest_sha256: record.committed.attempt for record in state.checkpoints}
    family = state.opened.model_family if state.opened else None
    return [
        _evaluation_row(run_id, family, attempts.get(summary.manifest_sha256), summary)
        for summary in list_evaluations(state)
    ]


def _evaluation_row(run_id: str, family: str | None, attempt: int | None, summary: EvaluationSummary) -> Any:
    verdict = summary.verdict
    return project(
        summary,
        ROWS["evaluations"],
        run_id=run_id,
        model_family=family,
        attempt=attempt,
        val_loss=summary.metrics.get("val_loss"),
        perplexity=summary.metrics.get("perplexity"),
        bits_per_byte=summary.metrics.get("bits_per_byte"),
        verdict_kind=verdict.kind if verdict else None,
        verdict_why=verdict.why if verdict else None,
    )


def make_run_row(run_id: str, state: RunState, standing: RunPhase) -> Any:
    """Return the run's own row."""
    opened, finished = state.opened, state.finished
    config = opened.config if opened else {}
    ends = [record.ended for record in state.attempts if record.ended]
    receipts = [make_receipt(run_id, state, record, before) for before, record in with_earlier(state)]
    committed_at = {record.committed.manifest_sha256: record.committed_at for record in state.checkpoints}
    signs = [record.ended_at or record.started_at for record in state.attempts[-1:]]
    signs += [record.committed_at for record in state.checkpoints[-1:]]
    evaluated = [item for item in state.evaluations if "val_loss" in item.metrics]
    farthest = max(evaluated, key=lambda item: (item.step, item.started_at), default=None)
    return project(
        summarize_run(run_id, state, standing),
        ROWS["runs"],
        tokens=sum(ended.tokens for ended in ends),
        gpu_seconds=sum(ended.gpu_seconds for ended in ends),
        useful_gpu_seconds=sum(ended.useful_gpu_seconds for ended in ends),
        wasted_gpu_seconds=sum(ended.wasted_gpu_seconds for ended in ends),
        waiting_seconds=sum(receipt.waiting_seconds for receipt in receipts),
        starting_seconds=sum(receipt.starting_seconds or 0.0 for receipt in receipts),
        practised_attempts=sum(bool(receipt.practised) for receipt in receipts),
        finished_at=committed_at.get(finished.manifest_sha256) if finished else None,
        last_seen_at=max(filter(None, (state.opened_at, *signs)), default=None),
        train_loss=None,
        deleted_at=state.deleted_at,
        stopped=(finished.stopped or None) if finished else None,
        state_sha256=finished.state_sha256 if finished else None,
        val_loss=farthest.metrics["val_loss"] if farthest else None,
        quarantined_windows=len(state.quarantined_windows),
        refused_entries=len(state.refused),
        data_snapshot=opened.data_snapshot if opened else None,
        config_sha256=opened.config_sha256 if opened else None,
        code_version=opened.code_version if opened else None,
        forked_from_run=state.origin.run_id if state.origin else None,
        forked_from_step=state.origin.checkpoint.step if state.origin else None,
        **{name: stored_value(config, section, name, kind) for name, (section, kind) in SETTINGS.items()},
        config=_json(config),
    )


def make_unreadable_row(run_id: str, why: str) -> Any:
    """Return the row of a run whose log does not verify."""
    nothing = dict.fromkeys(ROWS["runs"].__annotations__)
    return ROWS["runs"](**nothing | {"run_id": run_id, "state": "unreadable", "detail": why})


def make_step_rows(run_id: str, state: RunState, records: Iterable[StepRecord]) -> list[Any]:
    """Return the surviving line: every step once, in order."""
    family = state.opened.model_family if state.opened else None
    return [
        ROWS["steps"](
            **_columns("", StepRecord, point.record), run_id=run_id, model_family=family, replays=point.replays
        )
        for point in splice(records, state.attempts)
    ]


def _json(document: Mapping[str, Any]) -> JsonText:
    return JsonText(msgspec.json.encode(document, order="sorted").decode())
