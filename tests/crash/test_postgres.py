"""Three deployed runs with Prefect on Postgres and two workers; worker, server, flows and trainers are killed.

Each kill waits for an event: all runs stand at a pause of `CAIRN_FAULTS` and go on when the test lets them.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from cairn.operations.checks import verify_run
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from tests.crash.prefect_api import (
    JOB_TEMPLATE,
    environment_of,
    flow_run,
    launch,
    prefect_command,
    start_beside,
)
from tests.crash.prefect_server import Server
from tests.crash.training_command import Command
from tests.crash.victims import kill
from tests.deployments.started_up import free_port
from tests.processes.waiting import patience_seconds, wait_for, wait_until

_PROGRAMS = ("initdb", "postgres", "pg_isready")
_NO_CARE = ("-c", "fsync=off", "-c", "unix_socket_directories=", "-c", "listen_addresses=127.0.0.1")
"""The machine will not lose its power, and nobody needs a socket."""


def missing_program() -> str:
    """Return the name of a program that is not on this machine, or nothing."""
    return next((name for name in _PROGRAMS if not _program(name)), "")


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server; yield the address that Prefect's server takes."""
    folder, user = Path(tempfile.mkdtemp(prefix="cairn-postgres-")), _user()
    try:
        if user is not None:
            shutil.chown(folder, user)
        data, port = folder / "data", free_port()
        made = [_program("initdb"), "-D", str(data), "-A", "trust", "-U", "cairn", "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(made, cwd=folder, user=user, capture_output=True, check=True, timeout=patience_seconds())
        with (folder / "server.txt").open("wb") as output:
            server = subprocess.Popen(
                [_program("postgres"), "-D", str(data), "-p", str(port), *_NO_CARE],
                cwd=folder, user=user, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            asked = [_program("pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
            wait_for(lambda: subprocess.run(asked, check=False).returncode == 0, server, "an answer of Postgres")
            yield f"postgresql+asyncpg://cairn@127.0.0.1:{port}/postgres"
        finally:
            with suppress(ProcessLookupError):
                server.send_signal(signal.SIGQUIT)
            server.wait(timeout=patience_seconds())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    folder = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
    return shutil.which(name, path=folder) or ""


def _user() -> str | None:
    """Return who runs it: Postgres refuses root."""
    if os.geteuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing_program()), reason=f"Postgres is not installed: no {missing_program()}"),
]
RUNS = ("bard-1", "bard-2", "bard-3")
PAUSES = ("pause@12", "pause@27", "pause@42")


class Deployed:
    """Prefect's server on Postgres, two workers, a watcher, and three runs that they train."""

    def __init__(self, folder: Path, database: str) -> None:
        self.store = LocalStore(folder / "store")
        self.server = Server(folder, PREFECT_SERVER_DATABASE_CONNECTION_URL=database)
        self._folder, self._processes = folder, dict[str, subprocess.Popen[bytes]]()
        self.command = Command(folder, self.server.url)
        self.prefect = prefect_command(self.command, self.server.url)

    def start(self, name: str, *words: str) -> None:
        """Start a program, or start it again; what it says goes to a file."""
        environment = environment_of(self.command, self.server.url, CAIRN_FAULTS=",".join(PAUSES))
        self._processes[name] = start_beside(self.command, environment, name, *words)

    def start_worker(self, name: str) -> None:
        self.start(name, "prefect", "worker", "start", "--pool", "cairn", "--name", name)

    def kill(self, name: str) -> None:
        """Kill a program; what it started goes on."""
        self._processes[name].kill()
        self._processes[name].wait()

    def state(self, run: str) -> RunState:
        return RunLog(self.store, run).refresh()

    def flow(self, run: str) -> psutil.Process:
        """The process whose attempt owns the run."""
        claims = [entry for entry in RunLog(self.store, run).read_entries() if entry.kind == "attempt-started"]
        return psutil.Process(claims[-1].writer.pid)

    def trainer(self, run: str) -> psutil.Process:
        (trainer,) = [child for child in self.flow(run).children() if "cairn.tasks.trainer.trainer" in child.cmdline()]
        return trainer

    def wait_for_all(self, pause: str) -> None:
        """Wait until each run stands at the pause."""
        keys = [f"runs/{run}/faults/{pause.replace('@', '-')}.json" for run in RUNS]
        wait_until(lambda: all(self.store.size(key) is not None for key in keys), f"{pause} in each run", self.output)

    def let_go(self, pause: str) -> None:
        for run in RUNS:
            self.store.create(f"runs/{run}/faults/{pause.replace('@', '-')}-go.json", b"{}\n")

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.txt")))

    def end(self) -> None:
        """End everything that was started, however deep."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("CAIRN_CACHE") == str(self._folder / "cache"):
                    process.kill()
            except psutil.Error:
                continue
        for started in self._processes.values():
            started.wait()
        if self.server.is_alive:
            self.server.kill()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Everything after its kills: all three runs have come to their end."""
    with ExitStack() as stack:
        deployed = Deployed(tmp_path_factory.mktemp("postgres"), stack.enter_context(postgres()))
        stack.callback(deployed.end)
        kill_worker_server_flows_and_trainers(deployed)
        yield deployed


def kill_worker_server_flows_and_trainers(deployed: Deployed) -> None:
    prefect, first, second, third = deployed.prefect, *RUNS
    prefect("work-pool", "create", "cairn", "--type", "process", "--base-job-template", JOB_TEMPLATE)
    prefect("--no-prompt", "deploy", "--all")
    for run in RUNS:
        launch(prefect, deployed.command, run_id=run)
    for name in ("worker-1", "worker-2"):
        deployed.start_worker(name)
    deployed.start("watcher", "cairn.cli.command", "watch", "--deployment", "train-gpt/train-gpt")

    deployed.wait_for_all("pause@12")
    deployed.kill("worker-1")
    deployed.start_worker("worker-1")
    deployed.let_go("pause@12")

    deployed.wait_for_all("pause@27")
    deployed.server.kill()
    deployed.let_go("pause@27")
    deployed.wait_for_all("pause@42")  # trained and committed while there was no server
    deployed.server.start()

    victims = [deployed.flow(first), deployed.trainer(second), deployed.trainer(third), deployed.flow(third)]
    deployed.kill("worker-2")
    for victim in victims:
        kill(victim.pid)
    deployed.start_worker("worker-2")
    deployed.let_go("pause@42")
    wait_until(lambda: all(deployed.state(run).finished for run in RUNS), "the end of all runs", deployed.output)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_with_the_bits_of_one_that_nobody_touched(
    ended: Deployed, run: str, undisturbed_sha256: str
) -> None:
    finished = ended.state(run).finished
    assert finished is not None and finished.state_sha256 == undisturbed_sha256


@pytest.mark.parametrize("run", RUNS)
def test_a_run_was_trained_by_one_at_a_time_and_continued_once(ended: Deployed, run: str) -> None:
    assert verify_run(ended.store, run).problems == ()
    kinds = [entry.kind for entry in RunLog(ended.store, run).read_entries()]
    claims_and_ends = [kind for kind in kinds if kind in ("attempt-started", "attempt-ended")]
    assert claims_and_ends == ["attempt-started", "attempt-ended"] * 2


@pytest.mark.parametrize("run", RUNS)
def test_every_attempt_has_a_receipt_that_says_why_it_ended_and_how_far_it_came(ended: Deployed, run: str) -> None:
    first, last = [attempt.ended for attempt in ended.state(run).attempts]
    assert first is not None and last is not None
    assert (first.reason, first.decision.action) == ("lost", "resume")
    assert 40 <= first.last_step <= 42 and first.gpu_seconds > 0
    assert (last.reason, last.last_step) == ("completed", 60)


@pytest.mark.parametrize("run", RUNS)
def test_prefect_on_postgres_has_the_end_of_each_run(ended: Deployed, run: str) -> None:
    flow_run_id = ended.state(run).attempts[-1].flow_run_id
    url = ended.server.url
    wait_until(lambda: flow_run(url, flow_run_id)["end_time"] is not None, "the flow run's end", ended.output)
    assert flow_run(url, flow_run_id)["state_name"] == "Completed"
