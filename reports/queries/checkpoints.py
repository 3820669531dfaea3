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
    manifest_sha256: str | None
    state_sha256: str | None
    bytes: int
    committed_at: datetime | None


def read_checkpoints(log: RunLog) -> tuple[CheckpointSummary, ...]:
    """Return every checkpoint in commit order, then the staged ones; the log is read again after the listing."""
    staged = Counter[str]()
    for key, size in log.store.sizes(f"{log.prefix}/checkpoints").items():
        staged[key.rpartition("/")[0]] += size
    known = tuple(summarize_checkpoint(log.run_id, record) for record in log.refresh().checkpoints)
    names = {summary.prefix for summary in known}
    writing = [
        CheckpointSummary(
            run_id=log.run_id,
            attempt=folder[1],
            step=folder[0],
            state="writing",
            prefix=prefix,
            manifest_sha256=None,
            state_sha256=None,
            bytes=size,
            committed_at=None,
        )
        for prefix, size in sorted(staged.items())
        if prefix not in names and (folder := parse_checkpoint_folder(prefix))
    ]
    return (*known, *writing)


def summarize_checkpoint(run_id: str, record: CheckpointRecord) -> CheckpointSummary:
    """Return the summary of a checkpoint that the log names."""
    return project(
        record.committed, CheckpointSummary, run_id=run_id, state=record.state, committed_at=record.committed_at
    )
