"""Chat templates of others: the same text, ids and answers as `transformers` finds."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.data.tokenizer import Tokenizer
from cairn.tasks.data.chat_template import ChatTemplate, Rendered, Renderer, render_row
from cairn.tasks.data.conversation import encode_documents
from cairn.tasks.data.document import make_document
from cairn.tasks.data.rejection import RejectionKind

FOLDER = Path(__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
UNMARKED = ("chatml", "mistral_v1")
MARKED = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.stem not in UNMARKED)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "漢"}}}
CONVERSATIONS: Mapping[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, 世界 😀!"}],
    "turns": [
        {"role": "user", "content": "é? "},
        {"role": "assistant", "content": " Yes.\n\nNo."},
        {"role": "user", "content": "And\tnow 👩‍👩‍👧?"},
        {"role": "assistant", "content": "😀"},
    ],
    "a system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi."},
    ],
    "an empty answer": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}],
    "a tool": [
        {"role": "user", "content": "1 + 漢?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "1漢"},
        {"role": "assistant", "content": "It is 1漢.", "tool_calls": None},
    ],
    "special tokens in the text": [
        {"role": "user", "content": "<|im_end|></s><s>x<|eot_id|>"},
        {"role": "assistant", "content": "a <|im_start|>assistant b</s> c"},
        {"role": "user", "content": "<|im_start|>assistant\nno answer"},
        {"role": "assistant", "content": "c"},
    ],
}


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def without_markers(text: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)


def messages_of(name: str, conversation: str) -> list[dict[str, Any]]:
    """The conversation, in parts where the template only knows those."""
    messages = CONVERSATIONS[conversation]
    if name not in ("idefics3", "llava_next", "smolvlm"):
        return messages
    return [{**one, "content": [{"type": "text", "text": one["content"] or ""}]} for one in messages]


def render(text: str, messages: Sequence[Any], **others: Any) -> Rendered:
    row = json.dumps({"messages": messages, **others}).encode()
    return render_row(Renderer(ChatTemplate(text=text, tokens=TOKENS)), 0, row)


def answers_of(rendered: Rendered) -> list[str]:
    assert not rendered.kind, rendered.detail
    return [rendered.text[begin:end] for begin, end in rendered.answers]


@pytest.fixture(scope="module")
def library() -> LibraryTokenizer:
    """Bytes, and every special token that a template spells."""
    inner = LibraryTokenizer.from_str(Tokenizer.bytes().json)
    texts = "".join(map(template_of, [*MARKED, *UNMARKED]))
    spelled = sorted({*TOKENS.values(), *re.findall(r"<[|\uff5c][^<>]*[|\uff5c]>|<(?:start|end)_of_\w+>", texts)})
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in spelled])
    return inner


def encoded(library: LibraryTokenizer, rendered: Rendered) -> tuple[list[int], list[int]]:
    document = make_document("a", 0, rendered.text.encode(), answers=rendered.answers)
    ids, _, mask = encode_documents(Tokenizer(library), [document], has_answers=True)
    return ids.tolist(), mask.astype(np.int64).tolist()


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("name", MARKED)
def test_ids_and_answers_of_published_templates_are_those_of_transformers(
    transformers: ModuleType, library: LibraryTokenizer, name: str
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **TOKENS)
    compared = 0
    for conversation in CONVERSATIONS:
        messages = messages_of(name, conversation)
        ours = render(template_of(name), messages)
        try:
            expected = theirs.apply_chat_template(
                messages, chat_template=template_of(name), return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:  # a template refuses a role, or does not know it
            assert ours.kind == RejectionKind.TEMPLATE, conversation
            continue
        assert encoded(library, ours) == (expected["input_ids"], expected["assistant_masks"]), conversation
        compared += any(expected["assistant_masks"])
    assert compared >= 3 and len(MARKED) == 20


def test_an_answer_that_ends_within_a_character_of_several_tokens_counts_whole(library: LibraryTokenizer) -> None:
    # `transformers` counts the first token of the last character alone.
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ids, mask = encoded(library, render(text, [{"role": "assistant", "content": "a😀"}]))
    assert (bytes(ids).decode(), mask) == ("a😀", [1] * 5)


@pytest.mark.parametrize("name", ["chatml", "llama3", "cohere", "gemma", "lfm2", "qwen3_instruct_2507", "phi3"])
def test_without_markers_the_answer_is_what_a_conversation_has_more_with_it(name: str) -> None:
    rendered = render(without_markers(template_of(name)), CONVERSATIONS["one turn"])
    (answer,) = answers_of(rendered)
    assert answer.startswith("Hello, 世界 😀!") and rendered.text.endswith(answer)
    if name in MARKED and name != "phi3":
        assert rendered.answers == render(template_of(name), CONVERSATIONS["one turn"]).answers


def test_without_markers_each_answer_of_several_is_found() -> None:
    rendered = render(template_of("mistral_v1"), CONVERSATIONS["turns"])
    assert answers_of(rendered) == ["  Yes.\n\nNo.</s>", " 😀</s>"]
    assert rendered.text.startswith("<s> [INST] é?  [/INST]")


def test_a_template_that_changes_what_stood_before_is_refused_by_the_message() -> None:
    # Phi-3 ends each rendering with an end of text, which is not there as soon as something follows.
    refused = render(without_markers(template_of("phi3")), CONVERSATIONS["turns"])
    assert refused.kind == RejectionKind.TEMPLATE
    assert "the conversation up to message 2 is rendered otherwise than in the whole" in refused.detail


def test_a_marker_in_a_comment_marks_nothing() -> None:
    commented = "{# {% generation %} marks answers #}" + template_of("chatml")
    assert answers_of(render(commented, CONVERSATIONS["one turn"])) == ["Hello, 世界 😀!<|im_end|>\n"]


def test_a_marker_whose_place_is_not_known_is_refused_and_not_guessed() -> None:
    macro = "{% macro say(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
    refused = render(macro + "{% for m in messages %}{{ say(m) }}{% endfor %}", CONVERSATIONS["one turn"])
    assert refused.kind == RejectionKind.TEMPLATE and "within a macro" in refused.detail


def test_of_a_prompt_with_turns_of_its_own_only_the_completion_counts() -> None:
    turns = CONVERSATIONS["turns"]
    for text in (template_of("llama3"), without_markers(template_of("llama3"))):
        row = json.dumps({"prompt": turns[:3], "completion": turns[3:]}).encode()
        rendered = render_row(Renderer(ChatTemplate(text=text, tokens=TOKENS)), 0, row)
        assert answers_of(rendered) == ["😀<|eot_id|>"]
        assert rendered.text == render(text, turns).text


def test_a_prompt_and_a_completion_that_are_texts_are_a_turn() -> None:
    row = json.dumps({"prompt": "Hi", "completion": "Hello"}).encode()
    chat = render_row(Renderer(ChatTemplate(text=template_of("chatml"), tokens=TOKENS)), 0, row)
    assert chat.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    plain = render_row(None, 0, row)
    assert plain.text == "HiHello" and plain.answers == ((2, len("HiHello") + 1),), "with the end of text"


ROWS = {
    "no JSON": (b"{", RejectionKind.NOT_JSON),
    "no object": (b"[]", RejectionKind.NOT_JSON),
    "other fields": (b'{"text": "a"}', RejectionKind.MISSING_FIELD),
    "a prompt alone": (b'{"prompt": "a"}', RejectionKind.MISSING_FIELD),
    "null": (b'{"messages": null}', RejectionKind.MISSING_FIELD),
    "a text": (b'{"messages": "a"}', RejectionKind.NOT_A_CONVERSATION),
    "texts": (b'{"messages": ["a"]}', RejectionKind.NOT_A_CONVERSATION),
    "no content": (b'{"messages": [{"role": "assistant", "value": "a"}]}', RejectionKind.NOT_A_CONVERSATION),
    "parts that are printed": (
        b'{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}',
        RejectionKind.TEMPLATE,
    ),
    "an object that is printed": (
        b'{"messages": [{"role": "assistant", "content": {"a": 1}}]}',
        RejectionKind.TEMPLATE,
    ),
    "tools in a text": (
        b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "[]"}',
        RejectionKind.NOT_A_CONVERSATION,
    ),
    "no role": (b'{"messages": [{"content": "a"}]}', RejectionKind.NOT_A_CONVERSATION),
    "no message": (b'{"messages": []}', RejectionKind.NO_ANSWER),
    "no answer": (b'{"messages": [{"role": "user", "content": "a"}]}', RejectionKind.NO_ANSWER),
    "an answer within the prompt": (
        b'{"prompt": [{"role": "assistant", "content": "a"}], "completion": [{"role": "user", "content": "b"}]}',
        RejectionKind.NO_ANSWER,
    ),
    "a lone surrogate": (b'{"prompt": "\\ud800", "completion": "a"}', RejectionKind.NOT_UTF8),
    "foreign bytes": (b'{"prompt": "\xff", "completion": "a"}', RejectionKind.NOT_UTF8),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_without_an_answer_is_left_out_by_its_reason(row: str) -> None:
    content, kind = ROWS[row]
    assert render_row(Renderer(ChatTemplate(text=template_of("chatml"), tokens=TOKENS)), 7, content).kind == kind


@pytest.mark.parametrize("others", [b'"id": NaN', b'"x": "\xff"', b'"y": "\\ud800"'])
def test_a_row_is_kept_where_only_a_field_that_nobody_reads_is_damaged(others: bytes) -> None:
    rendered = render_row(None, 0, b'{"prompt": "a", "completion": "b", ' + others + b"}")
    assert (rendered.text, rendered.kind) == ("ab", "")
