"""Prints answers to people, and those of SQL to people and scripts."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.reports.errors import ReportError
from cairn.reports.queries.run_lookup import describe_no_runs
from cairn.reports.text import answer_text, display_tables
from cairn.storage.errors import StorageError
from cairn.storage.logs import registry, run_index, run_log
from cairn.storage.stores import codec, object_store
from cairn.tasks.configuration.addresses import store_option
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.text import format, output

if TYPE_CHECKING:
    from cairn.flows.preparation.training_plan import TrainingPlan
    from cairn.flows.watching.run_watcher import WatchRow
    from cairn.operations.unrecorded_plan import Replay
    from cairn.storage.tables.table_cache import Column
    from cairn.tasks.configuration.run_configuration import RunConfig

_MOST_ROWS = 1_000
_LARGEST_INTEGER = 2**63


def note_no_runs(store: object_store.ObjectStore, found: Sequence[object] = ()) -> None:
    """Say where a store without runs is, and which are nearby; nothing where runs were found or it cannot be read."""
    with suppress(StorageError):
        if not found and not run_index.list_folders(store):
            output.say(describe_no_runs(store))


def print_blocks(*blocks: answer_text.Block) -> None:
    """Print lines, facts and tables."""
    for block in blocks:
        match block:
            case str():
                output.print_line(block)
            case display_tables.Table():
                output.print_table(block.columns, block.rows, empty=block.empty)
            case answer_text.Verbatim():
                print(block.text)
            case _:
                output.print_facts(block.items())


def print_replay(replay: "Replay") -> None:
    """Print what every segment came to, and their sum."""
    rows = list[tuple[object, ...]]()
    for item in replay.segments:
        device, ranks = item.placement.device, item.placement.world_size
        steps, where = f"{item.from_step} to {item.end.step}", f"{ranks} x {device}" if ranks > 1 else device
        digests = format.short_digest(item.end.state_sha256), format.short_digest(item.computed_sha256)
        rows.append((steps, item.end.attempt, where, item.outcome, *digests, f"{item.seconds:.1f}", item.why or None))
    columns = ("steps", "attempt", "trained on", "outcome", "committed", "recomputed", "seconds", "why")
    output.print_table(columns, rows, empty="no committed segment trains such a step")
    found = ", ".join(f"{count} {outcome}" for outcome, count in replay.outcomes.items() if count) or "none replayed"
    output.print_line(f"run {replay.run_id}: {format.format_count(replay.committed, 'committed segment')}, {found}")


def print_watch(rows: "Sequence[WatchRow]") -> None:
    """Print what the watcher did about each run, and why."""
    waits = (None if row.seconds is None else format.format_duration(row.seconds) for row in rows)
    cells = [(row.run_id, row.action, wait, row.why, row.how) for row, wait in zip(rows, waits, strict=True)]
    output.print_table(("run", "action", "in", "why", "how"), cells, empty="nothing to watch")


def draw_runs(logs: Sequence[run_log.RunLog], file: str, x: str = "step") -> None:
    """Draw the losses of runs over each other into a file, and say so."""
    from cairn.reports.plots import curve_plot, run_curves

    image = curve_plot.draw_comparison(logs, form=run_curves.plot_form(Path(file)), across=x)
    size = run_curves.write_output(Path(file), image)
    output.say(f"{len(logs)} runs: {file} ({size:,} bytes)")


def print_set(logs: Sequence[run_log.RunLog], name: str) -> None:
    """Print the runs of a set beside each other, and draw them into `NAME.png` of this folder, if that can be."""
    from cairn.reports.queries.run_comparison import compare_runs

    print_blocks(display_tables.compared_runs_table(compare_runs(logs)))
    try:
        draw_runs(logs, f"{name}.png")
    except (InvalidConfiguration, ReportError) as error:
        output.say(f"they are not drawn: {error}")


def print_answer(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print an aligned table of at most 1,000 rows; stderr says how many more there are."""
    remaining = iter(rows)  # they may exceed memory
    shown = [[_format_cell(value) for value in row] for row in islice(remaining, _MOST_ROWS)]
    output.print_table([column.name for column in columns], shown, empty="no rows")
    if more := sum(1 for _ in remaining):
        output.say(f"and {more:,} more rows; --json prints them all")


def print_json(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print a list of objects: times are ISO 8601 in UTC, NaN is null, JSON columns are nested values."""
    separator = "["
    for row in rows:
        record = {column.name: _plain(value, column.type) for column, value in zip(columns, row, strict=True)}
        output.write_json(separator + codec.encode(record).decode().rstrip("\n"))
        separator = ",\n"
    sys.stdout.write("[]\n" if separator == "[" else "]\n")


def _format_cell(value: object) -> object:
    match value:
        case bool():
            return "yes" if value else "no"
        case float() | Decimal():
            return f"{value:.6g}"
        case dict() | list():
            return " ".join(line.strip() for line in codec.encode(_plain(value, "")).decode().splitlines())
        case _:
            return value


def _plain(value: Any, type_name: str) -> Any:
    match value:
        case str() if type_name == "JSON":
            return codec.decode(value.encode(), object, where="a JSON column")
        case dict():
            return {str(key): _plain(item, "") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, "") for item in value]
        case Decimal():
            return float(value)
        case int() if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
            return float(value)  # JSON readers keep no larger integers
        case _:
            return value


def describe_finished_run(log: run_log.RunLog, config: "RunConfig", store_url: str, ending: str) -> Iterator[str]:
    """Yield the lines, each fact once; the commands find the store, and can be pasted into a shell."""
    from cairn.reports.queries.run_status import bits_differ
    from cairn.tasks.checkpoints.promotion import Gate

    yield f"run {log.run_id}: {ending}"
    if differ := bits_differ(log.state):
        yield f"bits: {differ}"
    alias = config.promotion.alias
    known = registry.Registry(log.store, alias).refresh()
    own = known.champion if known.champion and known.champion.run_id == log.run_id else None
    if (newest := log.state.newest_committed) is not None:
        yield f"committed: step {newest.committed.step}, {log.store.url}/{newest.committed.prefix}"
    if own is not None:
        losses = ", ".join(f"{name} {value:.4g}" for name, value in sorted(own.metrics.items()) if name != "samples")
        yield f"promoted: {alias} → {log.run_id}@{own.step} ({losses})"
    ends = [record.ended for record in log.state.attempts if record.ended]
    seconds, price = sum(ended.gpu_seconds for ended in ends), config.cost.gpu_hour_price
    spent = f"{format.format_duration(seconds)} of devices in {format.format_count(len(ends), 'attempt')}"
    money = "" if price is None else f", {format.format_money(seconds / 3600 * price, config.cost.currency)}"
    yield f"cost: {spent}{money}"
    sampled = [e for e in log.state.evaluations if e.samples and (not own or e.manifest_sha256 == own.manifest_sha256)]
    if sampled and sampled[-1].samples[0]:
        yield "it writes:"
        yield from (f"  | {line}" for line in sampled[-1].samples[0].splitlines())
    option = store_option(store_url, os.environ)
    yield "try:"
    yield f'  cairn sample {alias if own else log.run_id} --prompt "The "{option}'
    decisions = (body for _, body in reversed(known.history) if isinstance(body, registry.Promoted | registry.Refused))
    last = next((body for body in decisions if body.run_id == log.run_id), None)
    if isinstance(last, registry.Refused) and last.gate in (Gate.COMPARABLE, Gate.BETTER):
        yield f"  cairn promote {log.run_id}@{last.step} --alias {log.run_id}-best{option}"
    yield f"  cairn status {log.run_id}{option}"
    yield f"  cairn attempts {log.run_id}{option}"
    if log.state.opened is not None:
        yield f"  cairn fork {log.run_id} NEW --set training.steps={2 * log.state.opened.total_steps}{option}"


def describe_plan(plan: "TrainingPlan", config: "RunConfig") -> Iterator[tuple[str, str]]:
    """Yield name and text of each line; estimates are marked as estimates."""
    from cairn.model.estimates.size_estimate import PARTS

    total_steps, data, model, memory = config.training.steps, plan.data, config.model, plan.memory
    origin = f"run {plan.run_id} from step {plan.from_step:,} of {total_steps:,} as attempt {plan.attempt}"
    actions = {
        "open": f"open {origin}",
        "continue": f"continue {origin}",
        "wait": f"wait for the owner of run {plan.run_id}, and if it is gone continue {origin}",
        "finish": f"write down that run {plan.run_id} is finished, and offer its best checkpoint",
    }
    yield "would", actions.get(plan.action, f"train nothing: run {plan.run_id} is finished")
    yield "because", plan.why
    yield "store", plan.store
    files = f"{format.format_count(len(data.sources), 'source')}, {format.format_quantity(sum(data.sources.values()))}"
    train, val, unit = data.train_tokens, data.val_tokens, "tokens"
    begin = f"snapshot {format.short_digest(data.snapshot_id)}"
    if data.snapshot_id is None:
        train, val, unit, begin = data.train_bytes, data.val_bytes, "bytes", "not tokenized yet"
        files = f"{files} ({format.format_list([*data.sources], 4)})"
    asked = None if config.data.val_sources else data.val_fraction
    split = "" if train is None or val is None else f", {format.describe_split(train, val, unit, asked)}"
    yield "data", "; ".join((f"{begin}: {files}{split}", *data.notes))
    if config.data.mixture:
        yield "draws", format.describe_mixture(config.data.mixture)
    layers, heads = format.format_count(model.n_layer, "layer"), format.format_count(model.n_head, "head")
    shape = model.module or f"{layers}, {heads}, width {model.n_embd}"
    vocabulary = f"{data.vocab_size:,} ids{'' if data.snapshot_id else ' at most'}, block {model.block_size:,}"
    yield "model", f"{config.model_family or plan.run_id}: {plan.parameters:,} parameters ({shape}, {vocabulary})"
    shown = {name.replace("_", " "): memory.parts.bytes_of(name) for name in PARTS}
    parts = ", ".join(f"{name} {format.format_quantity(size)}" for name, size in shown.items() if size)
    recomputed = ", activations recomputed" if memory.sizes.activation_checkpointing else ""
    numerics = f"{config.training.precision} with {config.training.kernels} kernels{recomputed}"
    at_once = f", {memory.workers} at once" if memory.workers > 1 else ""
    how = f"micro-batch {memory.sizes.micro_batch}{at_once}, {numerics} ({parts})"
    there = "" if memory.there_bytes is None else f"; {format.format_quantity(memory.there_bytes)} are there"
    short = ": more than there is" if there and memory.total_bytes > (memory.there_bytes or 0) else ""
    if plan.arithmetic_moved:
        yield "bits", plan.arithmetic_moved
    yield from _describe_recipe(config)
    within = f", within {memory.error_bound:.0%} of traced steps" if memory.error_bound else ""
    peak = f"{format.format_quantity(memory.total_bytes)}{' a process' if plan.processes > 1 else ''} at its peak"
    yield "memory", f"an estimate{within}: {peak} with {how}{there}{short}"
    if plan.processes > 1:
        yield "processes", _describe_exchanges(plan, config.training.parallel)
    if plan.action != "nothing":
        yield from _describe_remaining(plan, config)
    yield "retries left", ", ".join(f"{reason} {budget.left}" for reason, budget in plan.budgets.items())


def _describe_recipe(config: "RunConfig") -> Iterator[tuple[str, str]]:
    chosen = config.training
    muon = f" (matrices at {chosen.muon_lr:g})" if chosen.optimizer == "muon" else ""
    warm = f" after {format.format_count(chosen.warmup_steps, 'step')} of warm-up" if chosen.warmup_steps else ""
    rate = f"learning rate {chosen.lr:g}{muon}{warm}, {chosen.schedule} down to {chosen.min_lr:g}"
    clipped = f"gradients clipped at {chosen.grad_clip:g}" if chosen.grad_clip else "no gradient is clipped"
    yield "optimizer", f"{chosen.optimizer}, {rate}; weight decay {chosen.weight_decay:g}, {clipped}"
    if chosen.init_from:
        yield "begins with", f"the weights of {chosen.init_from}"
    if chosen.lora is not None:
        from cairn.model.configuration.training import count_trained

        count = sum(count_trained(config.model, chosen.lora))
        yield "trains", f"{count:,} numbers of adapters of rank {chosen.lora.rank}; the weights stay"
    if faults := os.environ.get("CAIRN_FAULTS"):
        yield "faults", f"are injected: {faults}"


def _describe_exchanges(plan: "TrainingPlan", parallel: str) -> str:
    share = "replicate the network (ddp)" if parallel == "ddp" else "share the network (fsdp)"
    moved = (f"{one.operation} {format.format_quantity(one.bytes)} ({one.calls:,}x)" for one in plan.exchanges)
    return f"{plan.processes:,} {share} and exchange in each step: {', '.join(moved)}"


def _describe_remaining(plan: "TrainingPlan", config: "RunConfig") -> Iterator[tuple[str, str]]:
    total_steps, early = config.training.steps, " at most: it may stop early" if config.early_stop.is_on else ""
    rules, room, cost, currency = config.checkpoint, plan.room, plan.cost, config.cost.currency
    unknown, tokens = "not known before the run has trained a step", f"{plan.tokens_ahead:,} tokens"
    ahead = f"{total_steps - plan.from_step:,} ahead of {total_steps:,}{early}"
    idle = "".join(f"; {note}" for note in format.describe_schedule(config.training.wastes_last_step))
    yield "steps", f"{ahead}; {tokens}, {plan.tokens_per_step:,} each{idle}"
    pace = f"of training at the {cost.tokens_per_second or 0:,.0f} tokens/s of its newest steps"
    if cost.measured_processes != plan.processes:
        pace += f", of {format.format_count(cost.measured_processes or 0, 'process', 'processes')}"
    yield "time", unknown if cost.seconds is None else f"an estimate: {format.format_duration(cost.seconds)} {pace}"
    every = f" and every {rules.every_seconds:g} s" if rules.every_seconds else ""
    kept = f"at most {room.kept_at_most} kept ({format.format_quantity(room.kept_at_most * room.bytes_each)})"
    schedule = f"{plan.commits:,} ahead, every {format.format_count(rules.every_steps, 'step')}{every}"
    kept += " beside those in use"
    later = format.format_duration(cost.commit_seconds or 0.0)
    took = "" if cost.commit_seconds is None else f", committed {later} after their step"
    yield "checkpoints", f"{schedule}, {format.format_quantity(room.bytes_each)} each{took}; {kept}"
    free = "" if room.free_bytes is None else f", {format.format_quantity(room.free_bytes)} are free"
    late = f", {format.format_quantity(room.late_bytes)} for a slow evaluator" if room.late_bytes else ""
    yield "room", f"the store needs {format.format_quantity(room.needed_bytes)} more for all at once{late}{free}"
    yield "evaluations", f"of {format.format_count(plan.evaluated_commits, 'commit')}: {', '.join(plan.suites)}"
    if config.cost.gpu_hour_price is not None:
        money = unknown if cost.money is None else f"an estimate: {format.format_money(cost.money, currency)}"
        yield "cost", f"{money}, at {config.cost.gpu_hour_price:g} {currency} an hour"
