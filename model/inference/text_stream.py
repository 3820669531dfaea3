"""Decodes ids to text while they are sampled, in whole characters.

A token may end inside a character, and some decoders write a token differently at the start of a text, so ids are
decoded together with those returned before them.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text that grows by ids; with a byte-level tokenizer the joined pieces equal one decoding of all ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids, self._returned = list(after), len(after)
        self._returned_text = decode(self._ids) if after else ""

    def push(self, token: int) -> str:
        """Add `token` and return the text that is now complete; "" while a character may be incomplete.

        Bytes that are not UTF-8 become replacement characters once other text follows them.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._returned_text):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the rest; no token follows."""
        return self._take(self._decode(self._ids)) if len(self._ids) > self._returned else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._returned_text) :]
        self._ids = self._ids[self._returned :]
        self._returned, self._returned_text = len(self._ids), self._decode(self._ids)
        return piece
