"""Retention: which checkpoints, pins and staged folders of a run are kept, and why, the sweep, and a run's deletion.

A pin ends on proof, never after a time: the pins' owners are checked before any registry or forked run is read. One
entry closes a run for good, then its checkpoints are deleted: a promotion or a fork pins its checkpoint in the log that
this entry is appended to, so none can come too late.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cairn.storage.checkpoints.resume_point import Finding, judge_fork_pin, unpin_entry
from cairn.storage.checkpoints.sweep import SweepPlan, SweepReport, parse_checkpoint_folder, sweep
from cairn.storage.errors import IntegrityError, StorageError, WriterTooOld, restated
from cairn.storage.logs import log_entry, registry, run_index, run_state
from cairn.storage.logs.run_entries import CheckpointPinned, RunDeleted
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.attempt.attempt_entries import Claimant, end_lost_attempt
from cairn.tasks.checkpoints.promotion import Candidate, Gate, refusal
from cairn.tasks.configuration.settings import METRIC, CheckpointConfig
from cairn.tasks.errors import BudgetExhausted, GateRefused, LiveOwner
from cairn.tasks.machine.placement import is_known_dead
from cairn.tasks.policy.early_stop import StopTerms, find_stop, outstanding

_ROLLBACK_REACH = 2
"""The checkpoint of an alias and that of its next rollback are kept; older ones can be given up."""
_NO_SUITE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionTerms:
    """The facts that a plan needs beside the run's state.

    `dead_pins` are the pins whose owner was known dead before any registry or other run was read; only then does a
    registry without a decision prove that none will follow. `fork_pins` are the findings on the pins of forks, by id:
    of those that were there before the forks were read.
    """

    policy: CheckpointConfig
    suite_sha256: str
    aliases: Mapping[str, registry.RegistryState] = field(default_factory=dict)
    dead_pins: frozenset[str] = frozenset()
    fork_pins: Mapping[str, Finding] = field(default_factory=dict)


def plan_retention(terms: RetentionTerms, state: run_state.RunState, folders: Sequence[str]) -> SweepPlan:
    """Return the findings on pins, kept checkpoints and other `folders`, which were listed before `state` was read."""
    rules = _Rules(terms, state)
    live = {record.committed.prefix for record in state.live_checkpoints}
    return SweepPlan(
        pins=tuple(_judge_pin(terms, pin) for pin in state.pins),
        checkpoints=tuple(rules.judge(record) for record in state.live_checkpoints if record.is_kept),
        staged=tuple(_judge_staged(state, folder) for folder in folders if folder not in live),
    )


class _Rules:
    """Why each checkpoint of one state is kept."""

    def __init__(self, terms: RetentionTerms, state: run_state.RunState) -> None:
        self._terms, self._policy, self._state, self._losses = terms, terms.policy, state, dict[str, float]()
        readable = state.readable
        self._readable_steps = [record.committed.step for record in readable]
        self._newest = {record.committed.prefix for record in readable[: terms.policy.keep_last]}
        measured = (item for record in state.live_checkpoints for item in record.evaluations)
        for item in measured:  # the lowest finite loss of each manifest counts, as in a promotion
            loss = item.metrics.get(METRIC, math.nan)
            if item.suite_sha256 == terms.suite_sha256 and math.isfinite(loss):
                self._losses[item.manifest_sha256] = min(loss, self._losses.get(item.manifest_sha256, math.inf))
        stop = find_stop(state, terms.suite_sha256)
        self._stop_step, self._awaited = stop.step if stop else None, set[str]()
        if state.attempts and state.finished is None:
            stopping = StopTerms(state.attempts[-1].started.config, terms.suite_sha256)
            if stopping.config.early_stop.is_on:
                self._awaited = {record.committed.prefix for record in outstanding(state, stopping)}
        # Steps beyond an early stop are not part of the result, however good they are.
        result = (record.committed for record in readable if stop is None or record.committed.step <= stop.step)
        evaluated = (committed for committed in result if committed.manifest_sha256 in self._losses)
        ranked = sorted(evaluated, key=lambda committed: (self._losses[committed.manifest_sha256], committed.step))
        self._best = {committed.prefix for committed in ranked[: terms.policy.keep_best]}

    def judge(self, record: run_state.CheckpointRecord) -> Finding:
        """Return whether the checkpoint is given up, and every reason for which it is kept."""
        policy, best = self._policy, self._policy.keep_best
        loss = self._losses.get(record.committed.manifest_sha256)
        if record.state == run_state.CheckpointState.QUARANTINED:
            parts = [f"quarantined ({record.detail}), and {policy.keep_last} newer ones can be read"]
        else:
            parts = [f"older than the newest {policy.keep_last}"]
            if best:
                parts.append("not evaluated" if loss is None else f"{METRIC} {loss:.4g} is not the best {best}")
            if policy.keep_every:
                parts.append(f"not at a multiple of {policy.keep_every} steps")
        reasons = "; ".join(self._reasons(record))
        return Finding(key=record.committed.prefix, is_over=not reasons, why=reasons or ", ".join(parts))

    def _reasons(self, record: run_state.CheckpointRecord) -> Iterator[str]:
        """Why the policy keeps it, then why it is needed regardless of the policy."""
        committed, policy = record.committed, self._policy
        newer = sum(step > committed.step for step in self._readable_steps)
        if record.state == run_state.CheckpointState.QUARANTINED:  # it does not count as one of the newest
            if newer < policy.keep_last:
                yield f"quarantined, and fewer than {policy.keep_last} newer ones can be read"
        else:
            if committed.prefix in self._newest:
                yield f"newest {policy.keep_last}"
            if committed.prefix in self._best:
                yield f"best {policy.keep_best} ({METRIC} {self._losses[committed.manifest_sha256]:.4g})"
            if policy.keep_every and committed.step % policy.keep_every == 0:
                yield f"every {policy.keep_every} steps"
        reaching = [alias for alias, known in self._terms.aliases.items() if committed.manifest_sha256 in known.reached]
        yield from (f"alias {alias}" for alias in reaching)
        for pin in self._state.pins:
            if pin.prefix == committed.prefix and pin.alias not in reaching:
                yield f"pinned {_for(pin)} on host {pin.pinned_by.host} (pid {pin.pinned_by.pid})"
        if committed.step == self._stop_step:
            yield "the run stops early here"
        if committed.prefix in self._awaited:
            yield "its evaluation is outstanding, and decides on stopping early"
        owner = self._state.open_attempt
        if owner and owner.started.resumed_from and owner.started.resumed_from.prefix == committed.prefix:
            yield f"attempt {self._state.latest_attempt} resumed from it"
        if not newer:
            yield "nothing newer to resume from"


def _judge_pin(terms: RetentionTerms, pin: CheckpointPinned) -> Finding:
    if pin.fork is not None:
        new = Finding(key=pin.pin_id, is_over=False, why=f"run {pin.fork} was forked from it meanwhile")
        return terms.fork_pins.get(pin.pin_id, new)
    process = f"process {pin.pinned_by.pid} on host {pin.pinned_by.host}, which pinned it,"
    is_dead = pin.pin_id in terms.dead_pins
    if pin.alias is None:
        why = f"{process} {'has died' if is_dead else 'may still read it'}"
        return Finding(key=pin.pin_id, is_over=is_dead, why=f"{_for(pin)}: {why}")
    known = terms.aliases.get(pin.alias)
    if known is not None and pin.pin_id in known.decided_pins:
        is_over = pin.manifest_sha256 not in known.reached
        why = "has decided, and does not point there" if is_over else "points at it, or a rollback could take it there"
    else:
        is_over = is_dead and known is not None
        why = f"is undecided, and {process} {'has died' if is_over else 'may still offer it'}"
    return Finding(key=pin.pin_id, is_over=is_over, why=f"alias {pin.alias} {why}")


def _for(pin: CheckpointPinned) -> str:
    if pin.fork is not None:
        return f"for run {pin.fork}, which was forked from it,"
    return "by an evaluation" if pin.alias is None else f"for alias {pin.alias}"


def _judge_staged(state: run_state.RunState, folder: str) -> Finding:
    if (named := parse_checkpoint_folder(folder)) is None:
        return Finding(key=folder, is_over=False, why="not a checkpoint's folder")
    step, attempt = named
    owner = state.open_attempt
    if attempt < state.latest_attempt or (owner is None and attempt == state.latest_attempt):
        return Finding(key=folder, is_over=True, why=f"attempt {attempt} has ended without committing it")
    last = owner.last_committed_step if owner else None
    if last is not None and step <= last and state.find(folder) is not None:
        return Finding(key=folder, is_over=True, why="left over from a checkpoint that is deleted")
    return Finding(key=folder, is_over=False, why=f"attempt {attempt} may still commit it")


def sweep_run(log: RunLog, policy: CheckpointConfig, suite_sha256: str, *, dry_run: bool = False) -> SweepReport:
    """Apply the policy to the run and delete all that is not needed; with `dry_run` only report it.

    Raises `IntegrityError` before any change if a registry cannot be read: its alias might need any checkpoint.
    """
    terms = retention_terms(log, policy, suite_sha256, dry_run=dry_run)
    return sweep(log, partial(plan_retention, terms), writer=log_entry.this_writer(), dry_run=dry_run)


def retention_terms(log: RunLog, policy: CheckpointConfig, suite_sha256: str, *, dry_run: bool) -> RetentionTerms:
    """Return the facts for a plan; without `dry_run`, what dead processes offered or forked is closed meanwhile."""
    pins, writer = log.refresh().pins, None if dry_run else log_entry.this_writer()
    dead, aliases = [pin for pin in pins if is_known_dead(pin.pinned_by)], dict[str, registry.RegistryState]()
    for alias in sorted({*registry.list_aliases(log.store), *(pin.alias for pin in pins if pin.alias)}):
        reader = registry.Registry(log.store, alias)
        unread = f"alias {alias} cannot be read, so nothing of run {log.run_id} is superseded or deleted"
        with restated((IntegrityError, WriterTooOld), IntegrityError, unread):
            aliases[alias] = reader.refresh_whole()
            if not dry_run:
                reader.cache()
                for pin in dead:
                    if pin.alias == alias:
                        aliases[alias] = reader.append(partial(_abandoned, log.run_id, pin))
            log_entry.refuse_old_writer(aliases[alias].closed_to_writers(), f"alias {alias}")
    forks = (judge_fork_pin(log.store, pin, is_dead=pin in dead, writer=writer) for pin in pins if pin.fork)
    return RetentionTerms(
        policy=policy,
        suite_sha256=suite_sha256,
        aliases=aliases,
        dead_pins=frozenset(pin.pin_id for pin in dead),
        fork_pins={finding.key: finding for finding in forks},
    )


def _abandoned(run_id: str, pin: CheckpointPinned, state: registry.RegistryState) -> registry.Refused | None:
    """Refuse the offer of a dead process; its last request may still arrive, but then it comes too late."""
    if pin.pin_id in state.decided_pins:
        return None
    candidate = Candidate(run_id=run_id, reference=pin, evaluations=(), by="sweep", pin_id=pin.pin_id)
    detail = f"process {pin.pinned_by.pid} on {pin.pinned_by.host}, which offered it, died before the gates decided"
    return refusal(candidate, pin.alias or "", Gate.ABANDONED, detail)


def check_deletion(log: RunLog) -> tuple[str, ...]:
    """Return the aliases that deleting the run keeps from being rolled back to it; raises `GateRefused` if needed.

    Needed are the checkpoint of an alias, that of its next rollback, one that is being offered, and the origin of a
    fork that has too few checkpoints of its own. Changes nothing.
    """
    state = log.refresh()
    log_entry.refuse_old_writer(state.closed_to_writers(), f"run {log.run_id}")
    if state.deleted is not None:
        return ()
    terms = retention_terms(log, CheckpointConfig(), _NO_SUITE, dry_run=True)
    reasons = [why for alias, known in terms.aliases.items() for why in _reasons_of_alias(alias, log.run_id, known)]
    _refuse(log.run_id, [*reasons, *_reasons_of_pins(terms, state)])
    return tuple(alias for alias, known in terms.aliases.items() if _reaches(known, log.run_id))


def delete_run(log: RunLog, body: RunDeleted, claimant: Claimant) -> SweepReport:
    """Close the run for good and delete its checkpoints; on a run that is closed, delete the rest of them.

    Raises `LiveOwner`, or `GateRefused` as `check_deletion` does, before anything is deleted.
    """
    if log.refresh().deleted is None:
        check_deletion(log)
        with suppress(BudgetExhausted):  # the receipt is written, and nothing is trained again
            end_lost_attempt(log, claimant)
        for alias in registry.list_aliases(log.store):
            registry.Registry(log.store, alias).append(partial(_withdraw, alias, log.run_id, body))
        terms = retention_terms(log, CheckpointConfig(), _NO_SUITE, dry_run=False)
        pins = {pin.pin_id: pin for pin in log.state.pins}
        for finding in plan_retention(terms, log.state, ()).pins:
            if finding.is_over:
                log.append(partial(unpin_entry, pins[finding.key], finding.why), writer=claimant.writer)
        _refuse(log.run_id, _reasons_of_pins(terms, log.state))
        log.append(partial(_close, log.run_id, body), writer=claimant.writer)
    report = sweep_run(log, CheckpointConfig(), _NO_SUITE)
    with suppress(StorageError):  # only a cache; without this, a list may show the run as it was for a while
        index = run_index.RunIndex(log.store)
        index.refresh()
        index.note(log, is_over=bool(log.state.attempts))
        index.save()
    return report


def _close(run_id: str, body: RunDeleted, state: run_state.RunState) -> RunDeleted | None:
    if state.deleted is not None:
        return None
    if state.open_attempt is not None:
        raise LiveOwner(f"run {run_id}: attempt {state.latest_attempt} has just claimed it; stop it there first")
    _refuse(run_id, [f"step {pin.step} was pinned meanwhile: delete the run again" for pin in state.binding_pins])
    return body


def _reaches(known: registry.RegistryState, run_id: str) -> bool:
    return any(promoted.run_id == run_id for _, promoted in known.champions)


def _reasons_of_alias(alias: str, run_id: str, known: registry.RegistryState) -> Iterator[str]:
    for place, (_, promoted) in enumerate(reversed(known.champions[-_ROLLBACK_REACH:])):
        if promoted.run_id == run_id:
            how = "`cairn rollback` of it goes back to" if place else "points at"
            yield f"alias {alias}: {how} step {promoted.step}; `cairn promote OTHER --alias {alias}` moves it on"


def _reasons_of_pins(terms: RetentionTerms, state: run_state.RunState) -> Iterator[str]:
    """Yield why a fork, or an offer that is not decided, needs the run; aliases that have decided say so themselves."""
    decided = {pin_id for known in terms.aliases.values() for pin_id in known.decided_pins}
    pins = {pin.pin_id: pin for pin in state.binding_pins}
    for finding in plan_retention(terms, state, ()).pins:
        pin = pins.get(finding.key)
        if pin is None or finding.is_over or finding.key in decided:
            continue
        how = f"; `cairn train --run-id {pin.fork}` makes more, `cairn delete {pin.fork}` gives it up"
        yield f"step {pin.step}: {finding.why}{how if pin.fork else ''}"


def _withdraw(alias: str, run_id: str, body: RunDeleted, known: registry.RegistryState) -> registry.Withdrawn | None:
    _refuse(run_id, _reasons_of_alias(alias, run_id, known))
    return registry.Withdrawn(alias=alias, run_id=run_id, by=body.by, why=body.why) if _reaches(known, run_id) else None


def _refuse(run_id: str, reasons: Iterable[str]) -> None:
    if listed := "; ".join(reasons):
        raise GateRefused(f"run {run_id} is needed, nothing is deleted: {listed}")
