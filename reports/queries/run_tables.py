"""The SQL tables: a record for each, whose fields are its columns: those of JSON, flattened, and what SQL adds.

Of one run they hold its receipts, checkpoints and evaluations, and its steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import make_dataclass
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, NewType, get_args, get_type_hints

import msgspec

from cairn.reports.queries import alias_history, evaluations, run_lookup, run_status
from cairn.reports.queries.receipts import SECONDS, Receipt, make_receipt
from cairn.storage.logs import fold_cache, log_entry, run_entries, run_note, run_state, step_log
from cairn.storage.stores.codec import sha256, stored_value
from cairn.storage.tables.table_cache import Column

JsonText = NewType("JsonText", str)
"""A JSON document as text."""

TABLES_VERSION = 7
_METRICS = ("val_loss", "perplexity", "bits_per_byte")
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


def _row_type(name: str, *records: tuple[type, str], **others: Any) -> type:
    """Return the record of a table: the run, the columns of these records with a prefix each, and others."""
    fields = {"run_id": str, "model_family": str | None}
    for record, prefix in records:
        fields |= {f"{prefix}{name}": hint for name, hint in plain_fields(record).items()}
    return make_dataclass(name, list((fields | others).items()), frozen=True, kw_only=True, slots=True)


@cache
def plain_fields(record: type) -> Mapping[str, Any]:
    """Return the fields of a record that are columns, with their types."""
    return {name: hint for name, hint in get_type_hints(record).items() if _plain(hint) in _TYPES}


def _plain(hint: Any) -> Any:
    """Return a type without its `| None`; a nested record is no type of a column."""
    return hint if hint in _TYPES else next((part for part in get_args(hint) if part is not NoneType), None)


ROWS: Mapping[str, type] = {
    # A receipt; `termination_reason` is null while the attempt is open.
    "training_attempts": _row_type(
        "TrainingAttemptRow",
        (Receipt, ""),
        (run_entries.Placement, "placement_"),
        (log_entry.DevicePeak, "peak_"),
        (log_entry.Arithmetic, "arithmetic_"),
        (run_entries.Decision, "decision_"),
        total_steps=int,
        activation_checkpointing=bool,
        quarantined_samples=int,
        made_progress=bool,
        config=JsonText,
    ),
    # A committed checkpoint, in whatever state it is now; one that is still being written has no row.
    "checkpoints": _row_type("CheckpointRow", (run_lookup.CheckpointSummary, ""), tokens=int, gpu_seconds=float),
    # One evaluation, recorded or failed, and the verdict on the loss curve up to its checkpoint.
    "evaluations": _row_type(
        "EvaluationRow",
        (evaluations.EvaluationSummary, ""),
        (run_entries.CurveVerdict, "verdict_"),
        attempt=int,
        **dict.fromkeys(_METRICS, float),
    ),
    # A decision on an alias, which points at the `current` row; of a roll-back, what the alias went back to.
    "promotions": _row_type(
        "PromotionRow", (alias_history.AliasDecision, ""), (alias_history.PromotedEvaluation, ""), val_loss=float
    ),
    # A person's note on a run; its tags are a column of `runs`.
    "notes": _row_type("NoteRow", (run_note.RunNote, "")),
    # One surviving step; `replays` counts earlier attempts that trained it, `tokens` all tokens up to it.
    "steps": _row_type("StepRow", (step_log.StepRecord, ""), replays=int),
    # A machine over all runs: its attempts, and those that were lost or hung with it, where that is known, without
    # injected faults.
    "hosts": make_dataclass(
        "HostRow",
        [("host", str), ("runs", int), ("attempts", int), ("failed", int), ("last_failed_at", datetime | None)],
    ),
    # One run; `finished_at` is when its last step was committed, `deleted_at` when a person deleted its checkpoints,
    # `last_seen_at` the newest sign of life, `train_loss` that of the last step; only a run that trains has a speed. An
    # unreadable run has only a state, and a detail.
    "runs": _row_type(
        "RunRow",
        (run_status.RunSummary, ""),
        **dict.fromkeys(("finished_at", "last_seen_at", "deleted_at"), datetime),
        **dict.fromkeys((*SECONDS, "waiting_seconds", "starting_seconds", "train_loss", "val_loss"), float),
        **dict.fromkeys(("tokens_per_second", "seconds_left"), float),
        **dict.fromkeys(("tokens", "injected_attempts", "quarantined_windows", "refused_entries"), int),
        **dict.fromkeys(("stopped", "state_sha256", "data_snapshot", "config_sha256", "code_version"), str),
        forked_from_run=str,
        forked_from_step=int,
        **{name: kind for name, (_, kind) in SETTINGS.items()},
        config=JsonText,
    ),
}
LOG_TABLES = ("runs", "training_attempts", "checkpoints", "evaluations", "notes")
"""Tables made from a run's log alone, except for the progress of an open attempt."""


def promotion_row(decision: alias_history.AliasDecision) -> Any:
    """Return the row of a decision on an alias; queries take the family from the run."""
    measured = decision.evaluation
    cells = _cells(alias_history.PromotedEvaluation, measured) | _cells(alias_history.AliasDecision, decision)
    cells["metrics"] = measured.metrics if measured else {}
    cells["val_loss"] = measured.metrics.get("val_loss") if measured else None
    return ROWS["promotions"](**cells, model_family=None)


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
        "training_attempts": [make_attempt_row(run_id, state, record) for record in state.attempts],
        "checkpoints": [
            ROWS["checkpoints"](
                **_cells(run_lookup.CheckpointSummary, run_lookup.summarize_checkpoint(run_id, record)),
                model_family=family,
                tokens=record.committed.tokens,
                gpu_seconds=record.committed.gpu_seconds,
            )
            for record in state.checkpoints
        ],
        "evaluations": [
            ROWS["evaluations"](
                **_cells(evaluations.EvaluationSummary, summary),
                run_id=run_id,
                model_family=family,
                attempt=attempts.get(summary.manifest_sha256),
                **{name: summary.metrics.get(name) for name in _METRICS},
                **_cells(run_entries.CurveVerdict, summary.verdict, "verdict_"),
            )
            for summary in evaluations.list_evaluations(state)
        ],
        "notes": [
            ROWS["notes"](**_cells(run_note.RunNote, note), run_id=run_id, model_family=family) for note in state.notes
        ],
    }


def make_attempt_row(run_id: str, state: run_state.RunState, record: run_state.AttemptRecord) -> Any:
    """Return a receipt as a row: placement, peak and decision become columns."""
    receipt, started = make_receipt(run_id, state, record), record.started
    return ROWS["training_attempts"](
        **_cells(Receipt, receipt),
        **_cells(run_entries.Placement, receipt.placement, "placement_"),
        **_cells(run_entries.Decision, receipt.decision, "decision_"),
        **_cells(log_entry.DevicePeak, receipt.peak, "peak_"),
        **_cells(log_entry.Arithmetic, receipt.arithmetic, "arithmetic_"),
        model_family=state.opened.model_family if state.opened else None,
        total_steps=state.opened.total_steps if state.opened else None,
        activation_checkpointing=started.activation_checkpointing,
        quarantined_samples=started.quarantined_samples,
        made_progress=record.made_progress,
        config=_json(started.config),
    )


def _cells(record_type: type, record: object | None, prefix: str = "") -> dict[str, Any]:
    """Return the plain fields of a record by column, all None where there is no record."""
    names = plain_fields(record_type)
    return {f"{prefix}{name}": None if record is None else getattr(record, name) for name in names}


def make_run_row(
    run_id: str, state: run_state.RunState, standing: run_status.RunPhase, train_loss: float | None = None
) -> Any:
    """Return the run's own row; `train_loss` is that of the last step of its newest attempt."""
    opened, finished = state.opened, state.finished
    config = opened.config if opened else {}
    ends = [record.ended for record in state.attempts if record.ended]
    receipts = [make_receipt(run_id, state, record) for record in state.attempts]
    committed_at = {record.committed.manifest_sha256: record.committed_at for record in state.checkpoints}
    signs = [record.ended_at or record.started_at for record in state.attempts[-1:]]
    signs += [record.committed_at for record in state.checkpoints[-1:]]
    evaluated = [item for item in state.evaluations if "val_loss" in item.metrics]
    farthest = max(evaluated, key=lambda item: (item.step, item.started_at), default=None)
    return ROWS["runs"](
        **_cells(run_status.RunSummary, run_status.summarize_run(run_id, state, standing)),
        **{name: sum(getattr(ended, name) for ended in ends) for name in ("tokens", *SECONDS)},
        waiting_seconds=sum(receipt.waiting_seconds for receipt in receipts),
        starting_seconds=sum(receipt.starting_seconds or 0.0 for receipt in receipts),
        injected_attempts=sum(bool(receipt.injected) for receipt in receipts),
        finished_at=committed_at.get(finished.manifest_sha256) if finished else None,
        last_seen_at=max(filter(None, (state.opened_at, *signs)), default=None),
        train_loss=train_loss,
        tokens_per_second=None,
        seconds_left=None,
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
    cells = ((_cells(step_log.StepRecord, point.record), point.replays) for point in points)
    return [ROWS["steps"](**record, **run, replays=replays) for record, replays in cells]


def _json(document: Mapping[str, Any]) -> JsonText:
    return JsonText(msgspec.json.encode(document, order="sorted").decode())
