"""One run on its stage: folder, store, commands, whoever continues it, and what is in the way of its store.

Owns starting things and taking everything down again. Refuses to know plans: it does what it is told.
"""

import os
import shutil
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.stores.local_store import LocalStore
from storage.stores.object_store import ObjectStore
from storage.stores.patient_store import PatientStore
from storage.stores.s3_store import S3Store
from tests.chaos.cast import TAG, Cast, Role
from tests.chaos.observer import Observer
from tests.chaos.plan import STEPS
from tests.crash.test_prefect_away import Server
from tests.crash.training_command import Command, configuration
from tests.s3.fault_proxy import FaultProxy
from tests.s3.servers import S3Server, s3_server

CONFIG = (
    configuration(steps=STEPS, every_commits=4)
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
DISK_BYTES = 48 * 1024 * 1024
_RESTARTED_AFTER_SECONDS = 12.0
"""A run that a watcher has not continued by then is continued by hand, as an impatient person would."""


@dataclass(kw_only=True)
class Started:
    """A command of the campaign's own: its process, its output, how it left and what was done to it meanwhile."""

    process: subprocess.Popen[bytes]
    output: Path
    number: int
    suffered: set[str] = field(default_factory=set)
    code: int | None = None


class Scene:
    """A run's folder and everything that is started for it."""

    def __init__(self, folder: Path, server: Server, *, store: str, driver: str, small_disk: bool = False) -> None:
        self.folder, self.server, self.driver = folder, server, driver
        folder.mkdir(parents=True)
        self.tag = uuid.uuid4().hex
        self.cast = Cast(self.tag)
        self.has_small_disk = small_disk and _mount(folder / "store")
        self.proxy: FaultProxy | None = None
        environment = {TAG: self.tag, "PREFECT_CLIENT_MAX_RETRIES": "4", "OMP_NUM_THREADS": "1"}
        where: ObjectStore = LocalStore(folder / "store")
        if store == "s3":
            quick: S3Server = s3_server("quick", folder)
            self.proxy = FaultProxy(upstream=quick.endpoint).__enter__()
            where = PatientStore(S3Store(quick.bucket(), self.tag))
            environment |= quick.environment(self.proxy.endpoint)
        self.command = Command(folder, server.url, store=where, environment=environment)
        (folder / "run.toml").write_text(CONFIG)
        self.observer = Observer(where, self.cast)
        self.started: list[Started] = []
        self._watcher: subprocess.Popen[bytes] | None = None
        self._alone_since: float | None = None
        self.next_environment: dict[str, str] = {}

    def train(self, **variables: str) -> Started:
        """Start the command once more."""
        return self._start("train", "run.toml", "--run-id", "bard", **{**self.next_environment, **variables})

    def verb(self, *words: str) -> tuple[int, str]:
        """Run another verb of `cairn` on the store to its end; returns exit code and output."""
        process = self.command.start_verb(*words)
        code = process.wait(timeout=120)
        return code, self.command.output()

    def keep_going(self) -> None:
        """See to it that somebody is at the run: whoever continues it here, or nobody has for long, by hand."""
        self._bury()
        if self.driver == "watch" and (self._watcher is None or self._watcher.poll() is not None):
            self._watcher = self.command.start_verb("watch", "--every", "0.5")
        if self.cast.of(Role.FLOW):
            self._alone_since = None
            return
        if self.driver == "watch" and self.started and not self.next_environment:
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since < _RESTARTED_AFTER_SECONDS:
                return
            self._alone_since = None
        self.train()
        self.next_environment = {}

    def suffer(self, what: str) -> None:
        """Note what is done while these commands live."""
        for one in self.started:
            if one.process.poll() is None:
                one.suffered.add(what)

    def dismiss_watcher(self) -> None:
        """End the watcher, so that only what is started by hand goes on."""
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
        self.driver = "command"

    def exits(self) -> list[Started]:
        """Return the commands that have ended."""
        self._bury()
        return [one for one in self.started if one.code is not None]

    def close(self) -> list[int]:
        """End whatever is left of the run; returns whom that had to be done to."""
        self.dismiss_watcher()
        left = [actor.pid for actor in self.cast.wait_gone(seconds=15.0)]
        self.cast.strike(signal.SIGCONT, *Role)
        self.cast.strike(signal.SIGKILL, *Role)
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

    def _start(self, *words: str, **variables: str) -> Started:
        process = self.command.start_verb(*words, **variables)
        number = self.command._count
        output = self.folder / f"command-{number}.txt"
        self.started.append(Started(process=process, output=output, number=number))
        return self.started[-1]

    def _bury(self) -> None:
        for one in self.started:
            if one.code is None:
                one.code = one.process.poll()


def _mount(folder: Path) -> bool:
    """Make the folder a disk of its own; False where this machine does not let us."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done: subprocess.CompletedProcess[Any] = subprocess.run(words, capture_output=True, check=False)
    return done.returncode == 0
