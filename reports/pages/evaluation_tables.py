"""The columns people see of evaluations: in the terminal, and in the orchestrator's UI.

Owns how numbers of different suites share a table. Refuses to fetch anything.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reports.pages.markdown import markdown_table
from reports.queries.evaluations import EvaluationSummary
from tasks.text.format import format_value, short_digest
from tasks.text.output import print_table

if TYPE_CHECKING:
    from reports.queries.comparison import EvaluationComparison

_NAMES = ("val_loss", "perplexity", "bits_per_byte")
_UNSHOWN = frozenset({*_NAMES, "samples"})
_OTHERS_SHOWN = 4
_ROWS_SHOWN = 200
_COMPARED = (
    "",
    "checkpoint",
    "status",
    "suite",
    "val_loss",
    "perplexity",
    "bits/byte",
    "others",
    "seconds",
    "manifest",
)


def print_evaluations(views: Sequence[EvaluationSummary]) -> None:
    """Print the evaluations."""
    columns = ("step", "status", "suite", *_COMPARED[4:8], "seconds", "manifest", "detail")
    print_table(columns, [(view.step, *_cells(view), view.detail) for view in views], empty="no evaluations yet")


def print_comparison(view: "EvaluationComparison") -> None:
    """Print a checkpoint's evaluations with those of other weights under the same suites."""
    print_table((*_COMPARED, "detail"), _compared(view), empty="nothing was measured")


def comparison_table(view: "EvaluationComparison") -> str:
    """Return the same as a Markdown table."""
    return markdown_table((*_COMPARED, "detail"), _compared(view))


def evaluations_table(views: Sequence[EvaluationSummary]) -> str:
    """Return the newest evaluations as a Markdown table, newest first, as many as a page can show."""
    columns = ("step", "status", "suite", *_COMPARED[4:8], "seconds", "manifest", "verdict", "detail")
    newest = list(reversed(views))[:_ROWS_SHOWN]
    rows = [(view.step, *_cells(view), view.verdict.kind if view.verdict else None, view.detail) for view in newest]
    table = markdown_table(columns, rows)
    older = len(views) - len(newest)
    return f"{table}\n\nand {older:,} older ones: `cairn evaluations`" if older else table


def others(metrics: Mapping[str, float]) -> str | None:
    """Return the numbers that have no column of their own, a few of them, or None."""
    named = [f"{name} {format_value(value)}" for name, value in sorted(metrics.items()) if name not in _UNSHOWN]
    more = [f"and {len(named) - _OTHERS_SHOWN} more"] if len(named) > _OTHERS_SHOWN else []
    return ", ".join([*named[:_OTHERS_SHOWN], *more]) or None


def _compared(view: "EvaluationComparison") -> list[tuple[object, ...]]:
    return [
        (row.role, f"{row.run_id}@{row.evaluation.step}", *_cells(row.evaluation), row.evaluation.detail)
        for row in view.rows
    ]


def _cells(view: EvaluationSummary) -> tuple[object, ...]:
    return (
        view.status,
        f"{view.suite} {short_digest(view.suite_sha256)}",
        *(view.metrics.get(name) for name in _NAMES),
        others(view.metrics),
        view.seconds,
        short_digest(view.manifest_sha256),
    )
