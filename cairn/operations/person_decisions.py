"""What a person takes back, on record in their name: a run, and what an alias points at."""

import time
from dataclasses import dataclass, replace

from cairn.flows.operations.checkpoint_offer import this_person
from cairn.reports.errors import RunNotFound
from cairn.reports.queries import alias_history, run_lookup
from cairn.storage.checkpoints.checkpoint import find_wrong_sizes, read_manifest
from cairn.storage.checkpoints.sweep import SweepAction, SweepKind
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import log_entry, registry, run_entries, run_log, run_state
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.attempt_claim import Claimant, refuse_live_owner
from cairn.tasks.checkpoints.run_deletion import delete_run, withdrawn_aliases
from cairn.tasks.text.format import format_count


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDeletion:
    """What deleting a run takes away; `freed_bytes` is None as long as nothing is deleted.

    `checkpoints` and `bytes` count staged ones too. Rollbacks of the aliases `withdrawn_from` went to it until now.
    """

    run_id: str
    checkpoints: int
    bytes: int
    withdrawn_from: tuple[str, ...]
    data_snapshot: str
    freed_bytes: int | None = None


def preview_deletion(log: run_log.RunLog) -> RunDeletion:
    """Return what would go; raises `GateRefused` for what an alias or a fork needs, `LiveOwner` for a living owner."""
    aliases = withdrawn_aliases(log)
    refuse_live_owner(log, run_lookup.configuration_of(log.state).lease, monotonic=time.monotonic, sleep=time.sleep)
    there = [item for item in run_lookup.read_checkpoints(log) if item.state != run_state.CheckpointState.DELETED]
    return RunDeletion(
        run_id=log.run_id,
        checkpoints=len(there),
        bytes=sum(item.bytes for item in there),
        withdrawn_from=aliases,
        data_snapshot=log.state.opened.data_snapshot if log.state.opened else "",
    )


def delete_as_person(log: run_log.RunLog, view: RunDeletion, why: str) -> RunDeletion:
    """Delete the run and return what went; raises as `delete_run` does."""
    config = run_lookup.configuration_of(log.state)
    claimant = Claimant(
        lease=config.lease,
        budgets=config.budgets,
        writer=log_entry.this_writer(),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    report = delete_run(log, run_entries.RunDeleted(by=this_person(), why=why), claimant)
    gone = [item for item in report.items if item.action == SweepAction.DELETE and item.kind != SweepKind.UNFINISHED]
    return replace(view, checkpoints=len(gone), bytes=sum(item.bytes for item in gone), freed_bytes=report.freed_bytes)


def describe_deletion(deletion: RunDeletion) -> list[str]:
    """Return what goes, or went, and what stays."""
    freed = deletion.freed_bytes
    verb, size = ("would delete", deletion.bytes) if freed is None else ("deleted", freed)
    lines = [f"run {deletion.run_id}: {verb} {format_count(deletion.checkpoints, 'checkpoint')} ({size:,} bytes)"]
    lines += [f"`cairn rollback --alias {alias}` skips them from then on" for alias in deletion.withdrawn_from]
    kept = f"its data snapshot {deletion.data_snapshot[:8]}"
    return [*lines, f"its log, receipts and curve stay (`cairn runs --archived`), and {kept}"]


def roll_back(store: ObjectStore, alias: str, *, by: str, why: str = "") -> alias_history.AliasDecision:
    """Point the alias at the last readable promotion before and return it; raises `RunNotFound` or `IntegrityError`."""

    def decide(state: registry.RegistryState) -> registry.RolledBack:
        if len(state.champions) < 2:
            has = "one promotion and nothing before it" if state.champions else "no promotion"
            raise RunNotFound(
                f"alias {alias!r} has {has}; `cairn models` shows the history, `cairn promote` adds to it"
            )
        problems, leaving = [], state.champions[-1][1]
        for _, before in reversed(state.champions[:-1]):
            if not (problem := _find_problem(store, before)):
                facts = f"from {leaving.run_id}@{leaving.step} back to {before.run_id}@{before.step}"
                facts += f": {why}" if why else ""
                return registry.RolledBack(
                    alias=alias,
                    manifest_sha256=before.manifest_sha256,
                    by=by,
                    why=facts,
                    left_manifest_sha256=leaving.manifest_sha256,
                )
            problems.append(f"{before.run_id}@{before.step} {problem}")
        raise IntegrityError(
            f"alias {alias!r} stays where it is, nothing before it can be read: {'; '.join(problems)}; "
            "`cairn promote RUN@STEP --alias NAME` points another alias at what is left"
        )

    return alias_history.list_alias_promotions(alias, registry.Registry(store, alias).append(decide))[0]


def _find_problem(store: ObjectStore, promoted: registry.Promoted) -> str:
    """Return why these weights cannot be used; empty where they are committed and all their bytes are there."""
    record = run_log.RunLog(store, promoted.run_id).refresh().find(promoted.prefix)
    if record is None or not record.is_committed:
        return "is not in its run's log" if record is None else f"is {record.state}: {record.detail}"
    try:
        manifest = read_manifest(store, promoted.prefix, promoted.manifest_sha256)
    except IntegrityError as error:
        return f"has no manifest: {error}"
    short = [damage.key.rsplit("/", 1)[1] for damage in find_wrong_sizes(store, promoted.prefix, manifest)]
    return f"has lost bytes: {', '.join(short)}" if short else ""
