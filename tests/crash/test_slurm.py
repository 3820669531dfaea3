"""The batch script on a real Slurm of two nodes: whatever ends a job or a task, the run ends with the same bits."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT
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
from tests.deployments.slurm_page import page_lines
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


def test_of_an_array_the_preempted_task_alone_is_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    """By the lines of the page; each task leaves with 75 the first time it runs, the last one is done at once."""
    program = tmp_path / "cairn"
    program.write_text('#!/bin/sh\necho "$4" >> starts\n[ "$4" = bard-3 ] || [ -e "$4" ] || { touch "$4"; exit 75; }\n')
    program.chmod(0o755)
    lines = page_lines(ROOT).replace("--run-id bard", '--run-id "bard-$SLURM_ARRAY_TASK_ID"')
    script = tmp_path / "array.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --requeue --array=1-3 --open-mode=append\nset -u\n{lines}\n")
    where = (f"--chdir={tmp_path}", f"--output={tmp_path}/array.txt")
    job = slurm.call("sbatch", "--parsable", *where, str(script), PATH=f"{tmp_path}:{os.environ['PATH']}")
    slurm.wait_until_gone(job)
    started = sorted((tmp_path / "starts").read_text().split())
    assert started == ["bard-1", "bard-1", "bard-2", "bard-2", "bard-3"]
