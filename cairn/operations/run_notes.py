"""Notes and tags of a person on a run: recorded in their name, and as they are now."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.storage.logs import log_entry, run_log, run_note, run_state
from cairn.storage.stores.redaction import redact
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import this_person
from cairn.tasks.text.format import sanitize


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """The tags of a run, and all notes on it, oldest first."""

    run_id: str
    tags: tuple[str, ...]
    notes: tuple[run_note.RunNote, ...]


def note_run(log: run_log.RunLog, text: str, tags: Sequence[str], untagged: Sequence[str]) -> RunNotes:
    """Record a note, tags, and tags to take away, and return all; without any of these nothing is recorded.

    Raises `InvalidConfiguration` or `StorageError` for what cannot be recorded.
    """
    noted = redact(sanitize(text)).strip()
    body = run_note.RunNoted(by=this_person(), text=noted, tags=tuple(tags), untagged=tuple(untagged))

    def decide(state: run_state.RunState) -> run_note.RunNoted:
        for tag in untagged:
            if tag not in state.tags:
                rule = f"one of {', '.join(state.tags) or 'none'}"
                raise InvalidConfiguration(f"--untag {tag}: run {log.run_id} has no such tag; rule: {rule}")
        if len({*state.tags, *tags} - {*untagged}) > run_note.MOST_TAGS:
            rule = f"a run has at most {run_note.MOST_TAGS} tags"
            raise InvalidConfiguration(f"--tag {tags[-1]}: {rule}; take some away: --untag")
        return body

    if noted or tags or untagged:
        log.append(decide, writer=log_entry.this_writer())
    return RunNotes(run_id=log.run_id, tags=log.state.tags, notes=tuple(log.state.notes))
