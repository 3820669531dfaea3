"""Notes and tags on a run, as a person makes them: the entry with its bounds, and a note as it is shown."""

from dataclasses import dataclass
from datetime import datetime

from cairn.storage.errors import StorageError
from cairn.storage.stores.object_store import check_name

MOST_CHARACTERS, MOST_TAGS, _MOST_TAG_CHARACTERS = 2_000, 20, 40
"""Of a note, the tags of a run, and characters of a tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNoted:
    """A person wrote about the run, tagged it, or took tags away; an open attempt may go on meanwhile."""

    by: str
    text: str = ""
    tags: tuple[str, ...] = ()
    untagged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rule = "write the rest into a note of its own"
        if (length := len(self.text)) > MOST_CHARACTERS:
            raise StorageError(f"a note of {length:,} characters: must have at most {MOST_CHARACTERS:,}; {rule}")
        for tag in (*self.tags, *self.untagged):
            if len(check_name("tag", tag)) > _MOST_TAG_CHARACTERS:
                raise StorageError(f"tag {tag[:80]}: must have at most {_MOST_TAG_CHARACTERS} characters; shorten it")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """A note on a run."""

    noted_at: datetime
    noted_by: str
    text: str
