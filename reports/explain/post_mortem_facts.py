"""Gathers the facts of a post-mortem from the run log, the attempt's step records and its heartbeat."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from reports.errors import RunNotFound
from reports.explain.post_mortem import (
    ConfigChange,
    End,
    Ineffective,
    OpenAttempt,
    Origin,
    PassedOver,
    PostMortem,
    Progress,
    Successor,
    Where,
)
from reports.queries.checkpoints import read_checkpoints
from reports.queries.evaluations import list_evaluations
from reports.queries.receipts import Receipt, failed_host, read_receipt
from reports.queries.run_status import read_status
from storage.errors import StorageError
from storage.logs.heartbeat import heartbeat_key, read_heartbeat
from storage.logs.log_entry import Entry, utc_now
from storage.logs.run_log import RunLog
from storage.logs.run_state import AttemptRecord, RunState
from storage.logs.step_log import StepRecord, read_last_record
from storage.stores.document import project
from tasks.configuration.flat_document import flatten, stored_value
from tasks.policy.termination import TerminationReason

_ATTEMPTS_OF_HOSTS = 200
"""So many of the newest attempts say which machines failed often."""


def gather_post_mortem(log: RunLog, number: int | None = None, *, now: datetime | None = None) -> PostMortem:
    """Return the facts of attempt `number` or `RunNotFound`; without one, the newest that did not complete."""
    state, status = log.state, read_status(log)
    facts: dict[str, Any] = {
        "run_id": log.run_id,
        "model_family": state.opened.model_family if state.opened else "",
        "run_state": status.state,
        "run_attempts": len(state.attempts),
        "total_steps": status.total_steps,
        "opened_at": state.opened_at,
        "next": status.next,
        "budgets": status.budgets,
    }
    record = _chosen(log, number)
    return PostMortem(**facts) if record is None else PostMortem(**facts, **_of_attempt(log, record, now or utc_now()))


def _chosen(log: RunLog, number: int | None) -> AttemptRecord | None:
    attempts = log.state.attempts
    if number is None:
        failed = (
            item for item in reversed(attempts) if item.ended and item.ended.reason != TerminationReason.COMPLETED
        )
        return next(failed, attempts[-1] if attempts else None)
    if 1 <= number <= len(attempts):
        return attempts[number - 1]
    there = f"attempts 1 to {len(attempts)}" if len(attempts) > 1 else "only attempt 1"
    raise RunNotFound(f"run {log.run_id} has no attempt {number}; it has {there if attempts else 'none yet'}")


def _of_attempt(log: RunLog, record: AttemptRecord, now: datetime) -> dict[str, Any]:
    state, number = log.state, record.started.attempt
    before = state.attempts[number - 2] if number > 1 else None
    receipt = read_receipt(log, record, before)
    after = state.attempts[receipt.attempt] if receipt.attempt < len(state.attempts) else None
    entries = log.read_entries() if _needs_entries(record, state) else ()
    mine = {item.committed.manifest_sha256 for item in state.checkpoints if item.committed.attempt == receipt.attempt}
    evaluations = tuple(item for item in list_evaluations(state) if item.manifest_sha256 in mine)
    return {
        "receipt": receipt,
        "where": _where(state, record, before),
        "origin": _origin(log, record, before),
        "progress": _progress(log, record, receipt, now),
        "end": _end(record, after, entries) if record.ended else None,
        "open": None if record.ended else _open(log, record, now),
        "successor": _successor(log, record, after) if after else None,
        "verdict": next((item.verdict for item in reversed(evaluations) if item.verdict), None),
        "changed": record.started.changed,
        "faults": record.started.faults,
        "config_changes": tuple(_config_changes(before, record)),
        "quarantines": tuple(item for item in state.quarantines if item.attempt < number),
        "evaluations": evaluations,
        "refused": tuple(_refused(state, entries, receipt.attempt)),
        "stderr_tail": record.ended.stderr_tail if record.ended else (),
    }


def _needs_entries(record: AttemptRecord, state: RunState) -> bool:
    """Whether the whole log is needed: for the writer of a vanished attempt's end, or for refused entries."""
    vanished = record.ended is not None and record.ended.evidence.get("exit_code") is None
    return vanished or any(item.attempt == record.started.attempt for item in state.refused)


def _where(state: RunState, record: AttemptRecord, before: AttemptRecord | None) -> Where:
    placement = record.started.placement
    earlier = before.started.placement if before else None
    here = (placement.host, placement.boot_id)
    newest = islice(reversed(state.attempts), _ATTEMPTS_OF_HOSTS)
    failed = Counter(host for item in newest if (host := failed_host(item.started.placement, item.ended)))
    return project(
        placement,
        Where,
        same_machine=(earlier.host, earlier.boot_id) == here if earlier else None,
        failed_hosts={host: count for host, count in failed.most_common() if count > 1},
    )


def _origin(log: RunLog, record: AttemptRecord, before: AttemptRecord | None) -> Origin:
    resumed = record.started.resumed_from
    found = log.state.find(resumed.prefix) if resumed else None
    return Origin(
        step=record.started.first_step,
        from_attempt=resumed.attempt if resumed else None,
        committed_at=found.committed_at if found else None,
        prefix=resumed.prefix if resumed else None,
        manifest_sha256=resumed.manifest_sha256 if resumed else None,
        reached_before=before.ended.last_step if before and before.ended else None,
        passed_over=tuple(_passed_over(log, record)),
    )


def _passed_over(log: RunLog, record: AttemptRecord) -> Iterator[PassedOver]:
    """Yield the checkpoints beyond the resume point that existed before: unreadable ones and ones never committed."""
    resumed, number = record.started.resumed_from, record.started.attempt
    first, since = (resumed.step, resumed.attempt) if resumed else (0, 1)
    states = {item.committed.prefix: item for item in log.state.checkpoints}
    for summary in read_checkpoints(log):
        if summary.step > first and since <= summary.attempt < number:
            detail = states[summary.prefix].detail if summary.prefix in states else ""
            objects = detail.replace(f"{summary.prefix}/", "")  # they stand first, however long the run's name is
            yield PassedOver(step=summary.step, attempt=summary.attempt, state=summary.state, detail=objects)


def _progress(log: RunLog, record: AttemptRecord, receipt: Receipt, now: datetime) -> Progress:
    line = _last_line(log, receipt.attempt)
    committed = tuple(item for item in log.state.checkpoints if item.committed.attempt == receipt.attempt)
    kept = receipt.first_step if receipt.last_committed_step is None else receipt.last_committed_step
    last_step = max(receipt.last_step, kept, line.step if line else 0)
    return Progress(
        committed=committed,
        recorded_step=line.step if line else None,
        train_loss=line.train_loss if line else None,
        seconds=max(((record.ended_at or now) - record.started_at).total_seconds(), 0.0),
        lost_steps=max(last_step - kept, 0) if record.ended else 0,
    )


def _last_line(log: RunLog, attempt: int) -> StepRecord | None:
    """Return the attempt's newest whole step record, None where the records cannot be read."""
    try:
        return read_last_record(log.store, log.prefix, attempt)
    except StorageError:
        return None


def _end(record: AttemptRecord, after: AttemptRecord | None, entries: tuple[Entry, ...]) -> End:
    ended, number = record.ended, record.started.attempt
    assert ended is not None
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


def _open(log: RunLog, record: AttemptRecord, now: datetime) -> OpenAttempt:
    from tasks.machine.placement import is_known_dead  # only an open attempt pays for it

    beat = read_heartbeat(log.store, log.prefix, record.started.attempt)
    return OpenAttempt(
        is_gone=is_known_dead(record.started.placement),
        symptom=beat.symptom if beat else "",
        heartbeat_age_seconds=_heartbeat_age_seconds(log, record.started.attempt, now),
        lease_seconds=stored_value(record.started.config, "lease", "seconds", float),
    )


def _heartbeat_age_seconds(log: RunLog, attempt: int, now: datetime) -> float | None:
    """Return the heartbeat's age where the store is a local folder and so has this machine's clock; else None."""
    path = log.store.local_path(heartbeat_key(log.prefix, attempt))
    if path is None or not path.exists():
        return None
    return max(now.timestamp() - path.stat().st_mtime, 0.0)


def _successor(log: RunLog, record: AttemptRecord, after: AttemptRecord) -> Successor:
    receipt = read_receipt(log, after, record)
    return project(
        receipt,
        Successor,
        seconds_later=max((receipt.started_at - (record.ended_at or receipt.started_at)).total_seconds(), 0.0),
        host=receipt.placement.host,
        changed=after.started.changed,
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
