"""Makes untrusted text (logs, samples, stderr, names in a store, answers of servers) safe to display.

Sources: ECMA-48 for terminal control functions, Unicode UAX #9 for characters that reorder text.
"""

import re

_COMMANDS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
)
"""Terminal commands: colours, cursor moves, titles."""
_INVISIBLE = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|#(?=#[\\w.-]*\\[)")
"""C1 controls, characters that are invisible or reorder text, and the mark of a CI system's command in a line."""


def sanitize(text: str, *, kept: str = "\n\t") -> str:
    """Return text without terminal commands and with other unprintable characters replaced, except those `kept`."""
    if text.isascii() and text.isprintable():
        return text
    return replace_unprintable(_COMMANDS.sub("", text), kept=kept)


def sanitize_cell(text: str) -> str:
    """Return sanitized text on one line, with `\\n` for the end of a line."""
    return sanitize(text.replace("\n", "\\n"), kept="\t")


def replace_unprintable(text: str, *, kept: str = "\n\t") -> str:
    """Return text of the same length with every unprintable character replaced."""
    return "".join(char if char.isprintable() or char in kept else "\N{REPLACEMENT CHARACTER}" for char in text)


def sanitize_json(document: str) -> str:
    """Return the same JSON document with invisible characters, and marks of commands, written as escapes."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)
