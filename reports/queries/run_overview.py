"""All runs at a glance for the live page: state, losses, device time, last sign of life; searched and sorted."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from reports.queries.run_query import answer_query
from reports.queries.run_status import RunPhase
from storage.stores.object_store import ObjectStore

_COLUMNS = """run_id, state, model_family, step, total_steps, attempts, train_loss, val_loss, gpu_seconds,
    wasted_gpu_seconds, last_seen_at, opened_at, forked_from_run, detail"""
SORTS = ("last_seen_at", "run_id", "state", "step", "train_loss", "val_loss", "gpu_seconds", "attempts")
"""The fields that runs can be sorted by; the first one is the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverviewRow:
    """One run: losses in nats per token, `train_loss` while it trains and `val_loss` of its newest evaluation."""

    run_id: str
    state: str
    model_family: str | None
    step: int | None
    total_steps: int | None
    attempts: int | None
    train_loss: float | None
    val_loss: float | None
    gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    last_seen_at: datetime | None
    opened_at: datetime | None
    forked_from_run: str | None
    detail: str | None

    @property
    def share(self) -> float:
        """How much of its steps the run has done, 0 to 1."""
        return min((self.step or 0) / self.total_steps, 1.0) if self.total_steps else 0.0


def read_overview(store: ObjectStore, *, work: Path) -> tuple[OverviewRow, ...]:
    """Return every run that is not deleted, as SQL has it; `work` is this machine's folder."""
    with answer_query(store, f"select {_COLUMNS} from runs where state <> '{RunPhase.DELETED}'", work=work) as found:
        names = [column.name for column in found.columns]
        return tuple(OverviewRow(**dict(zip(names, row, strict=True))) for row in found.rows)


def select_rows(rows: Sequence[OverviewRow], *, search: str, sort: str, descending: bool) -> tuple[OverviewRow, ...]:
    """Return the runs in whose id, state, family or detail every word of `search` occurs, sorted; unknowns last."""
    words = search.casefold().split()
    kept = [row for row in rows if all(word in _searched(row) for word in words)]
    kept.sort(key=lambda row: row.run_id)
    known = [row for row in kept if getattr(row, sort) is not None]
    unknown = [row for row in kept if getattr(row, sort) is None]
    return (*sorted(known, key=lambda row: getattr(row, sort), reverse=descending), *unknown)


def _searched(row: OverviewRow) -> str:
    return " ".join(filter(None, (row.run_id, row.state, row.model_family, row.detail))).casefold()
