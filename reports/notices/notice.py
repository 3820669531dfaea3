"""Notices of the decisions in a run's log that a person wants to know of, each with a key of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from cairn.reports.queries import run_lookup, run_status
from cairn.reports.text.answer_text import describe_end
from cairn.storage.logs import registry, run_state
from cairn.storage.stores.document import encode, stored_value
from cairn.tasks.policy.termination import DecisionAction, FlowOutcome, flow_outcome
from cairn.tasks.text.format import one_line

_OLD = timedelta(days=1)
"""Older decisions make no notice: a store that gets its first watcher does not repeat its history."""
_MOST_CHARACTERS = 500
_FORMAT_VERSION = 1


class NoticeKind(StrEnum):
    """The event that a notice is about."""

    FINISHED = "finished"
    BUDGET_EXHAUSTED = "budget-exhausted"
    STOPPED = "stopped"
    INTEGRITY = "integrity"
    APPROVAL_WANTED = "approval-wanted"
    SILENT = "silent"


_KINDS = {
    FlowOutcome.BUDGET_EXHAUSTED: NoticeKind.BUDGET_EXHAUSTED,
    FlowOutcome.ERROR: NoticeKind.STOPPED,
    FlowOutcome.STORAGE: NoticeKind.STOPPED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One decision of one run; `key` is the same in every process that reads it, `text` a line for people."""

    run_id: str
    key: str
    kind: NoticeKind
    step: int
    at: datetime | None
    text: str

    @property
    def document(self) -> bytes:
        """The notice as receivers get it, as JSON: equal `id`s are one decision, sent again."""
        named = {name: getattr(self, name) for name in ("run_id", "kind", "step", "at", "text")}
        return encode({"version": _FORMAT_VERSION, "id": f"{self.run_id}/{self.key}", **named})


def find_notices(
    run_id: str, state: run_state.RunState, read_registry: Callable[[str], registry.RegistryState], *, now: datetime
) -> Iterator[Notice]:
    """Yield the decisions of the last day; `read_registry` is asked only where an approval may be wanted."""
    for record in state.checkpoints:
        if record.state == run_state.CheckpointState.QUARANTINED:
            prefix = record.committed.prefix.rpartition("/")[2]
            text = f"checkpoint {prefix} is quarantined: {record.detail}"
            yield _notice(run_id, f"quarantined-{prefix}", NoticeKind.INTEGRITY, record.committed.step, None, text)
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.ended is None or last.ended_at is None or now - last.ended_at >= _OLD:
        return
    number, at, ended = f"{last.started.attempt:04d}", last.ended_at, last.ended
    if state.finished is not None:
        step = state.finished.step
        text = run_status.stopped_early(state) or f"it is finished, at step {step}"
        yield _notice(run_id, f"finished-{number}", NoticeKind.FINISHED, step, at, text)
        config = run_lookup.configuration_document(state)
        alias = stored_value(config, "promotion", "alias", str)
        if alias and stored_value(config, "promotion", "require_approval", bool):
            decided = [item.promoted or item.refused for item in read_registry(alias).history]
            if not any(body is not None and body.run_id == run_id for body in decided):
                wish = f"its promotion to {alias} waits for a person, unless a gate refuses it"
                text = f"{wish}: `cairn promote {run_id}`"
                yield _notice(run_id, f"approval-{number}", NoticeKind.APPROVAL_WANTED, step, at, text)
    elif ended.decision.action == DecisionAction.STOP:
        outcome = flow_outcome(ended.reason, ended.decision.action, ended.decision.charged)
        if outcome in _KINDS:
            text = f"attempt {last.started.attempt} ended: {ended.reason}: {describe_end(ended)}"
            yield _notice(run_id, f"ended-{number}", _KINDS[outcome], ended.last_step, at, text)


def silent_notice(run_id: str, attempt: int, step: int, seconds: float) -> Notice:
    """Return the notice of an open attempt that has shown no life for two leases."""
    text = f"attempt {attempt} has shown no sign of life for {seconds:.0f} seconds, and nothing has continued the run"
    return _notice(run_id, f"silent-{attempt:04d}", NoticeKind.SILENT, step, None, text)


def _notice(run_id: str, key: str, kind: NoticeKind, step: int, at: datetime | None, text: str) -> Notice:
    said = one_line(f"cairn run {run_id}: {text}", _MOST_CHARACTERS)
    return Notice(run_id=run_id, key=key, kind=kind, step=step, at=at, text=said)
