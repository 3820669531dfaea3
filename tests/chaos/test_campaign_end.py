"""A campaign that is told to go leaves nothing behind, a command that does not end is a violation, and its observer."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cairn.storage.logs.run_log import fold
from cairn.storage.stores.local_store import LocalStore
from tests.fabricated_run import fabricate
from tests.processes.waiting import patience_seconds, wait_for
from tests.programs.chaos.environment import CommandEnd, Started
from tests.programs.chaos.judge import _ends
from tests.programs.chaos.kinds import Kind
from tests.programs.chaos.observer import RUN, Observer
from tests.programs.chaos.processes import Processes

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize(("seconds", "said"), [(30.0, 0), (1e6, 1)])
def test_a_command_that_does_not_end_after_the_last_fault_is_a_violation(
    tmp_path: Path, seconds: float, said: int
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    end = CommandEnd(after=Kind.KILL_OWN_SERVER, seconds=seconds)
    command = Started(process=process, output=tmp_path, number=1, end=end)
    assert len(list(_ends([command], fold([]), 10.0))) == said


def test_what_was_seen_in_the_log_is_remembered_with_the_number_of_its_entry(tmp_path: Path) -> None:
    run = fabricate(LocalStore(tmp_path), RUN)
    run.start()
    observer = Observer(run.log.store, Processes("nobody's"))
    newest = observer.newest_seq()
    assert observer.seen == {newest: run.log.read_entries()[newest].write_id}


@pytest.mark.slow
def test_a_campaign_that_is_terminated_while_its_server_starts_leaves_no_server(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        words = [sys.executable, "-m", "tests.programs.chaos.campaign", "--runs", "1", "--out", str(tmp_path)]
        campaign = subprocess.Popen(words, stdout=file, stderr=file)
    started = list[psutil.Process]()

    def has_server() -> bool:
        children = psutil.Process(campaign.pid).children()
        started.extend(child for child in children if child.cmdline()[2:5] == ["prefect", "server", "start"])
        return bool(started)

    wait_for(has_server, campaign, "a server that starts", output.read_text)
    campaign.terminate()
    assert campaign.wait(timeout=patience_seconds()) == 143, output.read_text()
    _, left = psutil.wait_procs(started, timeout=patience_seconds())
    assert left == []
