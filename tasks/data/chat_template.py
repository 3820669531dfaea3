"""Renders conversations with a chat template of unknown origin in a child process, and finds where their answers are.

The child has bounded memory and time and no credentials. In it Jinja's sandbox runs the template as `transformers`
does, without clock and chance. A template without `{% generation %}` is rendered with and without each answer.
Source: https://huggingface.co/docs/transformers/chat_templating.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2.nodes
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cairn.tasks.data.rejection import RejectionKind

_MARK = "cairn_generation"
_OPENING = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_CLOSING = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_LEAST_CHARACTERS, _MOST_GROWTH = 1 << 20, 64
_MOST_ROW_BYTES = 64 << 20
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A Jinja template, and the text of the special tokens that it may name, such as `bos_token`."""

    text: str
    tokens: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The text of a row and the places of its answers in characters, one beyond the text for its end; or its fault."""

    offset_bytes: int
    text: str = ""
    answers: tuple[Span, ...] = ()
    kind: str = ""
    detail: str = ""


class _Fault(Exception):
    """Why a row has no text: its kind, then the detail."""


def run() -> None:
    """Read a template, or null, and rows from stdin, each behind a line with its offset and size; write their text."""
    with open(0, "rb") as rows, open(1, "wb") as out:
        template = msgspec.json.decode(rows.readline(), type=ChatTemplate | None)
        try:
            renderer = None if template is None else Renderer(template)
        except (jinja2.TemplateError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            sys.exit(f"the chat template cannot be read: {' '.join(str(error).split())}")
        while line := rows.readline():
            offset, size = map(int, line.split())
            out.write(msgspec.json.encode(render_row(renderer, offset, rows.read(size))) + b"\n")


def render_row(renderer: "Renderer | None", offset_bytes: int, content: bytes) -> Rendered:
    """Return the text of a row of JSON, or why there is none; without a template of prompt and completion alone."""
    try:
        text, answers = _text_of(renderer, content)
        text.encode("utf-8")  # a lone surrogate is legal in an escape
        if not text.strip():
            raise _Fault(RejectionKind.EMPTY, "no text but white space")
        return Rendered(offset_bytes=offset_bytes, text=text, answers=tuple(answers))
    except UnicodeError as error:
        kind, detail = RejectionKind.NOT_UTF8, str(error)
    except _Fault as fault:
        kind, detail = fault.args
    return Rendered(offset_bytes=offset_bytes, kind=kind, detail=detail)


def _text_of(renderer: "Renderer | None", content: bytes) -> tuple[str, list[Span]]:
    if len(content) > _MOST_ROW_BYTES:
        raise _Fault(RejectionKind.TOO_LONG, f"longer than {_MOST_ROW_BYTES} bytes")
    try:  # leniently: a row is not thrown away for a field that nobody reads
        row = json.loads(content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise _Fault(RejectionKind.NOT_JSON, str(error)) from error
    if not isinstance(row, dict):
        raise _Fault(RejectionKind.NOT_JSON, "no object")
    messages, prompt, completion = (row.get(name) for name in ("messages", "prompt", "completion"))
    if messages is None and (prompt is None or completion is None):
        raise _Fault(RejectionKind.MISSING_FIELD, "no fields messages, or prompt and completion, or null in them")
    if renderer is None:  # as they stand: the completion and the end of text behind it are the answer
        if messages is None and isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion, [(len(prompt), len(prompt) + len(completion) + 1)]
        remedy = "name with data.tokenizer a tokenizer.json with chat_template.jinja or tokenizer_config.json beside it"
        raise _Fault(RejectionKind.TEMPLATE, f"messages need a chat template: {remedy}")
    before = [] if messages is not None else _messages(prompt, "user")
    after = _messages(completion, "assistant") if messages is None else _messages(messages)
    if not any(message["role"] == "assistant" for message in after):
        roles = ", ".join(sorted({message["role"] for message in after})) or "none"
        raise _Fault(RejectionKind.NO_ANSWER, f"no message of the assistant; roles: {roles[:100]}")
    if not isinstance(tools := row.get("tools"), list | None):
        raise _Fault(RejectionKind.NOT_A_CONVERSATION, f"tools are of type {type(tools).__name__}; rule: a list")
    most = _LEAST_CHARACTERS + _MOST_GROWTH * len(content)
    try:
        return renderer.render([*before, *after], tools, len(before), most)
    except (_Fault, MemoryError):
        raise
    except Exception as error:  # a template may raise anything
        raise _Fault(RejectionKind.TEMPLATE, f"{type(error).__name__}: {error}") from error


def _messages(found: Any, role: str = "") -> list[dict[str, Any]]:
    """Return messages without null in them, as `transformers` takes them; a text is one of `role`, if there is one."""
    if role and isinstance(found, str):
        return [{"role": role, "content": found}]
    problem = "" if isinstance(found, list) else f"messages are of type {type(found).__name__}"
    if problem or (problem := next(filter(None, map(_problem_of, found)), "")):
        raise _Fault(RejectionKind.NOT_A_CONVERSATION, f"{problem}; rule: a list of objects with role and content")
    return [{name: value for name, value in message.items() if value is not None} for message in found]


def _problem_of(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f"a message is of type {type(message).__name__} and has no role"
    is_there = "content" in message or message.get("tool_calls")
    return "" if is_there else f"a message with the role {message['role']} has no content"


def _is_printed(found: Any, text: str) -> bool:
    """Whether an object within messages stands in the text as Python's `str` writes it and JSON does not."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    is_printed = inner and str(found) in text and str(found) != json.dumps(found, ensure_ascii=False)
    return is_printed or any(_is_printed(one, text) for one in inner)


class Renderer:
    """A template in its sandbox."""

    def __init__(self, template: ChatTemplate) -> None:
        """Compile it; raises jinja2.TemplateError."""
        options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
        sandbox = ImmutableSandboxedEnvironment(**options, optimized=False)  # nothing is computed before it is rendered
        sandbox.filters["tojson"] = _to_json
        del sandbox.globals["lipsum"], sandbox.filters["random"]  # chance; and the clock's strftime_now is not there
        functions: dict[str, Any] = {"raise_exception": _raise_exception, _MARK: self._mark}
        sandbox.globals |= functions | {"dict": lambda *given, **named: dict(*given, **named)}  # no class of Python's
        marked = _CLOSING.sub(r"{%\1 endcall \2%}", _OPENING.sub(rf"{{%\1 call {_MARK}() \2%}}", template.text))
        calls = sandbox.parse(marked).find_all(jinja2.nodes.Call)
        self._is_marked = any(isinstance(call.node, jinja2.nodes.Name) and call.node.name == _MARK for call in calls)
        self._template, self._tokens = sandbox.from_string(marked), dict(template.tokens)

    def render(self, messages: Sequence[Any], tools: Any, first: int, most: int) -> tuple[str, list[Span]]:
        """Return the text, of at most so many characters, and its answers from message `first` on.

        Raises _Fault, and whatever the template raises.
        """
        self._most = most
        text, answers = self._render(messages, tools)
        if _is_printed(messages, text):
            raise _Fault(RejectionKind.TEMPLATE, "it prints an object as Python does; rule: texts, or what it reads")
        numbers = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]

        def stop_of(count: int, place: str, is_begun: bool = False) -> int:
            part, _ = self._render(messages[:count], tools, is_begun)
            if text.startswith(part):
                return len(part)
            rule = "{% generation %} marks answers, or what comes later changes nothing that stood before"
            problem = f"the conversation {place} is rendered otherwise than in the whole; rule: {rule}"
            raise _Fault(RejectionKind.TEMPLATE, problem)

        if self._is_marked:
            begin = stop_of(first, "of the prompt alone") if first else 0
            answers = [span for span in answers if span[0] >= begin]
        else:
            begins = [stop_of(one, f"before message {one + 1}", is_begun=True) for one in numbers]
            stops = [stop_of(one + 1, f"up to message {one + 1}") for one in numbers]
            answers = list(zip(begins, stops, strict=True))
        if not answers:
            raise _Fault(RejectionKind.NO_ANSWER, "the template marks no answer in it")
        return text, answers

    def _render(self, messages: Sequence[Any], tools: Any, is_begun: bool = False) -> tuple[str, list[Span]]:
        """Return the text and the places in it that the template marks."""
        blocks, self._length, self._marked = list[str](), 0, list[tuple[int, str]]()
        given: Any = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": is_begun}
        for block in self._template.generate(**self._tokens, **given):
            blocks.append(block)
            self._length += len(block)
            if self._length > self._most:
                raise _Fault(RejectionKind.TOO_LONG, f"the template makes more than {self._most} characters of it")
        text = "".join(blocks)
        if not all(text.startswith(part, begin) for begin, part in self._marked):
            problem = "a {% generation %} stands within a macro, so that its place is not known"
            raise _Fault(RejectionKind.TEMPLATE, f"{problem}; rule: it stands in the template itself")
        return text, [(begin, begin + len(part)) for begin, part in self._marked]

    def _mark(self, caller: Any) -> str:
        self._marked.append((self._length, str(caller())))
        return self._marked[-1][1]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
