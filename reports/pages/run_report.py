"""The read model of `cairn report`: its JSON, and the input of the page templates."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from cairn.model.configuration.data import MixtureStage
from cairn.reports.plots.run_curves import RunCurves, gather_curves
from cairn.reports.queries import alias_history, receipts, run_lookup, run_status
from cairn.reports.queries.evaluations import EvaluationSummary, HeldOutPoint, list_evaluations
from cairn.storage.logs import run_entries, run_log, step_log
from cairn.tasks.configuration.settings import CostConfig

_CURVE_POINTS = 200
_PRICE, _CURRENCY = "CAIRN_COST__GPU_HOUR_PRICE", "CAIRN_COST__CURRENCY"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Device time in seconds: all, kept in a commit, lost, and of the open attempt, which is neither yet.

    `elapsed_seconds` is from the opening to the newest entry; in `waiting_seconds` of it no attempt showed life, in
    `unused_seconds` one did not train, and of these it needed `starting_seconds` before it could. `replayed_steps`
    counts how often a step was trained again. Money is an estimate, device hours times the configured price; None
    without a price.
    """

    gpu_seconds: float
    useful_gpu_seconds: float
    wasted_gpu_seconds: float
    open_gpu_seconds: float
    elapsed_seconds: float
    waiting_seconds: float
    unused_seconds: float
    starting_seconds: float
    replayed_steps: int
    gpu_hour_price: float | None
    currency: str
    money: float | None
    wasted_money: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A run from its opening to the entry `newest_seq`; also the JSON of `cairn report`.

    `status` as in `cairn status`; `attempts`, `checkpoints`, `evaluations` as those verbs have them; `promotions` are
    the decisions of any alias about this run; `reasons` rarest first; `curve` at most 200 steps of the surviving line,
    `held_out` losses of one suite on it and `best` of them; `state_sha256` digests the newest committed train state;
    `mixture` has what it draws from step 0 and from each stage's step on, none without weights.
    """

    run_id: str
    newest_seq: int
    model_family: str
    opened_at: datetime | None
    status: run_status.RunStatus
    state_sha256: str | None
    best: HeldOutPoint | None
    verdict: run_entries.CurveVerdict | None
    cost: RunCost
    reasons: tuple[receipts.ReasonRow, ...]
    attempts: tuple[receipts.Receipt, ...]
    curve: tuple[step_log.StepRecord, ...]
    held_out: tuple[HeldOutPoint, ...]
    evaluations: tuple[EvaluationSummary, ...]
    checkpoints: tuple[run_lookup.CheckpointSummary, ...]
    promotions: tuple[alias_history.AliasDecision, ...]
    opened: run_entries.RunOpened | None
    mixture: tuple[MixtureStage, ...]
    quarantines: tuple[run_entries.DataQuarantined, ...]
    machines: tuple[receipts.MachineRow, ...]


def gather_report(
    log: run_log.RunLog, environment: Mapping[str, str], *, lines: Sequence[step_log.StepRecord] | None = None
) -> tuple[RunReport, RunCurves]:
    """Return the report of a run that was read, and the curves of its plot; without `lines` step records are read."""
    state, beat = log.state, run_lookup.read_beat(log)
    attempts, last = receipts.read_receipts(log, beat), lines[-1] if lines else None
    curves = gather_curves(log, lines, attempts)
    newest = state.newest_committed
    price = find_price(environment, run_lookup.configuration_document(state).get("cost", {}))
    signs = [record.committed_at for record in state.checkpoints]
    signs += [record.ended_at or record.started_at for record in state.attempts]
    replayed = sum(point.replays for point in curves.points)
    drawn = dict.fromkeys((*curves.points[:: max(len(curves.points) // _CURVE_POINTS, 1)], *curves.points[-1:]))
    report = RunReport(
        run_id=log.run_id,
        newest_seq=log.seq,
        model_family=curves.model_family,
        opened_at=state.opened_at,
        status=run_status.make_status(log, beat, last if beat and last and last.attempt == beat.attempt else None),
        state_sha256=newest.committed.state_sha256 if newest else None,
        best=curves.best,
        verdict=next((item.verdict for item in reversed(state.evaluations) if item.verdict), None),
        cost=count_cost(attempts, replayed_steps=replayed, price=price, until=max(signs, default=None)),
        reasons=receipts.count_reasons(attempts),
        attempts=attempts,
        curve=tuple(point.record for point in drawn),
        held_out=curves.held_out,
        evaluations=list_evaluations(state),
        checkpoints=run_lookup.read_checkpoints(log),
        promotions=tuple(item for item in alias_history.list_decisions(log.store) if item.run_id == log.run_id),
        opened=state.opened,
        mixture=run_lookup.mixture_of(state),
        quarantines=state.quarantines,
        machines=receipts.list_machines(attempts),
    )
    return report, curves


def find_price(environment: Mapping[str, str], stored: object = None) -> CostConfig:
    """Return the price that the environment names, else the `stored` one; raises `ValueError` for a wrong one."""
    document = dict[str, Any]()
    with suppress(ValidationError):  # another version's, or a foreign log's
        document = CostConfig.model_validate(stored).model_dump()
    named = {"gpu_hour_price": environment.get(_PRICE), "currency": environment.get(_CURRENCY)}
    return CostConfig.model_validate(document | {key: value for key, value in named.items() if value})


def count_cost(
    attempts: Sequence[receipts.Receipt], *, replayed_steps: int, price: CostConfig, until: datetime | None
) -> RunCost:
    """Return the cost of these attempts; an open one counts until `until`."""
    gpu = sum(receipt.gpu_seconds for receipt in attempts)
    wasted = sum(receipt.wasted_gpu_seconds or 0.0 for receipt in attempts)
    hourly = price.gpu_hour_price
    seen_before = [_seen_before(receipt) for receipt in attempts]
    ends = [*seen_before[1:], *(receipt.ended_at or until or receipt.started_at for receipt in attempts[-1:])]
    open_seconds = [_seconds(receipt.started_at, end) for receipt, end in zip(attempts, ends, strict=True)]
    busy = [receipt.gpu_seconds / receipt.placement.devices for receipt in attempts]
    return RunCost(
        gpu_seconds=gpu,
        useful_gpu_seconds=sum(receipt.useful_gpu_seconds or 0.0 for receipt in attempts),
        wasted_gpu_seconds=wasted,
        open_gpu_seconds=sum(receipt.gpu_seconds for receipt in attempts if receipt.termination_reason is None),
        elapsed_seconds=_seconds(seen_before[0], ends[-1]) if attempts else 0.0,
        waiting_seconds=sum(receipt.waiting_seconds for receipt in attempts),
        unused_seconds=sum(max(wall - work, 0.0) for wall, work in zip(open_seconds, busy, strict=True)),
        starting_seconds=sum(receipt.starting_seconds or 0.0 for receipt in attempts),
        replayed_steps=replayed_steps,
        gpu_hour_price=hourly,
        currency=price.currency,
        money=None if hourly is None else gpu / 3600 * hourly,
        wasted_money=None if hourly is None else wasted / 3600 * hourly,
    )


def _seen_before(receipt: receipts.Receipt) -> datetime:
    """Return when the wait for the attempt began; the first moment there is, where a log says that it was before."""
    start, waited = receipt.started_at, timedelta(seconds=receipt.waiting_seconds)
    return start - min(waited, start - datetime.min.replace(tzinfo=start.tzinfo))


def _seconds(first: datetime, second: datetime) -> float:
    return max((second - first).total_seconds(), 0.0)
