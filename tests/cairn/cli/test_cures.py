"""Commands that are shown as what to do next: each works as it is typed, wherever the run's store is."""

import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from cairn.cli.app import list_records
from cairn.flows.orchestrator.run_notices import notices_of
from cairn.flows.orchestrator.run_overview import overview_markdown
from cairn.reports.notices import notice
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.addresses import name_store
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate
from tests.writing_run import open_writing_run

STORE = "a store"


def stopped(run: FabricatedRun, cairn: Cairn) -> FabricatedRun:
    run.start()
    run.commit(20)
    run.end("oom", action="stop")
    return run


def forked(run: FabricatedRun, cairn: Cairn) -> FabricatedRun:
    parent = open_writing_run(run.log.store, Path(run.log.store.url.removeprefix("file://")).parent)
    parent.start()
    parent.commit(20)
    parent.end("oom")
    assert cairn("fork", parent.log.run_id, "twin", "--store", STORE).code == 0
    assert cairn("delete", "fresh", "--yes", "--store", STORE).code == 0
    return run


def approval_wanted(run: FabricatedRun, cairn: Cairn) -> FabricatedRun:
    run.start(overrides=("promotion.require_approval=true",))
    run.finish(run.commit(40))
    run.end("completed", action="finish")
    return run


Prepare = Callable[[FabricatedRun, Cairn], FabricatedRun]
COMMANDS: dict[str, tuple[Prepare, str]] = {
    "status fresh": (stopped, "train"),
    "status fresh --json": (stopped, "train"),
    "runs": (stopped, "explain"),
    "explain fresh": (stopped, "train"),
    "report fresh": (stopped, "train"),
    "status twin": (forked, "train"),
    "watch --once": (forked, "train"),
    "delete bard --yes": (forked, "train"),
    "promote fresh@20": (stopped, "evaluate"),
}
PAGES: dict[str, tuple[Prepare, str, Callable[[FabricatedRun], str]]] = {
    "the page in Prefect": (stopped, "train", lambda run: overview_markdown(run.log, "")),
    "a notice": (approval_wanted, "promote", lambda run: " ".join(one.text for one in notices_of(run.log))),
}


@pytest.fixture
def run(tmp_path: Path) -> FabricatedRun:
    return fabricate(LocalStore(tmp_path / STORE), "fresh")


def shown(text: str) -> list[str]:
    """Return the commands in backquotes, as they are typed."""
    return re.findall(r"`(cairn [^`]+)`", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_its_store_in_what_it_says_to_do(line: str, run: FabricatedRun, cairn: Cairn) -> None:
    prepare, verb = COMMANDS[line]
    prepare(run, cairn)
    ended = cairn(*shlex.split(line), f"--store={STORE}")
    cures = shown(ended.out + ended.err)
    assert any(cure.split()[1] == verb for cure in cures), ended
    assert all(Path(shlex.split(cure)[-1]).name == STORE for cure in cures if "--help" not in cure), cures


@pytest.mark.parametrize("page", PAGES)
def test_what_is_read_elsewhere_names_the_store_though_this_machine_would_find_it(
    page: str, run: FabricatedRun, cairn: Cairn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare, verb, text = PAGES[page]
    monkeypatch.setenv("CAIRN_STORE", str(tmp_path / STORE))
    monkeypatch.setattr(notice, "_OLD", timedelta(days=100_000))
    cures = shown(text(prepare(run, cairn)))
    assert any(cure.split()[1] == verb for cure in cures)
    assert all(shlex.split(cure)[-2:] == ["--store", str(tmp_path / STORE)] for cure in cures)


def test_what_is_shown_is_found_as_it_is_typed(run: FabricatedRun, cairn: Cairn) -> None:
    [cure] = shown(cairn("runs", "--store", str(Path(stopped(run, cairn).log.store.url.removeprefix("file://")))).out)
    assert cairn(*shlex.split(cure)[1:]).code == 0


@pytest.mark.parametrize(
    "text",
    [
        "`cairn config KEY`",
        "`cairn --help` lists",
        "`cairn runs --help` shows",
        "`cairn promote x --store y`",
        "`make up`",
        "cairn train",
        "",
    ],
)
def test_nothing_is_added_where_no_store_is_wanted_or_one_is_named(text: str) -> None:
    assert name_store(text, "s3://bucket/cairn", {}) == text


def test_a_store_that_is_found_anyway_is_not_named(tmp_path: Path) -> None:
    found = LocalStore(tmp_path / "here").url
    assert name_store("`cairn runs`", found, {"CAIRN_STORE": str(tmp_path / "x/../here/")}) == "`cairn runs`"


def test_every_command_takes_a_store_but_those_to_whose_lines_none_is_added(cairn: Cairn) -> None:
    verbs = {line.split()[0] for line in (*list_records(), "sql")}
    takes_one = {verb for verb in verbs if "--store" in cairn(verb, "--help").out}
    assert {verb for verb in verbs if " --store" in name_store(f"`cairn {verb} x`", "s3://a/b", {})} == takes_one
