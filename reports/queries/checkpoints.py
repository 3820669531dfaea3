"""The checkpoints of a run: one record for each, those that are still being written too."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from storage.checkpoints.sweep import parse_checkpoint_folder
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointRecord
from storage.stores.document import project


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """A checkpoint in one of its states; one that is still *writing* has no digests and no commit time."""

    run_id: str
    attempt: int
    step: int
    state: str
    prefix: str
    manifest_sha256: str | None = None
    state_sha256: str | None = None
    bytes: int
    committed_at: datetime | None = None


def read_checkpoints(log: RunLog) -> tuple[CheckpointSummary, ...]:
    """Return every checkpoint in commit order, then the staged ones; the log is read again after the listing."""
    staged = Counter[str]()
    for key, size in log.store.sizes(f"{log.prefix}/checkpoints").items():
        staged[key.rpartition("/")[0]] += size
    known = [summarize_checkpoint(log.run_id, record) for record in log.refresh().checkpoints]
    for prefix in sorted(staged.keys() - {summary.prefix for summary in known}):
        if folder := parse_checkpoint_folder(prefix):
            (step, attempt), size = folder, staged[prefix]
            writing = CheckpointSummary(
                run_id=log.run_id, step=step, attempt=attempt, prefix=prefix, state="writing", bytes=size
            )
            known.append(writing)
    return tuple(known)


def summarize_checkpoint(run_id: str, record: CheckpointRecord) -> CheckpointSummary:
    """Return the summary of a checkpoint that the log names."""
    return project(
        record.committed, CheckpointSummary, run_id=run_id, state=record.state, committed_at=record.committed_at
    )
