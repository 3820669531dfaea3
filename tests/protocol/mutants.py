"""Deliberate mistakes in the protocol, each a patch of the product's own code: the suite must notice every one.

Owns the mistakes and which invariant is expected to catch each. A mutant nobody catches means that a promise is not
tested.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

import cairn.storage.checkpoints.checkpoint as checkpoint
import cairn.storage.checkpoints.resume_point as resume_point
import cairn.storage.checkpoints.sweep as sweep
import cairn.tasks.attempt.attempt_entries as attempt_entries
import cairn.tasks.checkpoints.promotion as promotion
import cairn.tasks.checkpoints.retention as retention
import cairn.tasks.evaluator.evaluation_run as evaluation_run
from cairn.storage.checkpoints.resume_point import Finding
from cairn.storage.errors import NotDurable, ObjectMissing, StoreUnavailable
from cairn.storage.logs.fold_cache import LogFold, decode_history
from cairn.storage.logs.log_entry import (
    FORMAT_VERSION,
    CheckpointReference,
    Entry,
    EntryLog,
    ReadEntry,
    decode_entry,
    entry_name,
)
from cairn.storage.logs.run_entries import CheckpointCommitted, CheckpointPinned, Placement, StagedCheckpoint
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import decode, encode, sha256
from cairn.storage.stores.object_store import ObjectStore
from tests.memory_store import MemoryStore

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A mistake, the scenarios it is looked for in first, and the invariants that may catch it.

    Of a scenario's cases those of `trouble` come first; schedules come after the scenarios, from `first_seed` on: each
    one that catches it today.
    """

    name: str
    patch: Patch
    scenarios: tuple[str, ...]
    caught_by: tuple[str, ...]
    first_seed: int = 0
    trouble: str = ""


def marker_before_payload(patch: pytest.MonkeyPatch) -> None:
    """The commit entry is appended first, the objects follow."""
    aside, stage = MemoryStore("aside"), checkpoint.stage_checkpoint

    def stage_nothing(store: ObjectStore, **named: Any) -> StagedCheckpoint:
        return stage(aside, **named)

    def commit_first(log: Any, staged: StagedCheckpoint, *, writer: Any, **named: Any) -> RunState:
        body = CheckpointCommitted(
            **{name: getattr(staged, name) for name in StagedCheckpoint.__dataclass_fields__}, **named
        )
        state: RunState = log.append(partial(checkpoint._unless_committed, body), writer=writer)
        for key in aside.keys(staged.prefix):
            log.store.write(key, aside.read(key))
        return state

    patch.setattr(checkpoint, "stage_checkpoint", stage_nothing)
    patch.setattr(checkpoint, "commit_checkpoint", commit_first)


def encode_entry(log: EntryLog, body: Any, *, after: Any, writer: Any, resume: Any = ()) -> tuple[str, bytes]:
    """Return the key and the bytes of the entry that holds `body` right after `after`."""
    entry = Entry(
        version=FORMAT_VERSION,
        seq=after.entry.seq + 1 if after else 0,
        kind=next(kind for kind, record in log.kinds.items() if record is type(body)),
        at=log.clock(),
        write_id=uuid4().hex,
        prev=after.sha256 if after else None,
        writer=writer,
        resume=resume,
        body=body,
    )
    return f"{log.prefix}/{entry_name(entry.seq)}", encode(entry)


def blind_retry(patch: pytest.MonkeyPatch) -> None:
    """An append without a clean answer is put again behind whatever is there now."""

    def append(self: EntryLog, body: Any, *, after: Any, **named: Any) -> ReadEntry | None:
        while True:
            key, data = encode_entry(self, body, after=after, **named)
            try:
                made = self.store.create(key, data)
            except StoreUnavailable:
                after = [after, *self.read_after(after)][-1]
                continue
            read = ReadEntry(entry=decode_entry(data, self.kinds, where=key), sha256=sha256(data))
            return read if made else None

    patch.setattr(EntryLog, "append", append)


def no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    """Neither writer nor fold asks whether a newer attempt owns the run."""
    patch.setattr(RunState, "fences", lambda self, attempt: False)


def delete_before_supersede(patch: pytest.MonkeyPatch) -> None:
    """The bytes go first, the entry that allows it follows."""
    supersede = sweep._Sweep._supersede

    def delete_first(self: sweep._Sweep) -> None:
        for verdict in self._plan(self._state, ()).checkpoints:
            if verdict.is_over:
                self._delete_bytes(verdict.key)
        supersede(self)

    patch.setattr(sweep._Sweep, "_supersede", delete_first)


def promote_without_pin(patch: pytest.MonkeyPatch) -> None:
    """The registry is asked without the run's log being told first."""
    patch.setattr(promotion, "pin_checkpoint", lambda log, pin, *, writer: True)


def resume_without_verification(patch: pytest.MonkeyPatch) -> None:
    """The newest committed checkpoint is believed."""
    patch.setattr(resume_point.checkpoint, "verify_checkpoint", lambda store, reference, **how: ())


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    """A lost answer is taken for a failure: the same PUT again, and whoever is there is somebody else."""

    def append(self: EntryLog, body: Any, **named: Any) -> ReadEntry | None:
        key, data = encode_entry(self, body, **named)
        for _ in range(6):
            try:
                made = self.store.create(key, data)
            except StoreUnavailable:
                continue
            return ReadEntry(entry=decode_entry(data, self.kinds, where=key), sha256=sha256(data)) if made else None
        raise StoreUnavailable(key)

    patch.setattr(EntryLog, "append", append)


def commit_not_idempotent(patch: pytest.MonkeyPatch) -> None:
    """Committing again after an unknown outcome does not look whether it is committed."""
    patch.setattr(checkpoint, "_unless_committed", lambda body, state: body)


def sweep_of_a_live_attempt(patch: pytest.MonkeyPatch) -> None:
    """Whatever is staged and not committed counts as an orphan."""
    patch.setattr(retention, "_judge_staged", lambda state, folder: Finding(key=folder, is_over=True, why="mutant"))


def fold_cache_trusted(patch: pytest.MonkeyPatch) -> None:
    """The cached fold is believed if it can be decoded, whatever log it was folded from."""

    def read(self: LogFold[RunState]) -> tuple[ReadEntry, RunState] | None:
        try:
            line, _, state = self._log.store.read(self.fold_key).partition(b"\n")
        except ObjectMissing:
            return None
        head = self._log.read(decode(line, dict, where=self.fold_key)["seq"])
        if head is None:
            return None
        return head, decode(state, RunState, where=self.fold_key, hook=decode_history)

    patch.setattr(LogFold, "read_fold", read)


def pins_of_the_living_unpinned(patch: pytest.MonkeyPatch) -> None:
    """A sweep takes an undecided pin for a forgotten one."""
    judge = retention._judge_pin

    def judge_as_dead(terms: retention.RetentionTerms, pin: Any) -> Finding:
        decided = any(pin.pin_id in known.decided_pins for known in terms.aliases.values())
        return judge(terms, pin) if decided else Finding(key=pin.pin_id, is_over=True, why="mutant")

    patch.setattr(retention, "_judge_pin", judge_as_dead)


def claim_on_an_old_state(patch: pytest.MonkeyPatch) -> None:
    """The claim does not read again what is newest when it has waited for its turn."""

    def next_attempt(log: Any, reference: CheckpointReference | None, start: Any, state: RunState) -> Any:
        if state.open_attempt is not None:
            raise attempt_entries._live_owner(log, state.open_attempt, "claimed the run first")
        return start(state.latest_attempt + 1, reference, state)

    patch.setattr(attempt_entries, "_next_attempt", next_attempt)


def fsync_error_swallowed(patch: pytest.MonkeyPatch) -> None:
    """After a failed fsync of the folder, reading the entry back from the page cache counts as committed."""
    append = EntryLog.append

    def read_back(self: EntryLog, body: Any, *, after: Any, **named: Any) -> ReadEntry | None:
        try:
            return append(self, body, after=after, **named)
        except NotDurable:
            return self.read(after.entry.seq + 1 if after else 0)

    patch.setattr(EntryLog, "append", read_back)


def quarantine_without_reread(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint that failed one read is quarantined."""
    patch.setattr(resume_point, "READ_TRIES", 1)


def deletion_without_a_check(patch: pytest.MonkeyPatch) -> None:
    """A quarantined checkpoint is given up on the old evidence."""
    patch.setattr(sweep._Sweep, "_reason_to_spare", lambda self, record: self._confirmed.add(record.committed.prefix))


def no_version_gate(patch: pytest.MonkeyPatch) -> None:
    """What cannot be understood is passed over, by writers too."""
    patch.setattr(RunState, "closed_to_writers", lambda self: "")


def heartbeat_ignored(patch: pytest.MonkeyPatch) -> None:
    """An owner that seems to be gone is not observed."""
    patch.setattr(attempt_entries, "_DEAD_SILENT_BEATS", 0.0)


def hole_taken_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """The first absent number is the end of a log, whatever lies beyond it."""
    patch.setattr(LogFold, "refresh_whole", lambda self: self.refresh())


def shared_pin(patch: pytest.MonkeyPatch) -> None:
    """A pin is named after its checkpoint, so two evaluators share it and the first to end unpins it."""

    def new_pin(reference: CheckpointReference, pinned_by: Placement, **named: Any) -> CheckpointPinned:
        return replace(resume_point.new_pin(reference, pinned_by, **named), pin_id=sha256(reference.prefix.encode()))

    patch.setattr(evaluation_run, "new_pin", new_pin)


def fork_judged(over: Callable[[RunState, bool], object]) -> Patch:
    """Return the mistake that the pin of a fork ends too early: by its state, or because its maker is dead."""
    judge = resume_point._judge

    def judge_early(pin: CheckpointPinned, state: RunState, *, is_abandoned: bool) -> tuple[bool, str]:
        is_over, why = judge(pin, state, is_abandoned=is_abandoned)
        return is_over or bool(over(state, is_abandoned)), why

    return lambda patch: patch.setattr(resume_point, "_judge", judge_early)


def fork_without_a_pin(patch: pytest.MonkeyPatch) -> None:
    """A fork is opened, and starts over, without a pin in its parent's log."""
    patch.setattr(resume_point, "pin_checkpoint", lambda log, pin, *, writer: True)


_FORK_KEEPS = ("a fork keeps its beginning",)
MUTANTS = (
    Mutant("marker-before-payload", marker_before_payload, ("stage-and-commit",), ("committed verifies",)),
    Mutant("blind-retry", blind_retry, ("commit", "promote"), ("no entry twice",), trouble="response_lost"),
    Mutant("no-epoch-check", no_epoch_check, ("commit",), ("fencing",), trouble="slow_while_taken_over"),
    Mutant(
        "delete-before-supersede", delete_before_supersede, ("supersede-and-delete",), ("nothing referenced deleted",)
    ),
    Mutant("promote-without-pin", promote_without_pin, (), ("nothing needed is superseded",), first_seed=261),
    Mutant(
        "resume-without-verification",
        resume_without_verification,
        ("quarantine-and-resume",),
        ("a resume point can be read", "the run goes on"),
    ),
    Mutant(
        "no-read-back",
        no_read_back,
        ("finish-run", "roll-back"),
        ("no entry twice", "an append is settled"),
        trouble="response_lost",
    ),
    Mutant(
        "commit-not-idempotent",
        commit_not_idempotent,
        ("commit",),
        ("committing again is harmless",),
        trouble="lost_then_throttled",
    ),
    Mutant("sweep-of-a-live-attempt", sweep_of_a_live_attempt, ("sweep",), ("nothing referenced deleted",)),
    Mutant(
        "fold-cache-trusted",
        fold_cache_trusted,
        ("read-back-over-a-foreign-cache",),
        ("the cache agrees with the entries", "readers agree", "content"),
    ),
    Mutant(
        "pins-of-the-living-unpinned",
        pins_of_the_living_unpinned,
        ("promote-oldest",),
        ("nothing needed is superseded",),
        trouble="slow_while_swept",
    ),
    Mutant(
        "fsync-error-swallowed",
        fsync_error_swallowed,
        ("commit",),
        ("nothing acknowledged is lost",),
        trouble="not_durable_and_a_power_cut",
    ),
    Mutant(
        "heartbeat-ignored",
        heartbeat_ignored,
        ("claim-from-a-beating-owner",),
        ("a heartbeat outvotes a missing pid",),
    ),
    Mutant("hole-taken-for-the-end", hole_taken_for_the_end, ("resume-over-a-hole",), ("a hole is not written into",)),
    Mutant("shared-pin", shared_pin, ("evaluate-beside-another",), ("what is pinned stays",)),
    Mutant("claim-on-an-old-state", claim_on_an_old_state, (), ("resumes from the newest",), first_seed=91),
    Mutant("quarantine-without-reread", quarantine_without_reread, (), ("no quarantine on one read",), first_seed=414),
    Mutant(
        "deletion-without-a-check", deletion_without_a_check, ("sweep-of-quarantined",), ("no quarantine on one read",)
    ),
    Mutant("no-version-gate", no_version_gate, ("commit-after-a-newer-program",), ("an old writer stops",)),
    Mutant("pin-of-a-fork-ends-with-its-maker", fork_judged(lambda state, dead: dead), (), _FORK_KEEPS, first_seed=7),
    Mutant("grown-once-claimed", fork_judged(lambda state, dead: state.attempts), (), _FORK_KEEPS, first_seed=2),
    Mutant("grown-with-one-commit", fork_judged(lambda state, dead: state.readable), (), _FORK_KEEPS, first_seed=2),
    Mutant("fork-without-a-pin", fork_without_a_pin, ("fork",), _FORK_KEEPS, first_seed=87),
)
