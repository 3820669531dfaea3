"""A job that `scancel` ended is told from one that Slurm preempts, queues again or ends at its time limit.

The lines are those of a real Slurm 22.05 of two nodes, asked by a task when it got SIGTERM; what matters is kept.
"""

from pathlib import Path

import pytest

from cairn.flows.orchestrator.flow_run import CancellationWatch, FlowRun
from cairn.tasks.attempt.preemption_notice import is_cancelled, is_cancelled_in_slurm
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal

CANCELLED = (
    "JobId=6 JobName=cairn JobState=COMPLETING Reason=None Restarts=0 ExitCode=0:15 RunTime=00:00:04 "
    "TimeLimit=UNLIMITED StartTime=2026-11-23T15:08:34 EndTime=2026-11-23T15:08:38 PreemptTime=None"
)
PREEMPTED = (
    "JobId=4 JobName=cairn JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 RunTime=00:00:04 "
    "TimeLimit=UNLIMITED StartTime=2026-11-23T15:08:21 EndTime=Unknown PreemptTime=2026-11-23T15:08:25"
)
REQUEUED = (
    "JobId=3 JobName=cairn JobState=COMPLETING Reason=None Restarts=1 ExitCode=0:0 RunTime=00:00:00 "
    "TimeLimit=UNLIMITED StartTime=2026-11-23T15:08:18 EndTime=Unknown Deadline=N/A"
)
REQUEUED_WITH_A_LIMIT = (
    "JobId=5 JobName=cairn JobState=COMPLETING Reason=None Restarts=1 ExitCode=0:0 RunTime=00:00:00 "
    "TimeLimit=1-00:00:00 StartTime=2026-11-23T16:01:13 EndTime=2026-11-24T16:01:13 Deadline=N/A"
)
LATER = CANCELLED.replace("COMPLETING", "CANCELLED")
LIMITED = CANCELLED.replace("TimeLimit=UNLIMITED", "TimeLimit=1-00:00:00")
OUT_OF_TIME = LIMITED.replace("RunTime=00:00:04", "RunTime=1-00:00:00")


@pytest.mark.parametrize(
    ("shown", "cancelled"),
    [
        (CANCELLED, True),
        (LATER, True),
        (LIMITED, True),
        (PREEMPTED, False),
        (REQUEUED, False),
        (REQUEUED_WITH_A_LIMIT, False),
        (OUT_OF_TIME, False),
        ("", False),
    ],
)
def test_only_a_job_that_a_person_ended_is_cancelled(shown: str, cancelled: bool) -> None:
    assert is_cancelled(shown) is cancelled


def test_outside_of_slurm_and_without_its_command_no_job_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_cancelled_in_slurm({}) and not is_cancelled_in_slurm({"SLURM_JOB_ID": "6"})


@pytest.fixture
def in_cancelled_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{CANCELLED}'\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "6")


@pytest.mark.parametrize(("name", "cancelled"), [("SIGTERM", True), ("SIGUSR1", False)])
def test_slurm_is_asked_once_sigterm_has_come(in_cancelled_job: None, name: str, cancelled: bool) -> None:
    shutdown = ShutdownSignal()
    watch = CancellationWatch(FlowRun(), shutdown)
    assert not watch.is_cancelling()
    shutdown.request(name)
    assert watch.is_cancelling() is cancelled and watch.where == ("Slurm" if cancelled else "Prefect")
