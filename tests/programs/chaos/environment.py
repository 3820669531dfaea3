"""What surrounds one run: folder, store, commands, workers and watchers that continue it, and what blocks its store."""

import os
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_store import S3Store
from cairn.tasks.configuration.configuration_source import load_configuration
from tests.clouds.servers import CLOUDS, cloud_server
from tests.crash.prefect_api import environment_of
from tests.crash.prefect_server import Server
from tests.crash.spoiled_data import ARITHMETIC, SpoiledData, open_run, spoil
from tests.crash.training_command import PROGRAM, Command, configuration
from tests.crash.victims import send
from tests.programs.chaos.deployed import DEPLOYMENT, Deployed
from tests.programs.chaos.observer import RUN, Observer
from tests.programs.chaos.plan import COMMAND, COMMITS_PER_EVALUATION, EARLY_SECONDS, STEPS, WORKER, Skipped
from tests.programs.chaos.processes import TAG, WORKERS, Processes, Role
from tests.s3.fault_proxy import FaultProxy
from tests.s3.servers import S3Server, s3_server
from tests.storage.builders import append_as_a_newer_program

CONFIG = (
    configuration(steps=STEPS, every_commits=COMMITS_PER_EVALUATION)
    + """
[budgets.evaluator-failed]
retries = 8
[budgets.bad-data]
retries = 20
[budgets.storage]
retries = 20
backoff_seconds = 0.5
"""
)
_GONE_SECONDS = 10.0
DISK_BYTES = 48 * 1024 * 1024
_SERVERS = {"s3": "quick", "ceph": "ceph"}
_RESTARTED_AFTER_SECONDS = {"watch": 12.0, WORKER: 45.0}
"""A run that a watcher has not continued by then is continued by hand, as an impatient person would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """How long a command took to its end after the last thing that was done to the run, or after its own start."""

    after: str
    seconds: float


@dataclass(kw_only=True)
class Started:
    """A command of the campaign's own: its process, its output, how it left and what was done to it meanwhile."""

    process: subprocess.Popen[bytes]
    output: Path
    number: int
    suffered: set[str] = field(default_factory=set)
    code: int | None = None
    began_at: float = field(default_factory=time.monotonic)
    end: CommandEnd | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A process that was killed, and whether within three seconds of its command's start."""

    role: Role
    is_early: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TooOldCommand:
    """A command on a copy of the store that a newer program has written to, and the keys that were there."""

    command: Command
    process: subprocess.Popen[bytes]
    there: frozenset[str]


class Environment:
    """A run's folder and everything that is started for it."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        *,
        store: str,
        driver: str,
        forked: bool,
        small_disk: bool = False,
        own_server: bool = False,
        processes: int = 1,
    ) -> None:
        self.folder, self.server, self.driver = folder, server, driver
        folder.mkdir(parents=True)
        self.tag = uuid.uuid4().hex
        self.processes = Processes(self.tag)
        self.has_small_disk = small_disk and mount(folder / "store")
        self.proxy: FaultProxy | None = None
        variables = {TAG: self.tag, "PREFECT_CLIENT_MAX_RETRIES": "4", "OMP_NUM_THREADS": "1"}
        where: ObjectStore = LocalStore(folder / "store")
        if store in _SERVERS:
            remote: S3Server = s3_server(_SERVERS[store], folder.parent)
            self.proxy = FaultProxy(upstream=remote.endpoint).__enter__()
            where = S3Store(remote.bucket(), self.tag)
            variables |= remote.environment(self.proxy.endpoint)
        elif store in CLOUDS:
            cloud = cloud_server(store, folder.parent)
            self.proxy = FaultProxy(upstream=cloud.endpoint).__enter__()
            where = cloud.store(self.tag)
            variables |= cloud.through(self.proxy.endpoint).variables
        self._variables = variables
        named = "" if own_server else server.url
        self.command = Command(folder, named, store=where, environment=variables, forked=forked)
        (folder / "run.toml").write_text(CONFIG.replace("[training]", f"[training]\nprocesses = {processes}"))
        self.kills: list[Kill] = []
        self.observer = Observer(where, self.processes)
        self.started: list[Started] = []
        self.too_old: list[TooOldCommand] = []
        self.rotten: dict[str, bytes] = {}
        self._last_fault, self._left_alone_at = "start", time.monotonic()
        self.spoiled: SpoiledData | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._deployed: Deployed | None = None
        self._alone_since: float | None = None
        self.next_variables: dict[str, str] = {}
        self._halted: dict[Role, list[int]] = {}
        self._is_halted = False

    def spoil(self, step: int) -> None:
        """Open the run on data whose first sample after `step` steps is bad, though every hash is right."""
        config = load_configuration(self.folder / "run.toml", overrides=ARITHMETIC, environment={})
        self.spoiled = spoil(self.observer.store, config, self.folder, step=step)
        open_run(RunLog(self.observer.store, RUN), config, self.spoiled.snapshot_id)

    def begin(self) -> None:
        """Have the run started for the first time, as its driver would have it."""
        if self.driver != WORKER:
            self.train()
            return
        self._deployed = Deployed(self.command, self.server.url, self._variables_of_others())
        self._deployed.ask_for_flow_run(RUN, self.url)
        self.keep_going()

    def train(self, **variables: str) -> Started:
        """Start the command once more."""
        return self._start("train", "run.toml", "--run-id", RUN, **{**self.next_variables, **variables})

    def train_in_other_namespace(self) -> Started:
        """Start the command where the processes of this machine are not to be seen, as in another container."""
        module, root = "tests.programs.chaos.other_namespace", str(Path(__file__).parents[3])
        return self._start("train", "run.toml", "--run-id", RUN, program=module, PYTHONPATH=root)

    def try_to_train_after_newer_program(self) -> None:
        """Copy the store, have a newer program write one entry to the copy, and start the command there."""
        folder = self.folder / f"newer-{len(self.too_old)}"
        shutil.copytree(self.folder / "store", folder / "store")
        untagged = {name: value for name, value in self._variables.items() if name != TAG}
        command = Command(folder, self.command.api_url, environment=untagged)
        (folder / "run.toml").write_text(CONFIG)
        append_as_a_newer_program(command.store, log=f"runs/{RUN}/log", kind="checkpoint-blessed")
        there = frozenset(command.store.keys("runs"))
        self.too_old.append(TooOldCommand(command=command, process=command.start(), there=there))

    def verb(self, *words: str) -> tuple[int, str]:
        """Run another verb of `cairn` on the store to its end; returns exit code and output."""
        process = self.command.start_verb(*words)
        code = process.wait(timeout=120)
        return code, self.command.output()

    def keep_going(self) -> None:
        """See to it that somebody is at the run: whoever continues it here, or nobody has for long, by hand."""
        self._bury()
        self._keep_watching()
        if self.processes.of(Role.FLOW):
            self._alone_since = None
            return
        patience = _RESTARTED_AFTER_SECONDS.get(self.driver, 0.0)
        if patience and not self.next_variables:
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since < patience:
                return
            self._alone_since = None
        self.train()
        self.next_variables = {}

    def _keep_watching(self) -> None:
        if self.driver == COMMAND:
            return
        if self._deployed is not None:
            self._deployed.keep_working()
        if self._watcher is None or self._watcher.poll() is not None:
            by = () if self._deployed is None else ("--deployment", DEPLOYMENT)
            self._watcher = self.command.start_verb("watch", "--every", "0.5", *by)

    def start_process(self, words: list[str]) -> "subprocess.Popen[bytes]":
        """Start a program of the campaign's own beside the run, with pipes to it."""
        variables = {**self._variables_of_others(), "PYTHONPATH": str(Path(__file__).parents[3])}
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=self.folder, env=variables, stdin=pipe, stdout=pipe)

    def kill(self, *roles: Role) -> int:
        """Kill all of these roles and wait until they are gone; returns how many, and raises `Skipped` for none."""
        living = self.processes.all()
        commands = [actor.age_seconds for actor in living if actor.role is Role.FLOW]
        struck = set(self.processes.send_signal(signal.SIGKILL, *roles))
        if not struck:
            raise Skipped(f"no {' or '.join(roles)} is left")
        for actor in (actor for actor in living if actor.pid in struck):
            command = min(commands, default=0.0) if actor.role in WORKERS else 0.0
            self.kills.append(Kill(role=actor.role, is_early=max(actor.age_seconds, command) <= EARLY_SECONDS))
        self.processes.wait_gone(list(struck), seconds=_GONE_SECONDS)
        return len(struck)

    def halt(self, role: Role) -> list[int]:
        """Stop the processes of a role until `wake`; returns which."""
        known = self._halted.get(role, [])
        living = [pid for pid in known if send(pid, signal.SIGSTOP)]
        self._halted[role] = living or self.processes.send_signal(signal.SIGSTOP, role)
        self._is_halted = True
        return self._halted[role]

    def wake(self) -> None:
        """Let everything that was halted go on."""
        if self._is_halted:
            for pid in [pid for pids in self._halted.values() for pid in pids]:
                send(pid, signal.SIGCONT)
        self._is_halted = False

    def suffer(self, what: str) -> None:
        """Note what is done while these commands live."""
        for one in self.started:
            if one.process.poll() is None:
                one.suffered.add(what)

    def leave_alone(self, after: str) -> None:
        """Note that from now on nothing is done to the run: `after` was the last fault."""
        self._last_fault, self._left_alone_at = after, time.monotonic()

    def dismiss_watcher(self) -> None:
        """End watcher and worker, so that only what is started by hand goes on."""
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
        if self._deployed is not None:
            self._deployed.end()
        self.driver = COMMAND

    def exits(self) -> list[Started]:
        """Return the commands that have ended."""
        self._bury()
        return [one for one in self.started if one.code is not None]

    def close(self) -> list[int]:
        """End whatever is left of the run; returns whom that had to be done to."""
        self.dismiss_watcher()
        left = [actor.pid for actor in self.processes.wait_gone(seconds=15.0)]
        self.processes.send_signal(signal.SIGCONT, *Role)
        self.processes.send_signal(signal.SIGKILL, *Role)
        self._bury()
        if self.proxy is not None:
            self.proxy.__exit__()
        return left

    def unmount(self, keep: bool) -> None:
        """Take the small disk away; what is on it is copied first where it must be kept."""
        if not self.has_small_disk:
            return
        if keep:
            shutil.copytree(self.folder / "store", self.folder / "store-kept")
        subprocess.run(["umount", str(self.folder / "store")], check=False)
        if keep:
            shutil.copytree(self.folder / "store-kept", self.folder / "store", dirs_exist_ok=True)
            shutil.rmtree(self.folder / "store-kept")

    @property
    def url(self) -> str:
        """The store as a command names it."""
        return self.observer.store.url.removeprefix("file://")

    def _variables_of_others(self) -> dict[str, str]:
        return environment_of(self.command, self.server.url, **self._variables, CAIRN_STORE=self.url)

    def _start(self, *words: str, program: str = PROGRAM, **variables: str) -> Started:
        process = self.command.start_verb(*words, program=program, **variables)
        number = self.command._count
        output = self.folder / f"command-{number}.txt"
        self.started.append(Started(process=process, output=output, number=number))
        return self.started[-1]

    def _bury(self) -> None:
        for one in self.started:
            if one.code is None:
                one.code = one.process.poll()
                if one.code is not None:
                    is_new = one.began_at > self._left_alone_at
                    since = time.monotonic() - max(one.began_at, self._left_alone_at)
                    one.end = CommandEnd(after="start" if is_new else self._last_fault, seconds=round(since, 1))


def fill(ballast: Path) -> None:
    """Write to a file until its disk is full."""
    for piece in (65536, 64):
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(b"\0" * piece):
                pass


def mount(folder: Path) -> bool:
    """Make the folder a disk of its own; False where this machine does not let us."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done: subprocess.CompletedProcess[Any] = subprocess.run(words, capture_output=True, check=False)
    return done.returncode == 0
