"""Notes and tags of a person on a run: recorded in their name, and as they are now."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_note import MOST_TAGS, RunNote, RunNoted
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.redaction import redact
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import this_person
from cairn.tasks.text.format import sanitize


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """The tags of a run, and all notes on it, oldest first."""

    run_id: str
    tags: tuple[str, ...]
    notes: tuple[RunNote, ...]


def note_run(log: RunLog, text: str, tags: Sequence[str], untagged: Sequence[str]) -> RunNotes:
    """Record a note, tags, and tags to take away, and return all; without any of these nothing is recorded.

    Raises `InvalidConfiguration` or `StorageError` for what cannot be recorded.
    """
    noted = redact(sanitize(text)).strip()
    body = RunNoted(by=this_person(), text=noted, tags=tuple(tags), untagged=tuple(untagged))

    def decide(state: RunState) -> RunNoted:
        for tag in untagged:
            if tag not in state.tags:
                raise InvalidConfiguration(
                    f"--untag {tag}: run {log.run_id} has no such tag; rule: one of {', '.join(state.tags) or 'none'}"
                )
        if len({*state.tags, *tags} - {*untagged}) > MOST_TAGS:
            raise InvalidConfiguration(f"--tag {tags[-1]}: a run has at most {MOST_TAGS} tags; take some away: --untag")
        return body

    if noted or tags or untagged:
        log.append(decide, writer=this_writer())
    return RunNotes(run_id=log.run_id, tags=log.state.tags, notes=tuple(log.state.notes))
