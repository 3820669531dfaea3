"""A chat template makes text: it reaches no object of Python, depends on no clock or chance, and ends."""

import json
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import conversation
from cairn.tasks.data.chat_template import ChatTemplate, Renderer, render_row
from cairn.tasks.data.conversation import render_rows
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import find_template
from cairn.tasks.data.rejection import RejectionKind
from cairn.tasks.data.snapshot_build import build_snapshot

ROW = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}).encode()
LOOP = "{% for i in range(99999) %}"
ENDLESS = f"{LOOP}{LOOP}{LOOP}{'{% endfor %}' * 3}"
ESCAPES = {
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by a name that is a text": "{{ ''['__class__'] }}",
    "by the filter attr": "{{ (''|attr('__class__'))|attr('__mro__') }}",
    "by the filter map": "{{ ['']|map(attribute='__class__')|list|first|attr('__mro__') }}",
    "by the format of a text": "{{ '{0.__class__.__mro__}'.format('') }}",
    "by format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "by format under another name": "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "the globals of a function": "{{ raise_exception.__globals__ }}",
    "the globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "the environment of a cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "the namespace": "{{ namespace.__init__.__globals__ }}",
    "the function behind dict": "{{ dict.__globals__ }}",
    "the code of a generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "the template itself": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "the marker's function": "{{ cairn_generation.__self__ }}",
    "a file beside it": "{% include 'chat_template.jinja' %}",
    "an import": "{% import 'os' as os %}",
    "a list that is changed": "{{ messages.append(1) }}",
    "an object that is changed": "{{ messages[0].update({'a': 1}) }}",
    "the clock": "{{ strftime_now('%Y') }}",
    "chance": "{{ [1, 2]|random }}",
    "chance in a text": "{{ lipsum() }}",
    "a range without end": "{% for i in range(10 ** 9) %}{% endfor %}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_that_reaches_out_of_its_sandbox_makes_no_text(name: str) -> None:
    try:
        renderer = Renderer(ChatTemplate(text=ESCAPES[name] + "x", tokens={}))
    except Exception as error:
        assert "random" in str(error)  # refused as it is read
        return
    rendered = render_row(renderer, 0, ROW)
    assert (rendered.kind, rendered.text) == (RejectionKind.TEMPLATE, "") or rendered.text == "x", "nothing beside it"


@pytest.mark.parametrize(
    "text",
    ["{{ 'a' * 10 ** 7 }}", "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "{{ 'a' * (10 ** 7) ~ 'b' }}"],
)
def test_a_template_that_makes_far_more_than_its_row_is_cut_off(text: str) -> None:
    assert render_row(Renderer(ChatTemplate(text=text, tokens={})), 0, ROW).kind == RejectionKind.TOO_LONG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENDLESS, "more than 1 s of a core"),
        ("{{ 'a' * 10 ** 11 }}", "MiB of memory"),
        ("{% if %}", "the chat template cannot be read"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "the chat template cannot be read"),
    ],
    ids=["time", "memory", "syntax", "depth"],
)
def test_a_template_that_does_not_end_ends_its_own_process(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_CORE_SECONDS", 1)
    with pytest.raises(InvalidCorpus, match=said):
        list(render_rows([(0, ROW)], ChatTemplate(text=text, tokens={})))


def test_the_process_of_a_template_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    from cairn.storage.stores import child_process

    start = child_process.start_child
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(
        child_process, "start_child", lambda *a, **k: started.append(k["environment"]) or start(*a, **k)
    )
    assert [row.kind for row in render_rows([(0, ROW)], None)] == [RejectionKind.TEMPLATE]
    assert len(started) == 1 and "secret" not in started[0].values()


def test_a_template_that_is_a_pipe_or_far_too_long_is_not_read(tmp_path: Path) -> None:
    data = DataConfig(sources=("a.jsonl",), tokenizer="tokenizer.json", loss_on="answers")
    (tmp_path / "chat_template.jinja").write_text("a" * (3 << 20))
    with pytest.raises(InvalidCorpus, match="cannot be read"):
        find_template(data, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(InvalidCorpus, match="cannot be read"):
        find_template(data, tmp_path)


def test_a_store_s_template_is_never_run(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}"}) + "\n" for n in range(60))
    (tmp_path / "a.jsonl").write_text(rows)
    store = LocalStore(tmp_path / "store")
    store.write("chat_template.jinja", ENDLESS.encode())
    made = build_snapshot(store, DataConfig(sources=("a.jsonl",), tokenizer="bytes", loss_on="answers"), tmp_path)
    assert made.manifest.splits.train.documents + made.manifest.splits.val.documents == 60
