"""A run that a live page follows: its report and curves, of which only what is new is read again."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from reports.pages.run_report import RunReport, gather_report
from reports.plots.run_curves import RunCurves
from reports.queries.run_lookup import find_run
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.logs.step_log import StepRecord, StepTail, read_step_records
from storage.stores.object_store import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as it was found: its report, the curves of its plot, and its log."""

    report: RunReport
    curves: RunCurves
    log: RunLog


class FollowedRun:
    """One run of a store; thread-safe. Nothing is read before `look`."""

    def __init__(self, store: ObjectStore, run_id: str, environment: Mapping[str, str]) -> None:
        """Raise `RunNotFound`; prices come from the environment where it names them."""
        self._log = find_run(store, run_id)
        self._environment = environment
        self._tail = StepTail(store, self._log.prefix)
        self._lines: list[StepRecord] | None = None
        self._view: RunView | None = None
        self._lock = Lock()

    def look(self) -> RunView:
        """Return the run as it is now; of one without an open attempt nothing but its log is asked again."""
        with self._lock:
            state, known = self._log.refresh(), self._view
            if known is not None and state.open_attempt is None and known.report.newest_seq == self._log.seq:
                return known
            lines = self._read_lines(state)
            report, curves = gather_report(self._log, self._environment, lines=lines)
            self._view = RunView(report=report, curves=curves, log=self._log)
            return self._view

    def _read_lines(self, state: RunState) -> list[StepRecord]:
        """Return all step records; the newest two attempts may still grow and are read on from where it stopped."""
        growing = [record.started.attempt for record in state.attempts[-2:]]
        if self._lines is None:
            before = read_step_records(self._log.store, self._log.prefix) if len(state.attempts) > 2 else []
            self._lines = [record for record in before if record.attempt not in growing]
        for attempt in growing:
            while fresh := self._tail.read(attempt):
                self._lines += fresh
        return self._lines
