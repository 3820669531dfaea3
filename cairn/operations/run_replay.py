"""Recomputes committed segments of a run from the store alone and compares the digests of the states they end with.

Writes nothing into the store: no entry, no lease, no cache. A segment that differs is computed twice.
"""

import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cairn.operations.replay_plan import Segment, committed_segments, compare_steps, find_obstacle
from cairn.operations.replay_result import Replay, ReplayedSegment, Verdict
from cairn.operations.segment_replay import Recomputed, SegmentReplayer
from storage.errors import IntegrityError, SnapshotDamaged
from storage.logs.run_log import RunLog
from storage.logs.step_log import read_attempt_records
from storage.stores.document import project
from tasks.configuration.stored_configuration import parse_stored_configuration
from tasks.machine.placement import library_versions


def replay_run(
    log: RunLog,
    choose: Callable[[Sequence[Segment]], Sequence[Segment]],
    on_segment: Callable[[ReplayedSegment], None],
) -> Replay:
    """Recompute the committed segments that `choose` returns, in order; `SnapshotDamaged` where their data is."""
    segments = committed_segments(log.state)
    with (
        tempfile.TemporaryDirectory(prefix="cairn-replay-") as folder,
        closing(SegmentReplayer(log, Path(folder))) as replayer,
    ):
        found = _Comparisons(log, replayer, choose(segments)).run(on_segment)
    verdicts = {str(verdict): sum(item.verdict is verdict for item in found) for verdict in Verdict}
    return Replay(version=1, run_id=log.run_id, committed=len(segments), verdicts=verdicts, segments=tuple(found))


class _Comparisons:
    """Compares segment after segment; keeps a state while a later segment needs it and the store lacks it."""

    def __init__(self, log: RunLog, replayer: SegmentReplayer, segments: Sequence[Segment]) -> None:
        self._log, self._replayer, self._segments = log, replayer, segments
        needing = ((number, item) for number, item in enumerate(segments) if item.unloadable)
        self._needed_until = {item.start.prefix: number for number, item in needing if item.start}
        self._reached: dict[str, Mapping[str, Tensor]] = {}

    def run(self, on_segment: Callable[[ReplayedSegment], None]) -> list[ReplayedSegment]:
        found = list[ReplayedSegment]()
        for number, segment in enumerate(self._segments):
            found.append(self._replay(segment))
            on_segment(found[-1])
            still = {prefix for prefix, until in self._needed_until.items() if until > number}
            self._reached = {prefix: tensors for prefix, tensors in self._reached.items() if prefix in still}
        return found

    def _replay(self, segment: Segment) -> ReplayedSegment:
        row, began = _describe(segment), time.monotonic()
        config, here = parse_stored_configuration(segment.started.config), library_versions()["torch"]
        why = find_obstacle(segment.started, config, torch_version=here, has_cuda=torch.cuda.is_available())
        carried = self._reached.get(segment.start.prefix) if segment.start and segment.unloadable else None
        if segment.unloadable and carried is None:
            why = why or f"{segment.unloadable}, and no segment replayed before ends there"
        if why:
            return replace(row, why=why)
        try:
            first = self._replayer.recompute(segment, carried)
            if first.state_sha256 == segment.end.state_sha256:
                if segment.end.prefix in self._needed_until:
                    self._reached[segment.end.prefix] = first.tensors
                found = replace(row, verdict=Verdict.EQUAL, computed_sha256=first.state_sha256)
            else:
                found = self._explain(row, segment, first, self._replayer.recompute(segment, carried))
        except SnapshotDamaged:
            raise
        except IntegrityError as error:
            return self._explain_unreadable(row, segment, error)
        return replace(found, seconds=round(time.monotonic() - began, 3))

    def _explain_unreadable(self, row: ReplayedSegment, segment: Segment, error: IntegrityError) -> ReplayedSegment:
        record = self._log.refresh().find(segment.start.prefix) if segment.start else None
        if record is not None and not record.is_committed:  # by retention, while others were replayed
            return replace(row, why=f"its start, the checkpoint of step {segment.from_step}, is {record.state} by now")
        why = f"{error}; `cairn verify {self._log.run_id}` reads everything"
        return replace(row, verdict=Verdict.UNREADABLE, why=why)

    def _explain(
        self, row: ReplayedSegment, segment: Segment, first: Recomputed, second: Recomputed
    ) -> ReplayedSegment:
        if first.state_sha256 != second.state_sha256:
            why = "two recomputations here differ from each other: this machine may be what is sick, ask another one"
            return replace(row, verdict=Verdict.UNDECIDED, computed_sha256=second.state_sha256, why=why)
        records = read_attempt_records(self._log.store, self._log.prefix, segment.started.attempt)
        last, different = compare_steps(records, second.steps, from_step=segment.from_step)
        what = f"the record of step {different} differs first" if different else "every step's record agrees"
        stopped = f"; the recomputation ends with: {second.problem}" if second.problem else ""
        here = socket.gethostname()
        where = (
            ""
            if row.host == here
            else f"; trained on {row.host}, this is {here}: bits differ between kinds of machines"
        )
        return replace(
            row,
            verdict=Verdict.DIFFERENT,
            computed_sha256=second.state_sha256,
            last_equal_step=last,
            first_different_step=different,
            why=f"{what}: what changed the run came after the record of step {last}{stopped}{where}",
        )


def _describe(segment: Segment) -> ReplayedSegment:
    return project(
        segment.started.placement,
        ReplayedSegment,
        from_step=segment.from_step,
        to_step=segment.end.step,
        attempt=segment.started.attempt,
        expected_sha256=segment.end.state_sha256,
    )
