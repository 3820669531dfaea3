"""A store that is not where it was: mistyped, half copied, or with a run's folder under another name."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.flows.orchestrator import session_server
from cairn.flows.watching.run_watcher import RunWatcher, WatcherMemory
from cairn.operations.checks import verify_run
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import check_place, entry_name
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.cairn.command_folder import CONFIGURATION, TEXT
from tests.cairn.recorded_starts import Recorded
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate, promote
from tests.memory_store import MemoryStore

VERBS = ("status", "verify", "explain", "export", "train")


@pytest.fixture
def misplaced(bard: FabricatedRun, store: LocalStore) -> str:
    """The name of a folder into which the whole run was copied."""
    runs = Path(store.local_path("runs") or "")
    shutil.copytree(runs / "bard", runs / "mallory")
    return "mallory"


@pytest.mark.parametrize("verb", VERBS)
def test_a_copy_under_another_name_is_refused(misplaced: str, cairn: Cairn, verb: str, tmp_path: Path) -> None:
    more = {"export": [misplaced, str(tmp_path / "out")], "train": ["--run-id", misplaced]}.get(verb, [misplaced])
    ended = cairn(verb, *more)
    assert ended.code == 5, ended
    assert "its entries are those of 'bard', and it lies where mallory should" in ended.err


def test_the_list_of_runs_says_so_and_shows_the_others(misplaced: str, cairn: Cairn) -> None:
    listed = {run["run_id"]: run["state"] for run in json.loads(cairn("runs", "--json").out)}
    assert listed[misplaced] == "unreadable" and listed["bard"] != "unreadable"


@pytest.mark.parametrize("name", ["<script>", "[a](b)", "\x1b[2J", "../bard", "Bard", "bard ", "b" * 10_000])
def test_the_name_that_a_log_gives_itself_is_printed_harmlessly(name: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        check_place("runs/bard/log", "bard", name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250


READING = (
    *("runs", "runs --json", "models", "sql 'select run_id from runs'", "watch --once", "compare a b", "rollback"),
    *("status bard", "explain bard", "report bard", "attempts bard", "checkpoints bard", "evaluations bard"),
    *("log bard", "plot bard x.png", "diagnose bard", "simulate bard", "sample bard", "evaluate bard", "promote bard"),
    *("export bard out", "fork bard new", "data bard", "export-tokens bard out", "verify bard", "replay bard"),
    *("sweep bard", "delete bard --dry-run"),
)


@pytest.mark.parametrize("line", READING)
def test_a_store_without_runs_is_named_with_one_nearby(cairn: Cairn, tmp_path: Path, line: str) -> None:
    (tmp_path / "other" / "runs" / "bard" / "log").mkdir(parents=True)
    ended = cairn(*shlex.split(line), "--store", "gone")
    where = f"there are no runs in {tmp_path}/gone, a folder that does not exist; stores nearby: --store other (1 run)"
    assert where in ended.err


def test_a_store_with_nothing_but_empty_folders_is_not_near_itself(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "empty" / "runs" / "bard" / "log").mkdir(parents=True)
    ended = cairn("status", "bard", "--store", "empty")
    assert ended.code == 2 and "there are no runs in" in ended.err and "--store ../empty" not in ended.err


Poll = Callable[..., dict[str, str]]
RUN_LOG, MODEL_LOG = "runs/bard/log", "models/champion/log"


def key_of(seq: int, log: str = RUN_LOG) -> str:
    return f"{log}/{entry_name(seq)}"


def problems_of(store: ObjectStore, log: str) -> list[str]:
    return [problem for problem in verify_run(store, "bard").problems if problem.startswith(f"{log}/99")]


@pytest.mark.parametrize("log", [RUN_LOG, MODEL_LOG])
def test_verify_names_every_missing_entry_and_says_that_putting_them_back_mends_the_log(
    bard: FabricatedRun, store: LocalStore, log: str
) -> None:
    for loss in (1.0, 0.5):
        promote(store, "bard", bard.log.state.resume[0], loss=loss, alias="champion")
    before, newest = verify_run(store, "bard").problems, len(store.keys(log)) - 1
    taken = {key: store.read(key) for key in (key_of(0, log), key_of(newest - 1, log))}
    for key in taken:
        store.delete(key)
    named = problems_of(store, log)
    assert [problem.split(": ")[0] for problem in named] == list(taken)
    assert all("put back as they were" in problem and "they mend the log" in problem for problem in named)
    for key, data in taken.items():
        store.create(key, data)
    assert verify_run(store, "bard").problems == before


@pytest.mark.unsound_log
def test_verify_names_a_thousand_missing_entries_in_one_line(bard: FabricatedRun, store: LocalStore) -> None:
    newest = bard.log.seq
    for seq in range(1, newest):
        store.delete(key_of(seq))
    (named,) = problems_of(store, RUN_LOG)
    assert f"{entry_name(1)} to {entry_name(newest - 1)}: seq 1 to {newest - 1} are missing" in named


@pytest.mark.unsound_log
@pytest.mark.parametrize("seq", [0, 4])
def test_train_is_refused_with_the_missing_entrys_name_before_anything_is_started(
    bard: FabricatedRun, store: LocalStore, cairn: Cairn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq: int
) -> None:
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    (tmp_path / "text.txt").write_text(TEXT)
    store.delete(key_of(seq))
    there = store.sizes("runs")
    monkeypatch.delattr(session_server, "TemporaryServer")
    ended = cairn("train", "run.toml", "--run-id", "bard", "--store", store.url, PREFECT_API_URL="")
    assert ended.code == 5 and f"{entry_name(seq)}: seq {seq} is missing" in ended.err
    assert store.sizes("runs") == there


@pytest.mark.unsound_log
def test_verify_exits_with_5_and_lists_what_is_missing_as_json(
    bard: FabricatedRun, store: LocalStore, cairn: Cairn
) -> None:
    store.delete(key_of(0))
    ended = cairn("verify", "bard", "--json", "--store", store.url)
    assert ended.code == 5
    assert any(entry_name(0) in problem for problem in json.loads(ended.out)["problems"])


@pytest.fixture
def poll(tmp_path: Path) -> Poll:
    """Poll twice, an hour apart: what shows no life in between is continued."""

    def poll(store: ObjectStore, recorded: Recorded, times: tuple[float, ...] = (1000.0, 4600.0)) -> dict[str, str]:
        why: dict[str, str] = {}
        for now in times:
            memory = WatcherMemory(tmp_path / "observations.json", monotonic=lambda now=now: now)
            watcher = RunWatcher(store, recorded, memory, lambda seconds: None)
            why |= {row.run_id: f"{row.action}: {row.why}" for row in watcher.poll()}
        return why

    return poll


def silent_run(store: ObjectStore) -> FabricatedRun:
    """A run of six entries whose owner shows no life."""
    run = fabricate(store, "bard", nodes_wanted=1)
    run.start()
    for step in (10, 20, 30, 40):
        run.commit(step)
    return run


def test_a_silent_run_that_is_whole_is_continued(poll: Poll) -> None:
    store, recorded = MemoryStore("whole"), Recorded()
    silent_run(store)
    poll(store, recorded)
    assert recorded.begun == ["bard"]


@pytest.mark.parametrize("indexed", [False, True], ids=["no index", "index"])
@pytest.mark.parametrize("seq", range(5))
def test_a_watcher_begins_nothing_on_a_half_copied_log(poll: Poll, seq: int, indexed: bool) -> None:
    store, recorded = MemoryStore("half"), Recorded()
    silent_run(store)
    if indexed:
        poll(store, recorded, (0.0,))
    store.delete(key_of(seq))
    why = poll(store, recorded)
    assert recorded.begun == []
    is_named = indexed or seq > 1  # before that a log alone gives no reason to begin anything
    assert not is_named or f"seq {seq} is missing" in why["bard"]


@pytest.mark.unsound_log
def test_a_sweep_deletes_nothing_while_a_decision_of_an_alias_is_missing(
    bard: FabricatedRun, store: LocalStore
) -> None:
    promote(store, "bard", bard.log.state.resume[0], loss=1.0, alias="champion")
    there = store.sizes("runs")
    store.delete(key_of(1, MODEL_LOG))
    with pytest.raises(IntegrityError, match="alias champion cannot be read, so nothing of run bard is superseded"):
        sweep_run(bard.log, CheckpointConfig(keep_last=1, keep_best=0), "s")
    assert store.sizes("runs") == there
