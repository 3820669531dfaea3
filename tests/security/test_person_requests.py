"""The two doors of the live page that do more than read: notes, and texts that a child draws from a checkpoint."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from starlette.responses import PlainTextResponse

from cairn.operations.run_notes import note_run
from cairn.operations.trained_models import RunSampler, SampleRequest
from cairn.storage.errors import StoreRefused
from cairn.storage.stores import child_process
from cairn.storage.stores.local_store import LocalStore
from cairn.ui import person_requests
from cairn.ui.person_requests import is_own_folder
from tests.cairn.live_server import Answer, LiveServer, served
from tests.fabricated_run import FabricatedRun, fabricate
from tests.memory_store import MemoryStore
from tests.processes.waiting import wait_until
from tests.writing_run import RUN, WritingRun, open_writing_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

NOTE, PROMPT = "/runs/bard/note", "/runs/bard/prompt"
ORDERS = {NOTE: b'{"text": "by whom?"}', PROMPT: b'{"prompt": "To be"}'}
TAGS = "<img src=x onerror=window.owned=1><script>window.owned=1</script>"
ENDLESS = f"import json, time; print(json.dumps({{'text': {TAGS!r}}}), flush=True); time.sleep(600)"
TELLING = "import json, os; print(json.dumps({'text': ' '.join(os.environ)}))"
FAILING = "raise SystemExit(7)"


@pytest.fixture
def bard(tmp_path: Path) -> FabricatedRun:
    """A run with a checkpoint, in a folder of this user's."""
    (tmp_path / "store").mkdir(mode=0o755)
    run = fabricate(LocalStore(tmp_path / "store"), "bard")
    run.start()
    run.commit(10)
    return run


@pytest.fixture
def live(bard: FabricatedRun, tmp_path: Path) -> Iterator[LiveServer]:
    with served(bard.log.store, tmp_path / "work", metrics_token="m" * 16) as page:
        yield page


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The children that were started to draw."""
    children, start = list[Any](), child_process.start_child
    monkeypatch.setattr(child_process, "start_child", lambda *a, **k: children.append(start(*a, **k)) or children[-1])
    return children


def drawing(monkeypatch: pytest.MonkeyPatch, program: str) -> list[int]:
    """Let a small program stand for the child that draws; returns the bytes of memory that each may take."""
    allowed = list[int]()

    def command(memory_bytes: int, *others: object) -> tuple[str, ...]:
        allowed.append(memory_bytes)
        return (sys.executable, "-c", program)

    monkeypatch.setattr(child_process, "bounded_command", command)
    return allowed


def post(live: LiveServer, path: str, body: bytes | None = None, **headers: str) -> Answer:
    return live.ask(path, method="POST", body=ORDERS[path] if body is None else body, **headers)


def pieces(answer: Answer) -> list[dict[str, str]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def nothing_was_done(run: FabricatedRun, started: list[Any]) -> bool:
    return not run.log.refresh().notes and not started


ORIGINS = (
    "",
    "null",
    "http://127.0.0.1:1",
    "http://localhost:{port}",
    "https://127.0.0.1:{port}",
    "http://127.0.0.1:{port}/",
)


@pytest.mark.parametrize("path", ORDERS)
def test_a_page_of_another_origin_asks_for_nothing_even_with_the_cookie(
    live: LiveServer, bard: FabricatedRun, started: list[Any], path: str
) -> None:
    cookie = f"cairn-{live.port}={live.access.token}"
    for origin in ORIGINS:
        answer = post(live, path, Authorization="", Cookie=cookie, Origin=origin.format(port=live.port))
        assert answer.status == 403, origin
    assert nothing_was_done(bard, started)


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": f"Bearer {'m' * 16}"}, 401),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 400),
    ],
)
def test_without_the_pages_token_or_under_another_name_nothing_is_done(
    live: LiveServer, bard: FabricatedRun, started: list[Any], path: str, given: dict[str, str], status: int
) -> None:
    assert (post(live, path, **given).status, nothing_was_done(bard, started)) == (status, True)


@pytest.mark.linux
@pytest.mark.parametrize("path", ORDERS)
def test_a_connection_that_the_system_does_not_call_this_users_does_nothing(
    live: LiveServer,
    bard: FabricatedRun,
    started: list[Any],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").write_text("heading\n")
    monkeypatch.setattr("cairn.ui.local_server._CONNECTIONS", (tmp_path / "empty",))
    assert (post(live, path).status, nothing_was_done(bard, started)) == (401, True)


NO_ORDERS = (
    b"",
    b"[]",
    b"nonsense",
    b'{"text": "\xff", "prompt": "\xff"}',
    b'{"text": "\\ud800", "prompt": "\\ud800"}',
    b'{"text": 1, "prompt": 1}',
    b'{"x": ' + b"[" * 20_000,
    b'{"text": "' + b"x" * 2_001 + b'", "prompt": "' + b"x" * 4_001 + b'"}',
    b'{"text": "' + b"x" * 10_000_000 + b'"}',
    b'{"text": "", "tags": ["a b"], "tokens": 1001}',
    b'{"text": " ", "tokens": 0}',
    b'{"tags": ["../x"], "temperature": NaN}',
    b'{"tags": [""], "temperature": -1}',
    b'{"tags": "x", "seed": -1}',
    b'{"tags": ["' + b'","'.join(b"t%d" % n for n in range(21)) + b'"], "seed": 1e300}',
)


@pytest.mark.parametrize("path", ORDERS)
def test_what_is_no_order_is_refused_in_one_line(
    live: LiveServer, bard: FabricatedRun, started: list[Any], path: str
) -> None:
    for body in NO_ORDERS:
        answer = post(live, path, body)
        assert (answer.status, len(answer.text.splitlines())) == (400, 1), body[:80]
    assert nothing_was_done(bard, started)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/runs/gone/note", b'{"text": "x"}', 404, "no run 'gone'"),
        ("/runs/other/prompt", b"{}", 404, "no run 'other'"),
        ("/runs/%2e%2e/prompt", b"{}", 400, "run id '..'"),
        ("/runs/%2e%2e/note", b'{"text": "x"}', 400, "run id '..'"),
        ("/runs/x%0ay/prompt", b"{}", 400, "run id"),
        (PROMPT, b'{"step": 11}', 404, "no checkpoint at step 11"),
    ],
)
def test_a_run_or_checkpoint_that_this_store_does_not_have_is_named(
    live: LiveServer, started: list[Any], tmp_path: Path, path: str, body: bytes, status: int, said: str
) -> None:
    fabricate(LocalStore(tmp_path / "another"), "other").start()
    answer = live.ask(path, method="POST", body=body)
    assert (answer.status, said in answer.text, started) == (status, True, [])


def test_of_twenty_texts_at_once_one_is_drawn_and_the_others_are_told_so(
    live: LiveServer, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, ENDLESS)

    def ask(_: int) -> int:
        with live.asking(PROMPT, body=b"{}") as answer:
            if answer.status == 200:
                answered.append(answer.readline())
                wait_until(lambda: len(statuses) == 19, "the end of the others")
            else:
                statuses.append(answer.status)
            return answer.status

    answered, statuses = list[bytes](), list[int]()
    with ThreadPoolExecutor(20) as pool:
        assert sorted(pool.map(ask, range(20))) == [200, *[429] * 19]
    assert len(started) == 1 and json.loads(answered[0]) == {"text": TAGS}


def test_a_child_ends_with_the_one_who_waits_for_its_text_and_the_next_is_answered(
    live: LiveServer, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, ENDLESS)
    for turn in range(2):
        wait_until(partial(is_answered, live), "an answer for the next")
        wait_until(lambda: not any(map(is_alive, started)), "the end of the child")
        assert len(started) == turn + 1


@pytest.mark.parametrize("path", ORDERS)
def test_one_who_leaves_within_an_order_or_a_text_does_nothing_and_prints_nothing(
    live: LiveServer,
    bard: FabricatedRun,
    started: list[Any],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    drawing(monkeypatch, ENDLESS)
    left = threading.Event()
    monkeypatch.setattr(person_requests, "_refuse", lambda error: left.set() or PlainTextResponse(""))
    own = f"127.0.0.1:{live.port}"
    head = f"Host: {own}\r\nOrigin: http://{own}\r\nAuthorization: Bearer {live.access.token}\r\n"
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}Content-Length: 100\r\n\r\n{{".encode())
    assert left.wait(60) and nothing_was_done(bard, started)
    if path == PROMPT:
        assert is_answered(live)
        wait_until(lambda: not any(map(is_alive, started)), "the end of the child")
    assert capfd.readouterr() == ("", "")


def test_a_server_that_ends_ends_a_text_and_prints_nothing(
    bard: FabricatedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drawing(monkeypatch, ENDLESS)
    with ExitStack() as waiting:
        with served(bard.log.store, tmp_path / "work") as live:
            answer = waiting.enter_context(live.asking(PROMPT, body=b"{}"))
            answer.readline()
        assert b"its process ended with -9" in answer.read() and capfd.readouterr() == ("", "")


def is_answered(live: LiveServer) -> bool:
    with live.asking(PROMPT, body=b"{}") as answer:
        return answer.status == 200 and bool(answer.readline())


def is_alive(child: Any) -> bool:
    return child.returncode is None and psutil.pid_exists(child.pid)


def test_one_who_never_reads_stops_nobody(
    live: LiveServer, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(person_requests, "MOST_SECONDS", 0.5)
    drawing(monkeypatch, "while True: print('x' * 65536)")
    with live.asking(PROMPT, body=b"{}"):
        wait_until(partial(is_answered, live), "an answer beside it")


def test_a_text_has_bounded_time_and_says_so(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(person_requests, "MOST_SECONDS", 1.0)
    drawing(monkeypatch, ENDLESS)
    first, last = pieces(post(live, PROMPT))
    assert first["text"] == TAGS and last["ended"].startswith("its process ended with -9: a text has at most 1 s")


def test_a_child_that_fails_says_so(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, FAILING)
    (last,) = pieces(post(live, PROMPT))
    assert last["ended"].startswith("its process ended with 7")


@pytest.mark.parametrize(("room", "expected"), [(1 << 40, 2 << 30), (1 << 30, 1 << 29), (None, 2 << 30)])
def test_a_child_has_at_most_half_of_the_free_memory(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, room: int | None, expected: int
) -> None:
    monkeypatch.setattr(person_requests, "available_memory_bytes", lambda pid: room)
    allowed = drawing(monkeypatch, FAILING)
    post(live, PROMPT)
    assert 0 <= allowed[0] - expected < 1 << 20, "and four times its checkpoint, which is small"


def test_the_limit_of_memory_holds_in_the_child(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text("def run(): bytearray(1 << 30)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = child_process.start_child(child_process.bounded_command(256 << 20, 60, "greedy"), environment=environment)
    child.communicate()
    assert child.returncode == 3


def test_the_child_of_a_folder_gets_no_credentials_and_that_of_a_bucket_those_of_buckets(
    bard: FabricatedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, TELLING)
    secrets = {"AWS_SECRET_ACCESS_KEY": "canary", "PREFECT_API_AUTH_STRING": "canary", "WANDB_API_KEY": "canary"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    far = MemoryStore()
    run = fabricate(far, "bard")
    run.start()
    run.commit(10)
    seen = []
    for store in (bard.log.store, far):
        with served(store, tmp_path / "work", secrets, prompts=True) as live:
            seen.append(secrets.keys() & set(pieces(post(live, PROMPT))[0]["text"].split()))
    assert seen == [set(), {"AWS_SECRET_ACCESS_KEY"}]


@pytest.mark.parametrize(("mode", "is_own"), [(0o700, True), (0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_that_others_may_write_to_is_not_this_users_own(tmp_path: Path, mode: int, is_own: bool) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    assert is_own_folder(LocalStore(tmp_path / "store")) == is_own


def test_neither_a_folder_of_another_user_nor_a_missing_one_nor_a_bucket_is_this_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_own_folder(LocalStore(tmp_path / "missing")) and not is_own_folder(MemoryStore())
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    assert not is_own_folder(LocalStore(tmp_path))


def test_from_a_store_of_others_nothing_is_drawn_unless_its_user_said_so(
    bard: FabricatedRun, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, ENDLESS)
    (tmp_path / "store").chmod(0o777)
    with served(bard.log.store, tmp_path / "work") as live:
        answer, page = post(live, PROMPT), live.ask("/runs/bard").text
        assert (answer.status, "cairn ui --prompts" in answer.text, started) == (403, True, [])
        assert 'data-task="prompt"' not in page and "<code>cairn ui --prompts</code>" in page
        (tmp_path / "store").chmod(0o755)
        assert is_answered(live), "a store that becomes its user's while the page is served"
    with served(bard.log.store, tmp_path / "work", prompts=True) as live:
        assert is_answered(live) and 'data-task="prompt"' in live.ask("/runs/bard").text


def test_a_note_is_the_entry_that_the_command_makes_and_is_shown_at_once(live: LiveServer, bard: FabricatedRun) -> None:
    note_run(bard.log, "by hand", ["one"], ())
    live.ask("/runs/bard")
    answer = post(live, NOTE, json.dumps({"text": f" {TAGS}\x1b[31m ", "tags": ["two"]}).encode())
    state = bard.log.refresh()
    assert (answer.status, [note.text for note in state.notes], state.tags) == (204, ["by hand", TAGS], ("one", "two"))
    assert len({note.noted_by for note in state.notes}) == 1
    shown = [live.ask(path, wait=0).text for path in ("/runs/bard", "/?q=two")]
    assert "&lt;img src=x onerror" in shown[0] and "<img src=x" not in shown[0] and 'class="tag">two<' in shown[1]


def test_a_store_that_cannot_be_written_refuses_a_note_in_words(tmp_path: Path) -> None:
    class ReadOnly(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if self.is_closed:
                raise StoreRefused(f"{key}: cannot be written: read-only file system")
            return super().create(key, data)

        is_closed = False

    store = ReadOnly()
    run = fabricate(store, "bard")
    store.is_closed = True
    with served(store, tmp_path / "work") as live:
        answer = post(live, NOTE)
    assert (answer.status, "read-only file system" in answer.text, len(run.log.refresh().notes)) == (503, True, 0)


def test_a_text_is_streamed_that_the_command_would_draw_and_the_store_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    run = writing(tmp_path)
    before = contents(tmp_path / "store")
    with (
        served(run.log.store, tmp_path / "cache") as live,
        live.asking(
            PROMPT, body=b'{"prompt": "To be", "step": 10, "tokens": 60, "seed": 3, "temperature": 5}'
        ) as answer,
    ):
        lines = answer.read().splitlines()
    *drawn, last = [json.loads(line) for line in lines]
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    sampler = RunSampler(run.log, SampleRequest(tokens=60, temperature=5.0, prompt="To be"))
    sampler.load(run.log.state.checkpoints[0].committed.reference)
    expected = sampler.write(3, lambda piece: None)
    assert "".join(piece["text"] for piece in drawn) == f"To be{expected.text}"
    assert last["ended"] == expected.ended and len(drawn) > expected.tokens
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert contents(tmp_path / "store") == before


def writing(folder: Path) -> WritingRun:
    """Return a run with two checkpoints that can write."""
    run = open_writing_run(LocalStore(folder / "store"), folder)
    run.start()
    for step in (10, 20):
        run.commit(step, seed=step)
    assert run.log.run_id == RUN
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # quick witness: the real answer above, and the Origins at the top
def test_a_browser_shows_a_text_as_text_while_it_is_drawn_and_stops_it(
    live: LiveServer, started: list[Any], page: "Page", monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, ENDLESS)
    page.goto(live.at("/runs/bard"))
    page.get_by_text("Let it write").click()
    page.get_by_label("Prompt").fill("To be")
    page.get_by_role("button", name="Write").click()
    page.locator("form pre", has_text="onerror").wait_for()
    assert page.evaluate("window.owned") is None and page.locator("form img, form script").count() == 0
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    wait_until(lambda: not any(map(is_alive, started)), "the end of the child")


@pytest.mark.slow  # quick witness: as above
def test_a_browser_keeps_a_note_and_another_port_of_this_machine_cannot(
    live: LiveServer, bard: FabricatedRun, page: "Page", tmp_path: Path
) -> None:
    page.goto(live.at("/runs/bard"))
    page.get_by_text("Write a note").click()
    page.get_by_label("Note").fill("seen in a browser")
    page.get_by_role("button", name="Keep it").click()
    page.locator("#notes").get_by_text("seen in a browser").wait_for()
    attack = """url => fetch(url, {method: "POST", mode: "no-cors", credentials: "include", body: '{"text": "x"}'})
        .catch(() => null)"""
    with served(MemoryStore(), tmp_path / "other") as other:
        page.goto(other.at("/"))  # the same site for a browser, whose policy is taken away
        page.context.new_cdp_session(page).send("Page.setBypassCSP", {"enabled": True})
        page.reload()
        page.evaluate(attack, f"http://127.0.0.1:{live.port}{NOTE}")
    assert [note.text for note in bard.log.refresh().notes] == ["seen in a browser"]
