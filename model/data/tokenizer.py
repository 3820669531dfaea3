"""Converts text to token ids and back.

A second library, twenty times as fast, encodes where its ids are those of `tokenizers`, the reference. Both encode a
probe: constructs that pre-tokenizers cut at, every assigned character in three surroundings, and a sample of the text.
Where an id differs, or the library is not there or cannot read the tokenizer, the reference encodes.
Sources: Sennrich et al. 2016 (byte pairs); Radford et al. 2019 (byte level); fastokens (Apache-2.0).
"""

import contextlib
import functools
import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Tokenizer

from cairn.model.configuration.data import SMALLEST_BPE_VOCABULARY
from cairn.model.data.tokenizer_file import added_tokens_of, known_tokenizers, load_again, without_token
from cairn.model.errors import InvalidInput

FlatIds = tuple[NDArray[np.uint32], NDArray[np.int64]]
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_CODES = (*range(256), *range(256, 0x800, 64), *range(0x800, 0xD800, 0x1000), *range(0xE000, 0x110000, 0x1000))
_EVERY_BYTE = "".join(map(chr, _CODES))
"""Characters whose UTF-8 has every byte that UTF-8 can have."""
_LONGEST_PRETOKEN, _SHOWN_TOKENS = 1024, 12
_LONG_RUNS = ("a" * 300, "_" * 70 + "=" * 70 + " " * 70 + "\n" * 40)
_CHARACTERS_PER_TEXT = 256
_SURROUNDINGS = ("{0}", "a {0} b", "a{0}b", "\n{0}\n", "{0}{0}")


class Encoder(Protocol):
    """Encodes as a tokenizer does, with special tokens as text."""

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """Return concatenated ids (N,) and each text's count (len(texts),); raises OSError if it has ended."""

    def close(self) -> None:
        """Free what it holds."""


class Tokenizer:
    """A vocabulary with an end-of-text token. `train_bpe` and `bytes` round-trip every text unchanged.

    `turned_off` names what its file asks for and would give a text more than one encoding, or a part of one;
    `spells_end` says that a text was met whose spelling would have ended a document.
    """

    def __init__(self, inner: _Tokenizer, *, end_of_text: str = "", end_of_text_id: int | None = None) -> None:
        """Wrap a loaded tokenizer, whose end of text is known by name or id, else one of `KNOWN_ENDS_OF_TEXT`.

        Raises InvalidInput for one that has no such token.
        """
        named = [end_of_text] if end_of_text else KNOWN_ENDS_OF_TEXT
        ends = [found for token in named if (found := inner.token_to_id(token)) is not None]
        if not ends and end_of_text_id is None:
            special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
            shown = ", ".join(map(repr, special[:_SHOWN_TOKENS])) or "none"
            rule = f"data.end_of_text names the token that ends its documents (its special tokens: {shown}), or add one"
            raise InvalidInput(f"tokenizer has no end-of-text token, looked for {', '.join(named)}; rule: {rule}")
        # Text that spells the marker stays text: a document must not be able to end itself.
        inner.encode_special_tokens = True
        self._inner, self.spells_end, self.turned_off = inner, False, tuple[str, ...]()
        if isinstance(model := inner.model, models.BPE) and model.dropout:
            self.turned_off += (f"dropout = {model.dropout:g}",)
            model.dropout = None
        if inner.truncation is not None:
            self.turned_off += ("truncation",)
            inner.no_truncation()
        if inner.padding is not None:
            self.turned_off += ("padding",)
            inner.no_padding()
        self.end_of_text_id = ends[0] if end_of_text_id is None else end_of_text_id
        self._fast: Encoder | None = None

    @functools.cached_property
    def end_of_text(self) -> str:
        """The text of the end-of-text token."""
        return str(self._inner.id_to_token(self.end_of_text_id))

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn a byte-level BPE of exactly `vocab_size` tokens; equal texts give equal tokenizers."""
        if vocab_size < SMALLEST_BPE_VOCABULARY:
            raise InvalidInput(f"vocab_size={vocab_size} must be at least {SMALLEST_BPE_VOCABULARY}")
        inner = _byte_level(models.BPE(), use_regex=True)
        ends, letters = [AddedToken(END_OF_TEXT, special=True, normalized=False)], pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=ends, initial_alphabet=sorted(letters), show_progress=False
        )
        splitting = inner.pre_tokenizer
        # Learning is quadratic in the longest pretoken: text without spaces would be one.
        bound = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_PRETOKEN}}}"), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([splitting, bound])
        inner.train_from_iterator(texts, trainer)
        inner.pre_tokenizer = splitting
        if (size := inner.get_vocab_size()) != vocab_size:
            raise InvalidInput(f"vocab_size={vocab_size} is too big for this text, which yields {size}; ask for less")
        return cls(inner)

    @classmethod
    def bytes(cls) -> Self:
        """Make the tokenizer with the bytes as ids 0 to 255 and end-of-text as 256."""
        printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
        spare = iter(range(256, 512))  # GPT-2's printable character of each other byte
        vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
        inner = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
        inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return cls(inner)

    @functools.cached_property
    def json(self) -> str:
        """The whole tokenizer as text, equal for equal tokenizers."""
        return str(self._inner.to_str(pretty=False))  # takes tens of megabytes each time

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of `json`, the tokenizer's identity."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @functools.cached_property
    def vocab_size(self) -> int:
        """The greatest id plus one."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def accelerate(self, sample: Iterable[str], start: Callable[[str], Encoder]) -> bool:
        """Encode with the fast library from now on, if its ids are the same for a probe and a sample of the text.

        `start` makes its encoder of a tokenizer.json.
        """
        self._fast = choose_encoder(self.json, functools.partial(_encode_flat, self._inner), sample, start)
        if self._fast:
            _ = self.vocab_size, self.end_of_text, self._unknown[1] is None and self._finder
            del self._inner  # two processes would hold a great vocabulary
        return self._fast is not None

    def slow_down(self) -> None:
        """Encode with the reference again, and free what the fast library holds."""
        if self._fast:
            self._fast.close()
        self._fast = None

    @functools.cached_property
    def _inner(self) -> _Tokenizer:
        """The reference, loaded again where it is needed after all."""
        inner = load_again(self.json)
        inner.encode_special_tokens = True
        return inner

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, in order, without special tokens."""
        ids, lengths = self._encode(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []

    def encode_prompt(self, prompt: str, *, spelled: bool = False) -> list[int]:
        """Encode a prompt, as `encode_spelled` if `spelled`; an empty or unknown one becomes the end-of-text id."""
        with contextlib.suppress(InvalidInput):
            ids = self.encode_spelled([prompt])[0].ids if spelled else self.encode_batch([prompt])[0]
            return ids or [self.end_of_text_id]
        return [self.end_of_text_id]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """Encode texts into concatenated ids (N,) and each one's count (len(texts),): all cores, no alignment.

        No text has the end-of-text id: raises InvalidInput for one that the tokenizer cannot encode without it.
        """
        ids, lengths = self._encode(texts)
        self._require_no_end(ids)
        return ids, lengths

    @functools.cached_property
    def _spelling(self) -> _Tokenizer:
        return load_again(self.json)

    def encode_spelled(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode texts in which special tokens stand for themselves, with the characters that each token is of."""
        return _encodings(self._spelling.encode_batch, texts)

    def require_ends_kept(self) -> None:
        """Raise InvalidInput if text that spells the end of text, in one of five surroundings, ends a document."""
        for around in _SURROUNDINGS:
            try:
                ids, _ = self._encode([around.format(self.end_of_text)])
            except InvalidInput:
                continue  # text that cannot be encoded at all is refused where it stands
            self._require_no_end(ids)

    def _require_no_end(self, ids: NDArray[np.uint32]) -> None:
        if (ids == self.end_of_text_id).any():
            problem = "a part of the text, by its spelling or because the tokenizer does not know it, becomes"
            raise InvalidInput(f"{problem} {self.end_of_text!r} (id {self.end_of_text_id}), which ends documents")

    def count_unknown(
        self, texts: Sequence[str], ids: NDArray[np.uint32], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the bytes of each of the encoded texts that the tokenizer does not know (len(texts),).

        They are in unknown tokens that the text does not spell; without an unknown token, in characters that are lost;
        and they are all of a text that becomes no token, as normalizers can make it.
        """
        (token, unknown_id), finder, found = self._unknown, None, np.zeros(len(texts), dtype=np.int64)
        for number in np.flatnonzero(lengths == 0).tolist():
            found[number] = len(texts[number].encode()) if texts[number].strip() else 0
        if unknown_id is None:
            if (finder := self._finder) is None:
                return found
            unknown_id = self.end_of_text_id
            ids, lengths = _encode_flat(finder, texts)
        if not (is_unknown := ids == unknown_id).any():
            return found
        numbers, inner = np.unique(np.repeat(np.arange(len(texts)), lengths)[is_unknown]), finder or self._inner
        encodings = inner.encode_batch([texts[number] for number in numbers], add_special_tokens=False)
        for number, encoding in zip(numbers, encodings, strict=True):
            offsets = np.array(encoding.offsets)[np.array(encoding.ids) == unknown_id]
            parts = (texts[number][start:stop] for start, stop in offsets)
            found[number] = sum(len(part.encode()) for part in parts if part != token)
        return found

    @functools.cached_property
    def _unknown(self) -> tuple[str, int | None]:
        """The unknown token and its id; "" and None without one."""
        if isinstance(model := self._inner.model, models.Unigram):
            # The library does not tell the id of a Unigram's unknown token.
            found: int | None = msgspec.json.decode(self._inner.to_str())["model"].get("unk_id")
            return ("", None) if found is None else (str(self._inner.id_to_token(found)), found)
        token = str(model.unk_token or "")
        return token, self._inner.token_to_id(token)

    @functools.cached_property
    def _finder(self) -> _Tokenizer | None:
        """A copy that writes the end of text for each character that this BPE loses; None if it loses none."""
        if not isinstance(self._inner.model, models.BPE):
            return None  # it refuses what it does not know
        ids, _ = _encode_flat(self._inner, [_EVERY_BYTE])
        if unicodedata.normalize("NFC", self.decode(ids.tolist())) == unicodedata.normalize("NFC", _EVERY_BYTE):
            return None  # a copy of a great vocabulary would take a lot of memory
        finder = without_token(self._inner, self.end_of_text, unknown=True)
        ids, _ = _encode_flat(finder, [_EVERY_BYTE])
        return finder if (ids == self.end_of_text_id).any() else None

    def _encode(self, texts: Sequence[str]) -> FlatIds:
        encoded: FlatIds | None = None
        with contextlib.suppress(OSError):  # its process was ended by these texts
            encoded = self._fast.encode_flat(texts) if self._fast else None
        ids, lengths = encoded or _encode_flat(self._inner, texts)
        if not (marks := ids == self.end_of_text_id).any():
            return ids, lengths
        self.spells_end = True
        # Only these texts once more: all others keep the ids that the tokenizer gives them.
        ending = np.unique(np.repeat(np.arange(len(texts)), lengths)[marks])
        again, counts = _encode_flat(self._without_end, [texts[number] for number in ending])
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for number, part in zip(ending, np.split(again, np.cumsum(counts)[:-1]), strict=True):
            parts[number] = part
        lengths[ending] = counts
        return np.concatenate(parts), lengths

    @functools.cached_property
    def _without_end(self) -> _Tokenizer:
        return without_token(self._inner, self.end_of_text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; end-of-text stays visible, bytes that are not UTF-8 become replacement characters."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def _encodings(encode: Callable[..., list[Encoding]], texts: Sequence[str]) -> list[Encoding]:
    try:
        return encode(list(texts), add_special_tokens=False)
    except (KeyboardInterrupt, MemoryError, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panics are not even an Exception
        raise InvalidInput(f"the tokenizer cannot encode the text: {error}") from None


def _encode_flat(inner: _Tokenizer, texts: Sequence[str]) -> FlatIds:
    encodings = _encodings(inner.encode_batch_fast, texts)
    lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
    ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
    return np.fromiter(ids, dtype=np.uint32, count=int(lengths.sum())), lengths


def _byte_level(model: models.BPE, *, use_regex: bool) -> _Tokenizer:
    inner = _Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def choose_encoder(
    document: str, reference: Callable[[Sequence[str]], FlatIds], sample: Iterable[str], start: Callable[[str], Encoder]
) -> Encoder | None:
    """Return the fast encoder of a tokenizer.json if each id of the probe and the sample is the reference's."""
    with contextlib.ExitStack() as stack:
        try:
            fast = start(document)
            stack.callback(fast.close)
            added = [f"a {token}b{token}" for token in added_tokens_of(document)]
            constructs = (*known_tokenizers()["constructs"], *_LONG_RUNS)
            for texts in itertools.chain([constructs, added], _every_character(), [tuple(sample)]):
                (ids, lengths), (expected, counts) = fast.encode_flat(texts), reference(texts)
                if not (np.array_equal(ids, expected) and np.array_equal(lengths, counts)):
                    return None
        except BaseException as error:  # the library is Rust: its panics are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            return None
        stack.pop_all()
        return fast


def _every_character() -> Iterator[tuple[str, ...]]:
    """Yield texts with every assigned character after a letter, after a space and twice before a digit."""
    assigned = (chr(code) for code in range(1, 0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co"))
    while characters := tuple(itertools.islice(assigned, 64 * _CHARACTERS_PER_TEXT)):
        parts = [f"x{character} {character}{character}1" for character in characters]
        starts = range(0, len(parts), _CHARACTERS_PER_TEXT)
        yield tuple(" ".join(parts[start : start + _CHARACTERS_PER_TEXT]) for start in starts)
