"""Reads a run's loss curve up to a step and judges it: the same verdict on that step whenever it is computed."""

from dataclasses import dataclass, replace

from storage.errors import StorageError
from storage.logs.run_entries import EvaluationRecorded
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.logs.step_log import StepRecord, read_step_records, splice
from storage.stores.document import decode
from storage.stores.object_store import ObjectStore
from tasks.configuration.flat_document import stored_value
from tasks.configuration.settings import METRIC
from tasks.policy.curve_statistics import Curve
from tasks.policy.curve_verdict import judge


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    vocab_size: int


def with_verdict(log: RunLog, body: EvaluationRecorded) -> EvaluationRecorded:
    """Return the evaluation with the verdict on the curve up to its step, if it has a held-out loss to judge."""
    if METRIC not in body.metrics:
        return body
    try:
        curve = read_curve(log, suite_sha256=body.suite_sha256, until_step=body.step)
        val = [point for point in curve.val if point[0] != body.step]
        verdict = judge(replace(curve, val=(*val, (body.step, body.metrics[METRIC]))))
        return replace(body, verdict=verdict)
    except (StorageError, ValueError, LookupError, ArithmeticError):
        return body


def read_curve(log: RunLog, *, suite_sha256: str | None, until_step: int | None = None) -> Curve:
    """Return the curve of a refreshed log up to `until_step`, with a suite's losses or none; raises `StorageError`."""
    state, last = log.state, until_step if until_step is not None else float("inf")
    points = splice(read_step_records(log.store, log.prefix), state.attempts)
    records = [point.record for point in points if point.record.step <= last]
    return Curve(
        steps=[record.step for record in records],
        train_losses=[record.train_loss for record in records],
        grad_norms=[record.grad_norm for record in records],
        learning_rates=[record.lr for record in records],
        tokens_per_second=[record.tokens_per_second for record in records],
        seconds=[record.seconds for record in records],
        slowest_ranks=[_slowest_rank(state, record) for record in records],
        samples=[record.sample for record in records if record.sample],
        val=tuple(
            (item.step, item.metrics[METRIC])
            for item in state.surviving_evaluations(suite_sha256)
            if item.step <= last and METRIC in item.metrics
        ),
        vocab_size=_vocab_size(log.store, state),
        total_steps=state.opened.total_steps if state.opened else 0,
        grad_clip=stored_value(state.opened.config if state.opened else {}, "training", "grad_clip", float) or 0.0,
    )


def _slowest_rank(state: RunState, record: StepRecord) -> tuple[str, float] | None:
    """Return the rank that the others waited for, with its host where that is known, and how much longer it worked."""
    if record.slowest_rank is None or not record.slowest_rank_seconds or not record.median_rank_seconds:
        return None
    hosts = state.attempt(record.attempt).started.placement.hosts
    on = f" on {hosts[record.slowest_rank * len(hosts) // record.world_size]}" if hosts else ""
    return f"rank {record.slowest_rank}{on}", record.slowest_rank_seconds / record.median_rank_seconds


def curve_suite(state: RunState) -> str | None:
    """Return the suite of the newest recorded held-out loss, or None before the first."""
    return next((item.suite_sha256 for item in reversed(state.evaluations) if METRIC in item.metrics), None)


def _vocab_size(store: ObjectStore, state: RunState) -> int:
    """Return the size of the run's vocabulary, or 0 if its snapshot cannot be read."""
    if state.opened is None:
        return 0
    key = f"data/{state.opened.data_snapshot}/snapshot.json"
    try:
        return decode(store.read(key), _Vocabulary, where=key).vocab_size
    except StorageError:
        return 0
