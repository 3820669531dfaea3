"""What `cairn train` says to a person: the plan of --dry-run, and promotion, losses and a sample of a finished run."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cairn.cli.app import store_option
from reports.queries.run_status import bits_differ
from storage.logs.registry import Promoted, Refused, Registry
from storage.logs.run_log import RunLog
from tasks.checkpoints.promotion import Gate
from tasks.data.document import describe_split
from tasks.text.format import format_count, format_duration, format_list, short_digest

if TYPE_CHECKING:
    from flows.preparation.training_plan import PlannedMemory, TrainingPlan

_DECIDED_BY_ALIAS = (Gate.COMPARABLE, Gate.BETTER)


def describe_finished_run(log: RunLog, alias: str, store_url: str, ending: str) -> Iterator[str]:
    """Yield the lines; the commands find the store, and can be pasted into a shell."""
    yield f"run {log.run_id}: {ending}"
    if differ := bits_differ(log.state):
        yield f"bits: {differ}"
    registry = Registry(log.store, alias).refresh()
    own = registry.champion if registry.champion and registry.champion.run_id == log.run_id else None
    if own is not None:
        losses = ", ".join(f"{name} {value:.4g}" for name, value in sorted(own.metrics.items()) if name != "samples")
        yield f"promoted: {alias} → {log.run_id}@{own.step} ({losses})"
    sampled = [e for e in log.state.evaluations if e.samples and (not own or e.manifest_sha256 == own.manifest_sha256)]
    if sampled and sampled[-1].samples[0]:
        yield "it writes:"
        yield from (f"  | {line}" for line in sampled[-1].samples[0].splitlines())
    option = store_option(store_url, os.environ)
    yield "try:"
    yield f'  cairn sample {alias if own else log.run_id} --prompt "The "{option}'
    decisions = (body for _, body in reversed(registry.history) if isinstance(body, Promoted | Refused))
    last = next((body for body in decisions if body.run_id == log.run_id), None)
    if isinstance(last, Refused) and last.gate in _DECIDED_BY_ALIAS:
        yield f"  cairn promote {log.run_id}@{last.step} --alias {log.run_id}-best{option}"
    yield f"  cairn status {log.run_id}{option}"
    yield f"  cairn attempts {log.run_id}{option}"
    if log.state.opened is not None:
        yield f"  cairn fork {log.run_id} NEW --set training.steps={2 * log.state.opened.total_steps}{option}"


def describe_plan(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    """Yield name and text of each line; estimates are marked as estimates."""
    origin = f"run {plan.run_id} from step {plan.from_step:,} of {plan.total_steps:,} as attempt {plan.attempt}"
    actions = {
        "open": f"open {origin}",
        "continue": f"continue {origin}",
        "wait": f"wait for the owner of run {plan.run_id}, and if it is gone continue {origin}",
        "finish": f"write down that run {plan.run_id} is finished, and offer its best checkpoint",
    }
    yield "would", actions.get(plan.action, f"train nothing: run {plan.run_id} is finished")
    yield "because", plan.why
    yield "store", plan.store
    yield "data", _describe_data(plan)
    model = plan.model
    shape = f"{format_count(model.layers, 'layer')}, {format_count(model.heads, 'head')}, width {model.width}"
    asked = "" if plan.data.snapshot_id else " at most"
    vocabulary = f"{model.vocab_size:,} ids{asked}, block {model.block_size:,}"
    yield "model", f"{model.family}: {model.parameters:,} parameters ({shape}, {vocabulary})"
    yield "memory", _describe_memory(plan.memory)
    if plan.action != "nothing":
        yield from _describe_remaining(plan)
    yield "retries left", ", ".join(f"{reason} {budget.left}" for reason, budget in plan.budgets.items())


def _describe_data(plan: "TrainingPlan") -> str:
    data = plan.data
    files = f"{format_count(len(data.sources), 'source')}, {_format_bytes(data.bytes)}"
    if data.snapshot_id is None:
        train, val, unit = data.train_bytes, data.val_bytes, "bytes"
        begin = f"not tokenized yet: {files} ({format_list([source.name for source in data.sources], 4)})"
    else:
        train, val, unit = data.train_tokens, data.val_tokens, "tokens"
        begin = f"snapshot {short_digest(data.snapshot_id)}: {files}"
    if train is None or val is None:
        return begin
    return f"{begin}, {describe_split(train, val, unit, data.val_fraction)}"


def _describe_memory(memory: "PlannedMemory") -> str:
    from model.estimates.size_estimate import PARTS

    shown = {name: memory.parts.bytes_of(name) for name in PARTS}
    parts = ", ".join(f"{name.replace('_', ' ')} {_format_bytes(size)}" for name, size in shown.items() if size)
    recomputed = ", activations recomputed" if memory.activation_checkpointing else ""
    how = f"micro-batch {memory.micro_batch}, {memory.precision} with {memory.kernels} kernels{recomputed}"
    peak = f"an estimate: {_format_bytes(memory.total_bytes)} at its peak with {how} ({parts})"
    if memory.there_bytes is None:
        return peak
    short = ": more than there is" if memory.total_bytes > memory.there_bytes else ""
    return f"{peak}; {_format_bytes(memory.there_bytes)} are there now{short}"


def _describe_remaining(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    steps, early = plan.total_steps - plan.from_step, " at most: it may stop early" if plan.may_stop_early else ""
    tokens = f"{plan.tokens_ahead:,} tokens, {plan.tokens_per_step:,} each"
    yield "steps", f"{steps:,} ahead of {plan.total_steps:,}{early}; {tokens}"
    speed, seconds = plan.cost.tokens_per_second, plan.cost.seconds
    if speed is None or seconds is None:
        yield "time", "not known before the run has trained a step"
    else:
        pace = f"the {speed:,.0f} tokens/s of its newest steps"
        yield "time", f"an estimate: {format_duration(seconds)} of training at {pace}"
    commits = plan.checkpoints
    every = f" and every {commits.every_seconds:g} s" if commits.every_seconds else ""
    room, size = commits.room, f"{_format_bytes(commits.room.bytes_each)} each"
    kept = f"at most {room.kept_at_most} kept ({_format_bytes(room.kept_at_most * room.bytes_each)})"
    schedule = f"{commits.ahead:,} ahead, every {format_count(commits.every_steps, 'step')}{every}, {size}"
    yield "checkpoints", f"{schedule}; {kept} beside those in use"
    free = "" if room.free_bytes is None else f", {_format_bytes(room.free_bytes)} are free"
    yield "room", f"the store needs {_format_bytes(room.needed_bytes)} more for all at once{free}"
    yield "evaluations", f"of {format_count(plan.evaluated_commits, 'commit')}: {', '.join(plan.suites)}"
    if plan.cost.gpu_hour_price is not None:
        money = "not known before the run has trained a step"
        if plan.cost.money is not None:
            amount = f"{plan.cost.money:,.2f}" if plan.cost.money >= 0.005 else "less than 0.01"
            money = f"an estimate: {amount} {plan.cost.currency}"
        yield "cost", f"{money}, at {plan.cost.gpu_hour_price:g} {plan.cost.currency} an hour"


def _format_bytes(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return format_count(size, "byte")
