"""Runs beside each other: what differs of their configurations, how far each came, its losses, and what it cost.

A set of runs are those named `SET.key=value`, as `cairn train --set key=value,value` names them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cairn.reports.errors import RunNotFound
from cairn.reports.queries import evaluations, run_lookup, run_status
from cairn.reports.queries.receipts import read_receipts
from cairn.storage.logs import run_index, run_log, step_log
from cairn.storage.stores import codec, object_store

if TYPE_CHECKING:
    from cairn.tasks.checkpoints.metric_comparison import Side


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run of a comparison; `settings` are those that differ between the runs, None where a run has no such key.

    Losses are in nats per token; speed, and memory in bytes, are those of the last step; `money` is device hours times
    the configured price, None without one; `arithmetics` are the digests of those that its attempts computed with, in
    order; `identical` says with which run before it it shares its bits, and until which step. `better_by` is how much
    lower the best held-out loss is than that of the run named first, over the same windows, with its standard error;
    `versus_first` says it in words, or why the two cannot be compared.
    """

    run_id: str
    state: str
    step: int
    total_steps: int
    tokens: int
    train_loss: float | None
    tokens_per_second: float | None
    memory_bytes: int | None
    held_out: tuple[evaluations.HeldOutPoint, ...]
    best: evaluations.HeldOutPoint | None
    metrics: Mapping[str, float]
    attempts: int
    gpu_seconds: float
    useful_gpu_seconds: float
    wasted_gpu_seconds: float
    money: float | None
    currency: str
    arithmetics: tuple[str, ...]
    identical: str
    settings: Mapping[str, Any]
    better_by: float | None = None
    better_by_error: float | None = None
    versus_first: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Runs in the order in which they were named; `differing` are the configuration keys that are not equal in all."""

    differing: tuple[str, ...]
    runs: tuple[ComparedRun, ...]


def find_runs(store: object_store.ObjectStore, names: Sequence[str]) -> list[run_log.RunLog]:
    """Return the logs of runs, and of all runs of a set where no run has the name or it is the only one given.

    Raises `RunNotFound` for a name that is neither.
    """
    listed = run_index.list_run_ids(store)
    wanted = expand_names(listed, names)
    if len(wanted) == 1 and len(names) == 1:
        run_lookup.find_run(store, names[0])
        raise RunNotFound(f"{names[0]} is one run and no set of runs: name another run to compare it with")
    return [run_lookup.find_run(store, run_id) for run_id in wanted]


def expand_names(listed: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return run ids for names: a set's members where none of the listed runs has its name, or it is the only name."""
    wanted = dict[str, None]()
    for name in names:
        members = [run_id for run_id in listed if run_id.startswith(f"{name}.") and "=" in run_id[len(name) :]]
        if name in listed or not members:
            wanted[name] = None
        if name not in listed or len(names) == 1:
            wanted |= dict.fromkeys(members)
    return tuple(wanted)


def compare_runs(logs: Sequence[run_log.RunLog]) -> RunComparison:
    """Return the comparison of runs that were read, of none where none could be."""
    if not logs:
        return RunComparison(differing=(), runs=())
    settings = [codec.flatten(run_lookup.configuration_document(log.state)) for log in logs]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = tuple(key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings))
    runs = [
        _compared(log, {key: one.get(key) for key in differing}, identical)
        for log, one, identical in zip(logs, settings, describe_identities(logs), strict=True)
    ]
    first = _side(logs[0], runs[0])
    beside = [_versus(first, log, run) for log, run in zip(logs[1:], runs[1:], strict=True)]
    return RunComparison(differing=differing, runs=(*runs[:1], *beside))


def describe_identities(logs: Sequence[run_log.RunLog]) -> tuple[str, ...]:
    """Return in words with which run before it each shares its bits, and until which step; empty if with none."""
    before, identities = dict[str, Mapping[int, str]](), list[str]()
    for log in logs:
        own = {item.committed.step: item.committed.state_sha256 for item in log.state.surviving_checkpoints}
        origin, found = log.state.origin, ""
        for run_id, others in before.items():
            shared = [step for step, digest in others.items() if own.get(step) == digest]
            shared += [origin.checkpoint.step] if origin and origin.run_id == run_id else []
            if shared and not found:
                found = f"identical to {run_id} until step {max(shared)}"
        identities.append(found)
        before[log.run_id] = own
    return tuple(identities)


def _side(log: run_log.RunLog, run: ComparedRun) -> "Side":
    """Return the best checkpoint of a run with its evaluations, newest first."""
    from cairn.tasks.checkpoints.metric_comparison import Side  # only where runs are compared

    of_best = log.state.evaluations_of(run.best.manifest_sha256) if run.best else ()
    named = f"{log.run_id}@{run.best.step}" if run.best else log.run_id
    return Side(named=named, run_id=log.run_id, measured=tuple(reversed(of_best)))


def _versus(first: "Side", log: run_log.RunLog, run: ComparedRun) -> ComparedRun:
    """Return the run with the difference of its best checkpoint from that of the run named first."""
    from cairn.tasks.checkpoints import metric_comparison  # as above
    from cairn.tasks.configuration.settings import MetricGate

    measured = [item for item in _side(log, run).measured if evaluations.VAL_LOSS in item.metrics]
    if not first.measured or not measured:
        return run
    alike = (item for item in measured if metric_comparison.find_alike(first.measured, item))
    item, read = next(alike, measured[0]), metric_comparison.losses_reader(log.store)
    found = metric_comparison.compare_metric(MetricGate(), item, log.run_id, first, read)
    if isinstance(found, str):
        return replace(run, versus_first=found)
    words = f"{found} than {first.named}" if found.error is not None else f"{found} against {first.named}"
    words = words if found.better_by else f"equal to {first.named}"
    return replace(run, better_by=found.better_by, better_by_error=found.error, versus_first=words)


def _compared(log: run_log.RunLog, settings: Mapping[str, Any], identical: str) -> ComparedRun:
    state, beat = log.state, run_lookup.read_beat(log)
    status, receipts = run_status.make_status(log, beat), read_receipts(log, beat)
    newest = state.attempts[-1].started if state.attempts else None
    last = step_log.read_last_record(log.store, log.prefix, newest.attempt, newest.claim_id) if newest else None
    gpu_seconds = sum(receipt.gpu_seconds for receipt in receipts)
    document = run_lookup.configuration_document(state)
    price = codec.stored_value(document, "cost", "gpu_hour_price", float)
    held_out = evaluations.list_held_out(state)
    return ComparedRun(
        run_id=log.run_id,
        state=status.state,
        step=status.step,
        total_steps=status.total_steps,
        tokens=run_lookup.tokens_at(state, status.step),
        train_loss=last.train_loss if last else None,
        tokens_per_second=last.tokens_per_second if last else None,
        memory_bytes=last.memory_bytes if last else None,
        held_out=held_out,
        best=evaluations.find_best(held_out),
        metrics=state.evaluations[-1].metrics if state.evaluations else {},
        attempts=len(receipts),
        gpu_seconds=gpu_seconds,
        useful_gpu_seconds=sum(receipt.useful_gpu_seconds or 0.0 for receipt in receipts),
        wasted_gpu_seconds=sum(receipt.wasted_gpu_seconds or 0.0 for receipt in receipts),
        money=None if price is None else gpu_seconds / 3600 * price,
        currency=codec.stored_value(document, "cost", "currency", str) or "",
        arithmetics=tuple(dict.fromkeys(item.arithmetic.digest for item in receipts if item.arithmetic)),
        identical=identical,
        settings=settings,
    )
