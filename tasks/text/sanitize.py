"""Text of foreign origin made fit to be shown: it can neither steer a terminal nor hide what it says.

Owns what counts as harmless. Logs, samples, stderr, names out of a store and answers of servers are foreign, whoever
wrote them. Pure. Source of the commands: ECMA-48 (control functions), of the hidden order: Unicode UAX #9.
"""

import re

_COMMANDS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
)
"""What a terminal takes for a command: colours, cursor moves, titles."""
_UNSEEN = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
"""C1 controls, and characters that show nothing or turn the order around; JSON escapes the rest by itself."""


def sanitize(text: str, *, kept: str = "\n\t") -> str:
    """Return text that cannot steer a terminal: its commands left out, other unprintable characters replaced."""
    if text.isascii() and text.isprintable():
        return text
    return replace_unprintable(_COMMANDS.sub("", text), kept=kept)


def replace_unprintable(text: str, *, kept: str = "\n\t") -> str:
    """Return text with every unprintable character replaced and nothing left out: where the text itself matters."""
    return "".join(char if char.isprintable() or char in kept else "\N{REPLACEMENT CHARACTER}" for char in text)


def sanitize_json(document: str) -> str:
    """Return the same JSON document, with every character in it that a terminal could mistake written as its number."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", document)
