"""The facts of one attempt for a reader who knows nothing of its run: from the run log, step records and heartbeat."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from cairn.reports.errors import RunNotFound
from cairn.reports.queries.evaluations import EvaluationSummary, list_evaluations
from cairn.reports.queries.receipts import Receipt, failed_host, make_receipt
from cairn.reports.queries.run_lookup import read_beat, read_checkpoints
from cairn.reports.queries.run_status import RunStatus, make_status
from cairn.storage.errors import StorageError
from cairn.storage.logs.log_entry import Entry, Writer, utc_now
from cairn.storage.logs.run_entries import AttemptEnded, CurveVerdict, DataQuarantined, Placement
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import AttemptRecord, CheckpointRecord, RunState
from cairn.storage.logs.step_log import Heartbeat, heartbeat_key, read_last_record
from cairn.storage.stores.document import flatten, stored_value
from cairn.tasks.policy.termination import TerminationReason

_ATTEMPTS_OF_HOSTS = 200
"""So many of the newest attempts say which machines failed often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """A key that differs from the previous attempt's configuration; None where one of the two lacks it."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where the attempt ran; `same_machine` compares host and boot with the previous attempt, None for the first.

    `failed_hosts` counts the attempts of the run that were lost or hung with a machine, for those with which more than
    one was.
    """

    placement: Placement
    same_machine: bool | None
    failed_hosts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """A checkpoint newer than the one that was resumed, and why it was skipped: still writing, or quarantined."""

    step: int
    attempt: int
    state: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The checkpoint that the attempt started from; step 0 without `prefix` is the beginning of the run."""

    step: int
    from_attempt: int | None
    committed_at: datetime | None
    prefix: str | None
    manifest_sha256: str | None
    reached_before: int | None
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Commits, the last recorded step with its train loss in nats per token, and the steps done but not committed."""

    committed: tuple[CheckpointRecord, ...]
    recorded_step: int | None
    train_loss: float | None
    seconds: float
    lost_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How the end was recorded: the evidence; `by` is the writer, None where the attempt's own parent wrote it."""

    evidence: Mapping[str, Any]
    by: Writer | None
    by_same_host: bool
    lease_seconds: float | None
    changed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """An attempt that has not ended: whether its process is known to be gone, its heartbeat's age and symptom."""

    is_gone: bool
    heartbeat_age_seconds: float | None
    symptom: str
    lease_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Successor:
    """The next attempt: its receipt, how long after the end of this one it started, and what was different."""

    receipt: Receipt
    seconds_later: float
    changed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ineffective:
    """An entry of this attempt that the fold refused, and why."""

    seq: int
    kind: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PostMortem:
    """One attempt and its run; also the JSON of `cairn explain`.

    `status` is the present one. `config_changes` are against the previous attempt, `changed` is what
    the last decision made different, `faults` were to be injected (CAIRN_FAULTS), `quarantines` and `origin` are
    those at its start. Of a run without an attempt only the run's facts are known, and `receipt` is None.
    """

    status: RunStatus
    model_family: str
    run_attempts: int
    opened_at: datetime | None
    receipt: Receipt | None = None
    where: Where | None = None
    origin: Origin | None = None
    progress: Progress | None = None
    end: End | None = None
    open: OpenAttempt | None = None
    successor: Successor | None = None
    verdict: CurveVerdict | None = None
    changed: str = ""
    faults: str = ""
    config_changes: tuple[ConfigChange, ...] = ()
    quarantines: tuple[DataQuarantined, ...] = ()
    evaluations: tuple[EvaluationSummary, ...] = ()
    refused: tuple[Ineffective, ...] = ()
    stderr_tail: tuple[str, ...] = ()


def gather_post_mortem(log: RunLog, number: int | None = None, *, now: datetime | None = None) -> PostMortem:
    """Return the facts of attempt `number` or `RunNotFound`; without one, the newest that did not complete."""
    state, status, attempts = log.state, make_status(log, beat := read_beat(log)), log.state.attempts
    if number is not None and not 1 <= number <= len(attempts):
        there = f"attempts 1 to {len(attempts)}" if len(attempts) > 1 else "only attempt 1"
        raise RunNotFound(f"run {log.run_id} has no attempt {number}; it has {there if attempts else 'none yet'}")
    failed = (item for item in reversed(attempts) if item.ended and item.ended.reason != TerminationReason.COMPLETED)
    record = attempts[number - 1] if number else next(failed, attempts[-1] if attempts else None)
    return PostMortem(
        status=status,
        model_family=state.opened.model_family if state.opened else "",
        run_attempts=len(attempts),
        opened_at=state.opened_at,
        **(_of_attempt(log, record, beat, now or utc_now()) if record else {}),
    )


def _of_attempt(log: RunLog, record: AttemptRecord, beat: Heartbeat | None, now: datetime) -> dict[str, Any]:
    state, number, ended = log.state, record.started.attempt, record.ended
    before = state.attempts[number - 2] if number > 1 else None
    after = state.attempts[number] if number < len(state.attempts) else None
    has_vanished = ended is not None and ended.evidence.get("exit_code") is None  # another process wrote its end
    entries = log.read_entries() if has_vanished or any(item.attempt == number for item in state.refused) else ()
    mine = {item.committed.manifest_sha256 for item in state.checkpoints if item.committed.attempt == number}
    evaluations = tuple(item for item in list_evaluations(state) if item.manifest_sha256 in mine)
    receipt, successor = make_receipt(log.run_id, state, record, before, beat), None
    if after:
        later = after.started_at - (record.ended_at or after.started_at)
        successor = Successor(
            receipt=make_receipt(log.run_id, state, after, record, beat),
            seconds_later=max(later.total_seconds(), 0.0),
            changed=after.started.changed,
        )
    return {
        "receipt": receipt,
        "where": _where(state, record, before),
        "origin": _origin(log, record, before),
        "progress": _progress(log, record, receipt, now),
        "end": _end(record, ended, after, entries) if ended else None,
        "open": None if ended else _open(log, record, beat, now),
        "successor": successor,
        "verdict": next((item.verdict for item in reversed(evaluations) if item.verdict), None),
        "changed": record.started.changed,
        "faults": record.started.faults,
        "config_changes": tuple(_config_changes(before, record)),
        "quarantines": tuple(item for item in state.quarantines if item.attempt < number),
        "evaluations": evaluations,
        "refused": tuple(_refused(state, entries, number)),
        "stderr_tail": ended.stderr_tail if ended else (),
    }


def _where(state: RunState, record: AttemptRecord, before: AttemptRecord | None) -> Where:
    here, earlier = record.started.placement, before.started.placement if before else None
    newest = islice(reversed(state.attempts), _ATTEMPTS_OF_HOSTS)
    failed = Counter(host for item in newest if (host := failed_host(item.started.placement, item.ended)))
    return Where(
        placement=here,
        same_machine=(earlier.host, earlier.boot_id) == (here.host, here.boot_id) if earlier else None,
        failed_hosts={host: count for host, count in failed.most_common() if count > 1},
    )


def _origin(log: RunLog, record: AttemptRecord, before: AttemptRecord | None) -> Origin:
    resumed = record.started.resumed_from
    found = log.state.find(resumed.prefix) if resumed else None
    first, since = (resumed.step, resumed.attempt) if resumed else (0, 1)
    details = {item.committed.prefix: item.detail for item in log.state.checkpoints}
    return Origin(
        step=record.started.first_step,
        from_attempt=resumed.attempt if resumed else None,
        committed_at=found.committed_at if found else None,
        prefix=resumed.prefix if resumed else None,
        manifest_sha256=resumed.manifest_sha256 if resumed else None,
        reached_before=before.ended.last_step if before and before.ended else None,
        passed_over=tuple(  # checkpoints beyond the resume point that existed before: unreadable or never committed
            PassedOver(
                step=item.step,
                attempt=item.attempt,
                state=item.state,  # of the detail, the objects stand first, however long the run's name is
                detail=details.get(item.prefix, "").replace(f"{item.prefix}/", ""),
            )
            for item in read_checkpoints(log)
            if item.step > first and since <= item.attempt < record.started.attempt
        ),
    )


def _progress(log: RunLog, record: AttemptRecord, receipt: Receipt, now: datetime) -> Progress:
    try:
        line = read_last_record(log.store, log.prefix, receipt.attempt)
    except StorageError:
        line = None
    kept = receipt.first_step if receipt.last_committed_step is None else receipt.last_committed_step
    last_step = max(receipt.last_step, kept, line.step if line else 0)
    return Progress(
        committed=tuple(item for item in log.state.checkpoints if item.committed.attempt == receipt.attempt),
        recorded_step=line.step if line else None,
        train_loss=line.train_loss if line else None,
        seconds=max(((record.ended_at or now) - record.started_at).total_seconds(), 0.0),
        lost_steps=max(last_step - kept, 0) if record.ended else 0,
    )


def _end(record: AttemptRecord, ended: AttemptEnded, after: AttemptRecord | None, entries: tuple[Entry, ...]) -> End:
    number = record.started.attempt
    writers = (item.writer for item in entries if item.kind == "attempt-ended" and item.body.attempt == number)
    writer = next(writers, None)
    foreign = writer if writer and writer.attempt != number else None
    return End(
        evidence=ended.evidence,
        by=foreign,
        by_same_host=foreign is not None and foreign.host == record.started.placement.host,
        lease_seconds=stored_value((after or record).started.config, "lease", "seconds", float),
        changed=ended.decision.changed,
    )


def _open(log: RunLog, record: AttemptRecord, beat: Heartbeat | None, now: datetime) -> OpenAttempt:
    from cairn.tasks.machine.placement import is_known_dead  # only an open attempt pays for it

    path = log.store.local_path(heartbeat_key(log.prefix, record.started.attempt))
    is_here = path is not None and path.exists()  # a local folder has this machine's clock
    return OpenAttempt(
        is_gone=is_known_dead(record.started.placement),
        symptom=beat.symptom if beat else "",
        heartbeat_age_seconds=max(now.timestamp() - path.stat().st_mtime, 0.0) if path and is_here else None,
        lease_seconds=stored_value(record.started.config, "lease", "seconds", float),
    )


def _config_changes(before: AttemptRecord | None, record: AttemptRecord) -> Iterator[ConfigChange]:
    if before is None:
        return
    old, new = flatten(before.started.config), flatten(record.started.config)
    for name in ("code_version", "micro_batch", "activation_checkpointing"):
        old[name], new[name] = getattr(before.started, name), getattr(record.started, name)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield ConfigChange(key=key, before=old.get(key), after=new.get(key))


def _refused(state: RunState, entries: tuple[Entry, ...], number: int) -> Iterator[Ineffective]:
    started = {item.body.attempt: item.seq for item in reversed(entries) if item.kind == "attempt-started"}
    ends = [item.seq for item in entries if item.kind == "attempt-ended" and item.body.attempt == number]
    for item in state.refused:
        if item.attempt != number:
            continue
        newer = [(seq, attempt) for attempt, seq in started.items() if attempt > number and seq < item.seq]
        if newer:
            why = f"attempt {min(newer)[1]} had taken over the run at entry {min(newer)[0]}"
        elif ends and ends[0] < item.seq:
            why = f"this attempt had already been ended at entry {ends[0]}"
        else:
            why = "what it says contradicts the entries before it"
        yield Ineffective(seq=item.seq, kind=item.kind, why=why)
