"""Deletes a run in the name of a person: what would go, and what went."""

import time
from dataclasses import dataclass, replace

from flows.operations.checkpoint_offer import this_person
from reports.queries.checkpoints import read_checkpoints
from reports.queries.run_lookup import configuration_of
from storage.checkpoints.sweep import SweepAction, SweepKind
from storage.logs.log_entry import this_writer
from storage.logs.run_entries import RunDeleted
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointState
from tasks.attempt.attempt_claim import Claimant, refuse_live_owner
from tasks.checkpoints.run_deletion import delete_run, withdrawn_aliases
from tasks.text.format import format_count


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


def preview_deletion(log: RunLog) -> RunDeletion:
    """Return what would go; raises `GateRefused` for what an alias or a fork needs, `LiveOwner` for a living owner."""
    aliases = withdrawn_aliases(log)
    lease = configuration_of(log.state).lease
    refuse_live_owner(log, lease, monotonic=time.monotonic, sleep=time.sleep)
    there = [item for item in read_checkpoints(log) if item.state != CheckpointState.DELETED]
    return RunDeletion(
        run_id=log.run_id,
        checkpoints=len(there),
        bytes=sum(item.bytes for item in there),
        withdrawn_from=aliases,
        data_snapshot=log.state.opened.data_snapshot if log.state.opened else "",
    )


def delete_as_person(log: RunLog, view: RunDeletion, why: str) -> RunDeletion:
    """Delete the run and return what went; raises as `delete_run` does."""
    config = configuration_of(log.state)
    claimant = Claimant(
        lease=config.lease, budgets=config.budgets, writer=this_writer(), monotonic=time.monotonic, sleep=time.sleep
    )
    report = delete_run(log, RunDeleted(by=this_person(), why=why), claimant)
    gone = [item for item in report.items if item.action == SweepAction.DELETE and item.kind != SweepKind.UNFINISHED]
    return replace(view, checkpoints=len(gone), bytes=sum(item.bytes for item in gone), freed_bytes=report.freed_bytes)


def describe_deletion(deletion: RunDeletion) -> list[str]:
    """Return what goes, or went, and what stays."""
    verb = "would delete" if deletion.freed_bytes is None else "deleted"
    size = deletion.bytes if deletion.freed_bytes is None else deletion.freed_bytes
    lines = [f"run {deletion.run_id}: {verb} {format_count(deletion.checkpoints, 'checkpoint')} ({size:,} bytes)"]
    lines += [f"`cairn rollback --alias {alias}` skips them from then on" for alias in deletion.withdrawn_from]
    data = deletion.data_snapshot[:8]
    return [*lines, f"its log, receipts and curve stay (`cairn runs --archived`), and its data snapshot {data}"]
