"""The columns and rows of each list that people read: the same in the terminal, in Markdown and in HTML.

In Markdown, text of a run stays text: it ends no table and begins no tag.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.reports.queries.receipts import ReasonRow, ReceiptSpan, group_receipts
from cairn.tasks.text import format
from cairn.tasks.text.format import format_duration, format_list, format_value, one_line, sanitize, short_digest

if TYPE_CHECKING:  # a command that prints one list loads nothing for the others
    from cairn.reports.queries import alias_history, evaluations, run_comparison, run_lookup, run_status
    from cairn.reports.queries.receipts import MachineRow, Receipt
    from cairn.storage.logs import log_entry, run_entries, run_note

_NAMED_METRICS = ("val_loss", "perplexity", "bits_per_byte", "samples")
_MOST_OTHERS, _MOST_STEPS, _MOST_CELL_CHARACTERS = 4, 20, 200
_SPECIAL = re.compile(r"([\\*\[\]|#~!`]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
Item = TypeVar("Item")
Columns = Mapping[str, Callable[[Item], object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headings; `empty` is shown instead where there is no row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    empty: str = ""


def make_table(items: Iterable[Item], columns: Columns[Item], *, empty: str = "") -> Table:
    """Return a row for each item, made by each column's function, without the columns in which every cell is None."""
    listed = list(items)
    cells = {name: [make(item) for item in listed] for name, make in columns.items()}
    kept = {name: column for name, column in cells.items() if any(value is not None for value in column)}
    return Table(columns=tuple(kept), rows=tuple(zip(*kept.values(), strict=True)), empty=empty)


def format_cell(value: object) -> str:
    """Return the text of a cell on a page: one line, at most 200 characters."""
    return one_line(format_value(value), _MOST_CELL_CHARACTERS)


def markdown_text(text: str) -> str:
    """Return text on one line in which nothing is Markdown except a pair of backquotes around a command."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    parts = escaped.split("`")
    if len(parts) % 2 == 0 or "|" in "".join(parts[1::2]):
        return _SPECIAL.sub(r"\\\1", escaped)
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def markdown_table(table: Table) -> str:
    """Return a Markdown table."""
    rows = [[markdown_text(format_cell(value)) for value in row] for row in table.rows]
    lines = [[markdown_text(column) for column in table.columns], ["---"] * len(table.columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fence(text: str) -> str:
    """Return text as it is between fences that are longer than any it contains."""
    shown = sanitize(text)
    longest = max((len(found) for found in re.findall("`+", shown)), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}\n{shown}\n{mark}"


def runs_table(runs: "Sequence[run_status.RunSummary]", *, empty: str) -> Table:
    """Return all runs, or all that were deleted."""
    columns: Columns[run_status.RunSummary] = {
        "run": lambda run: run.run_id,
        "state": lambda run: run.state,
        "family": lambda run: run.model_family,
        "step": lambda run: f"{format_value(run.step)}/{format_value(run.total_steps)}",
        "committed": lambda run: run.newest_committed_step,
        "attempts": lambda run: run.attempts,
        "opened (UTC)": lambda run: run.opened_at,
        "tags": lambda run: ", ".join(run.tags) or None,
        "detail": lambda run: run.detail,
    }
    return make_table(runs, columns, empty=empty)


def notes_table(notes: "Sequence[run_note.RunNote]") -> Table:
    """Return the notes on a run."""
    columns: Columns[run_note.RunNote] = {
        "at (UTC)": lambda note: note.noted_at,
        "by": lambda note: note.noted_by,
        "note": lambda note: note.text,
    }
    return make_table(notes, columns, empty="no note yet")


def receipts_table(receipts: "Sequence[Receipt]") -> Table:
    """Return the receipts, one a row."""
    return spans_table([span for receipt in receipts for span in group_receipts([receipt])])


def spans_table(spans: Sequence[ReceiptSpan]) -> Table:
    """Return attempts in order, each span of equal ends as one row; the micro-batch only where it changed."""
    sizes = {receipt.micro_batch for span in spans for receipt in span.attempts}
    columns: Columns[ReceiptSpan] = {
        "attempt": lambda row: f"{row.first.attempt} to {row.last.attempt}" if row.is_many else row.first.attempt,
        "started (UTC)": lambda row: row.first.started_at,
        "reason": lambda row: f"{row.reason} × {len(row.attempts):,}" if row.is_many else row.reason,
        "steps": lambda row: f"{row.first.first_step:,} → {row.last.last_step:,}",
        "committed": lambda row: row.last.last_committed_step,
        "lost": lambda row: _sum(item.wasted_gpu_seconds for item in row.attempts),
        "decision": lambda row: row.last.decision.action if row.last.decision else None,
        "waited": lambda row: _sum(item.waiting_seconds for item in row.attempts),
        "lasted": lambda row: _sum([row.lasted_seconds]),
        "device time": lambda row: _sum(item.gpu_seconds for item in row.attempts),
        "micro-batch": lambda row: row.last.micro_batch if len(sizes) > 1 else None,
        "injected": lambda row: format_list([fault for one in row.attempts for fault in one.injected], 4) or None,
        "detail": lambda row: row.last.detail or None,
    }
    return make_table(spans, columns, empty="no attempts yet")


def _sum(seconds: Iterable[float | None]) -> str | None:
    known = [item for item in seconds if item is not None]
    return format_duration(sum(known)) if known else None


def reasons_table(reasons: Sequence[ReasonRow]) -> Table:
    """Return why attempts ended, one reason a row."""
    columns: Columns[ReasonRow] = {
        "reason": lambda row: row.reason,
        "attempts": lambda row: f"{row.attempts:,}",
        "device time": lambda row: format_duration(row.gpu_seconds),
        "lost": lambda row: format_duration(row.wasted_gpu_seconds),
        "last attempt": lambda row: row.last_attempt,
        "ended (UTC)": lambda row: row.last_at,
        "last detail": lambda row: row.last_detail,
    }
    return make_table(reasons, columns)


def budgets_table(budgets: "Mapping[str, run_status.BudgetStatus]") -> Table:
    """Return what each budget has spent and left."""
    columns: Columns[str] = {
        "reason": lambda reason: reason,
        "retries left": lambda reason: f"{budgets[reason].left:,}",
        "spent since progress": lambda reason: f"{budgets[reason].spent:,}",
        "spent in all": lambda reason: f"{budgets[reason].spent_total:,}",
        "left in all": lambda reason: budgets[reason].left_total,
    }
    return make_table(budgets, columns)


def checkpoints_table(checkpoints: "Sequence[run_lookup.CheckpointSummary]") -> Table:
    """Return the checkpoints with their states."""
    columns: Columns[run_lookup.CheckpointSummary] = {
        "step": lambda item: item.step,
        "attempt": lambda item: item.attempt,
        "state": lambda item: item.state,
        "bytes": lambda item: f"{item.bytes:,}",
        "committed (UTC)": lambda item: item.committed_at,
        "manifest": lambda item: short_digest(item.manifest_sha256),
        "state digest": lambda item: short_digest(item.state_sha256),
        "prefix": lambda item: item.prefix,
        "detail": lambda item: item.detail.replace(f"{item.prefix}/", "") or None,
    }
    return make_table(checkpoints, columns, empty="no checkpoints yet")


def evaluations_table(evaluations: "Sequence[evaluations.EvaluationSummary]") -> Table:
    """Return the evaluations."""
    columns = {"step": lambda item: item.step, **_measured(lambda item: item)}
    return make_table(evaluations, columns, empty="no evaluations yet")


def _measured(of: "Callable[[Any], evaluations.EvaluationSummary]") -> dict[str, Callable[[Any], object]]:
    return {
        "status": lambda row: of(row).status,
        "suite": lambda row: f"{of(row).suite} {short_digest(of(row).suite_sha256)}",
        "val_loss": lambda row: of(row).metrics.get("val_loss"),
        "perplexity": lambda row: of(row).metrics.get("perplexity"),
        "bits/byte": lambda row: of(row).metrics.get("bits_per_byte"),
        "verdict": lambda row: getattr(of(row).verdict, "kind", None),
        "seconds": lambda row: of(row).seconds,
        "manifest": lambda row: short_digest(of(row).manifest_sha256),
        "others": lambda row: _other_metrics(of(row).metrics),
        "detail": lambda row: of(row).detail,
    }


def _other_metrics(metrics: Mapping[str, float]) -> str | None:
    """Return the first metrics that have no column of their own, or None."""
    others = [f"{name} {format_value(value)}" for name, value in sorted(metrics.items()) if name not in _NAMED_METRICS]
    more = [f"and {len(others) - _MOST_OTHERS} more"] if len(others) > _MOST_OTHERS else []
    return ", ".join([*others[:_MOST_OTHERS], *more]) or None


def comparison_table(comparison: "evaluations.EvaluationComparison") -> Table:
    """Return a checkpoint's evaluations with those of other weights under the same suites."""
    measured = _measured(lambda row: row.evaluation)
    columns = {"": lambda row: row.role, "checkpoint": lambda row: f"{row.run_id}@{row.evaluation.step}", **measured}
    return make_table(comparison.rows, columns, empty="nothing was measured")


def compared_runs_table(comparison: "run_comparison.RunComparison") -> Table:
    """Return the runs, that with the least held-out loss first, and in each what differs of its configuration."""
    is_mixed = len({run.arithmetics for run in comparison.runs}) > 1
    columns: Columns[run_comparison.ComparedRun] = {
        "run": lambda run: run.run_id,
        "best held-out loss": lambda run: run.best.val_loss if run.best else None,
        "at step": lambda run: run.best.step if run.best else None,
        **{key: partial(_setting, key=key) for key in comparison.differing},
        "than the first": lambda run: run.versus_first,
        "train loss": lambda run: run.train_loss,
        "bits": lambda run: run.identical or None,
        "state": lambda run: run.state,
        "step": lambda run: f"{run.step:,}/{run.total_steps:,}",
        "tokens": lambda run: f"{run.tokens:,}",
        "tokens/s": lambda run: run.tokens_per_second and f"{run.tokens_per_second:,.0f}",
        "memory": lambda run: run.memory_bytes and format.format_quantity(run.memory_bytes),
        "attempts": lambda run: run.attempts,
        "device time": lambda run: format_duration(run.gpu_seconds),
        "lost": lambda run: format_duration(run.wasted_gpu_seconds),
        "cost": lambda run: None if run.money is None else format.format_money(run.money, run.currency),
        "arithmetic": lambda run: format_list(run.arithmetics, 3) if is_mixed else None,
    }
    best_first = sorted(comparison.runs, key=lambda run: run.best.val_loss if run.best else math.inf)
    return make_table(best_first, columns)


def _setting(run: "run_comparison.ComparedRun", *, key: str) -> object:
    return run.settings[key]


def held_out_table(comparison: "run_comparison.RunComparison") -> Table:
    """Return the held-out losses at the newest steps that were evaluated, a run a column."""
    losses = {run.run_id: {item.step: item.val_loss for item in run.held_out} for run in comparison.runs}
    steps = sorted({step for of_run in losses.values() for step in of_run})[-_MOST_STEPS:]
    columns: dict[str, Callable[[int], object]] = {run_id: of_run.get for run_id, of_run in losses.items()}
    return make_table(steps, {"held-out loss at step": lambda step: step, **columns})


def decisions_table(decisions: "Sequence[alias_history.AliasDecision]") -> Table:
    """Return decisions about aliases; a star marks what an alias points at."""
    columns: Columns[alias_history.AliasDecision] = {
        "alias": lambda item: f"{item.alias} *" if item.current else item.alias,
        "decision": lambda item: f"{item.kind}: {item.gate}" if item.gate else item.kind,
        "checkpoint": lambda item: item.run_id if item.step is None else f"{item.run_id}@{item.step}",
        "at (UTC)": lambda item: item.decided_at,
        "by": lambda item: item.by,
        "why": lambda item: item.why,
        "detail": lambda item: item.detail,
        "manifest": lambda item: short_digest(item.manifest_sha256),
        "previous": lambda item: short_digest(item.previous) if item.previous else None,
    }
    none = "nothing was decided yet; a run that finishes offers its best checkpoint"
    return make_table(decisions, columns, empty=none)


def entries_table(entries: "Sequence[log_entry.Entry]") -> Table:
    """Return the run log, one entry a row; --json has the whole of each."""
    columns: Columns[log_entry.Entry] = {
        "seq": lambda entry: entry.seq,
        "at (UTC)": lambda entry: entry.at,
        "kind": lambda entry: entry.kind,
        "writer": lambda entry: f"{entry.writer.host}:{entry.writer.pid}",
        "attempt": lambda entry: entry.writer.attempt or getattr(entry.body, "attempt", None),
        "step": lambda entry: getattr(entry.body, "step", getattr(entry.body, "last_step", None)),
    }
    return make_table(entries, columns, empty="the log is empty")


def machines_table(machines: "Sequence[MachineRow]") -> Table:
    """Return the machines that attempts ran on."""
    columns: Columns[MachineRow] = {
        "host": lambda item: item.placement.host,
        "devices": lambda item: f"{item.placement.world_size} × {item.device}",
        "threads": lambda item: f"{item.placement.threads} on {item.placement.cores} cores",
        "MFU against": lambda item: (
            item.peak and f"{format.format_quantity(item.peak.flops, 'FLOP/s')}, {item.peak.source}"
        ),
        "code version": lambda item: item.code_version,
        "attempts": lambda item: item.attempts,
    }
    return make_table(machines, columns)


def quarantines_table(quarantines: "Sequence[run_entries.DataQuarantined]") -> Table:
    """Return what was quarantined, and why."""
    columns: Columns[run_entries.DataQuarantined] = {
        "attempt": lambda item: item.attempt,
        "reason": lambda item: item.reason,
        "windows": lambda item: format_list(item.windows, 12),
        "why": lambda item: one_line(item.detail, 120),
    }
    return make_table(quarantines, columns)
