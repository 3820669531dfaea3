"""Answers of commands to people: read models as lines, facts and tables; scripts use --json."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.reports.text.display_tables import Columns, Table, make_table
from cairn.tasks.text import format

if TYPE_CHECKING:  # a command that prints one answer loads nothing for the others
    from cairn.reports.queries import data_summary, evaluations, run_simulation, run_status
    from cairn.storage.logs import run_entries
    from cairn.storage.snapshots.snapshot_manifest import SnapshotSource
    from cairn.tasks.simulation.simulated_run import IntervalLoss

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
    windows = f"{format.format_count(count, 'window')} of the data, never drawn again; `cairn log` says why"
    forked = {"forked from": status.forked_from} if status.forked_from else {}
    notes = {"stopped early": status.stopped_early, "quarantined": windows if count else ""}
    notes |= {"speed": describe_speed(status)}
    notes |= {"evaluations": f"{status.evaluations_outstanding} outstanding" if status.evaluations_outstanding else ""}
    notes |= {"bits": status.bits, "warning": status.symptom, "injected": status.injected}
    *before, newest = status.notes or (None,)
    more = f"; `cairn note {status.run_id}` shows those before it" if before else ""
    note = f"{newest.text} ({newest.noted_by}, {format.format_time(newest.noted_at)}){more}" if newest else ""
    notes |= {"tags": ", ".join(status.tags), "note": note}
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


def describe_speed(status: "run_status.RunStatus") -> str:
    """Return the speed of a run that trains, and how long its other steps take at it; empty for any other."""
    speed, left = status.tokens_per_second, status.seconds_left
    return "" if speed is None or left is None else f"{speed:,.0f} tokens/s, {format.format_duration(left)} to go"


def describe_left(left: Mapping[str, int | None]) -> str:
    """Return what is left of a budget, limit by limit, as its keys name them."""
    limits = (f"{name.replace('_', ' ')} {value}" for name, value in left.items() if value is not None)
    return ", ".join(limits) or "no limit is set"


def describe_end(ended: "run_entries.AttemptEnded") -> str:
    """Return the detail of an end and the reason of its decision, once where both are the same."""
    return "; ".join(dict.fromkeys((ended.detail, ended.decision.reason)))


def describe_kept(ended: "run_entries.AttemptEnded", committed_step: int) -> str:
    """Return the detail of an attempt that a notice ended, and what of its work is committed and what is lost."""
    lost = ended.last_step - committed_step
    again = f", {format.format_count(lost, 'later step')} must be computed again" if lost > 0 else ""
    kept = f"step {committed_step} is committed" if committed_step else "nothing is committed"
    return f"{ended.detail}; {kept}{again}"


def diagnosis_blocks(diagnosis: "evaluations.Diagnosis") -> Iterator[Block]:
    """Yield the verdict with its numbers and cures, then a row for each evaluation."""
    verdict = diagnosis.verdict
    yield {
        "run": diagnosis.run_id,
        "step": f"{diagnosis.step} of {diagnosis.total_steps}",
        "verdict": verdict.kind,
        "why": verdict.why,
        "numbers": ", ".join(f"{name} {format.format_value(value)}" for name, value in verdict.numbers.items()) or None,
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
    from cairn.tasks.data.snapshot_lookup import describe_answers

    manifest = summary.manifest
    ids = f"{manifest.vocab_size:,} ids, end of text {manifest.end_of_text_id}"
    facts = {"snapshot": summary.snapshot_id, "bytes": f"{sum(item.bytes for item in manifest.objects):,}"}
    facts["tokenizer"] = f"{format.short_digest(manifest.tokenizer_sha256)}, {ids}"
    for split, size in {"train": manifest.splits.train, "val": manifest.splits.val}.items():
        shards = sum(item.key.startswith(f"{split}-") for item in manifest.objects)
        text = f"{size.tokens:,} tokens of {size.bytes:,} bytes in {size.documents:,} documents"
        windows = f"{summary.window_counts[split]:,} windows of {summary.block_size}"
        facts[split] = f"{text}, {format.format_count(shards, 'shard')}, {windows}"
    facts |= dict(line.split(": ", 1) for line in describe_answers(manifest))
    if summary.mixture:
        facts["draws"] = format.describe_mixture(summary.mixture)
    facts["left out"] = ", ".join(f"{item.kind} {item.documents:,}" for item in manifest.rejected) or "nothing"
    text_bytes = manifest.splits.train.bytes + manifest.splits.val.bytes
    yield facts | ({} if summary.unknown_bytes is None else _describe_unknown(summary.unknown_bytes, text_bytes))
    yield ""
    yield from _source_blocks(manifest.sources)
    if summary.groups:
        before = f" before step {summary.mixture[1].from_step:,}" if len(summary.mixture) > 1 else ""
        groups: Columns[data_summary.GroupSummary] = {
            "drawn together": lambda item: item.group.name,
            "files": lambda item: f"{item.group.sources:,}",
            "train tokens": lambda item: f"{item.group.train_tokens:,}",
            "val tokens": lambda item: f"{item.group.val_tokens:,}",
            "train windows of its own": lambda item: f"{item.windows:,}",
            "weight": lambda item: None if item.weight is None else f"{item.weight:g}",
            f"share of draws{before}": lambda item: None if item.share is None else f"{item.share:.2%}",
        }
        yield ""
        yield make_table(summary.groups, groups)
    for window in summary.windows:
        last = window.first_token + summary.block_size - 1
        yield f"\n{window.split} window {window.window}, tokens {window.first_token:,} to {last:,}, from"
        for place in window.documents:
            document, first = place.row, max(0, window.first_token - place.first_token)
            where = f"{document.source} byte {document.offset_bytes:,} ({document.bytes:,} bytes)"
            yield f"  {where}, sha256 {format.short_digest(document.sha256)}, from its token {first:,} on"
        if not window.is_drawn:
            yield f"  it crosses the border of {' and '.join(window.groups)}: with weights no step draws it"
        yield Verbatim(format.replace_unprintable(window.text))


def _source_blocks(sources: "Sequence[SnapshotSource | data_summary.PreviewedSource]") -> Iterator[Block]:
    """Yield the first sources, and how many more there are; only a snapshot has their digests."""
    columns: Columns[SnapshotSource | data_summary.PreviewedSource] = {
        "source": lambda item: item.name,
        "documents": lambda item: f"{item.documents:,}",
        "bytes": lambda item: f"{item.bytes:,}",
        "a document is": lambda item: item.unit,
        "sha256": lambda item: format.short_digest(item.sha256) if hasattr(item, "sha256") else None,
    }
    yield make_table(sources[:_MOST_SOURCES], columns, empty="no sources")
    if len(sources) > _MOST_SOURCES:
        yield f"and {len(sources) - _MOST_SOURCES:,} more; --json lists all"


def _describe_unknown(unknown_bytes: int, text_bytes: int) -> dict[str, str]:
    share = unknown_bytes / max(1, text_bytes)
    return {"unknown": f"{unknown_bytes:,} bytes of the text to the tokenizer ({share:.2%})"}


def preview_blocks(preview: "data_summary.CorpusPreview") -> Iterator[Block]:
    """Yield the text of a configuration: its sizes, its sources, what is left out, and the first documents."""
    train_bytes = preview.text_bytes - preview.val_bytes
    yield {
        "train": f"{train_bytes:,} bytes in {preview.train_documents:,} documents",
        "val": f"{preview.val_bytes:,} bytes in {preview.val_documents:,} documents",
        **({"draws": format.describe_mixture(preview.mixture)} if preview.mixture else {}),
        **({} if preview.unknown_bytes is None else _describe_unknown(preview.unknown_bytes, preview.text_bytes)),
        **({"refused": preview.refused} if preview.refused else {}),
    }
    yield from preview.notes
    yield ""
    yield from _source_blocks(preview.sources)
    left: Columns[data_summary.LeftOut] = {
        "left out": lambda item: f"{item.documents:,} {item.kind}",
        "of": lambda item: item.source,
        "the first at": lambda item: item.place,
        "because": lambda item: item.detail,
    }
    yield ""
    yield make_table(preview.left_out, left, empty="nothing is left out")
    for item in preview.documents:
        yield ""
        yield f"{item.source}, {item.place}: {item.bytes:,} bytes of {item.split}"
        yield Verbatim(format.replace_unprintable(item.text))


_OFFERS: "Columns[tuple[str, run_simulation.OfferOutcome]]" = {
    "machines": lambda item: item[0] or "the trace's",
    "an hour": lambda item: format.format_money(item[1].price_per_device_hour, item[1].currency),
    "time": lambda item: format.format_duration(item[1].days.value * 86400),
    "goodput": lambda item: f"{item[1].goodput.value:.1%}",
    "cost": lambda item: format.format_money(item[1].money.value, item[1].currency),
    "middle 80 %": lambda item: f"{item[1].money.low:,.2f} to {item[1].money.high:,.2f}",
    "finished": lambda item: f"{item[1].finished_seeds} of {item[1].seeds}",
}


def simulation_blocks(summary: "run_simulation.SimulationSummary") -> Iterator[Block]:
    """Yield how the run ends under each policy, the assumptions, and the loss at other checkpoint intervals."""
    plan, trace, seeds = summary.plan, summary.trace, summary.outcomes[0].seeds
    for outcome in summary.outcomes:
        yield f"{outcome.policy}: {_describe_outcome(outcome, plan.total_steps)}"
    between, shocks = summary.hours_between_failures, trace.aftershocks
    often = "never" if between is None else f"every {format.format_duration(between * 3600)}"
    wait = f"another machine after {format.format_duration(trace.replacement_seconds)} on average, "
    again = f"{shocks.share:.0%} followed by another {shocks.rate_factor:g} times as fast, "
    assumed = f"{wait if trace.replacement_seconds else ''}{again if shocks.share else ''}"
    tried = f"seed {summary.seed}" if seeds == 1 else f"median and middle 80 % of {seeds} seeds from {summary.seed}"
    undisturbed = format.format_duration(plan.total_steps * plan.step_seconds)
    yield (
        f"\non {format.format_count(plan.devices, 'device')}, {plan.total_steps:,} steps "
        f"of {plan.step_seconds:.4g} s ({undisturbed} if nothing failed), "
        f"a commit stops training for {plan.checkpoint_seconds:.3g} s, a restart takes {plan.restart_seconds:.4g} s,\n"
        f"a failure {often}, {assumed}{tried}; {trace.source}\n"
    )
    columns: Columns[run_simulation.PolicyOutcome] = {
        "policy": lambda item: item.policy,
        "attempts": lambda item: item.attempts,
        "device hours lost": lambda item: f"{item.hours['lost'] * plan.devices:,.1f}",
        "in commits": lambda item: f"{item.hours['commits'] * plan.devices:,.1f}",
        "in restarts": lambda item: f"{item.hours['restarts'] * plan.devices:,.1f}",
        "retries by reason": lambda item: ", ".join(f"{why} {count}" for why, count in item.retries.items()) or None,
    }
    yield make_table(summary.outcomes, columns)
    yield ""
    losses: Columns[tuple[str, IntervalLoss]] = {
        "commit every": lambda item: item[0],
        "steps": lambda item: item[1].every_steps,
        "time": lambda item: format.format_duration(item[1].seconds),
        "not useful": lambda item: f"{item[1].lost_share:.2%} ({item[1].lost_least:.2%} to {item[1].lost_most:.2%})",
    }
    yield make_table(summary.intervals.items(), losses)
    if summary.offers:
        yield from ("", make_table(summary.offers.items(), _OFFERS), "")
    if "simulated" not in summary.intervals:
        yield "nothing that loses work ever happens: any interval is short enough"
        return
    best = summary.intervals["simulated"]
    gained = summary.intervals["present"].lost_share - best.lost_share
    better = f"checkpoint.every_steps={best.every_steps} would make {gained:.2%} more of the time useful"
    yield better if gained >= 0.001 else "the present interval is as good as any"


def _describe_outcome(outcome: "run_simulation.PolicyOutcome", total_steps: int) -> str:
    days, goodput = outcome.days, outcome.goodput
    low, after, high = (format.format_duration(number * 86400) for number in (days.low, days.value, days.high))
    useful = f"goodput {goodput.value:.1%} ({goodput.low:.1%} to {goodput.high:.1%})"
    if outcome.stopped_by is None:
        of_all = f"{outcome.finished_seeds} of {outcome.seeds} seeds"
        return f"finishes after {after} ({low} to {high}) with {of_all}, {useful}"
    done = f"{outcome.step / total_steps:.1%} of the steps done"
    return f"gives up after {after} with {done}, {useful}, stopped by {outcome.stopped_by}"
