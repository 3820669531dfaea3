"""Reads a run's loss curve for a verdict, each step record once however many verdicts there are. Imports no torch."""

from contextlib import suppress
from dataclasses import dataclass, replace

from cairn.storage.errors import StorageError
from cairn.storage.logs import run_state, step_log
from cairn.storage.stores.codec import decode, stored_value
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.policy.curve_statistics import Curve, CurveFold

_SIZES = dict[str, int]()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    vocab_size: int


class CurveReader:
    """Reads the curve of one run, on from the last read; one thread at a time."""

    def __init__(self, store: ObjectStore, run_prefix: str) -> None:
        """Read nothing yet."""
        self._store, self._prefix = store, run_prefix
        self._steps, self._fold = step_log.SurvivingSteps(store, run_prefix), CurveFold()

    def read(self, state: run_state.RunState, *, suite_sha256: str | None, until_step: float = float("inf")) -> Curve:
        """Return the curve up to `until_step`, with a suite's losses or none; raises `StorageError`.

        It begins again where it has read further than that, or steps were trained again.
        """
        if self._steps.last_step > until_step or not self._steps.is_current(state.attempts):
            self._steps, self._fold = step_log.SurvivingSteps(self._store, self._prefix), CurveFold()
        for record in self._steps.read(state.attempts, until_step):
            self._fold.add(record, _slowest_rank(state, record))
        measured = state.surviving_evaluations(suite_sha256, METRIC)
        opened, config = state.opened, state.opened.config if state.opened else {}
        newest = state.attempts[-1].started.config if state.attempts else {}
        return replace(
            self._fold.curve(),
            val=tuple((item.step, item.metrics[METRIC]) for item in measured if item.step <= until_step),
            vocab_size=vocab_size_of(self._store, state),
            total_steps=opened.total_steps if opened else 0,
            grad_clip=stored_value(config, "training", "grad_clip", float) or 0.0,
            min_lr=stored_value(config, "training", "min_lr", float),
            threads=stored_value(config, "training", "threads", int) or 0,
            patience=stored_value(newest, "early_stop", "patience", int) or 0,
            overfit_ratio=stored_value(newest, "early_stop", "overfit_ratio", float) or 0.0,
        )


def vocab_size_of(store: ObjectStore, state: run_state.RunState) -> int:
    """Return the size of a run's vocabulary, read once a process; 0 where its snapshot cannot be read."""
    key = f"data/{state.opened.data_snapshot if state.opened else ''}/snapshot.json"
    known = f"{store.url}/{key}"  # a snapshot never changes
    if state.opened and known not in _SIZES:
        with suppress(StorageError):
            _SIZES[known] = decode(store.read(key), _Vocabulary, where=key).vocab_size  # without pyarrow, which is slow
    return _SIZES.get(known, 0)


def _slowest_rank(state: run_state.RunState, record: step_log.StepRecord) -> tuple[str, float] | None:
    """Return the rank that the others waited for, with its host where that is known, and how much longer it worked."""
    if record.slowest_rank is None or not record.slowest_rank_seconds or not record.median_rank_seconds:
        return None
    hosts = state.attempt(record.attempt).started.placement.hosts
    on = f" on {hosts[record.slowest_rank * len(hosts) // record.world_size]}" if hosts else ""
    return f"rank {record.slowest_rank}{on}", record.slowest_rank_seconds / record.median_rank_seconds


def curve_suite(state: run_state.RunState) -> str | None:
    """Return the suite of the newest recorded held-out loss, or None before the first."""
    return next((item.suite_sha256 for item in reversed(state.evaluations) if METRIC in item.metrics), None)
