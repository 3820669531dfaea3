"""Prints for people what the commands answer; scripts use --json."""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from storage.stores.document import decode, encode
from tasks.text.format import format_count, replace_unprintable, short_digest
from tasks.text.output import print_facts, print_line, print_table, say, write_json

if TYPE_CHECKING:
    from flows.watching.run_watcher import WatchRow
    from reports.queries.data_summary import DataSummary, GroupSummary
    from reports.queries.display_tables import Table
    from reports.queries.run_simulation import PolicyOutcome, SimulationSummary
    from storage.tables.table_index import Column

_MOST_SOURCES, _MOST_ROWS = 20, 1_000
_LARGEST_INTEGER = 2**63


def print_rows(table: "Table") -> None:
    """Print a list."""
    print_table(table.columns, table.rows, empty=table.empty)


def print_data(summary: "DataSummary") -> None:
    """Print a snapshot: its facts, its sources, and windows with their documents."""
    ids = f"{summary.vocab_size:,} ids, end of text {summary.end_of_text_id}"
    print_facts(
        [
            ("snapshot", summary.snapshot_id),
            ("bytes", f"{summary.bytes:,}"),
            ("tokenizer", f"{short_digest(summary.tokenizer_sha256)}, {ids}"),
            *(
                (
                    split,
                    f"{size.tokens:,} tokens of {size.bytes:,} bytes in {size.documents:,} documents, "
                    f"{format_count(size.shards, 'shard')}, {size.windows:,} windows of {summary.block_size}",
                )
                for split, size in summary.splits.items()
            ),
            ("left out", ", ".join(f"{kind} {count:,}" for kind, count in summary.rejected.items()) or "nothing"),
        ]
    )
    print()
    rows = [
        (source.name, f"{source.documents:,}", f"{source.bytes:,}", source.unit, short_digest(source.sha256))
        for source in summary.sources[:_MOST_SOURCES]
    ]
    print_table(("source", "documents", "bytes", "a document is", "sha256"), rows, empty="no sources")
    if len(summary.sources) > _MOST_SOURCES:
        print(f"and {len(summary.sources) - _MOST_SOURCES:,} more; --json lists all")
    if summary.groups:
        print()
        _print_groups(summary.groups)
    for window in summary.windows:
        last = window.first_token + summary.block_size - 1
        print(f"\n{window.split} window {window.window}, tokens {window.first_token:,} to {last:,}, from")
        for document in window.documents:
            where = f"{document.source} byte {document.offset_bytes:,} ({document.bytes:,} bytes)"
            print_line(f"  {where}, sha256 {short_digest(document.sha256)}, from its token {document.first_token:,} on")
        if not window.is_drawn:
            print_line(f"  it crosses the border of {' and '.join(window.groups)}: with weights no step draws it")
        print(replace_unprintable(window.text))


def _print_groups(groups: "Sequence[GroupSummary]") -> None:
    weights = [] if groups[0].weight is None else ["weight", "share of draws"]
    print_table(
        ["drawn together", "files", "train tokens", "val tokens", "train windows of its own", *weights],
        [
            (
                group.name,
                f"{group.sources:,}",
                f"{group.train_tokens:,}",
                f"{group.val_tokens:,}",
                f"{group.windows:,}",
                *(() if group.share is None else (f"{group.weight:g}", f"{group.share:.2%}")),
            )
            for group in groups
        ],
        empty="",
    )


def print_watch(rows: "Sequence[WatchRow]") -> None:
    """Print what the watcher did about each run, and why."""
    cells = [(r.run_id, r.action, None if r.seconds is None else _format_span(r.seconds), r.why, r.how) for r in rows]
    print_table(("run", "action", "in", "why", "how"), cells, empty="no runs here yet; nothing to watch")


def print_simulation(summary: "SimulationSummary") -> None:
    """Print how the run ends under each policy, the assumptions, and the loss at other checkpoint intervals."""
    policy, *plain = summary.outcomes
    plan, between = summary.plan, summary.trace.hours_between_failures
    often = "never" if between is None else f"every {_format_span(between * 3600)}"
    plain_ends = "; ".join(f"{outcome.policy}: {_describe_end(outcome)}" for outcome in plain)
    print_line(f"this policy {_describe_end(policy)}; plain retry counts: {plain_ends}")
    print_line(
        f"on {format_count(plan.devices, 'device')}, {plan.total_steps:,} steps "
        f"of {plan.step_seconds:.4g} s ({_format_span(plan.total_steps * plan.step_seconds)} if nothing failed), "
        f"a commit stops training for {plan.checkpoint_seconds:.3g} s, a restart takes {plan.restart_seconds:.4g} s,\n"
        f"a failure {often}, {_describe_seeds(summary)}; {summary.trace.source}\n"
    )
    columns = ("policy", "end", "goodput", "hours wasted", "in commits", "in restarts", "attempts", "retries by reason")
    print_table(
        columns,
        [
            (
                outcome.policy,
                f"{_format_span(outcome.days * 86400)} {'finished' if outcome.finished else 'given up'}",
                f"{outcome.goodput:.1%} ({outcome.spread.goodput_low:.1%} to {outcome.spread.goodput_high:.1%})",
                _format_hours(outcome.wasted_gpu_hours),
                _format_hours(outcome.checkpoint_gpu_hours),
                _format_hours(outcome.restart_gpu_hours),
                outcome.attempts,
                ", ".join(f"{reason} {count}" for reason, count in outcome.retries.items()) or None,
            )
            for outcome in summary.outcomes
        ],
        empty="",
    )
    for outcome in summary.outcomes:
        if outcome.stopped_by:
            print_line(f"  {outcome.policy} stopped by {outcome.stopped_by}")
    print()
    _print_intervals(summary)


def _describe_seeds(summary: "SimulationSummary") -> str:
    """Return what else is assumed, and over how many seeds the intervals in brackets reach."""
    trace, count = summary.trace, summary.outcomes[0].spread.seeds
    wait = f"another machine after {_format_span(trace.replacement_seconds)} on average, "
    shocks = f"{trace.aftershock_share:.0%} followed by another {trace.aftershock_rate_factor:g} times as fast, "
    seeds = f"seed {summary.seed}" if count == 1 else f"median and middle 80 % of {count} seeds from {summary.seed}"
    return f"{wait if trace.replacement_seconds else ''}{shocks if trace.aftershock_share else ''}{seeds}"


def _print_intervals(summary: "SimulationSummary") -> None:
    found = summary.intervals
    names = ("now", "Young", "Daly", "simulated best")
    listed = zip(names, (found.present, found.young, found.daly, found.simulated), strict=True)
    print_table(
        ("commit every", "steps", "time", "not useful"),
        [
            (
                name,
                i.every_steps,
                _format_span(i.seconds),
                f"{i.lost_share:.2%} ({i.lost_least:.2%} to {i.lost_most:.2%})",
            )
            for name, i in listed
            if i
        ],
        empty="",
    )
    if found.simulated is None:
        print_line("nothing that loses work ever happens: any interval is short enough")
        return
    gained = found.present.lost_share - found.simulated.lost_share
    better = f"checkpoint.every_steps={found.simulated.every_steps} would make {gained:.2%} more of the time useful"
    print_line(better if gained >= 0.001 else "the present interval is as good as any")


def _describe_end(outcome: "PolicyOutcome") -> str:
    spread = outcome.spread
    if outcome.finished:
        between = f" ({_format_span(spread.days_low * 86400)} to {_format_span(spread.days_high * 86400)})"
        of_all = f" with {spread.finished} of {spread.seeds} seeds" if spread.finished < spread.seeds else ""
        return f"finishes after {_format_span(outcome.days * 86400)}{between}{of_all}, goodput {outcome.goodput:.1%}"
    done = outcome.step / outcome.total_steps
    return f"gives up after {_format_span(outcome.days * 86400)} with {done:.1%} of the steps done"


def _format_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _format_span(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.3g} s"


def print_answer(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print an aligned table of at most 1,000 rows; stderr says how many more there are."""
    remaining = iter(rows)  # they may exceed memory
    shown = [[_format_cell(value) for value in row] for row in islice(remaining, _MOST_ROWS)]
    print_table([column.name for column in columns], shown, empty="no rows")
    if more := sum(1 for _ in remaining):
        say(f"and {more:,} more rows; --json prints them all")


def print_json(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print a list of objects: times are ISO 8601 in UTC, NaN is null, JSON columns are nested values."""
    separator = "["
    for row in rows:
        record = {column.name: _plain(value, column.type) for column, value in zip(columns, row, strict=True)}
        write_json(separator + encode(record).decode().rstrip("\n"))
        separator = ",\n"
    sys.stdout.write("[]\n" if separator == "[" else "]\n")


def _format_cell(value: object) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "yes" if value else "no"
        case float() | Decimal():
            return f"{value:.6g}"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S")
        case dict() | list():
            return " ".join(line.strip() for line in encode(_plain(value, "")).decode().splitlines())
        case _:
            return str(value)


def _plain(value: Any, type_name: str) -> Any:
    match value:
        case str() if type_name == "JSON":
            return decode(value.encode(), object, where="a JSON column")
        case dict():
            return {str(key): _plain(item, "") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, "") for item in value]
        case Decimal():
            return float(value)
        case bool():
            return value
        case int() if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
            return float(value)  # JSON readers keep no larger integers
        case _:
            return value
