"""Answers of commands to people: read models as lines, facts and tables; scripts use --json."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.reports.text.display_tables import Columns, Table, make_table
from cairn.tasks.text.format import format_count, format_duration, format_value, replace_unprintable, short_digest

if TYPE_CHECKING:  # a command that prints one answer loads nothing for the others
    from cairn.reports.queries import data_summary, evaluations, run_simulation, run_status
    from cairn.storage.snapshots.snapshot_manifest import SnapshotSource

_MOST_SOURCES = 20
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text that is shown as it is, without line breaks of ours."""

    text: str


Block = str | Facts | Table | Verbatim
"""A line, names with values, a table, or text of others."""


def status_facts(status: "run_status.RunStatus") -> Facts:
    """Return where a run stands; what is not the case is left out."""
    owner, count = status.owner, status.quarantined_windows
    windows = f"{format_count(count, 'window')} of the data, never drawn again; `cairn log` says why" if count else ""
    forked = {"forked from": status.forked_from} if status.forked_from else {}
    notes = {"stopped early": status.stopped_early, "quarantined": windows}
    notes |= {"bits": status.bits, "warning": status.symptom, "injected": status.injected}
    return {
        "run": status.run_id,
        **forked,
        "state": status.state,
        "step": f"{status.step} of {status.total_steps}",
        "newest committed": status.newest_committed_step,
        "owner": f"pid {owner.pid} on {owner.host} ({owner.device})" if owner else None,
        "retries left": ", ".join(f"{reason} {budget.left}" for reason, budget in status.budgets.items()),
        **{name: text for name, text in notes.items() if text},
        "next": status.next,
    }


def diagnosis_blocks(diagnosis: "evaluations.Diagnosis") -> Iterator[Block]:
    """Yield the verdict with its numbers and cures, then a row for each evaluation."""
    verdict = diagnosis.verdict
    yield {
        "run": diagnosis.run_id,
        "step": f"{diagnosis.step} of {diagnosis.total_steps}",
        "verdict": verdict.kind,
        "why": verdict.why,
        "numbers": ", ".join(f"{name} {format_value(value)}" for name, value in verdict.numbers.items()) or None,
        **{f"cure {number}": cure for number, cure in enumerate(verdict.cures, start=1)},
        **({"ended": diagnosis.stopped_early} if diagnosis.stopped_early else {}),
    }
    yield ""
    columns: Columns[evaluations.EvaluationSummary] = {
        "step": lambda item: item.step,
        "val_loss": lambda item: item.metrics["val_loss"],
        "train_loss": lambda item: item.verdict.numbers.get("train_loss") if item.verdict else None,
        "verdict": lambda item: item.verdict.kind if item.verdict else None,
        "why": lambda item: item.verdict.why if item.verdict else None,
    }
    yield make_table(diagnosis.evaluations, columns, empty="no evaluations yet")


def data_blocks(summary: "data_summary.DataSummary") -> Iterator[Block]:
    """Yield a snapshot: its facts, its sources, and windows with their documents."""
    manifest = summary.manifest
    ids = f"{manifest.vocab_size:,} ids, end of text {manifest.end_of_text_id}"
    facts = {"snapshot": summary.snapshot_id, "bytes": f"{sum(item.bytes for item in manifest.objects):,}"}
    facts["tokenizer"] = f"{short_digest(manifest.tokenizer_sha256)}, {ids}"
    for split, size in {"train": manifest.splits.train, "val": manifest.splits.val}.items():
        parts = summary.splits[split]
        text = f"{size.tokens:,} tokens of {size.bytes:,} bytes in {size.documents:,} documents"
        shards = f"{format_count(parts.shards, 'shard')}, {parts.windows:,} windows of {summary.block_size}"
        facts[split] = f"{text}, {shards}"
    facts["left out"] = ", ".join(f"{item.kind} {item.documents:,}" for item in manifest.rejected) or "nothing"
    yield facts
    yield ""
    columns: Columns[SnapshotSource] = {
        "source": lambda item: item.name,
        "documents": lambda item: f"{item.documents:,}",
        "bytes": lambda item: f"{item.bytes:,}",
        "a document is": lambda item: item.unit,
        "sha256": lambda item: short_digest(item.sha256),
    }
    yield make_table(manifest.sources[:_MOST_SOURCES], columns, empty="no sources")
    if len(manifest.sources) > _MOST_SOURCES:
        yield f"and {len(manifest.sources) - _MOST_SOURCES:,} more; --json lists all"
    if summary.groups:
        groups: Columns[data_summary.GroupSummary] = {
            "drawn together": lambda item: item.group.name,
            "files": lambda item: f"{item.group.sources:,}",
            "train tokens": lambda item: f"{item.group.train_tokens:,}",
            "val tokens": lambda item: f"{item.group.val_tokens:,}",
            "train windows of its own": lambda item: f"{item.windows:,}",
            "weight": lambda item: None if item.weight is None else f"{item.weight:g}",
            "share of draws": lambda item: None if item.share is None else f"{item.share:.2%}",
        }
        yield ""
        yield make_table(summary.groups, groups)
    for window in summary.windows:
        yield from _window_blocks(window, summary.block_size)


def _window_blocks(window: "data_summary.WindowSummary", block_size: int) -> Iterator[Block]:
    last = window.first_token + block_size - 1
    yield f"\n{window.split} window {window.window}, tokens {window.first_token:,} to {last:,}, from"
    for place in window.documents:
        document, first = place.row, max(0, window.first_token - place.first_token)
        where = f"{document.source} byte {document.offset_bytes:,} ({document.bytes:,} bytes)"
        yield f"  {where}, sha256 {short_digest(document.sha256)}, from its token {first:,} on"
    if not window.is_drawn:
        yield f"  it crosses the border of {' and '.join(window.groups)}: with weights no step draws it"
    yield Verbatim(replace_unprintable(window.text))


def simulation_blocks(summary: "run_simulation.SimulationSummary") -> Iterator[Block]:
    """Yield how the run ends under each policy, the assumptions, and the loss at other checkpoint intervals."""
    policy, *plain = summary.outcomes
    plan, trace, count = summary.plan, summary.trace, policy.seeds
    between, shocks = summary.hours_between_failures, trace.aftershocks
    often = "never" if between is None else f"every {format_duration(between * 3600)}"
    plain_ends = "; ".join(f"{outcome.policy}: {_describe_end(outcome, plan.total_steps)}" for outcome in plain)
    wait = f"another machine after {format_duration(trace.replacement_seconds)} on average, "
    again = f"{shocks.share:.0%} followed by another {shocks.rate_factor:g} times as fast, "
    assumed = f"{wait if trace.replacement_seconds else ''}{again if shocks.share else ''}"
    seeds = f"seed {summary.seed}" if count == 1 else f"median and middle 80 % of {count} seeds from {summary.seed}"
    yield f"this policy {_describe_end(policy, plan.total_steps)}; plain retry counts: {plain_ends}"
    yield (
        f"on {format_count(plan.devices, 'device')}, {plan.total_steps:,} steps "
        f"of {plan.step_seconds:.4g} s ({format_duration(plan.total_steps * plan.step_seconds)} if nothing failed), "
        f"a commit stops training for {plan.checkpoint_seconds:.3g} s, a restart takes {plan.restart_seconds:.4g} s,\n"
        f"a failure {often}, {assumed}{seeds}; {trace.source}\n"
    )
    columns = ("policy", "end", "goodput", "hours wasted", "in commits", "in restarts", "attempts", "retries by reason")
    yield Table(columns=columns, rows=tuple(map(_outcome_row, summary.outcomes)))
    for outcome in summary.outcomes:
        if outcome.stopped_by:
            yield f"  {outcome.policy} stopped by {outcome.stopped_by}"
    yield ""
    found = summary.intervals
    intervals = {"now": found.present, "Young": found.young, "Daly": found.daly, "simulated best": found.simulated}
    rows = [
        (
            name,
            i.every_steps,
            format_duration(i.seconds),
            f"{i.lost_share:.2%} ({i.lost_least:.2%} to {i.lost_most:.2%})",
        )
        for name, i in intervals.items()
        if i
    ]
    yield Table(columns=("commit every", "steps", "time", "not useful"), rows=tuple(rows))
    if found.simulated is None:
        yield "nothing that loses work ever happens: any interval is short enough"
        return
    gained = found.present.lost_share - found.simulated.lost_share
    better = f"checkpoint.every_steps={found.simulated.every_steps} would make {gained:.2%} more of the time useful"
    yield better if gained >= 0.001 else "the present interval is as good as any"


def _outcome_row(outcome: "run_simulation.PolicyOutcome") -> tuple[object, ...]:
    end = f"{format_duration(outcome.days * 86400)} {'finished' if outcome.finished else 'given up'}"
    goodput = f"{outcome.goodput:.1%} ({outcome.goodput_low:.1%} to {outcome.goodput_high:.1%})"
    lost = (outcome.wasted_gpu_hours, outcome.checkpoint_gpu_hours, outcome.restart_gpu_hours)
    hours = (f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" for hours in lost)
    retries = ", ".join(f"{reason} {count}" for reason, count in outcome.retries.items()) or None
    return outcome.policy, end, goodput, *hours, outcome.attempts, retries


def _describe_end(outcome: "run_simulation.PolicyOutcome", total_steps: int) -> str:
    after = format_duration(outcome.days * 86400)
    if outcome.finished:
        between = f" ({format_duration(outcome.days_low * 86400)} to {format_duration(outcome.days_high * 86400)})"
        of_all = f" with {outcome.finished_seeds} of {outcome.seeds} seeds"
        of_all = of_all if outcome.finished_seeds < outcome.seeds else ""
        return f"finishes after {after}{between}{of_all}, goodput {outcome.goodput:.1%}"
    return f"gives up after {after} with {outcome.step / total_steps:.1%} of the steps done"
