"""The batch script on a real Slurm of two nodes: whatever ends a job or a task, the run ends with the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.reference import reference_run
from tests.crash.slurm_job import (
    NEEDED,
    Job,
    Slurm,
    drain_node,
    has_slurm,
    kill_first,
    kill_other,
    lose_node,
    notify_other,
    preempt,
    reach_time_limit,
    requeue,
)
from tests.crash.training_command import Command
from tests.crash.two_machines import PAUSE, SETTINGS
from tests.processes.waiting import wait_until

VARIABLES = {
    f"CAIRN_{key.upper().replace('.', '__')}": value
    for key, value in (setting.split("=") for setting in SETTINGS)
    if key != "training.processes"
}
pytestmark = [pytest.mark.slurm, pytest.mark.linux]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if not has_slurm():
        pytest.skip(NEEDED)
    with Slurm(tmp_path_factory.mktemp("slurm")).running() as slurm:
        yield slurm


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path, api_url: str) -> Iterator[Job]:
    """A job that is in the middle of its run, on two nodes."""
    command = Command(tmp_path, api_url)
    job = Job(slurm, command, {**VARIABLES, "CAIRN_FAULTS": PAUSE})
    wait_until(lambda: command.has_met(PAUSE), PAUSE, job.output)
    yield job
    job.cancel()


@pytest.mark.parametrize(
    ("disturb", "reasons"),
    [
        (preempt, {"preempted"}),
        (requeue, {"preempted"}),
        (reach_time_limit, {"preempted"}),
        (drain_node, {"preempted"}),
        (notify_other, {"preempted"}),
        (lose_node, {"preempted", "lost"}),
        (kill_first, {"lost"}),
        (kill_other, {"lost"}),
    ],
    ids=[
        "preempted",
        "queued again",
        "time limit",
        "drained",
        "notified",
        "node down",
        "first killed",
        "other killed",
    ],
)
def test_a_job_that_is_disturbed_ends_with_the_bits_of_one_machine(
    job: Job, disturb: Callable[[Job], None], reasons: set[str]
) -> None:
    disturb(job)
    job.command.let_go(PAUSE)
    assert job.wait_for_end() == "COMPLETED", job.output()
    first, last = job.reasons()
    assert first in reasons and last == "completed", job.output()
    assert job.command.state_sha256() == reference_run(job.command).state_sha256
    assert [attempt.started.placement.nodes for attempt in job.command.state().attempts] == [2, 2]


def test_a_job_that_a_person_cancels_is_cancelled_and_no_watcher_continues_it(job: Job) -> None:
    job.slurm.call("scancel", job.id)
    assert job.wait_for_end() == "CANCELLED"
    wait_until(lambda: job.reasons() == ["cancelled"], "the receipt", job.output)
    rows = job.command.start_verb("watch", "--once", "--json")
    assert rows.wait() == 0
    assert "a person stopped it" in job.command.output()
