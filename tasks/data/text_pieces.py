"""Cuts a long text into pieces of bounded size, at a paragraph or a line where there is one.

So a split gets its share of a long text, and memory holds one piece at a time.
"""

from collections.abc import Iterator
from typing import BinaryIO

_PARAGRAPHS_AND_LINES = (b"\n\n", b"\n\r\n", b"\n")
_LONGEST_CHARACTER_BYTES = 4


def pieces_of(text: BinaryIO, longest: int, border: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each piece; together they are the text.

    A piece has at most `longest` bytes, and a character's rest where the piece ends at `border`: no piece lies on both
    sides of it, and none begins or ends within a UTF-8 character.
    """
    offset, held = 0, b""
    while held := held + text.read(longest + _LONGEST_CHARACTER_BYTES - len(held)):
        to_border = border - offset if border is not None else 0
        end = _after_character(held, to_border) if 0 < to_border <= longest else _end_of_piece(held, longest)
        yield offset, held[:end]
        offset, held = offset + end, held[end:]


def _end_of_piece(held: bytes, longest: int) -> int:
    if len(held) <= longest:
        return len(held)
    for mark in _PARAGRAPHS_AND_LINES:
        if (found := held.rfind(mark, longest // 2, longest)) >= 0:
            return found + len(mark)
    return next(
        (end for end in range(longest, longest - _LONGEST_CHARACTER_BYTES, -1) if _is_start(held[end])), longest
    )


def _after_character(held: bytes, end: int) -> int:
    while end < len(held) and not _is_start(held[end]):
        end += 1
    return end


def _is_start(byte: int) -> bool:
    return byte & 0xC0 != 0x80
