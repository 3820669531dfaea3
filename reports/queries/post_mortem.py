"""The facts of one attempt for a reader who knows nothing of its run: from the run log, step records and heartbeat."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from cairn.model.configuration.data import MixtureStage
from cairn.reports.errors import RunNotFound
from cairn.reports.queries import receipts, run_lookup, run_status
from cairn.reports.queries.evaluations import EvaluationSummary, list_evaluations
from cairn.storage.errors import StorageError
from cairn.storage.logs import log_entry, run_entries, run_members, run_state, step_log
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.stores.codec import flatten, stored_value
from cairn.tasks.machine.placement import is_known_dead
from cairn.tasks.policy.termination import TerminationReason

_ATTEMPTS_OF_HOSTS = 200
"""So many of the newest attempts say which machines failed often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFacts:
    """One attempt: its receipt, what it started from, what it did, how its end was recorded, and the next attempt.

    `reached_step` may be known from step records alone, of which `last_record` is the newest; `lost_steps` are done and
    not committed. `same_machine` compares host and boot with the previous attempt, None for the first; `failed_hosts`
    counts the run's attempts that were lost or hung with a machine, where more than one was. `ended_by` wrote the end,
    None where the attempt's own parent did; `is_gone` says of an open attempt that its process is known to be gone.
    `config_changes` are values of the previous attempt and of this one, None where one lacks the key; `quarantines` and
    `passed_over` are those at its start. `refused` says why the fold refused the entry of this number.
    """

    receipt: receipts.Receipt
    record: AttemptRecord
    seconds: float
    reached_step: int
    lost_steps: int
    last_record: step_log.StepRecord | None
    committed: tuple[run_state.CheckpointRecord, ...]
    same_machine: bool | None
    failed_hosts: Mapping[str, int]
    resumed_committed_at: datetime | None
    reached_before: int | None
    passed_over: tuple[run_lookup.CheckpointSummary, ...]
    ended_by: log_entry.Writer | None
    lease_seconds: float | None
    is_gone: bool
    heartbeat_age_seconds: float | None
    successor: receipts.Receipt | None
    config_changes: Mapping[str, tuple[Any, Any]]
    quarantines: tuple[run_entries.DataQuarantined, ...]
    evaluations: tuple[EvaluationSummary, ...]
    member_changes: tuple[run_members.MembersChanged, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PostMortem:
    """A run as it stands now, and one attempt of it, None where there is none; also the JSON of `cairn explain`.

    `mixture` has what the run draws from step 0 and from each stage's step on, none without weights.
    """

    status: run_status.RunStatus
    model_family: str
    run_attempts: int
    opened_at: datetime | None
    mixture: tuple[MixtureStage, ...]
    attempt: AttemptFacts | None


def gather_post_mortem(log: RunLog, number: int | None = None, *, now: datetime | None = None) -> PostMortem:
    """Return the facts of attempt `number` or `RunNotFound`; without one, the newest that did not complete."""
    state, attempts, beat = log.state, log.state.attempts, run_lookup.read_beat(log)
    if number is not None and not 1 <= number <= len(attempts):
        there = f"attempts 1 to {len(attempts)}" if len(attempts) > 1 else "only attempt 1"
        raise RunNotFound(f"run {log.run_id} has no attempt {number}; it has {there if attempts else 'none yet'}")
    failed = (item for item in reversed(attempts) if item.ended and item.ended.reason != TerminationReason.COMPLETED)
    record = attempts[number - 1] if number else next(failed, attempts[-1] if attempts else None)
    return PostMortem(
        status=run_status.make_status(log, beat),
        model_family=state.opened.model_family if state.opened else "",
        run_attempts=len(attempts),
        opened_at=state.opened_at,
        mixture=run_lookup.mixture_of(state),
        attempt=_gather_attempt(log, record, beat, now or log_entry.utc_now()) if record else None,
    )


def _gather_attempt(log: RunLog, record: AttemptRecord, beat: step_log.Heartbeat | None, now: datetime) -> AttemptFacts:
    state, started, ended, number = log.state, record.started, record.ended, record.started.attempt
    before = state.attempts[number - 2] if number > 1 else None
    after = state.attempts[number] if number < len(state.attempts) else None
    has_vanished = ended is not None and ended.evidence.get("exit_code") is None  # another process wrote its end
    entries = log.read_entries() if has_vanished or any(item.attempt == number for item in state.refused) else ()
    ends = (item.writer for item in entries if item.kind == "attempt-ended" and item.body.attempt == number)
    writer = next(ends, None)
    committed = tuple(item for item in state.checkpoints if item.committed.attempt == number)
    mine = {item.committed.manifest_sha256 for item in committed}
    evaluations = tuple(item for item in list_evaluations(state) if item.manifest_sha256 in mine)
    receipt, last_record = receipts.make_receipt(log.run_id, state, record, beat), None
    with suppress(StorageError):
        last_record = step_log.read_last_record(log.store, log.prefix, number, started.claim_id)
    reached = max(receipt.last_step, receipt.last_committed_step or 0, last_record.step if last_record else 0)
    kept = receipt.first_step if receipt.last_committed_step is None else receipt.last_committed_step
    resumed = state.find(started.resumed_from.prefix) if started.resumed_from else None
    first, since = (started.resumed_from.step, started.resumed_from.attempt) if started.resumed_from else (0, 1)
    beyond = (item for item in run_lookup.read_checkpoints(log) if item.step > first)  # unreadable, or never committed
    passed_over = tuple(item for item in beyond if since <= item.attempt < number)
    path = log.store.local_path(step_log.heartbeat_key(log.prefix, number))  # a local folder has this machine's clock
    beat_at = path.stat().st_mtime if path is not None and path.exists() else None
    here, earlier = started.placement, before.started.placement if before else None
    newest = islice(reversed(state.attempts), _ATTEMPTS_OF_HOSTS)
    failed = Counter(host for item in newest if (host := receipts.failed_host(item.started.placement, item.ended)))
    return AttemptFacts(
        receipt=receipt,
        record=record,
        seconds=max(((record.ended_at or now) - record.started_at).total_seconds(), 0.0),
        reached_step=reached,
        lost_steps=max(reached - kept, 0) if ended else 0,
        last_record=last_record,
        committed=committed,
        same_machine=(earlier.host, earlier.boot_id) == (here.host, here.boot_id) if earlier else None,
        failed_hosts={host: count for host, count in failed.most_common() if count > 1},
        resumed_committed_at=resumed.committed_at if resumed else None,
        reached_before=before.ended.last_step if before and before.ended else None,
        passed_over=passed_over,
        ended_by=writer if writer and writer.attempt != number else None,
        lease_seconds=stored_value((after or record).started.config, "lease", "seconds", float),
        is_gone=ended is None and is_known_dead(here),
        heartbeat_age_seconds=max(now.timestamp() - beat_at, 0.0) if beat_at and not ended else None,
        successor=receipts.make_receipt(log.run_id, state, after, beat) if after else None,
        config_changes=_config_changes(before, record),
        quarantines=tuple(item for item in state.quarantines if item.attempt < number),
        evaluations=evaluations,
        member_changes=tuple(change for change in state.member_changes if change.attempt == number),
        refused=dict(_refused(state, entries, number)),
    )


def _config_changes(before: AttemptRecord | None, record: AttemptRecord) -> Mapping[str, tuple[Any, Any]]:
    if before is None:
        return {}
    old, new = flatten(before.started.config), flatten(record.started.config)
    for name in ("code_version", "micro_batch", "activation_checkpointing"):
        old[name], new[name] = getattr(before.started, name), getattr(record.started, name)
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _refused(state: run_state.RunState, entries: tuple[log_entry.Entry, ...], number: int) -> Iterator[tuple[str, str]]:
    started = {item.body.attempt: item.seq for item in reversed(entries) if item.kind == "attempt-started"}
    for item in state.refused:
        if item.attempt != number:
            continue
        newer = [(seq, attempt) for attempt, seq in started.items() if attempt > number and seq < item.seq]
        why = "it came after the end of this attempt, or contradicts the entries before it"
        if newer:
            why = f"attempt {min(newer)[1]} had taken over the run at entry {min(newer)[0]}"
        yield str(item.seq), f"{item.kind}, but {why}"
