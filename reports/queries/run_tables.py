"""The SQL tables: a record for each, whose fields are its columns: those of JSON, flattened, and what SQL adds.

Of one run they hold its receipts, checkpoints and evaluations, and its steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, NewType, get_args, get_type_hints

import msgspec

from cairn.reports.queries import alias_history, evaluations, run_lookup, run_status
from cairn.reports.queries.receipts import (
    SECONDS,
    DecisionSummary,
    PlacementSummary,
    Receipt,
    make_receipt,
    with_earlier,
)
from cairn.storage.logs import fold_cache, log_entry, run_state, step_log
from cairn.storage.stores.document import project, sha256, stored_value
from cairn.storage.tables.table_cache import Column

JsonText = NewType("JsonText", str)
"""A JSON document as text."""

TABLES_VERSION = 5
SETTINGS: Mapping[str, tuple[str, type]] = {
    "lr": ("training", float),
    "global_batch": ("training", int),
    "seed": ("training", int),
    "precision": ("training", str),
    "n_layer": ("model", int),
    "n_head": ("model", int),
    "n_embd": ("model", int),
    "block_size": ("model", int),
    "dropout": ("model", float),
    "tokenizer": ("data", str),
}
"""The settings of a run that are columns of their own: section and type."""
_TYPES: Mapping[Any, str] = {
    str: "VARCHAR",
    int: "BIGINT",
    float: "DOUBLE",
    bool: "BOOLEAN",
    datetime: "TIMESTAMP WITH TIME ZONE",
    JsonText: "JSON",
    tuple[str, ...]: "VARCHAR[]",
    Mapping[str, float]: "MAP(VARCHAR, DOUBLE)",
    Mapping[str, str]: "MAP(VARCHAR, VARCHAR)",
    Mapping[str, int | None]: "MAP(VARCHAR, BIGINT)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionRow:
    """A decision on an alias: `kind` is promoted, refused, rolled-back or withdrawn; it points at the `current` row.

    Run, step and weights of a roll-back are those the alias went back to.
    """

    alias: str
    kind: str
    decided_at: datetime
    promoted_at: datetime | None
    run_id: str | None
    model_family: str | None
    step: int | None
    manifest_sha256: str | None
    previous: str | None
    current: bool
    by: str
    why: str | None
    gate: str | None
    detail: str | None
    suite_sha256: str | None
    val_loss: float | None
    metrics: Mapping[str, float]
    verdict: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow:
    """A machine over all runs: in how many attempts it took part, how many were lost or hung with it, the last when.

    Practised faults do not count; which machine of several hung is not known.
    """

    host: str
    runs: int
    attempts: int
    failed: int
    last_failed_at: datetime | None


def _row_type(name: str, *records: tuple[type, str], **others: Any) -> type:
    """Return the record of a table: the run, the columns of these records with a prefix each, and others."""
    fields = {"run_id": str, "model_family": str | None}
    for record, prefix in records:
        hints = get_type_hints(record).items()
        fields |= {f"{prefix}{name}": hint for name, hint in hints if _plain(hint) in _TYPES}
    return make_dataclass(name, list((fields | others).items()), frozen=True, kw_only=True, slots=True)


def _plain(hint: Any) -> Any:
    """Return a type without its `| None`; a nested record is no type of a column."""
    return hint if hint in _TYPES else next((part for part in get_args(hint) if part is not NoneType), None)


ROWS: Mapping[str, type] = {
    # A receipt; `termination_reason` is null while the attempt is open.
    "training_attempts": _row_type(
        "TrainingAttemptRow",
        (Receipt, ""),
        (PlacementSummary, "placement_"),
        (log_entry.DevicePeak, "peak_"),
        (DecisionSummary, "decision_"),
        total_steps=int,
        activation_checkpointing=bool,
        quarantined_samples=int,
        changed=str,
        made_progress=bool,
        config=JsonText,
    ),
    # A committed checkpoint, in whatever state it is now; one that is still being written has no row.
    "checkpoints": _row_type(
        "CheckpointRow", (run_lookup.CheckpointSummary, ""), tokens=int, gpu_seconds=float, detail=str
    ),
    # One evaluation, recorded or failed, and the verdict on the loss curve up to its checkpoint.
    "evaluations": _row_type(
        "EvaluationRow",
        (evaluations.EvaluationSummary, ""),
        attempt=int,
        val_loss=float,
        perplexity=float,
        bits_per_byte=float,
        verdict_kind=str,
        verdict_why=str,
    ),
    "promotions": PromotionRow,
    # One surviving step; `replays` counts earlier attempts that trained it, `tokens` all tokens up to it.
    "steps": _row_type("StepRow", (step_log.StepRecord, ""), replays=int),
    "hosts": HostRow,
    # One run; `finished_at` is when its last step was committed, `deleted_at` when a person deleted its checkpoints,
    # `last_seen_at` the newest sign of life; `train_loss` only of an open attempt. An unreadable run has only a state,
    # and a detail.
    "runs": _row_type(
        "RunRow",
        (run_status.RunSummary, ""),
        tokens=int,
        gpu_seconds=float,
        useful_gpu_seconds=float,
        wasted_gpu_seconds=float,
        waiting_seconds=float,
        starting_seconds=float,
        practised_attempts=int,
        finished_at=datetime,
        last_seen_at=datetime,
        train_loss=float,
        deleted_at=datetime,
        stopped=str,
        state_sha256=str,
        val_loss=float,
        quarantined_windows=int,
        refused_entries=int,
        data_snapshot=str,
        config_sha256=str,
        code_version=str,
        forked_from_run=str,
        forked_from_step=int,
        **{name: kind for name, (_, kind) in SETTINGS.items()},
        config=JsonText,
    ),
}
LOG_TABLES = ("runs", "training_attempts", "checkpoints", "evaluations")
"""Tables made from a run's log alone, except for the progress of an open attempt."""


def promotion_row(decision: alias_history.AliasDecision) -> PromotionRow:
    """Return the row of a decision on an alias; queries take the family from the run."""
    measured = decision.evaluation
    return project(
        decision,
        PromotionRow,
        kind=decision.decision,
        decided_at=decision.at,
        promoted_at=decision.at if decision.decision == "promoted" else None,
        model_family=None,
        suite_sha256=measured.suite_sha256 if measured else None,
        val_loss=measured.metrics.get("val_loss") if measured else None,
        metrics=measured.metrics if measured else {},
        verdict=measured.verdict if measured else None,
    )


@cache
def columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table in order."""
    return tuple(Column(name=name, type=_TYPES[_plain(hint)]) for name, hint in get_type_hints(ROWS[table]).items())


@cache
def schema_digest() -> str:
    """Return the digest of versions and columns; packs with another digest are not used."""
    listed = [f"{table}.{column.name} {column.type}" for table in ROWS for column in columns(table)]
    return sha256("\n".join([str(TABLES_VERSION), str(fold_cache.FOLD_VERSION), *listed]).encode())


def make_log_rows(run_id: str, state: run_state.RunState, standing: run_status.RunPhase) -> dict[str, list[Any]]:
    """Return the rows of one run in every table that follows from its log."""
    family = state.opened.model_family if state.opened else None
    attempts = {record.committed.manifest_sha256: record.committed.attempt for record in state.checkpoints}
    return {
        "runs": [make_run_row(run_id, state, standing)],
        "training_attempts": [make_attempt_row(run_id, state, *attempts) for attempts in with_earlier(state)],
        "checkpoints": [
            project(
                run_lookup.summarize_checkpoint(run_id, record),
                ROWS["checkpoints"],
                model_family=family,
                tokens=record.committed.tokens,
                gpu_seconds=record.committed.gpu_seconds,
                detail=record.detail,
            )
            for record in state.checkpoints
        ],
        "evaluations": [
            project(
                summary,
                ROWS["evaluations"],
                run_id=run_id,
                model_family=family,
                attempt=attempts.get(summary.manifest_sha256),
                **{name: summary.metrics.get(name) for name in ("val_loss", "perplexity", "bits_per_byte")},
                verdict_kind=summary.verdict.kind if summary.verdict else None,
                verdict_why=summary.verdict.why if summary.verdict else None,
            )
            for summary in evaluations.list_evaluations(state)
        ],
    }


def make_attempt_row(
    run_id: str, state: run_state.RunState, before: run_state.AttemptRecord | None, record: run_state.AttemptRecord
) -> Any:
    """Return a receipt as a row: placement, peak and decision become columns."""
    receipt, started = make_receipt(run_id, state, record, before), record.started
    return project(
        receipt,
        ROWS["training_attempts"],
        **_columns("placement_", PlacementSummary, receipt.placement),
        **_columns("decision_", DecisionSummary, receipt.decision),
        **_columns("peak_", log_entry.DevicePeak, receipt.peak),
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


def make_run_row(run_id: str, state: run_state.RunState, standing: run_status.RunPhase) -> Any:
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
        run_status.summarize_run(run_id, state, standing),
        ROWS["runs"],
        **{name: sum(getattr(ended, name) for ended in ends) for name in ("tokens", *SECONDS)},
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


def make_step_rows(run_id: str, state: run_state.RunState, records: Iterable[step_log.StepRecord]) -> list[Any]:
    """Return the surviving line: every step once, in order."""
    run = {"run_id": run_id, "model_family": state.opened.model_family if state.opened else None}
    points = step_log.splice(records, state.attempts)
    return [project(point.record, ROWS["steps"], **run, replays=point.replays) for point in points]


def _json(document: Mapping[str, Any]) -> JsonText:
    return JsonText(msgspec.json.encode(document, order="sorted").decode())
