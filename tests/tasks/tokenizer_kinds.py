"""A tokenizer.json of each accepted kind, with a vocabulary that covers the texts of the tests beside this file."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from cairn.model.data.tokenizer import END_OF_TEXT, Tokenizer
from tests.security.tokenizer_shapes import (
    BYTE_LEVEL,
    GPT4,
    REPLACE_BLOCK,
    REPLACE_SPACE,
    TEMPLATE,
    document,
    sequence,
    split,
)

PARAGRAPHS = tuple(
    f"Paragraph {number} speaks of stone {number * number % 97} on the long way up; {number % 7} walkers said so."
    for number in range(60)
)
MORE = ("A second voice, with more to say.", "It ends\n\nafter a gap.", "Seven stones; no walkers.")
TEXTS = (*PARAGRAPHS, *MORE)
CHARACTERS = sorted(set("".join(TEXTS)) - {" ", "\n"})
WORDS = sorted({word for text in TEXTS for word in text.split()})
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BETWEEN_CHARACTERS = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
SPACED = sequence(
    "decoders", REPLACE_BLOCK, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)  # fmt: skip


def added(*tokens: str, special: bool = True) -> list[dict[str, Any]]:
    """Return added tokens with the ids from 0 on."""
    return [{"id": number, "content": token, "special": special, **FLAGS} for number, token in enumerate(tokens)]


def numbered(*tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of these tokens, each once."""
    return {token: number for number, token in enumerate(dict.fromkeys(token for part in tokens for token in part))}


def learned(end: str = END_OF_TEXT, **changed: Any) -> dict[str, Any]:
    """Return a byte-level BPE that was learned from the texts, as GPT-2's."""
    text = Tokenizer.train_bpe(TEXTS, 330).json.replace(END_OF_TEXT, end)
    return {**json.loads(text), **changed}


def llama3() -> dict[str, Any]:
    """Return a byte-level BPE that takes a word whole if its vocabulary has it."""
    found = learned("<|end_of_text|>", pre_tokenizer=sequence("pretokenizers", split(GPT4), BYTE_LEVEL))
    return {**found, "model": {**found["model"], "ignore_merges": True}}


def sentencepiece_bpe(**parts: Any) -> dict[str, Any]:
    """Return a BPE of characters that falls back to bytes, as Llama 2's."""
    tokens, merged = [f"<0x{byte:02X}>" for byte in range(256)], ["▁s", "st", "▁st", "on", "▁w"]
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": numbered(["<unk>", "<s>", "</s>"], tokens, ["▁", *CHARACTERS], merged),
        "merges": ["▁ s", "s t", "▁ st", "o n", "▁ w"],
    }  # fmt: skip
    return document(added_tokens=added("<unk>", "<s>", "</s>"), model=model, **parts)


def llama2() -> dict[str, Any]:
    """Return one whose normalizer writes spaces as blocks."""
    spaces = sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, REPLACE_SPACE)
    return sentencepiece_bpe(normalizer=spaces, decoder=SPACED)


def mistral() -> dict[str, Any]:
    """Return one whose pre-tokenizer writes spaces as blocks."""
    block = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return sentencepiece_bpe(pre_tokenizer=block, decoder=SPACED)


def gemma() -> dict[str, Any]:
    """Return one that cuts behind each space."""
    cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return sentencepiece_bpe(normalizer=REPLACE_SPACE, pre_tokenizer=cut, decoder=SPACED)


def unigram() -> dict[str, Any]:
    """Return a Unigram, as T5's: its end of text stands in its vocabulary."""
    pieces = [*numbered(["▁", *CHARACTERS], (f"▁{word}" for word in WORDS))]
    vocab = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]] + [
        [piece, -12.0 + len(piece) / 2] for piece in (*pieces, "<", "/", ">")
    ]
    block = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 2, "byte_fallback": False, "vocab": vocab}
    tokens = added("<pad>", "</s>", "<unk>")
    return document(added_tokens=tokens, pre_tokenizer=block, decoder=block, post_processor=TEMPLATE, model=model)


def wordpiece() -> dict[str, Any]:
    """Return a WordPiece, as BERT's, split at white space and punctuation."""
    cleaning = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
        "lowercase": True,
    }  # fmt: skip
    letters = sorted({letter.lower() for letter in CHARACTERS})
    model = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": numbered(["[PAD]", "[UNK]", "[SEP]"], letters, (f"##{letter}" for letter in letters), "[]/<>"),
    }  # fmt: skip
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    tokens = added("[PAD]", "[UNK]", "[SEP]")
    return document(
        added_tokens=tokens, normalizer=cleaning, pre_tokenizer={"type": "BertPreTokenizer"}, decoder=decoder,
        model=model,
    )  # fmt: skip


def wordlevel() -> dict[str, Any]:
    """Return a WordLevel of whole words, split at white space."""
    model = {"type": "WordLevel", "unk_token": "<unk>", "vocab": numbered(["<unk>", "<eos>"], WORDS)}
    return document(added_tokens=added("<unk>", "<eos>"), pre_tokenizer={"type": "WhitespaceSplit"}, model=model)


def single_characters() -> dict[str, Any]:
    """Return a WordLevel of single characters without an unknown token."""
    vocabulary = numbered(["</s>", " ", "\n", *CHARACTERS])
    return document(
        added_tokens=added("</s>"), pre_tokenizer=BETWEEN_CHARACTERS, decoder={"type": "Fuse"},
        model={"type": "WordLevel", "unk_token": "", "vocab": vocabulary},
    )  # fmt: skip


def merged_characters() -> dict[str, Any]:
    """Return a BPE of single characters that merges none."""
    model = {**learned()["model"], "vocab": numbered(["<eos>", " ", "\n", *CHARACTERS]), "merges": []}
    return document(added_tokens=added("<eos>"), pre_tokenizer=BETWEEN_CHARACTERS, model=model)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "a byte-level BPE": learned,
    "Llama 3": llama3,
    "Llama 2": llama2,
    "Mistral": mistral,
    "Gemma": gemma,
    "a Unigram": unigram,
    "a WordPiece": wordpiece,
    "a WordLevel": wordlevel,
    "single characters": single_characters,
    "single characters, as a BPE": merged_characters,
}
