"""Numbers, times, lists and untrusted text (logs, samples, stderr, names in a store) as they are shown to people.

Sources: ECMA-48 for terminal control functions, Unicode UAX #9 for characters that reorder text.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.model.configuration.data import MixtureStage

_FAR = 1.5
"""A share this many times greater or smaller than asked is reported: one long document can be most of a text."""
_UNITS = ((86_400, "day", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")
_COMMANDS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
)
"""Terminal commands: colours, cursor moves, titles."""
_INVISIBLE = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|#(?=#[\\w.-]*\\[)")
"""C1 controls, characters that are invisible or reorder text, and the mark of a CI system's command in a line."""


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return `1 step`, `2 steps`, `1,000 steps`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_quantity(amount: float, unit: str = "B") -> str:
    """Return an amount with three digits, in thousands that suit it: `434 kB`, `6.28 TB`, `104 GFLOP/s`."""
    digits, _, exponent = f"{amount:.2e}".partition("e")
    thousands = min(max(int(exponent) // 3, 0), len(_THOUSANDS) - 1)
    return f"{float(digits) * 10 ** (int(exponent) - 3 * thousands):g} {_THOUSANDS[thousands]}{unit}"


def format_money(amount: float, currency: str) -> str:
    """Return an amount with its currency: `2.50 EUR`, `less than 0.01 EUR`."""
    return f"{'less than 0.01' if 0 < amount < 0.005 else f'{amount:,.2f}'} {currency}".rstrip()


def format_duration(seconds: float) -> str:
    """Return a duration in its two greatest units: `0.4 s`, `12 s`, `4 min 12 s`, `3 h 5 min`, `2 days 4 h`."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 or seconds == 0 else f"{max(seconds, 0.1):.1f} s"
    size, name, part_size, part_name = next(unit for unit in _UNITS if round(seconds) >= unit[0])
    whole, parts = divmod(round(seconds / part_size), size // part_size)
    first = format_count(whole, "day") if name == "day" else f"{whole:,} {name}"
    return f"{first} {parts} {part_name}" if parts else first


def format_clock(seconds: float | None) -> str:
    """Return a duration as `0:40`, `12:05` or `3:00:09`, and a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_bar(share: float, cells: int) -> str:
    """Return a progress bar of this many cells, filled to a share between 0 and 1."""
    filled = int(min(max(share, 0.0), 1.0) * cells)
    return "━" * filled + "─" * (cells - filled)


def format_time(at: datetime | None) -> str:
    """Return a time with its zone, to the second."""
    return f"{format_value(at)} UTC" if at else "at an unknown time"


def format_list(items: Sequence[object], most: int, *, more: str = "") -> str:
    """Return the first items, how many are left out, and where they are: `1, 2, 3, … and 12 more: cairn log R`."""
    shown = ", ".join(str(item) for item in items[:most])
    left = len(items) - most
    return shown if left <= 0 else f"{shown}, … and {left:,} more{f': {more}' if more else ''}"


def format_steps(first: int, last: int) -> str:
    """Return a range of steps with both ends: `step 12`, `steps 12 to 20`."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def one_line(text: str, most: int = 0) -> str:
    """Return sanitized text on one line, cut to `most` characters if that is not 0."""
    line = " ".join(sanitize(text).split())
    return f"{line[: most - 1]}…" if most and len(line) > most else line


def format_value(value: object) -> str:
    """Return a value for a table: a dash for None, times to the second, numbers with four digits."""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def short_digest(digest: str | None) -> str:
    """Return the first 12 characters of a digest."""
    return digest[:12] if digest else "–"


def sanitize(text: str, *, kept: str = "\n\t") -> str:
    """Return text without terminal commands and with other unprintable characters replaced, except those `kept`."""
    is_plain = text.isascii() and text.isprintable()
    return text if is_plain else replace_unprintable(_COMMANDS.sub("", text), kept=kept)


def sanitize_cell(text: str) -> str:
    """Return sanitized text on one line, with `\\n` for the end of a line."""
    return sanitize(text.replace("\n", "\\n"), kept="\t")


def replace_unprintable(text: str, *, kept: str = "\n\t") -> str:
    """Return text of the same length with every unprintable character replaced."""
    return "".join(char if char.isprintable() or char in kept else "\N{REPLACEMENT CHARACTER}" for char in text)


def sanitize_json(document: str) -> str:
    """Return the same JSON document with invisible characters, and marks of commands, written as escapes."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def describe_mixture(stages: "Sequence[MixtureStage]") -> str:
    """Return what is drawn: `from step 0 75.00% a.txt, 25.00% b.txt; from step 800 …`."""
    shown = (", ".join(f"{share:.2%} {name}" for name, share in stage.shares.items() if share) for stage in stages)
    return "; ".join(f"from step {stage.from_step:,} {text}" for stage, text in zip(stages, shown, strict=True))


def describe_schedule(wastes_last_step: bool) -> tuple[str, ...]:
    """Return the note that a schedule which ends at a learning rate of 0 deserves, if any."""
    return ("the last step changes no weight: training.min_lr is 0",) if wastes_last_step else ()


def describe_split(train: int, val: int, unit: str, val_fraction: float | None) -> str:
    """Return the sizes of both splits in `unit`, with a warning where the share held out is far from the one asked."""
    sizes = f"{train:,} {unit} to train on, {val:,} held out"
    share = val / max(1, train + val)
    if val_fraction is None or val_fraction / _FAR <= share <= val_fraction * _FAR:
        return sizes
    problem = f"that is {share:.1%}, not data.val_fraction = {val_fraction:g}"
    cause = "each document goes by its own hash and few are long"
    return f"{sizes}; warning: {problem}, because {cause}: lower data.max_document_bytes, or set data.split = 'end'"
