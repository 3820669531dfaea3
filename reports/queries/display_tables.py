"""The columns and rows of each list that people read: the same in the terminal, in Markdown and in HTML."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.queries.run_timeline import ReasonRow, Stretch, group_receipts
from tasks.text.format import format_duration, format_value, one_line, short_digest

if TYPE_CHECKING:  # a command that prints one list loads nothing for the others
    from reports.queries.alias_history import AliasDecision, AliasPromotion
    from reports.queries.checkpoints import CheckpointSummary
    from reports.queries.comparison import EvaluationComparison
    from reports.queries.evaluations import EvaluationSummary
    from reports.queries.receipts import Receipt
    from reports.queries.run_status import BudgetStatus, RunSummary
    from storage.logs.log_entry import Entry

_METRICS = ("val_loss", "perplexity", "bits_per_byte")
_MEASURED = (
    "status",
    "suite",
    "val_loss",
    "perplexity",
    "bits/byte",
    "others",
    "seconds",
    "manifest",
    "verdict",
    "detail",
)
_MOST_OTHERS = 4
_MOST_CELL_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headings; `empty` is shown instead where there is no row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    empty: str = ""


def make_table(columns: Sequence[str], rows: Iterable[tuple[object, ...]], empty: str = "") -> Table:
    """Return the table without the columns in which every cell is None."""
    listed = tuple(rows)
    kept = [number for number in range(len(columns)) if any(row[number] is not None for row in listed)]
    return Table(
        columns=tuple(columns[number] for number in kept),
        rows=tuple(tuple(row[number] for number in kept) for row in listed),
        empty=empty,
    )


def format_cell(value: object) -> str:
    """Return the text of a cell on a page: one line, at most 200 characters."""
    return one_line(format_value(value), _MOST_CELL_CHARACTERS)


def runs_table(runs: "Sequence[RunSummary]") -> Table:
    """Return all runs."""
    return make_table(
        ("run", "state", "family", "step", "committed", "attempts", "opened (UTC)", "detail"),
        (
            (
                run.run_id,
                run.state,
                run.model_family,
                f"{format_value(run.step)}/{format_value(run.total_steps)}",
                run.newest_committed_step,
                run.attempts,
                run.opened_at,
                run.detail,
            )
            for run in runs
        ),
        empty="no runs here yet; `cairn train deployments/quickstart.toml` makes the first one",
    )


def receipts_table(receipts: "Sequence[Receipt]") -> Table:
    """Return the receipts, one a row."""
    return stretches_table([stretch for receipt in receipts for stretch in group_receipts([receipt])])


def stretches_table(stretches: Sequence[Stretch]) -> Table:
    """Return attempts in order, each stretch of equal ends as one row; the micro-batch only where it changed."""
    sizes = {receipt.micro_batch for stretch in stretches for receipt in stretch.attempts}
    columns = (
        "attempt",
        "started (UTC)",
        "lasted",
        "reason",
        "steps",
        "committed",
        "device time",
        "lost",
        "micro-batch",
        "decision",
        "detail",
    )
    rows = (_stretch_row(stretch, with_micro_batch=len(sizes) > 1) for stretch in stretches)
    return make_table(columns, rows, empty="no attempts yet")


def _stretch_row(stretch: Stretch, *, with_micro_batch: bool) -> tuple[object, ...]:
    first, last, count = stretch.first, stretch.last, len(stretch.attempts)
    lost = [receipt.wasted_gpu_seconds for receipt in stretch.attempts if receipt.wasted_gpu_seconds is not None]
    return (
        first.attempt if count == 1 else f"{first.attempt} to {last.attempt}",
        first.started_at,
        format_duration((last.ended_at - first.started_at).total_seconds()) if last.ended_at else None,
        stretch.reason if count == 1 else f"{stretch.reason} × {count:,}",
        f"{first.first_step:,} → {last.last_step:,}",
        last.last_committed_step,
        format_duration(sum(receipt.gpu_seconds for receipt in stretch.attempts)),
        format_duration(sum(lost)) if lost else None,
        last.micro_batch if with_micro_batch else None,
        last.decision.action if last.decision else None,
        last.detail or None,
    )


def reasons_table(reasons: Sequence[ReasonRow]) -> Table:
    """Return why attempts ended, one reason a row."""
    return make_table(
        ("reason", "attempts", "device time", "lost", "last attempt", "ended (UTC)", "last detail"),
        (
            (
                row.reason,
                f"{row.attempts:,}",
                format_duration(row.gpu_seconds),
                format_duration(row.wasted_gpu_seconds),
                row.last_attempt,
                row.last_at,
                row.last_detail,
            )
            for row in reasons
        ),
    )


def budgets_table(budgets: "Mapping[str, BudgetStatus]") -> Table:
    """Return what each budget has spent and left."""
    return make_table(
        ("reason", "retries left", "spent since progress", "spent in all", "left in all"),
        (
            (reason, f"{budget.left:,}", f"{budget.spent:,}", f"{budget.spent_total:,}", budget.left_total)
            for reason, budget in budgets.items()
        ),
    )


def checkpoints_table(checkpoints: "Sequence[CheckpointSummary]") -> Table:
    """Return the checkpoints with their states."""
    return make_table(
        ("step", "attempt", "state", "bytes", "committed (UTC)", "manifest", "state digest", "prefix"),
        (
            (
                item.step,
                item.attempt,
                item.state,
                f"{item.bytes:,}",
                item.committed_at,
                short_digest(item.manifest_sha256),
                short_digest(item.state_sha256),
                item.prefix,
            )
            for item in checkpoints
        ),
        empty="no checkpoints yet",
    )


def evaluations_table(evaluations: "Sequence[EvaluationSummary]") -> Table:
    """Return the evaluations."""
    rows = ((item.step, *_measured(item)) for item in evaluations)
    return make_table(("step", *_MEASURED), rows, empty="no evaluations yet")


def comparison_table(comparison: "EvaluationComparison") -> Table:
    """Return a checkpoint's evaluations with those of other weights under the same suites."""
    rows = ((row.role, f"{row.run_id}@{row.evaluation.step}", *_measured(row.evaluation)) for row in comparison.rows)
    return make_table(("", "checkpoint", *_MEASURED), rows, empty="nothing was measured")


def _measured(item: "EvaluationSummary") -> tuple[object, ...]:
    return (
        item.status,
        f"{item.suite} {short_digest(item.suite_sha256)}",
        *(item.metrics.get(name) for name in _METRICS),
        _other_metrics(item.metrics),
        item.seconds,
        short_digest(item.manifest_sha256),
        item.verdict.kind if item.verdict else None,
        item.detail,
    )


def _other_metrics(metrics: Mapping[str, float]) -> str | None:
    """Return the first metrics that have no column of their own, or None."""
    others = [
        f"{name} {format_value(value)}" for name, value in sorted(metrics.items()) if name not in (*_METRICS, "samples")
    ]
    more = [f"and {len(others) - _MOST_OTHERS} more"] if len(others) > _MOST_OTHERS else []
    return ", ".join([*others[:_MOST_OTHERS], *more]) or None


def promotions_table(promotions: "Sequence[AliasPromotion]") -> Table:
    """Return what every alias points at and pointed at; a star marks the present."""
    return make_table(
        ("alias", "points at", "promoted (UTC)", "by", "why", "manifest", "previous"),
        (
            (
                f"{item.alias} *" if item.current else item.alias,
                f"{item.run_id}@{item.step}",
                item.promoted_at,
                item.by,
                item.why,
                short_digest(item.manifest_sha256),
                short_digest(item.previous),
            )
            for item in promotions
        ),
        empty="nothing is promoted yet; a run that finishes offers its best checkpoint",
    )


def decisions_table(decisions: "Sequence[AliasDecision]") -> Table:
    """Return every decision about an alias."""
    return make_table(
        ("alias", "decision", "checkpoint", "at (UTC)", "by", "manifest", "why"),
        (
            (
                item.alias,
                f"{item.decision}: {item.gate}" if item.gate else item.decision,
                f"{item.run_id}@{item.step}" if item.run_id else None,
                item.at,
                item.by,
                short_digest(item.manifest_sha256),
                item.why,
            )
            for item in decisions
        ),
        empty="nothing was decided yet; a run that finishes offers its best checkpoint",
    )


def entries_table(entries: "Sequence[Entry]") -> Table:
    """Return the run log, one entry a row; --json has the whole of each."""
    return make_table(
        ("seq", "at (UTC)", "kind", "writer", "attempt", "step"),
        (
            (
                entry.seq,
                entry.at,
                entry.kind,
                f"{entry.writer.host}:{entry.writer.pid}",
                entry.writer.attempt or getattr(entry.body, "attempt", None),
                getattr(entry.body, "step", getattr(entry.body, "last_step", None)),
            )
            for entry in entries
        ),
        empty="the log is empty",
    )
