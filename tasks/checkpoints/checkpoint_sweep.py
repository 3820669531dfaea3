"""Sweeping one run: collect the facts for retention in the order that makes them proof, then sweep.

The pins' owners are checked before any registry or forked run is read: if an owner is dead, a registry without a
decision proves that none will follow, and a log without a run that none will be opened.
"""

from collections.abc import Callable, Iterable
from functools import partial

from storage.checkpoints.sweep import SweepReport, sweep
from storage.errors import IntegrityError, WriterTooOld
from storage.logs.log_entry import refuse_old_writer, this_writer
from storage.logs.registry import Refused, Registry, RegistryState, list_aliases
from storage.logs.run_entries import CheckpointPinned, Placement
from storage.logs.run_log import RunLog
from storage.stores.document import project
from tasks.checkpoints.promotion import Gate
from tasks.checkpoints.retention import AliasReach, RetentionTerms, plan_retention
from tasks.configuration.settings import CheckpointConfig
from tasks.machine.placement import is_known_dead


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
    dead = tuple(pin for pin in pins if is_dead(pin.holder))
    aliases = sorted({*list_aliases(log.store), *(pin.alias for pin in pins if pin.alias)})
    forks = {pin.fork: RunLog(log.store, pin.fork).refresh() for pin in pins if pin.fork}
    grown = frozenset(name for name, state in forks.items() if state.readable or state.finished or state.deleted)
    return RetentionTerms(
        policy=policy,
        suite_sha256=suite_sha256,
        aliases=tuple(_reach(log, alias, () if dry_run else dead, dry_run=dry_run) for alias in aliases),
        dead_pins=frozenset(pin.hold_id for pin in dead),
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
    return AliasReach(
        alias=alias,
        reached=frozenset(state.reached),
        decided_pins=frozenset(state.decided_pins),
    )


def _abandoned(run_id: str, pin: CheckpointPinned, state: RegistryState) -> Refused | None:
    """Refuse the offer of a dead process; its last request may still arrive, but then it comes too late."""
    if pin.hold_id in state.decided_pins:
        return None
    return project(
        pin,
        Refused,
        alias=pin.alias or "",
        run_id=run_id,
        gate=Gate.ABANDONED.value,
        detail=f"the process that offered it, pid {pin.holder.pid} on {pin.holder.host}, died before the gates decided",
        by="sweep",
    )
