"""From ids to text while they are drawn: only whole characters leave.

Owns what is held back. A token may end inside a character, and some decoders write a token differently at the beginning
of a text than after another one, so ids are decoded together with those shown before them. Refuses to know the
tokenizer beyond its `decode`.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text that grows by ids; with a byte-level tokenizer the pieces joined are what decoding all at once gives."""

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        """Begin after the ids of a prompt, which are not shown again."""
        self._decode = decode
        self._ids, self._shown = list(after), len(after)
        self._shown_text = decode(self._ids) if after else ""

    def push(self, token: int) -> str:
        """Return the text that is certain now that `token` has come; nothing while a character may be incomplete.

        Bytes that are no UTF-8 come out as replacement characters once something else follows them.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown_text):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """Return what was held back: nothing follows any more."""
        return self._show(self._decode(self._ids)) if len(self._ids) > self._shown else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        self._ids = self._ids[self._shown :]
        self._shown, self._shown_text = len(self._ids), self._decode(self._ids)
        return piece
