"""Deleting a run: one entry closes it, then its checkpoints are deleted; its log, receipts and curve stay.

Aliases and pins come first: a promotion or a fork pins a checkpoint in the log that the closing entry is appended to,
so none of them can come too late. After a kill, deleting again goes on.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from cairn.storage.checkpoints import resume_point, sweep
from cairn.storage.errors import StorageError
from cairn.storage.logs.log_entry import refuse_old_writer
from cairn.storage.logs.registry import Registry, RegistryState, Withdrawn, list_aliases
from cairn.storage.logs.run_entries import Placement, RunDeleted
from cairn.storage.logs.run_index import RunIndex
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.tasks.attempt.attempt_claim import Claimant, end_lost_attempt
from cairn.tasks.checkpoints.retention import RetentionTerms, plan_retention, retention_terms, sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import BudgetExhausted, GateRefused, LiveOwner
from cairn.tasks.machine.placement import is_known_dead

_ROLLBACK_REACH = 2
"""What an alias points at and what its next rollback goes to are kept; anything older can be given up."""
_NO_SUITE = ""


def withdrawn_aliases(log: RunLog, *, is_dead: Callable[[Placement], bool] = is_known_dead) -> tuple[str, ...]:
    """Return the aliases that deleting the run keeps from being rolled back to it; raises `GateRefused` if needed.

    Needed is what an alias points at or goes back to next, what is being offered to one, and what a fork begins with
    that has no checkpoint of its own. Changes nothing.
    """
    state = log.refresh()
    refuse_old_writer(state.closed_to_writers(), f"run {log.run_id}")
    if state.deleted is not None:
        return ()
    registries = {alias: Registry(log.store, alias).refresh() for alias in list_aliases(log.store)}
    reasons = [why for alias, known in registries.items() for why in _reasons_of_alias(alias, log.run_id, known)]
    terms = retention_terms(log, CheckpointConfig(), _NO_SUITE, dry_run=True, is_dead=is_dead)
    reasons += _reasons_of_pins(terms, state)
    _refuse(log.run_id, reasons)
    return tuple(alias for alias, known in registries.items() if _reaches(known, log.run_id))


def delete_run(
    log: RunLog, body: RunDeleted, claimant: Claimant, *, is_dead: Callable[[Placement], bool] = is_known_dead
) -> sweep.SweepReport:
    """Close the run for good and delete its checkpoints; on a run that is closed, delete what is left of them.

    Raises `LiveOwner`, or `GateRefused` as `withdrawn_aliases` does, before anything is deleted.
    """
    if log.refresh().deleted is None:
        withdrawn_aliases(log, is_dead=is_dead)
        with suppress(BudgetExhausted):  # the receipt is written, and nothing is trained again
            end_lost_attempt(log, claimant)
        for alias in list_aliases(log.store):
            Registry(log.store, alias).append(partial(_withdraw, alias, log.run_id, body))
        terms = retention_terms(log, CheckpointConfig(), _NO_SUITE, dry_run=False, is_dead=is_dead)
        pins = {pin.pin_id: pin for pin in log.state.pins}
        for verdict in plan_retention(terms, log.state, ()).pins:
            if verdict.is_over:
                log.append(partial(resume_point.unpin_entry, pins[verdict.key], verdict.why), writer=claimant.writer)
        _refuse(log.run_id, _reasons_of_pins(terms, log.state))
        log.append(partial(_close, log.run_id, body), writer=claimant.writer)
    report = sweep_run(log, CheckpointConfig(), _NO_SUITE, is_dead=is_dead)
    with suppress(StorageError):  # only a cache; without this, a list may show the run as it was for a while
        index = RunIndex(log.store)
        index.refresh()
        index.note(log, is_over=bool(log.state.attempts))
        index.save()
    return report


def _close(run_id: str, body: RunDeleted, state: RunState) -> RunDeleted | None:
    if state.deleted is not None:
        return None
    if state.open_attempt is not None:
        raise LiveOwner(f"run {run_id}: attempt {state.latest_attempt} has just claimed it; stop it there first")
    _refuse(run_id, [f"step {pin.step} was pinned meanwhile: delete the run again" for pin in state.binding_pins])
    return body


def _reaches(known: RegistryState, run_id: str) -> bool:
    return any(promoted.run_id == run_id for _, promoted in known.champions)


def _reasons_of_alias(alias: str, run_id: str, known: RegistryState) -> Iterator[str]:
    for place, (_, promoted) in enumerate(reversed(known.champions[-_ROLLBACK_REACH:])):
        if promoted.run_id == run_id:
            how = "`cairn rollback` of it goes back to" if place else "points at"
            yield f"alias {alias}: {how} step {promoted.step}; `cairn promote OTHER --alias {alias}` moves it on"


def _reasons_of_pins(terms: RetentionTerms, state: RunState) -> Iterator[str]:
    """Yield why a fork, or an offer that is not decided, needs the run; aliases that have decided say so themselves."""
    decided = {pin_id for facts in terms.aliases for pin_id in facts.decided_pins}
    pins = {pin.pin_id: pin for pin in state.binding_pins}
    for verdict in plan_retention(terms, state, ()).pins:
        pin = pins.get(verdict.key)
        if pin is None or verdict.is_over or verdict.key in decided:
            continue
        how = f"; `cairn train --run-id {pin.fork}` makes one, `cairn delete {pin.fork}` gives it up"
        yield f"step {pin.step}: {verdict.why}{how if pin.fork else ''}"


def _withdraw(alias: str, run_id: str, body: RunDeleted, known: RegistryState) -> Withdrawn | None:
    _refuse(run_id, _reasons_of_alias(alias, run_id, known))
    return Withdrawn(alias=alias, run_id=run_id, by=body.by, why=body.why) if _reaches(known, run_id) else None


def _refuse(run_id: str, reasons: Iterable[str]) -> None:
    if listed := "; ".join(reasons):
        raise GateRefused(f"run {run_id} is needed, nothing is deleted: {listed}")
