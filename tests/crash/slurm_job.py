"""The batch script for several machines on a real Slurm of two nodes, and what may happen to its job there."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from tests.crash.training_command import RUN, Command
from tests.crash.victims import kill
from tests.processes.waiting import wait_until

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "deployments" / "slurm" / "multi_node.sbatch"
_CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
_SMALL = ("--gpus-per-node=0", "--cpus-per-task=1")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
NEEDED = "needs root and, on Debian: apt-get install --no-install-recommends slurm-wlm munge"


def has_slurm() -> bool:
    """Whether a cluster can be started here."""
    return not os.geteuid() and bool(shutil.which("slurmctld") and shutil.which("munged"))


def is_free(port: int) -> bool:
    """Whether nothing listens at a port; those of the daemons lie below the ports that connections are given."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Slurm:
    """A cluster of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = next(port for port in range(26000, 30000, 3) if all(map(is_free, range(port, port + 3))))

    @contextmanager
    def running(self) -> Iterator["Slurm"]:
        """Start the cluster, and end it with the block."""
        for folder in (self.folder, *self.folder.parents):
            if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o1000:
                folder.chmod(folder.stat().st_mode | 0o055)  # munged runs as a user of its own
        try:
            subprocess.run(["bash", str(_CLUSTER), "up", str(self.folder), str(self._port)], check=True, timeout=120)
            yield self
        finally:
            subprocess.run(["bash", str(_CLUSTER), "down", str(self.folder)], check=True, timeout=120)

    def call(self, *words: str, **variables: str) -> str:
        """Run a command of Slurm's; returns what it prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job: str, field: str) -> str:
        """What Slurm has in one of a job's fields; JobState is PENDING, RUNNING, COMPLETED, CANCELLED and so on."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)[field]

    def state(self, job: str) -> str:
        """The job's state."""
        return self.show(job, "JobState")

    def wait_until_gone(self, job: str) -> None:
        """Wait until no task of the job is queued or running; what was put back may run at once."""
        self.call("scontrol", "update", "jobid=" + job, "StartTime=now")
        wait_until(lambda: not self.call("squeue", "--noheader", "--job", job), f"the end of job {job}")


class Job:
    """A run that the batch script trains on the cluster, with variables that change its configuration."""

    def __init__(self, slurm: Slurm, command: Command, variables: Mapping[str, str]) -> None:
        self.slurm, self.command, self._variables = slurm, command, variables
        folder = self.command.folder / "bin"
        folder.mkdir()
        (folder / "cairn").write_text(
            f'#!/bin/sh\nexport CAIRN_CACHE="{self.command.folder}/cache-$SLURM_NODEID"\n'
            f'exec {sys.executable} -m cairn.cli.command "$@"\n',
            encoding="utf-8",
        )
        (folder / "cairn").chmod(0o755)
        self.submit()

    def submit(self, *more: str) -> None:
        """Give the script to Slurm, as a person does, with more words for sbatch."""
        variables = {
            "PATH": f"{self.command.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(_ROOT),
            "CAIRN_STORE": self.command.store.url.removeprefix("file://"),
            "CAIRN_TRAINING__DEVICE": "cpu",
            "PREFECT_API_URL": self.command.api_url,
            "PREFECT_HOME": str(self.command.folder / "prefect"),
            **self._variables,
        }
        output = f"--output={self.command.folder / 'job.txt'}"
        where = f"--chdir={self.command.folder}"
        words = ("sbatch", "--parsable", *_SMALL, *more, output, where, str(_SCRIPT), "run.toml", RUN)
        self.id = self.slurm.call(*words, **variables)

    def output(self) -> str:
        """What the script and the commands have printed."""
        path = self.command.folder / "job.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def is_over(self) -> bool:
        """Whether the job is neither queued nor running."""
        return self.slurm.state(self.id) in _OVER

    def wait_for_end(self) -> str:
        """Wait until the job is over; returns its last state."""
        wait_until(self.is_over, "the end of the job", self.output)
        return self.slurm.state(self.id)

    def wait_for_state(self, *states: str) -> None:
        """Wait until Slurm has the job in one of these states."""
        wait_until(lambda: self.slurm.state(self.id) in states, f"the job {' or '.join(states)}", self.output)

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
        """Why the attempts ended."""
        return [attempt.ended.reason for attempt in self.command.state().attempts if attempt.ended is not None]

    def cancel(self) -> None:
        """Cancel the job, as a person does; none is no error."""
        variables = {**os.environ, "SLURM_CONF": str(self.slurm.folder / "slurm.conf")}
        subprocess.run(["scancel", self.id], env=variables, check=False)


def preempt(job: Job) -> None:
    """Take both nodes for another job of a higher partition, and wait until Slurm has told this one.

    Until then the run waits at its pause: it could end before Slurm has looked at its queue.
    """
    job.slurm.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    is_told = partial(job.slurm.show, job.id, "PreemptTime")
    wait_until(lambda: is_told() != "None" or job.slurm.state(job.id) != "RUNNING", "the preemption", job.output)


def requeue(job: Job) -> None:
    """Put the job back into the queue."""
    job.slurm.call("scontrol", "requeue", job.id)


def kill_first(job: Job) -> None:
    """Kill the command and the ranks on the first node, as the kernel does it there for memory."""
    _kill(job, 0)


def kill_other(job: Job) -> None:
    """Kill the command and the ranks on the second node."""
    _kill(job, 1)


def kill_first_ranks(job: Job) -> None:
    """Kill the ranks on the first node, not the command."""
    _kill(job, 0, lambda words: "train" not in words)


def kill_other_ranks(job: Job) -> None:
    """Kill the ranks on the second node, not the command."""
    _kill(job, 1, lambda words: "train" not in words)


def notify_other(job: Job) -> None:
    """Announce the end of the second machine to its command alone, as a cloud does."""
    for process in job.commands_of(1):
        if "train" in process.cmdline():
            process.terminate()


def reach_time_limit(job: Job) -> None:
    """Move the job's time limit so near that Slurm announces it now, and away again once the job has left.

    Slurm counts limits in minutes, and looks twice a minute.
    """
    hours, minutes, seconds = map(int, job.slurm.show(job.id, "RunTime").split(":"))
    limit = -(-(3600 * hours + 60 * minutes + seconds + 75) // 60)
    job.slurm.call("scontrol", "update", f"jobid={job.id}", f"timelimit={limit}")
    job.wait_for_state("PENDING", *_OVER)
    job.slurm.call("scontrol", "update", f"jobid={job.id}", "timelimit=60")


def drain_node(job: Job) -> None:
    """Drain the second node and queue the job again; the node is given back once the job waits for it."""
    job.slurm.call("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    requeue(job)
    _give_back(job)


def lose_node(job: Job) -> None:
    """Declare the second node dead, and give it back once the job waits for it."""
    job.slurm.call("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    _give_back(job)


def _give_back(job: Job) -> None:
    job.wait_for_state("PENDING", *_OVER)
    with suppress(AssertionError):  # refused for a node that has come back by itself
        job.slurm.call("scontrol", "update", "nodename=n1", "state=resume")


def _kill(job: Job, node: int, is_struck: Callable[[list[str]], bool] = lambda words: True) -> None:
    for process in job.commands_of(node):
        with suppress(psutil.NoSuchProcess):
            if is_struck(process.cmdline()):
                kill(process.pid)
