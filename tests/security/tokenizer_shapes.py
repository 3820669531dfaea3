"""The shapes of well-known tokenizer.json files with small vocabularies, and files that mean harm."""

from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PHI4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_FROM_THE_RIGHT = r"(?=(\d{3})+(?!\d))"
PATTERNS = {
    "GPT-2": GPT2, "Llama 3 and Qwen": GPT4, "Phi-4": PHI4, "GPT-4o, Llama 4, Mistral Tekken": GPT4O,
    "DeepSeek": DEEPSEEK, "digits": r"\p{N}{1,3}", "CJK": "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "thousands": DIGITS_FROM_THE_RIGHT,
    "Bloom": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
REPLACE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
REPLACE_BLOCK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


def bpe(**changed: Any) -> dict[str, Any]:
    """Return a BPE of a few letters; `changed` replaces its fields."""
    tokens = ["</s>", "<s>", "a", "b", "ab", "▁", "Ġ", "c"]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": ["a b"],
        **changed,
    }


def document(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json with these parts."""
    end = {"id": 0, "content": "</s>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": bpe(),
        **parts,
    }


def sequence(part: str, *members: Any) -> dict[str, Any]:
    """Return a Sequence whose members stand in the field `part`."""
    return {"type": "Sequence", part: list(members)}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    """Return a Split by a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _old_gpt2_model() -> dict[str, Any]:
    model = bpe(continuing_subword_prefix="", end_of_word_suffix="")
    return {name: value for name, value in model.items() if name not in ("type", "byte_fallback", "ignore_merges")}


KNOWN = {
    "GPT-2": document(
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        model=_old_gpt2_model(),
    ),
    "Llama 2, TinyLlama, Phi-3": document(
        normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, REPLACE_SPACE),
        post_processor=TEMPLATE,
        decoder=sequence(
            "decoders",
            REPLACE_BLOCK,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
        model=bpe(byte_fallback=True, fuse_unk=True, unk_token="</s>"),
    ),
    "Llama 3, Qwen, GPT-4o": document(
        normalizer={"type": "NFC"},
        pre_tokenizer=sequence("pretokenizers", split(GPT4), BYTE_LEVEL),
        post_processor=sequence("processors", BYTE_LEVEL, TEMPLATE),
        decoder=BYTE_LEVEL,
        model=bpe(ignore_merges=True, merges=[["a", "b"]]),
    ),
    "Mistral": document(
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        post_processor=TEMPLATE,
        decoder=sequence("decoders", REPLACE_BLOCK, {"type": "ByteFallback"}, {"type": "Fuse"}),
        model=bpe(byte_fallback=True),
    ),
    "Mistral Nemo": document(
        pre_tokenizer=sequence("pretokenizers", split(GPT4O), BYTE_LEVEL), post_processor=TEMPLATE, decoder=BYTE_LEVEL
    ),
    "SmolLM": document(
        pre_tokenizer=sequence(
            "pretokenizers", {"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}
        ),
        decoder=BYTE_LEVEL,
    ),
    "Gemma": document(
        normalizer=REPLACE_SPACE,
        pre_tokenizer={
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        post_processor=TEMPLATE,
        decoder=sequence("decoders", REPLACE_BLOCK, {"type": "ByteFallback"}, {"type": "Fuse"}),
        model=bpe(byte_fallback=True, fuse_unk=True),
    ),
    "Phi-4": document(pre_tokenizer=sequence("pretokenizers", split(PHI4, "Removed"), BYTE_LEVEL), decoder=BYTE_LEVEL),
    "DeepSeek": document(
        normalizer=sequence("normalizers"),
        pre_tokenizer=sequence(
            "pretokenizers", split(r"\p{N}{1,3}"), split(PATTERNS["CJK"]), split(DEEPSEEK), BYTE_LEVEL
        ),
        post_processor=BYTE_LEVEL,
        decoder=BYTE_LEVEL,
    ),
    "a WordPiece": document(
        normalizer={
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor={"type": "BertProcessing", "sep": ["</s>", 0], "cls": ["<s>", 1]},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        model={
            "type": "WordPiece", "unk_token": "</s>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"</s>": 0, "<s>": 1, "a": 2, "##b": 3},
        },
    ),
    "a Unigram": document(
        normalizer=sequence(
            "normalizers",
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        ),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        model={
            "type": "Unigram", "unk_id": 0, "byte_fallback": False,
            "vocab": [["</s>", 0.0], ["<s>", -0.1234567890123456], ["a", -2.5], ["▁", -3.25]],
        },
    ),
}  # fmt: skip


def grown(times: int) -> dict[str, Any]:
    """Return the decoder that doubles every "a" so many times."""
    doubled = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return sequence("decoders", *[doubled] * times)


def added(count: int, *, alternating: bool = False) -> list[dict[str, Any]]:
    """Return so many added tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = document()["added_tokens"]
    return end + [
        {"id": 8 + n, "content": f"<{n}>", "special": not (alternating and n % 2), **flags} for n in range(count)
    ]


EMPTY_REGEX = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}
ENDLESS_PATTERNS = (
    *("q{1,2}+!", "q{1,2}{2,9}!", "q{1,2}*!", "q??+!", "q+*!", "q++*!", "(?:(?:q*)x?)*!", "(?:(?:q*))*!"),
    *("(?x)q{1,2} +!", "(?x:q{1,2} +)!", "(?ix)q{1,2} +!", "q{1,2}(?#x)+!", "q?" * 30 + "!", "q{1,9}" * 20 + "!"),
    *("(?:q|q|q)" * 20 + "!", "(?:q{1,9}|q)" * 10 + "!", "(?:(?:q|q)(?:q|q))" * 10 + "!", "(?>q{1,2})+!"),
)
"""They match a word in as many ways as a power of its length or theirs."""
HOSTILE = {
    "a decoder that doubles thirty times": document(decoder=grown(30)),
    "a decoder that makes a text longer once": document(decoder=grown(1)),
    "a decoder that replaces nothing": document(decoder=sequence("decoders", {
        "type": "Replace", "pattern": {"String": ""}, "content": ""})),
    "a decoder with a regular expression": document(decoder={**EMPTY_REGEX, "pattern": {"Regex": "a"}}),
    "a decoder that strips without end": document(decoder={
        "type": "Strip", "content": " ", "start": 2**62, "stop": 0}),
    "a long prefix of every letter": document(model=bpe(continuing_subword_prefix="a" * 9_000)),
    "a word of any length": document(model={**KNOWN["a WordPiece"]["model"], "max_input_chars_per_word": 10**9}),
    "an empty suffix": document(decoder={"type": "BPEDecoder", "suffix": ""}),
    "a normalizer that doubles": document(normalizer=sequence("normalizers", *[EMPTY_REGEX] * 16)),
    "byte levels one over another": document(pre_tokenizer=sequence("pretokenizers", *[BYTE_LEVEL] * 16)),
    "a long text in front of each": document(normalizer={"type": "Prepend", "prepend": "a" * 2000}),
    "a sequence in a sequence": document(decoder=sequence("decoders", grown(1))),
    "a precompiled normalizer": document(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an unknown decoder": document(decoder={"type": "CTC", "pad_token": "a", "word_delimiter_token": "|",
                                            "cleanup": True}),
    "a template that repeats the text": document(post_processor={**TEMPLATE, "single": TEMPLATE["single"] * 30}),
    "a token of a megabyte": document(model=bpe(vocab={**bpe()["vocab"], "d" * 2**20: 8})),
    "an added token of a megabyte": document(added_tokens=[
        {**document()["added_tokens"][0], "content": "d" * 2**20}]),
    "too many added tokens": document(added_tokens=added(20_000)),
    "added tokens that take turns": document(added_tokens=added(1_000, alternating=True)),
    "a repeated group that repeats": document(pre_tokenizer=split(r"(a+)+$")),
    "a repeated group that can match in two ways": document(pre_tokenizer=split(r"(?:a|a)*$")),
    **{f"a pattern such as {pattern[:24]}": document(pre_tokenizer=split(pattern)) for pattern in ENDLESS_PATTERNS},
    "a reference": document(pre_tokenizer=split(r"(a*)\1b")),
    "brackets without end": document(pre_tokenizer=split("[" * 16_000)),
    "a group that is not closed": document(pre_tokenizer=split("(a")),
    "many repetitions": document(pre_tokenizer=split(r"a*" * 20 + "b")),
    "a great count": document(pre_tokenizer=split(r"(?:a{90000}){90000}")),
    "a pattern of a megabyte": document(pre_tokenizer=split("a" * 2**20)),
    "a component without a type": document(decoder={"decoders": []}),
    "a list": [],
    "a deep list": None,
}  # fmt: skip
