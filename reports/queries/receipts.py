"""Receipts: one record for each attempt; JSON, SQL rows and tables are made from it. Grouped by how attempts ended."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from cairn.storage.logs import log_entry, run_entries, run_log, run_state, step_log
from cairn.tasks.machine.arithmetic import arithmetic_before, describe_move
from cairn.tasks.policy.termination import TerminationReason

OPEN = "open"
SECONDS = ("gpu_seconds", "useful_gpu_seconds", "wasted_gpu_seconds")
INJECTED = " (injected)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The work of an attempt, why it ended and its cost; in an open attempt the termination reason is None.

    `first_step` is the step the attempt started from: 0, or the step of the checkpoint it resumed. `waiting_seconds`
    passed before it started, since the opening or the last sign of life before it, `gathering_seconds` of them until
    the other machines had come; `starting_seconds` before it could train. `peak` is what its MFU is a share of,
    `arithmetic_moved` says that the state it began with was computed by another arithmetic, empty if not; `injected`
    are the faults that were injected into it, `failed_host` the machine that was lost or hung, if it is known.
    """

    run_id: str
    attempt: int
    started_at: datetime
    ended_at: datetime | None
    termination_reason: str | None
    detail: str | None
    fingerprint: str | None
    config_sha256: str
    data_snapshot: str
    initial_weights_sha256: str | None
    code_version: str
    versions: Mapping[str, str]
    placement: run_entries.Placement
    flow_run_id: str | None
    resumed_from_step: int | None
    resumed_from_manifest: str | None
    first_step: int
    last_step: int
    last_committed_step: int | None
    tokens: int
    gpu_seconds: float
    useful_gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    waiting_seconds: float
    gathering_seconds: float
    starting_seconds: float | None
    peak: log_entry.DevicePeak | None
    arithmetic: log_entry.Arithmetic | None
    arithmetic_moved: str
    injected: tuple[str, ...]
    failed_host: str | None
    micro_batch: int
    changed: str
    decision: run_entries.Decision | None


def read_receipts(log: run_log.RunLog, beat: step_log.Heartbeat | None) -> tuple[Receipt, ...]:
    """Return the receipts of a run that was read, oldest first, with the heartbeat of its open attempt."""
    return tuple(make_receipt(log.run_id, log.state, record, beat) for record in log.state.attempts)


def make_receipt(
    run_id: str, state: run_state.RunState, record: run_state.AttemptRecord, beat: step_log.Heartbeat | None = None
) -> Receipt:
    """Return the receipt of one attempt; of an open one with the progress of its `beat`."""
    started, resumed, ended, since = record.started, record.started.resumed_from, record.ended, state.opened_at
    before = state.attempt(started.attempt - 1) if started.attempt > 1 else None
    if before is not None and before.ended is not None and before.ended_at is not None:
        since = min(max(before.ended.last_seen_at or before.ended_at, before.started_at), before.ended_at)
    progress = ended or beat
    return Receipt(
        run_id=run_id,
        attempt=started.attempt,
        flow_run_id=record.flow_run_id,
        started_at=record.started_at,
        ended_at=record.ended_at,
        termination_reason=ended.reason if ended else None,
        detail=ended.detail if ended else None,
        fingerprint=ended.fingerprint if ended else None,
        config_sha256=started.config_sha256,
        data_snapshot=state.opened.data_snapshot if state.opened else "",
        initial_weights_sha256=state.opened.initial_weights_sha256 if state.opened else None,
        code_version=started.code_version,
        versions=started.versions,
        placement=started.placement,
        resumed_from_step=resumed.step if resumed else None,
        resumed_from_manifest=resumed.manifest_sha256 if resumed else None,
        first_step=started.first_step,
        last_step=max(record.last_known_step, beat.step if beat and not ended else 0),
        last_committed_step=record.last_committed_step,
        tokens=progress.tokens if progress else 0,
        gpu_seconds=progress.gpu_seconds if progress else 0.0,
        useful_gpu_seconds=ended.useful_gpu_seconds if ended else None,
        wasted_gpu_seconds=ended.wasted_gpu_seconds if ended else None,
        waiting_seconds=max((record.started_at - since).total_seconds(), 0.0) if since else 0.0,
        gathering_seconds=started.gathering_seconds,
        starting_seconds=progress.starting_seconds if progress else None,
        peak=progress.peak if progress else None,
        arithmetic=progress.arithmetic if progress else None,
        arithmetic_moved=describe_move(arithmetic_before(state, resumed), ended.arithmetic) if ended else "",
        injected=ended.injected if ended else (),
        failed_host=failed_host(started.placement, ended),
        micro_batch=started.micro_batch,
        changed=started.changed,
        decision=ended.decision if ended else None,
    )


def failed_host(placement: run_entries.Placement, ended: run_entries.AttemptEnded | None) -> str | None:
    """Return the machine that an attempt was lost with: another one that was seen to fail, else that of the command."""
    if ended is None or ended.injected or ended.reason not in (TerminationReason.LOST, TerminationReason.HUNG):
        return None
    if ended.reason == TerminationReason.HUNG and placement.nodes > 1:
        return None
    return str(ended.evidence.get("lost_host") or placement.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptSpan:
    """Consecutive attempts that ended for the same reason, all injected or none; `open` for one that has not ended."""

    reason: str
    attempts: tuple[Receipt, ...]

    @property
    def is_many(self) -> bool:
        """Whether these are several."""
        return len(self.attempts) > 1

    @property
    def lasted_seconds(self) -> float | None:
        """The time from the first start to the last end; None before it."""
        return (self.last.ended_at - self.first.started_at).total_seconds() if self.last.ended_at else None

    @property
    def first(self) -> Receipt:
        """The oldest attempt of the span."""
        return self.attempts[0]

    @property
    def last(self) -> Receipt:
        """The newest attempt of the span."""
        return self.attempts[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonRow:
    """All attempts that ended for one reason: how many, the newest of them, what they cost, the newest detail."""

    reason: str
    attempts: int
    gpu_seconds: float
    wasted_gpu_seconds: float
    last_attempt: int
    last_at: datetime | None
    last_detail: str


def group_receipts(receipts: Iterable[Receipt]) -> tuple[ReceiptSpan, ...]:
    """Return the attempts in order, neighbours with the same reason as one span, injected faults apart."""
    grouped = groupby(receipts, key=lambda receipt: (receipt.termination_reason or OPEN, bool(receipt.injected)))
    return tuple(ReceiptSpan(reason=reason, attempts=tuple(group)) for (reason, _), group in grouped)


def count_reasons(receipts: Sequence[Receipt]) -> tuple[ReasonRow, ...]:
    """Return one row for each reason, the rarest first; of equally rare ones the newest first."""
    by_reason: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        injected = INJECTED if receipt.injected else ""
        by_reason.setdefault(f"{receipt.termination_reason or OPEN}{injected}", []).append(receipt)
    rows = [
        ReasonRow(
            reason=reason,
            attempts=len(group),
            gpu_seconds=sum(receipt.gpu_seconds for receipt in group),
            wasted_gpu_seconds=sum(receipt.wasted_gpu_seconds or 0.0 for receipt in group),
            last_attempt=group[-1].attempt,
            last_at=group[-1].ended_at,
            last_detail=group[-1].detail or "",
        )
        for reason, group in by_reason.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.attempts, -row.last_attempt)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRow:
    """A machine by its newest attempt's placement, what the MFU there is a share of, code version and attempts."""

    placement: run_entries.Placement
    peak: log_entry.DevicePeak | None
    code_version: str
    attempts: int

    @property
    def device(self) -> str:
        """The device and its name."""
        name = self.placement.device_name
        return f"{self.placement.device} ({name})" if name else self.placement.device


def list_machines(attempts: Sequence[Receipt]) -> tuple[MachineRow, ...]:
    """Return the machines that attempts ran on, in the order of their first attempts."""
    alike: dict[tuple[object, ...], list[Receipt]] = {}
    for receipt in attempts:
        place = replace(receipt.placement, pid=0, start_ticks=0, boot_id="", pid_namespace="")
        alike.setdefault((place, receipt.code_version), []).append(receipt)
    return tuple(
        MachineRow(
            placement=group[-1].placement,
            peak=next((item.peak for item in reversed(group) if item.peak), None),
            code_version=group[-1].code_version,
            attempts=len(group),
        )
        for group in alike.values()
    )
