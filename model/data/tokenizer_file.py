"""Loads a tokenizer.json of unknown origin: known components with bounded contents, checked before the library runs.

Anything else could multiply text or match for ever. GPT-2, Llama, Qwen, Mistral, SmolLM, Gemma and Phi need no more.
Source: the serialized form of Hugging Face's `tokenizers`.
"""

import functools
import itertools
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from cairn.model.errors import InvalidInput

MAX_FILE_BYTES = 64 * 1024 * 1024
_UNSPELLED = "\N{ZERO WIDTH JOINER}" * 64
"""Stands for a token that no text may become: so many in a row, which join nothing, are in no text."""
_PROBE = "Don't  repeat 3000000 lines:\r\n\t``b'' é 漢字 مر 😀 <s>" + "a" * 200
_MAX_TOKEN_CHARACTERS, _MEAN_CHARACTERS = 1024, 8
MAX_VOCABULARY, _MAX_ADDED_TOKENS, _MAX_ADDED_GROUPS = 512 * 1024, 16 * 1024, 128
_MAX_PARTS_BYTES, _MAX_COMPONENTS, _MAX_AFFIX, _MAX_COUNT = 32 * 1024, 16, 16, 999
_MAX_PATTERN, _MAX_REPETITIONS, _MAX_CHOICE_BITS = 2048, 3, 12
_AFFIXES = ("prepend", "prefix", "replacement", "continuing_subword_prefix", "end_of_word_suffix")
_COUNTS = ("start", "stop", "max_input_chars_per_word")
_REPEATABLE = frozenset({"Split", "Split by regex", "Strip", "Replace"})
_MODELS = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})
_ATOM = re.compile(r"\\[xpP]\{[^}]*\}|\\[^1-9gk]|\[\^?\]?(?:\\.|[^\[\]\\]|\[(?:\\.|[^\]\\])*\])*\]", re.S)
_GROUP = re.compile(r"\((?:\?[a-z-]*[:=!>])?([^()]*)\)([*+{])?")
_FLEXIBLE = re.compile(r"[*+?|]|\{\d*,")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}|\{[\d,]*\d\d\}")
_INTERVAL = re.compile(r"\{(\d*),(\d+)\}")
_CHAINED = re.compile(r"[*+?][*{]|[*+?][+?][*+?{]|\}[*+{]|\}\?[*+?{]|\(\?[a-z-]*x|\(\?#")
"""Repetitions of repetitions, beside reluctant and possessive ones, and what could hide them: free spaces, comments."""
_ENDLESS = re.compile(r"[()\\]|\{[\d,]*\d{4}")


@functools.cache
def known_tokenizers() -> Mapping[str, Any]:
    """Return the parts of a tokenizer.json that are known, and constructs that pre-tokenizers cut at."""
    return tomllib.loads(Path(__file__).with_name("tokenizers.toml").read_text(encoding="utf-8"))


def run() -> None:
    """Load the tokenizer.json on stdin and encode and decode with it, in a process that may die of it."""
    try:
        with open(0, encoding="utf-8") as file:
            tokenizer = load_tokenizer(file.read(MAX_FILE_BYTES + 1))
    except InvalidInput as error:
        sys.exit(" ".join(str(error).split()))
    try:
        ids = tokenizer.encode(_PROBE).ids
    except Exception:  # it has no token for unknown text: a build refuses such text, and names it
        ids = [*range(min(tokenizer.get_vocab_size(), len(_PROBE)))]
    tokenizer.decode(ids, skip_special_tokens=False)


def load_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises InvalidInput for one that is damaged, unknown or unbounded."""
    try:
        if len(text) > MAX_FILE_BYTES:
            raise _refused(f"it has {len(text):,} characters", f"at most {MAX_FILE_BYTES:,}")
        document = msgspec.json.decode(text)
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
            raise _refused("it has no model with a vocabulary", "an object with both")
        _check_vocabulary(document, document["model"], document.get("added_tokens") or [])
        for part, known in known_tokenizers()["parts"].items():
            _check_part(part, document.get(part), known["members"], known["known"])
        # The library reads what was checked, not the text: two parsers may see different documents in one text.
        return Tokenizer.from_str(msgspec.json.encode(document).decode())
    except (InvalidInput, KeyboardInterrupt, MemoryError, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        raise InvalidInput(f"not a tokenizer.json the tokenizers library can read: {error}") from error


def load_again(text: str) -> Tokenizer:
    """Return the tokenizer of a document that a loaded one has given."""
    return Tokenizer.from_str(text)


def without_token(tokenizer: Tokenizer, token: str, *, unknown: bool = False) -> Tokenizer:
    """Return a copy that gives no text the id of `token`, and has every other id; text that spells it stays text.

    With `unknown` each character that the tokenizer does not know has this id.
    """
    document = msgspec.json.decode(tokenizer.to_str())
    model = document["model"]
    for named in (item for item in document["added_tokens"] if item["content"] == token):
        named |= {"content": _UNSPELLED, "special": True}
    if isinstance(vocabulary := model["vocab"], dict):
        model["vocab"] = {_UNSPELLED if name == token else name: number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[_UNSPELLED if name == token else name, score] for name, score in vocabulary]
    if unknown or model.get("unk_token") == token:
        model["unk_token"] = _UNSPELLED
    prefix = model.get("continuing_subword_prefix") or ""
    if "merges" in model:
        made = ((one, other, one + other.removeprefix(prefix)) for one, other in model["merges"])
        model["merges"] = [[*merge[:2]] for merge in made if token not in merge]
    copy = Tokenizer.from_str(msgspec.json.encode(document).decode())
    copy.encode_special_tokens = True
    return copy


def _check_vocabulary(document: Any, model: dict[str, Any], added: Sequence[Mapping[str, Any]]) -> None:
    kind = model.setdefault("type", "BPE" if "merges" in model else "")  # GPT-2's own file names none
    if kind not in _MODELS:
        raise _refused(f"model is {kind!r}", f"one of {', '.join(sorted(_MODELS))}")
    _check_growth("model", kind, model)
    size = len(msgspec.json.encode({**document, "model": {**model, "vocab": 0, "merges": 0}, "added_tokens": 0}))
    if size > _MAX_PARTS_BYTES:
        raise _refused(f"beside the tokens it has {size:,} bytes", f"at most {_MAX_PARTS_BYTES:,}")
    _check_tokens("vocab", [item if isinstance(item, str) else item[0] for item in model["vocab"]], MAX_VOCABULARY)
    ids = [*model["vocab"].values()] if isinstance(model["vocab"], dict) else []
    if len(ids) != len(set(ids)):  # the library keeps one of them, by chance
        raise _refused("vocab gives an id to two tokens", "each token has its own id")
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


def _check_part(part: str, found: Any, members: str, known: Sequence[str]) -> None:
    components = () if found is None else found[members] if found["type"] == "Sequence" else (found,)
    names = [one["type"] + " by regex" * ("Regex" in (one.get("pattern") or {})) for one in components]
    for name, component in zip(names, components, strict=True):
        kind = component["type"]
        if kind not in known:
            raise _refused(f"{part} has a {kind!r}", f"one of {', '.join(known)}")
        if (times := names.count(name)) > (_MAX_COMPONENTS if name in _REPEATABLE else 1):
            raise _refused(f"{part} has {name} {times} times", f"{_MAX_COMPONENTS} times, or once if it grows")
        if part == "decoder" and name != kind:
            raise _refused(f"{part} has a {name}", "by a plain text")
        _check_growth(f"{part}.{kind}", kind, component)


def _check_growth(where: str, kind: str, component: Mapping[str, Any]) -> None:
    """Refuse what makes a text longer than by a little, or takes a time that grows much faster than it."""
    pattern = component.get("pattern") or {}
    if "Regex" in pattern:
        _check_regex(where, pattern["Regex"])
    replaced = component.get("suffix") if kind == "BPEDecoder" else pattern.get("String", "x")
    # An empty pattern splits between any two characters; it would replace what is between them.
    if kind != "Split" and (not replaced or len(component.get("content") or "") > len(replaced)):
        raise _refused(f"{where} replaces {replaced!r} by more", "what is replaced is not empty and not shorter")
    affixes = (component.get(name) for name in _AFFIXES)
    if any(isinstance(affix, str) and len(affix) > _MAX_AFFIX for affix in affixes):
        raise _refused(f"{where} adds a long text", f"at most {_MAX_AFFIX} characters")
    if max(component.get(name) or 0 for name in _COUNTS) > _MAX_COUNT:
        raise _refused(f"{where} counts further than {_MAX_COUNT}", "less")
    for template in ("single", "pair") if kind == "TemplateProcessing" else ():
        if sum("Sequence" in item for item in component[template]) > 2:
            raise _refused(f"{where} repeats its text", "each text once")


def _check_regex(where: str, pattern: str) -> None:
    """Refuse patterns that backtrack without bound: an ambiguous group repeated, a reference, many repetitions."""
    left = _ATOM.sub("x", pattern[:_MAX_PATTERN])
    repetitions = max(len(_UNBOUNDED.findall(branch)) for branch in left.split("|"))
    is_endless = repetitions > _MAX_REPETITIONS or len(pattern) > _MAX_PATTERN or bool(_CHAINED.search(left))
    while not is_endless and (group := _GROUP.search(left)):  # the innermost first
        is_ambiguous = bool(_FLEXIBLE.search(group[1]))
        is_endless = is_ambiguous and bool(group[2])
        stands = "x?" * max(is_ambiguous, _choice_bits(group[1])) or "x"
        left = f"{left[: group.start()]}{stands}{group[2] or ''}{left[group.end() :]}"
    if is_endless or _ENDLESS.search(left) or _choice_bits(left) > _MAX_CHOICE_BITS:
        rule = f"no repetition of what can match in two ways, no reference, {_MAX_REPETITIONS} repetitions, few choices"
        raise _refused(f"{where} has a pattern that may match for ever", rule)


def _choice_bits(pattern: str) -> int:
    """Return the logarithm of the ways in which a pattern without groups can match, repetitions without end aside."""
    bits, branches = list[int](), pattern.split("|")
    for branch in branches:
        widths = (int(most) - int(least or 0) for least, most in _INTERVAL.findall(branch))
        bits.append(branch.count("?") + sum(abs(width).bit_length() for width in widths))
    return max(bits) + (len(branches) - 1).bit_length()


def _refused(problem: str, rule: str) -> InvalidInput:
    return InvalidInput(f"tokenizer.json: {problem}; rule: {rule}. Take another tokenizer, or bytes, or bpe:<size>")


def added_tokens_of(text: str) -> list[str]:
    """Return the added tokens of a tokenizer.json, without its vocabulary as objects."""
    token: Any = msgspec.defstruct("Token", [("content", str)])
    parts: Any = msgspec.defstruct("Parts", [("added_tokens", list[token] | None, None)])
    return [item.content for item in msgspec.json.decode(text, type=parts).added_tokens or ()]
