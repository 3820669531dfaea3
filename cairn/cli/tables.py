"""Prints for people what the commands answer; scripts use --json."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.text.format import format_count, replace_unprintable, short_digest
from tasks.text.output import print_facts, print_line, print_table

if TYPE_CHECKING:
    from cairn.operations.replay_result import Replay
    from cairn.operations.run_deletion import RunDeletion
    from cairn.operations.token_files import ImportView
    from flows.watching.run_watcher import WatchRow
    from reports.queries.data_summary import DataSummary, GroupSummary
    from reports.queries.display_tables import Table
    from reports.queries.run_simulation import PolicyOutcome, SimulationSummary
    from reports.queries.run_status import RunStatus
    from storage.checkpoints.sweep import SweepReport
    from tasks.policy.checkpoint_interval import IntervalLoss


_DONE = {"keep": "kept", "release": "released", "supersede": "superseded", "delete": "deleted", "discard": "discarded"}
_MOST_SOURCES = 20


def print_rows(table: "Table") -> None:
    """Print a list."""
    print_table(table.columns, table.rows, empty=table.empty)


def print_status(status: "RunStatus") -> None:
    """Print the status of a run."""
    owner, count = status.owner, status.quarantined_windows
    windows = f"{format_count(count, 'window')} of the data" if count else ""
    budgets = ", ".join(f"{reason} {b.left}" for reason, b in status.budgets.items())
    print_facts(
        [
            ("run", status.run_id),
            *([("forked from", status.forked_from)] if status.forked_from else []),
            ("state", status.state),
            ("step", f"{status.step} of {status.total_steps}"),
            ("newest committed", status.newest_committed_step),
            ("owner", f"pid {owner.pid} on {owner.host} ({owner.device})" if owner else None),
            ("retries left", budgets),
            *([("stopped early", status.stopped_early)] if status.stopped_early else []),
            *([("quarantined", f"{windows}, never drawn again; `cairn log` says why")] if windows else []),
            *([("bits", status.bits)] if status.bits else []),
            *([("warning", status.symptom)] if status.symptom else []),
            *([("practised", status.practised)] if status.practised else []),
            ("next", status.next),
        ]
    )


def print_sweep(report: "SweepReport") -> None:
    """Print the actions of a sweep and their sum."""
    rows = [(i.action, i.kind, i.step, i.attempt, f"{i.bytes:,}", i.why, i.key) for i in report.items]
    columns = ("action", "what", "step", "attempt", "bytes", "why", "where")
    print_table(columns, rows, empty="no checkpoints yet")
    counts = Counter[str](item.action for item in report.items)
    done = ", ".join(f"{_DONE[action]} {counts[action]}" for action in _DONE if counts[action])
    when = " (a sweep would do this; nothing was changed)" if report.dry_run else ""
    print_line(f"run {report.run_id}: {done or 'nothing to do'}; freed {report.freed_bytes:,} bytes{when}")


def describe_deletion(deletion: "RunDeletion") -> list[str]:
    """Return what goes, or went, and what stays."""
    verb = "would delete" if deletion.freed_bytes is None else "deleted"
    size = deletion.bytes if deletion.freed_bytes is None else deletion.freed_bytes
    lines = [f"run {deletion.run_id}: {verb} {format_count(deletion.checkpoints, 'checkpoint')} ({size:,} bytes)"]
    lines += [f"`cairn rollback --alias {alias}` skips them from then on" for alias in deletion.withdrawn_from]
    data = deletion.data_snapshot[:8]
    return [*lines, f"its log, receipts and curve stay (`cairn runs --archived`), and its data snapshot {data}"]


def print_replay(replay: "Replay") -> None:
    """Print what every segment came to, and their sum."""
    print_table(
        ("steps", "attempt", "trained on", "verdict", "committed", "recomputed", "seconds", "why"),
        [
            (
                f"{item.from_step} to {item.to_step}",
                item.attempt,
                item.device if item.world_size == 1 else f"{item.world_size} x {item.device}",
                item.verdict,
                short_digest(item.expected_sha256),
                short_digest(item.computed_sha256) if item.computed_sha256 else None,
                f"{item.seconds:.1f}",
                item.why or None,
            )
            for item in replay.segments
        ],
        empty="no committed segment trains such a step",
    )
    found = ", ".join(f"{count} {verdict}" for verdict, count in replay.verdicts.items() if count) or "none replayed"
    print_line(f"run {replay.run_id}: {format_count(replay.committed, 'committed segment')}, {found}")


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


def print_import(summary: "ImportView", store: str) -> None:
    """Print the result of an import; `store` is what the command to look at it needs."""
    for split, tokens in summary.tokens.items():
        print_line(f"{split}  {tokens:,} tokens in {summary.documents[split]:,} documents")
    print_line(f"snapshot {summary.snapshot_id}\nlook at it: cairn data {short_digest(summary.snapshot_id)}{store}")


def print_watch(rows: "Sequence[WatchRow]") -> None:
    """Print what the watcher did about each run, and why."""
    cells = [
        (row.run_id, row.action, None if row.seconds is None else _format_span(row.seconds), row.why, row.how)
        for row in rows
    ]
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
    _print_outcomes(summary.outcomes)
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


def _print_outcomes(outcomes: "Sequence[PolicyOutcome]") -> None:
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
            for outcome in outcomes
        ],
        empty="",
    )


def _print_intervals(summary: "SimulationSummary") -> None:
    found = summary.intervals
    listed: list[tuple[str, IntervalLoss | None]] = [
        ("now", found.present),
        ("Young", found.young),
        ("Daly", found.daly),
        ("simulated best", found.simulated),
    ]
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
