"""The curve of a run as its log and its step records tell it, and the verdict that goes with an evaluation.

Owns what is read: the surviving line's step records and held-out losses up to a step, so that the verdict on a step is
the same whenever it is asked for. Refuses to let a verdict cost an evaluation: one that cannot be had is left out.
"""

from dataclasses import dataclass, replace

from storage.errors import StorageError
from storage.logs.run_entries import CurveVerdict, EvaluationRecorded
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.logs.step_curve import splice
from storage.logs.step_log import read_step_records
from storage.stores.document import decode
from storage.stores.object_store import ObjectStore
from tasks.policy.curve_statistics import Curve
from tasks.policy.curve_verdict import judge
from tasks.policy.promotion import METRIC


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    vocab_size: int


def with_verdict(log: RunLog, body: EvaluationRecorded) -> EvaluationRecorded:
    """Return the evaluation with the verdict on the curve up to its step; without one where none can be had.

    Only held-out losses belong to a curve: what other suites measure gets no verdict.
    """
    if METRIC not in body.metrics:
        return body
    try:
        return replace(body, verdict=verdict_at(log, body))
    except (StorageError, ValueError, LookupError, ArithmeticError):
        return body


def verdict_at(log: RunLog, body: EvaluationRecorded) -> CurveVerdict:
    """Return the verdict on the curve up to an evaluation that need not be on record yet; raises `StorageError`."""
    curve = read_curve(log, suite_sha256=body.suite_sha256, until_step=body.step)
    val = [point for point in curve.val if point[0] != body.step]
    return judge(replace(curve, val=(*val, (body.step, body.metrics[METRIC]))))


def read_curve(log: RunLog, *, suite_sha256: str | None, until_step: int | None = None) -> Curve:
    """Return the curve of a run that was read, up to `until_step` or as far as it goes; raises `StorageError`.

    Its held-out losses are those of one suite; of no suite there are none.
    """
    state, last = log.state, until_step if until_step is not None else float("inf")
    points = splice(read_step_records(log.store, log.prefix), state.attempts)
    lines = [point.record for point in points if point.record.step <= last]
    return Curve(
        steps=[line.step for line in lines],
        train_losses=[line.train_loss for line in lines],
        grad_norms=[line.grad_norm for line in lines],
        learning_rates=[line.lr for line in lines],
        val=tuple(point for point in val_losses(state, suite_sha256) if point[0] <= last),
        vocab_size=_vocab_size(log.store, state),
        total_steps=state.opened.total_steps if state.opened else 0,
    )


def val_losses(state: RunState, suite_sha256: str | None) -> tuple[tuple[int, float], ...]:
    """Return step and newest held-out loss of every checkpoint of the surviving line that the suite measured."""
    losses = {
        item.manifest_sha256: item.metrics[METRIC]
        for item in state.evaluations
        if item.suite_sha256 == suite_sha256 and METRIC in item.metrics
    }
    line = (record.committed for record in state.surviving_line)
    return tuple((item.step, losses[item.manifest_sha256]) for item in line if item.manifest_sha256 in losses)


def curve_suite(state: RunState) -> str | None:
    """Return the suite of the newest held-out loss on record, None before the first."""
    return next((item.suite_sha256 for item in reversed(state.evaluations) if METRIC in item.metrics), None)


def _vocab_size(store: ObjectStore, state: RunState) -> int:
    """Return the size of the run's vocabulary, 0 where its snapshot cannot be read."""
    if state.opened is None:
        return 0
    key = f"data/{state.opened.data_snapshot}/snapshot.json"
    try:
        return decode(store.read(key), _Vocabulary, where=key).vocab_size
    except StorageError:
        return 0
