"""Loads a tokenizer.json of unknown origin: known components with bounded contents, checked before the library runs.

Anything else could multiply text or match for ever. GPT-2, Llama, Qwen, Mistral, SmolLM, Gemma and Phi need no more.
Source: the serialized form of Hugging Face's `tokenizers`.
"""

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from model.errors import InvalidInput

MAX_FILE_BYTES = 64 * 1024 * 1024
_MAX_TOKEN_CHARACTERS = 1024
_MEAN_CHARACTERS = 8
_MAX_VOCABULARY = 512 * 1024
_MAX_ADDED_TOKENS = 16 * 1024
_MAX_ADDED_GROUPS = 128
_MAX_COMPONENTS = 16
_MAX_PATTERN = 2048
_MAX_ENTRIES = 64
_MAX_AFFIX = 16
_MAX_COUNT = 1000
_MAX_REPETITIONS = 4
_REPEATABLE = frozenset({"Split", "Split by regex", "Strip", "Replace"})
_MODELS = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})
_PARTS: Mapping[str, tuple[str, frozenset[str]]] = {
    "normalizer": (
        "normalizers",
        frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Nmt", "Prepend", "Replace"})
        | {"BertNormalizer", "ByteLevel"},
    ),
    "pre_tokenizer": (
        "pretokenizers",
        frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})
        | {"BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts"},
    ),
    "post_processor": (
        "processors",
        frozenset({"ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"}),
    ),
    "decoder": (
        "decoders",
        frozenset({"ByteLevel", "Metaspace", "WordPiece", "BPEDecoder", "Replace", "ByteFallback", "Fuse", "Strip"}),
    ),
}
"""Each part of a file: the field that lists a Sequence's members, and the components that are known."""
_REGEX_TOKENS = re.compile(
    r"\\[xpP]\{[^}]*\}|\\.|\[\^?\]?|\]|\(\?[a-z-]*[:=!>]?|\(|\)|\||[*+?]|\{(\d*)(,?)(\d*)\}", re.S
)
_REFERENCE = re.compile(r"\\(?:[1-9]|[gk][<'{])|\(\?(?:[&(R0-9+]|P[>=])")


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a file as `load_tokenizer` does; raises OSError and UnicodeDecodeError too."""
    with path.open(encoding="utf-8") as file:
        return load_tokenizer(file.read(MAX_FILE_BYTES + 1))


def load_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises InvalidInput for one that is damaged, unknown or unbounded."""
    try:
        if len(text) > MAX_FILE_BYTES:
            raise _refused(f"it has {len(text):,} characters", f"at most {MAX_FILE_BYTES:,}")
        document = msgspec.json.decode(text)
        _check_vocabulary(document["model"], document.get("added_tokens") or [])
        for part, (members, known) in _PARTS.items():
            _check_part(part, document.get(part), members, known)
        # The library reads what was checked, not the text: two parsers may see different documents in one text.
        return Tokenizer.from_str(msgspec.json.encode(document).decode())
    except (InvalidInput, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        raise InvalidInput(f"not a tokenizer.json the tokenizers library can read: {error}") from error


def _check_vocabulary(model: dict[str, Any], added: Sequence[Mapping[str, Any]]) -> None:
    kind = model.setdefault("type", "BPE" if "merges" in model else "")  # GPT-2's own file names none
    if kind not in _MODELS:
        raise _refused(f"model is {kind!r}", f"one of {', '.join(sorted(_MODELS))}")
    _check_texts("model", {name: value for name, value in model.items() if name not in ("vocab", "merges")})
    _check_tokens("vocab", [item if isinstance(item, str) else item[0] for item in model["vocab"]], _MAX_VOCABULARY)
    _check_tokens("added_tokens", [token["content"] for token in added], _MAX_ADDED_TOKENS)
    groups = 1 + sum(one["special"] is not next["special"] for one, next in itertools.pairwise(added))
    if groups > _MAX_ADDED_GROUPS:  # the library builds its automaton again for each
        raise _refused(f"added_tokens change {groups:,} times between special and not", f"at most {_MAX_ADDED_GROUPS}")


def _check_tokens(where: str, tokens: Sequence[str], most: int) -> None:
    longest, characters = max(map(len, tokens), default=0), sum(map(len, tokens))
    if len(tokens) > most or longest > _MAX_TOKEN_CHARACTERS or characters > _MEAN_CHARACTERS * most:
        found = f"{where} has {len(tokens):,} tokens of up to {longest:,}, together {characters:,} characters"
        rule = f"at most {most:,} tokens of {_MAX_TOKEN_CHARACTERS:,}, together {_MEAN_CHARACTERS * most:,} characters"
        raise _refused(found, rule)


def _check_part(part: str, found: Any, members: str, known: Set[str]) -> None:
    components = () if found is None else found[members] if found["type"] == "Sequence" else (found,)
    names = [
        component["type"] + " by regex" * ("Regex" in (component.get("pattern") or {})) for component in components
    ]
    for name, component in zip(names, components, strict=True):
        kind = component["type"]
        if kind not in known:
            raise _refused(f"{part} has a {kind!r}", f"one of {', '.join(sorted(known))}")
        if names.count(name) > (_MAX_COMPONENTS if name in _REPEATABLE else 1):
            raise _refused(
                f"{part} has {name} {names.count(name)} times", f"{_MAX_COMPONENTS} times, or once if it grows"
            )
        if part == "decoder" and name != kind:
            raise _refused(f"{part} has a {name}", "by a plain text")
        _check_texts(f"{part}.{kind}", component)
        _check_growth(f"{part}.{kind}", kind, component)


def _check_texts(where: str, value: Any) -> None:
    """Bound every text and list in a component."""
    if isinstance(value, dict | list | str) and len(value) > (_MAX_PATTERN if isinstance(value, str) else _MAX_ENTRIES):
        raise _refused(f"{where} has a length of {len(value):,}", f"at most {_MAX_PATTERN:,}, lists {_MAX_ENTRIES}")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_texts(where, item)


def _check_growth(where: str, kind: str, component: Mapping[str, Any]) -> None:
    """Refuse what makes a text longer than by a little, or takes a time that grows much faster than it."""
    pattern = component.get("pattern") or {}
    if "Regex" in pattern:
        _check_regex(where, pattern["Regex"])
    replaced = component.get("suffix") if kind == "BPEDecoder" else pattern.get("String", "x")
    if not replaced or len(component.get("content") or "") > len(replaced):
        raise _refused(f"{where} replaces {replaced!r} by more", "what is replaced is not empty and not shorter")
    affixes = (component.get(name) for name in ("prepend", "prefix", "replacement"))
    if any(isinstance(affix, str) and len(affix) > _MAX_AFFIX for affix in affixes):
        raise _refused(f"{where} adds a long text", f"at most {_MAX_AFFIX} characters")
    if max(component.get(name) or 0 for name in ("start", "stop")) > _MAX_COUNT:
        raise _refused(f"{where} strips more than {_MAX_COUNT:,} characters", "less")
    for template in ("single", "pair") if kind == "TemplateProcessing" else ():
        if sum("Sequence" in item for item in component[template]) > 2:
            raise _refused(f"{where} repeats its text", "each text once")


def _check_regex(where: str, pattern: str) -> None:
    """Refuse patterns that backtrack without bound: an ambiguous group repeated, a reference, many repetitions."""
    is_ambiguous, closed, classes, repetitions = [False], False, 0, 0
    is_bounded = not _REFERENCE.search(pattern)
    for found in _REGEX_TOKENS.finditer(pattern):
        token, before, closed = found[0], closed, False
        if token[0] == "[" or token == "]":
            classes = max(0, classes + (1 if token[0] == "[" else -1))
        elif classes or token[0] == "\\":
            continue
        elif token[0] == "(":
            is_ambiguous.append(False)
        elif token == ")":
            closed = len(is_ambiguous) > 1 and is_ambiguous.pop()
            is_ambiguous[-1] |= closed
        elif token == "|":
            is_ambiguous[-1], repetitions = True, 0
        else:
            counts = [int(count) for count in (found[1], found[3]) if count]
            is_long = token in "*+" or (found[2] and not found[3]) or max(counts, default=0) > _MAX_AFFIX
            repetitions += bool(is_long)
            is_bounded &= not (is_long and before) and max(counts, default=0) <= _MAX_COUNT
            is_bounded &= repetitions <= _MAX_REPETITIONS
            is_ambiguous[-1] |= not counts or bool(found[2])
    if not is_bounded:
        rule = f"no repetition of a group that can match in two ways, no reference, {_MAX_REPETITIONS} repetitions each"
        raise _refused(f"{where} has a pattern that may match for ever", rule)


def _refused(problem: str, rule: str) -> InvalidInput:
    return InvalidInput(f"tokenizer.json: {problem}; rule: {rule}. Take another tokenizer, or bytes, or bpe:<size>")
