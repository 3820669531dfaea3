"""Retention: which checkpoints, pins and staged folders of a run are kept, and why, and the sweep that follows it.

Kept are the newest, the best, every M-th, and whatever an alias, a pin or an attempt needs. A pin ends on proof, never
after a time; a staged folder is an orphan once its attempt has ended. The facts are collected in the order that makes
them proof: the pins' owners are checked before any registry or forked run is read.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cairn.storage.checkpoints.sweep import Finding, SweepPlan, SweepReport, parse_checkpoint_folder, sweep
from cairn.storage.errors import IntegrityError, WriterTooOld
from cairn.storage.logs.log_entry import refuse_old_writer, this_writer
from cairn.storage.logs.registry import Refused, Registry, RegistryState, list_aliases
from cairn.storage.logs.run_entries import CheckpointPinned, Placement
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import CheckpointRecord, CheckpointState, RunState
from cairn.tasks.checkpoints.promotion import Gate
from cairn.tasks.configuration.settings import METRIC, CheckpointConfig
from cairn.tasks.machine.placement import is_known_dead
from cairn.tasks.policy.early_stop import StopTerms, find_stop, outstanding


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasReach:
    """The manifests (sha256) that an alias points at or a rollback could reach, and the pins that it has decided on."""

    alias: str
    reached: frozenset[str]
    decided_pins: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionTerms:
    """What a plan needs beside the run's state.

    `dead_pins` are the pins whose owner was known dead before any registry or other run was read; only then does a
    registry without a decision prove that none will follow. Of the runs forked from this one `young_forks` have no
    checkpoint of their own to resume from, and `grown_forks` have one, or need none.
    """

    policy: CheckpointConfig
    suite_sha256: str
    aliases: tuple[AliasReach, ...] = ()
    dead_pins: frozenset[str] = frozenset()
    young_forks: frozenset[str] = frozenset()
    grown_forks: frozenset[str] = frozenset()


def plan_retention(terms: RetentionTerms, state: RunState, folders: Sequence[str]) -> SweepPlan:
    """Return the findings on pins, kept checkpoints and other `folders`, which were listed before `state` was read."""
    standing, checkpoints = _standing(terms, state), []
    for record in (record for record in state.live_checkpoints if record.is_kept):
        reasons = [*_wanted(terms.policy, standing, record), *_needed(terms, standing, record)]
        why = "; ".join(reasons) or _unwanted(terms.policy, standing, record)
        checkpoints.append(Finding(key=record.committed.prefix, is_over=not reasons, why=why))
    live = {record.committed.prefix for record in state.live_checkpoints}
    staged = tuple(_judge_staged(state, folder) for folder in folders if folder not in live)
    pins = tuple(_judge_pin(terms, pin) for pin in state.pins)
    return SweepPlan(pins=pins, checkpoints=tuple(checkpoints), staged=staged)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Standing:
    """Facts shared by the findings on one state."""

    state: RunState
    readable_steps: tuple[int, ...]
    newest: frozenset[str]
    losses: dict[str, float]
    best: frozenset[str]
    stop_step: int | None
    awaited: frozenset[str]


def _standing(terms: RetentionTerms, state: RunState) -> _Standing:
    readable, losses = state.readable, dict[str, float]()
    measured = (item for record in state.live_checkpoints for item in record.evaluations)
    for item in measured:  # the lowest finite loss of each manifest counts, as in a promotion
        loss = item.metrics.get(METRIC, math.nan)
        if item.suite_sha256 == terms.suite_sha256 and math.isfinite(loss):
            losses[item.manifest_sha256] = min(loss, losses.get(item.manifest_sha256, math.inf))
    stop, awaited = find_stop(state, terms.suite_sha256), tuple[CheckpointRecord, ...]()
    if state.attempts and state.finished is None:
        stopping = StopTerms(state.attempts[-1].started.config, terms.suite_sha256)
        awaited = outstanding(state, stopping) if stopping.config.early_stop.is_on else ()
    # Steps beyond an early stop are not part of the result, however good they are.
    result = (record.committed for record in readable if stop is None or record.committed.step <= stop.step)
    evaluated = (committed for committed in result if committed.manifest_sha256 in losses)
    ranked = sorted(evaluated, key=lambda committed: (losses[committed.manifest_sha256], committed.step))
    return _Standing(
        state=state,
        readable_steps=tuple(sorted(record.committed.step for record in readable)),
        newest=frozenset(record.committed.prefix for record in readable[: terms.policy.keep_last]),
        losses=losses,
        best=frozenset(committed.prefix for committed in ranked[: terms.policy.keep_best]),
        stop_step=stop.step if stop else None,
        awaited=frozenset(record.committed.prefix for record in awaited),
    )


def _wanted(policy: CheckpointConfig, standing: _Standing, record: CheckpointRecord) -> Iterator[str]:
    """Why the policy keeps it; a quarantined checkpoint does not count as one of the newest."""
    committed = record.committed
    if record.state == CheckpointState.QUARANTINED:
        if _newer(standing, committed.step) < policy.keep_last:
            yield f"quarantined, and fewer than {policy.keep_last} newer ones can be read"
        return
    if committed.prefix in standing.newest:
        yield f"newest {policy.keep_last}"
    if committed.prefix in standing.best:
        yield f"best {policy.keep_best} ({METRIC} {standing.losses[committed.manifest_sha256]:.4g})"
    if policy.keep_every and committed.step % policy.keep_every == 0:
        yield f"every {policy.keep_every} steps"


def _needed(terms: RetentionTerms, standing: _Standing, record: CheckpointRecord) -> Iterator[str]:
    """Why it is needed regardless of the policy."""
    committed = record.committed
    reaching = [facts.alias for facts in terms.aliases if committed.manifest_sha256 in facts.reached]
    yield from (f"alias {alias}" for alias in reaching)
    for pin in standing.state.pins:
        if pin.prefix == committed.prefix and pin.alias not in reaching:
            yield f"pinned {_for(pin)} on host {pin.pinned_by.host} (pid {pin.pinned_by.pid})"
    if committed.step == standing.stop_step:
        yield "the run stops early here"
    if committed.prefix in standing.awaited:
        yield "its evaluation is outstanding, and decides on stopping early"
    owner = standing.state.open_attempt
    if owner and owner.started.resumed_from and owner.started.resumed_from.prefix == committed.prefix:
        yield f"attempt {standing.state.latest_attempt} resumed from it"
    if not _newer(standing, committed.step):
        yield "nothing newer to resume from"


def _unwanted(policy: CheckpointConfig, standing: _Standing, record: CheckpointRecord) -> str:
    if record.state == CheckpointState.QUARANTINED:
        return f"quarantined ({record.detail}), and {policy.keep_last} newer ones can be read"
    parts = [f"older than the newest {policy.keep_last}"]
    loss = standing.losses.get(record.committed.manifest_sha256)
    if policy.keep_best:
        parts.append("not evaluated" if loss is None else f"{METRIC} {loss:.4g} is not the best {policy.keep_best}")
    if policy.keep_every:
        parts.append(f"not at a multiple of {policy.keep_every} steps")
    return ", ".join(parts)


def _newer(standing: _Standing, step: int) -> int:
    return len(standing.readable_steps) - bisect_right(standing.readable_steps, step)


def _judge_pin(terms: RetentionTerms, pin: CheckpointPinned) -> Finding:
    process = f"process {pin.pinned_by.pid} on host {pin.pinned_by.host}, which pinned it,"
    is_dead = pin.pin_id in terms.dead_pins
    if pin.fork is not None:
        is_over = pin.fork in terms.grown_forks or (is_dead and pin.fork not in terms.young_forks)
        why = "needs it no more" if is_over else "has no checkpoint of its own yet"
        return Finding(key=pin.pin_id, is_over=is_over, why=f"run {pin.fork}, which was forked from it, {why}")
    if pin.alias is None:
        why = f"{process} {'has died' if is_dead else 'may still read it'}"
        return Finding(key=pin.pin_id, is_over=is_dead, why=f"{_for(pin)}: {why}")
    facts = next((facts for facts in terms.aliases if facts.alias == pin.alias), None)
    if facts is not None and pin.pin_id in facts.decided_pins:
        is_over = pin.manifest_sha256 not in facts.reached
        why = "has decided, and does not point there" if is_over else "points at it, or a rollback could take it there"
    else:
        is_over = is_dead and facts is not None
        why = f"is undecided, and {process} {'has died' if is_over else 'may still offer it'}"
    return Finding(key=pin.pin_id, is_over=is_over, why=f"alias {pin.alias} {why}")


def _for(pin: CheckpointPinned) -> str:
    if pin.fork is not None:
        return f"for run {pin.fork}, which was forked from it,"
    return "by an evaluation" if pin.alias is None else f"for alias {pin.alias}"


def _judge_staged(state: RunState, folder: str) -> Finding:
    named = parse_checkpoint_folder(folder)
    if named is None:
        return Finding(key=folder, is_over=False, why="not a checkpoint's folder")
    step, attempt = named
    owner = state.open_attempt
    if attempt < state.latest_attempt or (owner is None and attempt == state.latest_attempt):
        return Finding(key=folder, is_over=True, why=f"attempt {attempt} has ended without committing it")
    last = owner.last_committed_step if owner else None
    if last is not None and step <= last and state.find(folder) is not None:
        return Finding(key=folder, is_over=True, why="left over from a checkpoint that is deleted")
    return Finding(key=folder, is_over=False, why=f"attempt {attempt} may still commit it")


def sweep_run(
    log: RunLog,
    policy: CheckpointConfig,
    suite_sha256: str,
    *,
    dry_run: bool = False,
    is_dead: Callable[[Placement], bool] = is_known_dead,
) -> SweepReport:
    """Apply the policy to the run and delete what is not needed; with `dry_run` only report it.

    Raises `IntegrityError` before any change if a registry cannot be read: its alias might need any checkpoint.
    """
    terms = retention_terms(log, policy, suite_sha256, dry_run=dry_run, is_dead=is_dead)
    return sweep(log, partial(plan_retention, terms), writer=this_writer(), dry_run=dry_run)


def retention_terms(
    log: RunLog, policy: CheckpointConfig, suite_sha256: str, *, dry_run: bool, is_dead: Callable[[Placement], bool]
) -> RetentionTerms:
    """Return what a plan needs; without `dry_run`, the undecided offers of dead processes are refused meanwhile."""
    pins = log.refresh().pins
    dead = tuple(pin for pin in pins if is_dead(pin.pinned_by))
    aliases = sorted({*list_aliases(log.store), *(pin.alias for pin in pins if pin.alias)})
    forks = {pin.fork: RunLog(log.store, pin.fork).refresh() for pin in pins if pin.fork}
    grown = frozenset(name for name, state in forks.items() if state.readable or state.finished or state.deleted)
    return RetentionTerms(
        policy=policy,
        suite_sha256=suite_sha256,
        aliases=tuple(_reach(log, alias, () if dry_run else dead, dry_run=dry_run) for alias in aliases),
        dead_pins=frozenset(pin.pin_id for pin in dead),
        grown_forks=grown,
        young_forks=frozenset(name for name, state in forks.items() if state.opened) - grown,
    )


def _reach(log: RunLog, alias: str, dead: Iterable[CheckpointPinned], *, dry_run: bool) -> AliasReach:
    registry = Registry(log.store, alias)
    try:
        state = registry.refresh()
        if not dry_run:
            registry.cache()
        for pin in dead:
            if pin.alias == alias:
                state = registry.append(partial(_abandoned, log.run_id, pin))
        refuse_old_writer(state.closed_to_writers(), f"alias {alias}")
    except (IntegrityError, WriterTooOld) as error:
        raise IntegrityError(
            f"alias {alias} cannot be read, so nothing of run {log.run_id} is superseded or deleted: {error}"
        ) from error
    return AliasReach(alias=alias, reached=frozenset(state.reached), decided_pins=frozenset(state.decided_pins))


def _abandoned(run_id: str, pin: CheckpointPinned, state: RegistryState) -> Refused | None:
    """Refuse the offer of a dead process; its last request may still arrive, but then it comes too late."""
    if pin.pin_id in state.decided_pins:
        return None
    return Refused(
        alias=pin.alias or "",
        run_id=run_id,
        step=pin.step,
        manifest_sha256=pin.manifest_sha256,
        pin_id=pin.pin_id,
        suite_sha256=pin.suite_sha256,
        gate=Gate.ABANDONED.value,
        detail=f"process {pin.pinned_by.pid} on {pin.pinned_by.host}, which offered it, died before the gates decided",
        by="sweep",
    )
