import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.flows.watching.run_watcher import Continuation, ContinuationHere, RunWatcher, WatcherMemory, WatchRow
from cairn.storage.errors import StoreUnavailable
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.registry import Registry, RegistryState
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.machine.placement import boot_id, this_placement
from tests import fabricated_run
from tests.cairn.recorded_starts import Recorded
from tests.commands import ROOT, Cairn, chosen_folders
from tests.entries import NOON, gone_placement
from tests.fabricated_run import FabricatedRun, promote
from tests.processes.fork_server import fork_server
from tests.processes.waiting import wait_until

fabricate = partial(fabricated_run.fabricate, nodes_wanted=1)  # a watcher leaves runs of several machines

ABANDONED = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # as a watcher does
SLEEPS = (sys.executable, "-c", "import signal; signal.pause()")


class Clock:
    """A clock that only sleeping moves; `meanwhile` is what the world does in a sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.meanwhile: Callable[[], Any] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(store: LocalStore, tmp_path: Path, clock: Clock) -> Callable[..., RunWatcher]:
    """A watcher in a process of its own, as far as memory goes: only the file is shared with the next."""

    def new(continuation: Continuation) -> RunWatcher:
        memory = WatcherMemory(tmp_path / "observations.json", monotonic=clock.monotonic)
        return RunWatcher(store, continuation, memory, clock.sleep)

    return new


def one(rows: tuple[WatchRow, ...]) -> WatchRow:
    (row,) = rows
    return row


@pytest.fixture
def orphan(store: LocalStore) -> FabricatedRun:
    """A run whose process on this machine is gone."""
    run = fabricate(store, "orphan")
    run.start(placement=gone_placement())
    return run


def test_a_run_whose_process_is_gone_is_continued_once_while_it_stands(
    orphan: FabricatedRun, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    recorded = Recorded()
    actions = []
    for _ in range(3):
        actions.append(one(watch(recorded).poll()).action)
        clock.sleep(5)
    assert (recorded.begun, actions) == (["orphan"], ["continued", "waits", "waits"])


def test_what_moved_since_is_continued_anew(orphan: FabricatedRun, watch: Callable[..., RunWatcher]) -> None:
    recorded = Recorded()
    watch(recorded).poll()
    orphan.end("lost", action="resume")
    orphan.start(placement=gone_placement())
    watch(recorded).poll()
    assert recorded.begun == ["orphan", "orphan"]


def test_the_attempts_to_continue_an_earlier_run_of_this_name_do_not_count(
    orphan: FabricatedRun, watch: Callable[..., RunWatcher]
) -> None:
    recorded, store = Recorded(), orphan.log.store
    watch(recorded).poll()
    for key in (*store.keys("runs"), *store.keys("index")):
        store.delete(key)
    fabricate(store, "orphan", opened_at=NOON + timedelta(days=1)).start(placement=gone_placement())
    watch(recorded).poll()
    assert recorded.begun == ["orphan", "orphan"]


def test_a_run_that_no_continuation_helps_is_tried_ever_later_and_says_where_to_look(
    orphan: FabricatedRun, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    recorded = Recorded()
    for _ in range(60):
        row = one(watch(recorded).poll())
        clock.sleep(60)
    assert len(recorded.begun) == 7  # at 0, 1, 3, 11, 26, 41 and 56 minutes
    assert row.action == "waits" and "not yet claimed" in row.why and row.how == "here"


def test_a_silent_owner_elsewhere_is_outwaited_within_one_patient_look(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    fabricate(store, "far").start()
    assert one(watch(Recorded()).poll_patiently()).action == "continued"
    assert clock.now == pytest.approx(1030, abs=1)


def test_an_owner_elsewhere_that_beats_is_left_as_soon_as_it_beats(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    run = fabricate(store, "far")
    run.start()
    clock.meanwhile = lambda: run.beat(7)
    row = one(watch(Recorded()).poll_patiently())
    assert (row.action, clock.now < 1002) == ("left", True)


def test_an_owner_elsewhere_that_commits_is_alive(store: LocalStore, watch: Callable[..., RunWatcher]) -> None:
    run = fabricate(store, "far")
    run.start()
    watch(Recorded()).poll()
    run.commit(10)
    assert "shows life" in one(watch(Recorded()).poll()).why


def test_watchers_started_anew_for_every_look_outwait_a_silent_owner_elsewhere(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    fabricate(store, "far").start()
    actions = []
    for _ in range(4):
        actions.append(one(watch(Recorded()).poll()).action)
        clock.sleep(11)
    assert actions == ["waits", "waits", "waits", "continued"]


def test_a_long_back_off_is_reported_and_not_waited_for(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    run = fabricate(store, "backing-off")
    run.start(placement=gone_placement())
    run.end("storage", action="resume", delay_seconds=300.0)
    row = one(watch(Recorded()).poll_patiently())
    assert (row.action, row.seconds, clock.now) == ("waits", 300.0, 1000.0)
    clock.sleep(300)
    assert one(watch(Recorded()).poll_patiently()).action == "continued"


@pytest.mark.parametrize(
    "spoil",
    [lambda text: text.replace(boot_id(), "another"), lambda text: "{"],
    ids=["of another boot", "damaged"],
)
def test_memory_that_cannot_be_used_costs_only_time(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock, tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    fabricate(store, "far").start()
    watch(Recorded()).poll()
    clock.sleep(100)
    kept = tmp_path / "observations.json"
    kept.write_text(spoil(kept.read_text()))
    assert one(watch(Recorded()).poll()).action == "waits"


@pytest.mark.unsound_log
def test_an_unreadable_run_and_one_that_cannot_be_continued_do_not_stop_the_others(
    orphan: FabricatedRun, store: LocalStore, watch: Callable[..., RunWatcher], tmp_path: Path
) -> None:
    for name in ("a-bad", "b-stuck"):
        fabricate(store, name).start(placement=gone_placement())
    entry = tmp_path / "store" / "runs" / "a-bad" / "log" / "9999999998.json"
    entry.write_text(entry.read_text().replace("gpt", "gtp"))
    newest = tmp_path / "store" / "runs" / "a-bad" / "log" / "9999999999.json"
    newest.write_text(newest.read_text().replace("gpt", "gtp"))
    recorded = Recorded(fails="b-stuck")
    rows = watch(recorded).poll()
    assert [row.action for row in rows] == ["failed", "failed", "continued"]
    assert recorded.begun == ["orphan"]


def test_a_run_nobody_claimed_is_left_to_the_process_that_opened_it_until_that_is_gone(
    store: LocalStore, watch: Callable[..., RunWatcher]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for name, pid in (("of a child", child.pid), ("of this process", os.getpid())):
        opener = Writer(host=socket.gethostname(), pid=pid)
        fabricate(store, name.replace(" ", "-"), opener=opener, opened_at=datetime.now(UTC))
    assert [row.action for row in watch(Recorded()).poll()] == ["continued", "left"]


class Stop(BaseException):
    """Ends the loop."""


def test_the_loop_tells_only_what_is_new_and_outlives_a_store_that_is_away(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(store, "far").start()
    told: list[list[str]] = []
    said: list[str] = []
    looks = iter(range(10))

    def meanwhile() -> None:
        look = next(looks)
        if look == 1:
            monkeypatch.setattr(LocalStore, "folders", refuse)
        if look == 3:
            monkeypatch.undo()
        if look == 6:
            raise Stop

    def refuse(self: LocalStore, prefix: str) -> list[str]:
        raise StoreUnavailable("no answer")

    clock.meanwhile = meanwhile
    watcher = watch(Recorded())
    with pytest.raises(Stop):
        watcher.watch(every_seconds=10.0, report=lambda rows: told.append([r.action for r in rows]), say=said.append)
    assert [rows for rows in told if rows] == [["waits"], ["continued"], ["waits"]]
    assert len(said) == 2 and "no answer" in said[0]


def test_an_attempt_that_nothing_continues_is_told_after_two_leases(
    store: LocalStore, watch: Callable[..., RunWatcher], clock: Clock
) -> None:
    fabricate(store, "held").start(overrides=["lease.seconds=30"])
    watcher, told = watch(Recorded()), list[list[str]]()
    for _ in range(3):
        watcher.poll()
        told.append([f"{notice.kind} {notice.key}" for notice in watcher.notices()])
        clock.sleep(31)
    assert told == [[], [], [f"silent silent-0001@{NOON.isoformat()}"]]


def test_one_look_tells_a_command_of_this_machine_what_it_saw(
    store: LocalStore, cairn: Cairn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = fabricate(store, "stopped", opened_at=datetime.now(UTC))
    stopped.start()
    stopped.end("error", action="stop")
    monkeypatch.setenv("CAIRN_NOTIFY__COMMAND", f"tee {tmp_path / 'told'}")
    assert cairn("watch", "--once").code == 0
    assert json.loads((tmp_path / "told").read_text())["id"].startswith("stopped/ended-0001@")


@pytest.fixture
def sleepers() -> Iterator[Callable[[], set[psutil.Process]]]:
    """Return the living children that the test has started, and no server another test has started."""
    before = set(psutil.Process().children())

    def living() -> set[psutil.Process]:
        started = set(psutil.Process().children()) - before
        return {child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}

    yield living
    for child in living():
        child.kill()
        child.wait()


@ABANDONED
def test_at_most_so_many_runs_are_continued_here_whoever_looks(
    store: LocalStore, tmp_path: Path, sleepers: Callable[[], set[psutil.Process]]
) -> None:
    runs = [fabricate(store, name) for name in ("a", "b", "c")]
    began = []
    for run in (*runs, *runs):  # each time a watcher of its own: only the locks are shared
        here = ContinuationHere(tmp_path / "watch", "store", at_most=2, program=SLEEPS)
        began.append(here.begin(run.log, silent_seconds=0.0))
    children = sleepers()
    assert [action for action, _ in began] == ["continued"] * 2 + ["waits"] * 4
    assert "--at-most" in began[2][1] and "is continuing it" in began[3][1]
    assert len(children) == 2
    assert {os.getsid(child.pid) for child in children} == {child.pid for child in children}


@ABANDONED
def test_a_child_that_died_gives_its_place_back(
    store: LocalStore, tmp_path: Path, sleepers: Callable[[], set[psutil.Process]]
) -> None:
    here = ContinuationHere(tmp_path / "watch", "store", at_most=1, program=SLEEPS)
    assert here.begin(fabricate(store, "a").log, silent_seconds=0.0)[0] == "continued"
    (child,) = sleepers()
    child.kill()
    wait_until(lambda: not sleepers(), "the end of the child")
    assert here.begin(fabricate(store, "b").log, silent_seconds=0.0)[0] == "continued"


def test_one_look_reads_the_decisions_of_an_alias_once_however_many_runs_have_finished(
    store: LocalStore, watch: Callable[..., RunWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        run = fabricate(store, name)
        run.start()
        promote(store, name, run.complete(), loss=2.0, alias="champion")
    looks: list[str] = []
    refresh = Registry.refresh

    def counted(self: Registry) -> RegistryState:
        looks.append(self.alias)
        return refresh(self)

    monkeypatch.setattr(Registry, "refresh", counted)
    rows = watch(None).poll()
    assert ({row.action for row in rows}, looks) == ({"left"}, ["champion"])


def test_the_verb_leaves_what_is_finished_stopped_or_alive_and_says_why(store: LocalStore, cairn: Cairn) -> None:
    done, stopped, alive = (fabricate(store, name) for name in ("done", "stopped", "alive"))
    done.start()
    promote(store, "done", done.complete(), loss=2.0, alias="champion")
    stopped.start()
    stopped.end("error", action="stop")
    alive.start(placement=this_placement(device="cpu", threads=1))
    before = [run.log.seq for run in (alive, done, stopped)]
    ended = cairn("watch", "--once", "--json")
    rows = {row["run_id"]: row for row in json.loads(ended.out)}
    assert ended.code == 0 and {row["action"] for row in rows.values()} == {"left"}
    assert "finished" in rows["done"]["why"] and "alive" in rows["alive"]["why"]
    assert "a person decides: so it was decided" in rows["stopped"]["why"]
    for run in (alive, done, stopped):
        run.log.refresh()
    assert [run.log.seq for run in (alive, done, stopped)] == before, "nothing was started"


def test_a_second_look_which_the_index_answers_says_the_same_of_runs_that_are_over(
    store: LocalStore, cairn: Cairn
) -> None:
    done, silent = fabricate(store, "done"), fabricate(store, "silent")
    done.start()
    promote(store, "done", done.complete(), loss=2.0, alias="champion")
    silent.start(placement=this_placement(device="cpu", threads=1))
    first, second = (cairn("watch", "--once", "--json") for _ in range(2))
    assert (first.code, second.code) == (0, 0), second.err
    assert [row["action"] for row in json.loads(second.out)] == [row["action"] for row in json.loads(first.out)]


def test_the_verb_prints_a_table_for_people(bard: FabricatedRun, cairn: Cairn) -> None:
    bard.end("error", action="stop")
    ended = cairn("watch", "--once")
    assert ended.code == 0 and "a person decides" in ended.out


@contextmanager
def watching(folder: Path, *options: str, **environment: str) -> "Iterator[subprocess.Popen[str]]":
    """The real command's loop over a store with one opened run; it is told to stop when the block ends."""
    fabricate(LocalStore(folder / "store"), "opened")
    command = [sys.executable, "-m", "cairn.cli.command", "watch", *options]
    variables = {**os.environ, **chosen_folders(folder), "PYTHONPATH": str(ROOT), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with fork_server().popen(command, env=variables, text=True, **pipes) as loop:
        yield loop
        loop.send_signal(signal.SIGTERM)
        _, errors = loop.communicate(timeout=240)
    assert (loop.returncode, "stopped watching" in errors) == (0, True)


def test_the_loop_leaves_with_0_when_it_is_told_to_stop(tmp_path: Path) -> None:
    with watching(tmp_path, "--every", "0.5") as loop:
        assert loop.stdout is not None and "action" in loop.stdout.readline()


def test_the_loop_watches_on_where_no_receiver_of_its_numbers_listens(tmp_path: Path) -> None:
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with watching(tmp_path, "--otlp", **nobody) as loop:
        assert loop.stderr is not None
        assert any("http://127.0.0.1:9 takes no OTLP metrics" in line for line in loop.stderr)
