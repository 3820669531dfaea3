"""The batch script on a real Slurm of two nodes: whatever ends a job or a task, the run ends with the same bits."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.crash.reference import reference_run
from tests.crash.training_command import RUN, Command, configuration
from tests.crash.two_machines import PAUSE, SETTINGS
from tests.crash.victims import kill
from tests.processes.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "deployments" / "slurm" / "multi_node.sbatch"
CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
SMALL = ("--gpus-per-node=0", "--cpus-per-task=1")
pytestmark = [pytest.mark.slurm, pytest.mark.linux]


def is_free(port: int) -> bool:
    """Whether nothing listens at a port; those of the daemons lie below the ports that connections are given."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Slurm:
    """A cluster of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = next(port for port in range(26000, 30000, 3) if all(map(is_free, range(port, port + 3))))

    def up(self) -> None:
        subprocess.run(["bash", str(CLUSTER), "up", str(self.folder), str(self._port)], check=True, timeout=120)

    def down(self) -> None:
        subprocess.run(["bash", str(CLUSTER), "down", str(self.folder)], check=True, timeout=120)

    def call(self, *words: str, **variables: str) -> str:
        """Run a command of Slurm's; returns what it prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The job's state: PENDING, RUNNING, COMPLETING, COMPLETED, CANCELLED, FAILED and so on."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]


class Job:
    """A run that the batch script trains on the cluster."""

    def __init__(self, slurm: Slurm, command: Command) -> None:
        self.slurm, self.command = slurm, command
        sections: dict[str, list[str]] = {}
        text = configuration()
        for setting in (*SETTINGS, "machines.wait_seconds=20"):
            key, value = setting.split("=")
            section, name = key.split(".")
            if name != "processes":
                sections.setdefault(section, []).append(f"CAIRN_{section.upper()}__{name.upper()}={value}")
        (command.folder / "run.toml").write_text(text, encoding="utf-8")
        self._settings = dict(line.split("=", 1) for lines in sections.values() for line in lines)
        self._make_command()
        self.id = self._submit()

    def _make_command(self) -> None:
        folder = self.command.folder / "bin"
        folder.mkdir()
        (folder / "cairn").write_text(
            f'#!/bin/sh\nexport CAIRN_CACHE="{self.command.folder}/cache-$SLURM_NODEID"\n'
            f'exec {sys.executable} -m cairn.cli.command "$@"\n',
            encoding="utf-8",
        )
        (folder / "cairn").chmod(0o755)

    def _submit(self) -> str:
        variables = {
            "PATH": f"{self.command.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CAIRN_STORE": self.command.store.url.removeprefix("file://"),
            "CAIRN_FAULTS": PAUSE,
            "CAIRN_TRAINING__DEVICE": "cpu",
            "PREFECT_API_URL": self.command.api_url,
            "PREFECT_HOME": str(self.command.folder / "prefect"),
            **self._settings,
        }
        output = f"--output={self.command.folder / 'job.txt'}"
        words = ("sbatch", "--parsable", *SMALL, output, f"--chdir={self.command.folder}", str(SCRIPT), "run.toml", RUN)
        return self.slurm.call(*words, **variables)

    def output(self) -> str:
        path = self.command.folder / "job.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_for_pause(self) -> None:
        wait_until(lambda: self.command.has_met(PAUSE), PAUSE, self.output)

    def let_go(self) -> None:
        self.command.let_go(PAUSE)

    def wait_for_end(self) -> str:
        """Wait until the job is neither queued nor running; returns its last state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.slurm.state(self.id) in over, "the end of the job", self.output)
        return self.slurm.state(self.id)

    def commands_of(self, node: int) -> list[psutil.Process]:
        """The command on a node, and its ranks."""
        found = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                own = (variables.get("SLURM_JOB_ID"), variables.get("SLURM_NODEID")) == (self.id, str(node))
                if own and "-m" in process.cmdline():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def reasons(self) -> list[str]:
        return [attempt.ended.reason for attempt in self.command.state().attempts if attempt.ended is not None]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.geteuid() or not (shutil.which("slurmctld") and shutil.which("munged")):
        pytest.skip("needs root and, on Debian: apt-get install --no-install-recommends slurm-wlm munge")
    for folder in (tmp_path_factory.getbasetemp(), *tmp_path_factory.getbasetemp().parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o1000:
            folder.chmod(folder.stat().st_mode | 0o055)  # munged runs as a user of its own
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.up()
        yield slurm
    finally:
        slurm.down()


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path, api_url: str) -> Iterator[Job]:
    """A job that is in the middle of its run, on two nodes."""
    job = Job(slurm, Command(tmp_path, api_url))
    job.wait_for_pause()
    yield job
    subprocess.run(["scancel", job.id], env={**os.environ, "SLURM_CONF": str(slurm.folder / "slurm.conf")})


def preempt(job: Job) -> None:
    """Take both nodes for another job of a higher partition."""
    job.slurm.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def requeue(job: Job) -> None:
    job.slurm.call("scontrol", "requeue", job.id)


def kill_first(job: Job) -> None:
    """Kill the command and the ranks on the first node, as the kernel does it there for memory."""
    for process in job.commands_of(0):
        kill(process.pid)
    job.let_go()


def kill_other(job: Job) -> None:
    for process in job.commands_of(1):
        kill(process.pid)
    job.let_go()


def notify_other(job: Job) -> None:
    """Announce the end of the second machine to its command alone, as a cloud does."""
    for process in job.commands_of(1):
        if "train" in process.cmdline():
            process.terminate()
    job.let_go()


def lose_node(job: Job) -> None:
    """Declare the second node dead, and give it back once the job waits for it."""
    job.slurm.call("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    wait_until(lambda: job.slurm.state(job.id) == "PENDING", "the job in the queue", job.output)
    with suppress(AssertionError):  # refused for a node that has come back by itself
        job.slurm.call("scontrol", "update", "nodename=n1", "state=resume")


@pytest.mark.parametrize(
    ("disturb", "reasons"),
    [
        (preempt, {"preempted"}),
        (requeue, {"preempted"}),
        (notify_other, {"preempted"}),
        (lose_node, {"preempted", "lost"}),
        (kill_first, {"lost"}),
        (kill_other, {"lost"}),
    ],
    ids=["preempted", "queued again", "notified", "node down", "first killed", "other killed"],
)
def test_a_job_that_is_disturbed_ends_with_the_bits_of_one_machine(
    job: Job, disturb: Callable[[Job], None], reasons: set[str]
) -> None:
    disturb(job)
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
