"""What a page of a report is made of: sections of facts, tables, words, things to unfold, and places for pictures.

Owns the pieces. Pure data, nothing in it is escaped; refuses Markdown and HTML.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Names and what they are."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headings; `reasons` names the column that holds termination reasons, which a page may colour."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    reasons: str = ""

    @property
    def filled(self) -> "Table":
        """Without the columns in which there is nothing at all."""
        kept = [number for number in range(len(self.columns)) if any(row[number] is not None for row in self.rows)]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[number] for number in kept), rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verbatim:
    """Text whose line breaks count: commands, samples."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Something long under a line that says what it is."""

    title: str
    block: "Block"


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A place for a picture the page has: the curve, or the timeline; `text` says what is seen on it."""

    name: str
    text: str


Block = Facts | Table | Words | Verbatim | Fold | Picture
CURVE, TIMELINE = "curve", "timeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]
