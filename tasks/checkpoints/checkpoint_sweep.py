"""Sweeping one run: gather what retention must know, in the order that makes it proof, then sweep.

Owns that order: holders are asked for before any registry is read, so that a registry without a decision proves that
none will follow. Refuses to know the orchestrator: a person sweeps without one.
"""

from collections.abc import Callable, Iterable
from functools import partial

from storage.checkpoints.sweep import SweepReport, sweep
from storage.errors import IntegrityError
from storage.logs.entry_log import this_writer
from storage.logs.registry import Registry, RegistryState, list_aliases
from storage.logs.registry_entries import Refused
from storage.logs.run_entries import CheckpointPinned, Placement
from storage.logs.run_log import RunLog
from tasks.configuration.settings import CheckpointConfig
from tasks.machine.placement import is_known_dead
from tasks.policy.retention import AliasReach, RetentionTerms, plan_retention


def sweep_run(
    log: RunLog,
    policy: CheckpointConfig,
    suite_sha256: str,
    *,
    dry_run: bool = False,
    is_dead: Callable[[Placement], bool] = is_known_dead,
) -> SweepReport:
    """Apply the policy to the run and delete what nobody needs; with `dry_run` only say what and why.

    Raises `IntegrityError`, with nothing superseded or deleted, where a registry cannot be read: an alias might need
    anything.
    """
    holds = log.refresh().pins
    dead = tuple(hold for hold in holds if is_dead(hold.holder))
    aliases = sorted({*list_aliases(log.store), *(hold.alias for hold in holds if hold.alias)})
    terms = RetentionTerms(
        policy=policy,
        suite_sha256=suite_sha256,
        aliases=tuple(_reach(log, alias, () if dry_run else dead) for alias in aliases),
        dead_pins=frozenset(hold.hold_id for hold in dead),
    )
    return sweep(log, partial(plan_retention, terms), writer=this_writer(), dry_run=dry_run)


def _reach(log: RunLog, alias: str, dead: Iterable[CheckpointPinned]) -> AliasReach:
    registry = Registry(log.store, alias)
    try:
        state = registry.refresh()
        for hold in dead:
            if hold.alias == alias:
                state = registry.append(partial(_abandoned, log.run_id, hold))
    except IntegrityError as error:
        raise IntegrityError(
            f"alias {alias} cannot be read, so nothing of run {log.run_id} is superseded or deleted: {error}"
        ) from error
    return AliasReach(
        alias=alias,
        reached=frozenset(promoted.manifest_sha256 for _, promoted in state.champions),
        decided_pins=state.decided_pins,
    )


def _abandoned(run_id: str, hold: CheckpointPinned, state: RegistryState) -> Refused | None:
    """Decide for an offerer that died: its last request may still be on its way, and now comes too late."""
    if hold.hold_id in state.decided_pins:
        return None
    return Refused(
        alias=hold.alias or "",
        run_id=run_id,
        step=hold.step,
        manifest_sha256=hold.manifest_sha256,
        gate="abandoned",
        detail=f"who offered it, pid {hold.holder.pid} on {hold.holder.host}, died before the gates had decided",
        by="sweep",
        hold_id=hold.hold_id,
    )
