"""The plan of `cairn train --dry-run`: data, sizes, time, cost and budgets from formulas and step records alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cairn.flows.preparation import preflight
from cairn.flows.preparation.preflight import AvailableMemory
from cairn.model.estimates.size_estimate import TRACED_ERROR, Exchange, MemoryEstimate, count_parameters, step_exchanges
from cairn.model.estimates.step_memory import FP32_BYTES
from cairn.reports.queries.run_status import BudgetStatus, RunPhase, count_budgets, read_status
from cairn.storage.logs import run_log, step_log
from cairn.storage.snapshots import data_snapshot, snapshot_manifest
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data import corpus, document, snapshot_build, snapshot_lookup
from cairn.tasks.evaluator.evaluation_run import suite_of
from cairn.tasks.machine.arithmetic import arithmetic_before, arithmetic_here, describe_move
from cairn.tasks.policy.attempt_sizes import AttemptSizes, next_sizes

_TOKENIZED_BYTES = 8 << 20
"""Of more text a plan does not say what the tokenizer does not know: it takes seconds."""


class PlanAction(StrEnum):
    """The next step of `cairn train`; `wait` is for a live owner."""

    OPEN = "open"
    CONTINUE = "continue"
    FINISH = "finish"
    WAIT = "wait"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """The data, with the bytes of each source by its name; of a text that was not read the sizes of splits are None.

    Without a snapshot there are no tokens yet, and `vocab_size` is the one asked for. `notes` say what of the tokenizer
    is turned off, and what it does not know.
    """

    snapshot_id: str | None = None
    sources: Mapping[str, int]
    train_tokens: int | None = None
    val_tokens: int | None = None
    train_bytes: int | None
    val_bytes: int | None
    val_fraction: float
    vocab_size: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMemory:
    """Estimated peak bytes of one trainer, on its device; `there_bytes` is what is free now, None if unknown.

    Each trainer computes the micro-batches of so many `workers` at once. `error_bound` is how far estimates for a GPU
    were from traced steps, as a share; None on a CPU.
    """

    sizes: AttemptSizes
    workers: int
    total_bytes: int
    error_bound: float | None
    there_bytes: int | None
    parts: MemoryEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCost:
    """Estimated time of the steps ahead by the run's own records, None without them; money is None without a price.

    The records are of so many `measured_processes`; `commit_seconds` is from the end of a step to its commit.
    """

    measured_processes: int | None
    commit_seconds: float | None
    tokens_per_second: float | None
    seconds: float | None
    money: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The plan that a dry run shows; `attempt` is the one that would train, None if none would.

    `commits` are those ahead, without those that `checkpoint.every_seconds` adds; of these `evaluated_commits` are
    evaluated, under each of the `suites`. `room` is for all that retention keeps at most; `arithmetic_moved` says that
    bits may differ from `from_step` on, empty if not. All `processes` together make the `exchanges` of each step.
    """

    run_id: str
    store: str
    action: PlanAction
    why: str
    attempt: int | None
    from_step: int
    tokens_per_step: int
    tokens_ahead: int
    data: PlannedData
    parameters: int
    memory: PlannedMemory
    processes: int
    exchanges: tuple[Exchange, ...]
    commits: int
    room: preflight.StoreRoom
    evaluated_commits: int
    suites: tuple[str, ...]
    arithmetic_moved: str
    cost: PlannedCost
    budgets: Mapping[str, BudgetStatus]
    config: Mapping[str, Any]


def plan_training(log: run_log.RunLog, config: RunConfig, base_dir: Path, memory: AvailableMemory) -> TrainingPlan:
    """Return the plan for a checked configuration and a log that was read."""
    action, why = _action(log)
    first, total, every = log.state.resume_step, config.training.steps, config.checkpoint.every_steps
    data = _data(log, config, base_dir)
    per_step = config.training.global_batch * config.model.block_size
    ahead = per_step * (total - first) if action is not PlanAction.NOTHING else 0
    on_cpu, processes = not memory.place.on_cuda, memory.place.processes
    sizes = next_sizes(log.state, config.training, config.model.block_size, processes=processes, on_cpu=on_cpu)
    workers = preflight.choose_workers(config, data.vocab_size, sizes, memory)
    memory = replace(memory, place=replace(memory.place, workers=workers))
    device, arithmetic = config.training.device, config.training.arithmetic
    before = arithmetic_before(log.state, log.state.resume_reference) if ahead else None
    is_own = bool(config.model.module)  # by a trial and not by formulas
    exchanges = partial(step_exchanges, config.model, config.training, data.vocab_size)
    parts = preflight.estimate_trainer(config, data.vocab_size, sizes, memory)
    return TrainingPlan(
        run_id=log.run_id,
        store=log.store.url,
        action=action,
        why=why,
        attempt=None if action is PlanAction.NOTHING else log.state.latest_attempt + 1,
        from_step=first,
        tokens_per_step=per_step,
        tokens_ahead=ahead,
        data=data,
        parameters=parts.parameters_bytes // FP32_BYTES if is_own else count_parameters(config.model, data.vocab_size),
        memory=PlannedMemory(
            sizes=sizes,
            workers=workers,
            total_bytes=parts.total_bytes,
            error_bound=None if on_cpu else TRACED_ERROR,
            there_bytes=memory.bytes,
            parts=parts,
        ),
        processes=processes,
        exchanges=() if is_own else exchanges(micro_batch=sizes.micro_batch, processes=processes),
        commits=_multiples(every, first, total),
        room=preflight.store_room(log.store, log.state, config, data.vocab_size),
        evaluated_commits=_multiples(every * config.evaluation.every_commits, first, total),
        suites=(suite_of(config.evaluation).name, *(suite.name for suite in config.evaluation.evaluators)),
        arithmetic_moved=describe_move(before, arithmetic_here(device, arithmetic)) if before else "",
        cost=_cost(log, config.cost.gpu_hour_price, 1 if on_cpu else processes, ahead),
        budgets=count_budgets(log.state, config.budgets.model_dump(mode="json")),
        config=config.document(),
    )


def _action(log: run_log.RunLog) -> tuple[PlanAction, str]:
    if log.state.opened is None:
        return PlanAction.OPEN, "there is no run of this name in the store"
    status = read_status(log)
    newest = log.state.newest_committed
    if status.state == RunPhase.FINISHED:
        return PlanAction.NOTHING, status.next
    if status.state == RunPhase.RUNNING:
        return PlanAction.WAIT, f"{status.next}; while it shows life this command leaves with exit code 7"
    if newest is not None and newest.committed.step >= status.total_steps:
        return PlanAction.FINISH, "the last step is committed, the run's end is not on record yet"
    return PlanAction.OPEN if status.state == RunPhase.OPENED else PlanAction.CONTINUE, status.next


def _data(log: run_log.RunLog, config: RunConfig, base_dir: Path) -> PlannedData:
    """Return the data of a run, or of one that would be opened; raises `InvalidCorpus` for unusable sources."""
    opened, data, sources = log.state.opened, config.data, tuple[document.Source, ...]()
    found: snapshot_lookup.SnapshotReference | None
    if opened is not None:
        manifest = data_snapshot.read_manifest(log.store, opened.data_snapshot)
        found = snapshot_lookup.SnapshotReference(snapshot_id=opened.data_snapshot, manifest=manifest, reused=True)
    elif data.snapshot:
        found = snapshot_lookup.find_by_id(log.store, data.snapshot)
    else:
        sources = corpus.preview_corpus(data, base_dir)
        found = snapshot_build.find_built(log.store, data, base_dir, sources)
    if found is not None:
        manifest, train, val = found.manifest, found.manifest.split("train"), found.manifest.split("val")
        return PlannedData(
            snapshot_id=found.snapshot_id,
            sources={source.name: source.bytes for source in manifest.sources},
            train_tokens=train.tokens,
            val_tokens=val.tokens,
            train_bytes=train.bytes,
            val_bytes=val.bytes,
            val_fraction=manifest.val_fraction,
            vocab_size=manifest.vocab_size,
            notes=found.notes,
        )
    sizes: dict[snapshot_manifest.SplitName, int] = {}
    if all(source.sha256 for source in sources):
        survey = document.survey_corpus(sources, data.val_fraction, None, deduplicate=data.deduplicate)
        snapshot_build.require_usable(survey, data)
        sizes = {"train": survey.text_bytes - survey.val_bytes, "val": survey.val_bytes}
    elif all(source.sha256 or source.border is not None for source in sources):  # else there is much, not looked at
        sizes = dict.fromkeys(snapshot_manifest.SPLITS, 0)
        for split, size_bytes in (size for source in sources for size in source.sizes(data.val_fraction)):
            sizes[split] += size_bytes
    given, text_bytes, notes = snapshot_build.given_tokenizer(data, base_dir), sum(sizes.values()), tuple[str, ...]()
    if given:
        is_quick = data.tokenizer.endswith(".json") and 0 < text_bytes <= _TOKENIZED_BYTES
        unknown = snapshot_build.count_unknown_bytes(sources, data, given) if is_quick else 0
        notes = snapshot_lookup.describe_tokenizer(given.turned_off, unknown, text_bytes)
    if data.loss_on:
        notes += ("answers: the loss counts their tokens alone",)
    return PlannedData(
        sources={source.name: source.bytes for source in sources},
        train_bytes=sizes.get("train"),
        val_bytes=sizes.get("val"),
        val_fraction=data.val_fraction,
        vocab_size=preflight.wanted_vocab_size(data, given),
        notes=notes,
    )


def _cost(log: run_log.RunLog, price: float | None, devices: int, tokens: int) -> PlannedCost:
    """Use the median of the newest steps: one slow step is no prediction."""
    newest = ((item.started.attempt, item.started.claim_id) for item in reversed(log.state.attempts))
    attempts = (step_log.read_newest_records(log.store, log.prefix, *attempt) for attempt in newest)
    lines = next(filter(None, attempts), [])[-200:]
    speed = median(line.tokens_per_second for line in lines) if lines else None
    seconds = tokens / speed if speed else None
    money = None if price is None or seconds is None else price * devices * seconds / 3600
    ended = {(line.attempt, line.step): line.at for line in lines if line.at}
    commits = (
        (record.committed_at, ended.get((record.committed.attempt, record.committed.step)))
        for record in log.state.checkpoints
    )
    took = [(committed - at).total_seconds() for committed, at in commits if at]
    return PlannedCost(
        measured_processes=lines[-1].world_size if lines else None,
        commit_seconds=median(took) if took else None,
        tokens_per_second=speed,
        seconds=seconds,
        money=money,
    )


def _multiples(every: int, first: int, last: int) -> int:
    """Count the multiples of `every` above `first` up to `last`, and `last` itself."""
    return (last // every - first // every + (last % every != 0)) if last > first else 0
