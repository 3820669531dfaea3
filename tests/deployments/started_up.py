"""`deployments/up.sh` as a person starts it: on a free port, with a home, a store and a configuration of its own."""

import base64
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from cairn.flows.orchestrator.prefect_settings import prefect_home
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from tests.crash.training_command import configuration
from tests.processes.waiting import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deployments" / "up.sh"


class StartedUp:
    """Everything `make up` starts, and the shell beside it."""

    def __init__(self, folder: Path, *, command: Sequence[str] = (str(SCRIPT),), **environment: str) -> None:
        self.folder, self.port = folder, int(environment.get("PORT") or free_port())
        self.environment = {**up_environment(folder, self.port), **environment}
        self.config = folder / "bard.toml"
        self.config.write_text(configuration())
        with (folder / "up.txt").open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        wait_for(lambda: "stop it all" in self.output(), self._process, "that everything has started", self.output)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> str:
        return (self.folder / "up.txt").read_text(errors="replace")

    def prefect(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `prefect` in another shell, told of nothing but the server's address and password."""
        return subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=self.folder,
            env={**self.shell(), **environment},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def train(self, run_id: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `prefect deployment run train-gpt/train-gpt` to its end."""
        given = ("-p", f"config={self.config}", "-p", f"run_id={run_id}", *words)
        return self.prefect("deployment", "run", "train-gpt/train-gpt", *given, "--watch", "--watch-interval", "1")

    @property
    def key(self) -> Path:
        """The file from which another shell takes address and password."""
        return prefect_home({"CAIRN_CACHE": str(self.folder / "cache")}) / "server"

    @property
    def password(self) -> str:
        """What the server asks for."""
        given = self.environment.get("PREFECT_SERVER_API_AUTH_STRING", "")
        return given or _variables(self.key)["PREFECT_API_AUTH_STRING"]

    def credentials(self) -> dict[str, str]:
        """Return the headers of somebody who has the password and has asked for a token."""
        basic = {"Authorization": f"Basic {base64.b64encode(self.password.encode()).decode()}"}
        token = self.ask("api/csrf-token?client=tests", headers=basic)["token"]
        return {**basic, "Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "tests"}

    def ask(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """Ask the API, by default as somebody who may; raises HTTPError for a refusal."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(self.credentials() if headers is None else headers)}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", data, sent), timeout=240) as answer:
            return json.loads(answer.read() or "null")

    def flow_runs(self, flow: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("api/flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})
        return found

    def state(self, run_id: str) -> RunState:
        return RunLog(LocalStore(self.folder / "store"), run_id).refresh()

    def processes(self) -> list[psutil.Process]:
        """Return every living process that was started by this one, however deep and under whatever parent."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def send(self, number: signal.Signals) -> None:
        """Send the signal to the command alone."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, number: signal.Signals, *, within_seconds: float = 150.0) -> int:
        """Send the signal to the command alone; returns its exit code once it has left."""
        self.send(number)
        try:
            return self._process.wait(timeout=within_seconds)
        finally:
            for process in self.processes() if self._process.poll() is None else []:
                process.kill()

    def shell(self) -> dict[str, str]:
        kept = {name: value for name, value in self.environment.items() if not name.startswith("PREFECT_")}
        given = {"PREFECT_API_URL": f"{self.url}/api", "PREFECT_API_AUTH_STRING": self.password}
        told = _variables(self.key) if self.key.exists() else given
        return {**kept, **told, "PREFECT_HOME": str(self.folder / "shell")}

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("CAIRN_CACHE") == str(self.folder / "cache") and (
                process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


def up_environment(folder: Path, port: int) -> dict[str, str]:
    """Return the environment of a person who has set nothing but where things lie."""
    return {
        **os.environ,
        "BIN": str(Path(sys.executable).parent),
        "PORT": str(port),
        "CAIRN_STORE": str(folder / "store"),
        "CAIRN_CACHE": str(folder / "cache"),
    }


def _variables(key: Path) -> dict[str, str]:
    """Return what a shell has exported once it has read the file."""
    return dict(word.split("=", 1) for word in shlex.split(key.read_text(encoding="utf-8"))[1:])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
