"""One folder with a configuration, a store, and the real `cairn train` command that trains there."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cairn.storage.logs.registry import Promoted, Registry
from cairn.storage.logs.run_entries import AttemptEnded
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import read_step_records
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.processes.fork_server import fork_server
from tests.processes.waiting import patience_seconds, wait_for
from tests.text.shakespeare import TINY_SHAKESPEARE

RUN, STEPS = "bard", 60
PROGRAM = "cairn.cli.command"
ARCHITECTURES = ("gpt2", "qwen3")


def configuration(*, steps: int = STEPS, every_commits: int = 12, architecture: str = "gpt2") -> str:
    """Return a run configuration that a test has the time to train; heads of qwen3 share their keys."""
    return f"""
model_family = "{architecture}-tiny"
[data]
sources = ["{TINY_SHAKESPEARE}"]
tokenizer = "bytes"
[model]
architecture = "{architecture}"
n_layer = 1
n_head = 2
n_kv_head = {1 if architecture == "qwen3" else 2}
n_embd = 32
block_size = 32
dropout = 0.1
[training]
steps = {steps}
global_batch = 8
micro_batch = 4
warmup_steps = 5
threads = 1
probe_every_steps = 25
probe_batches = 1
sample_tokens = 8
[checkpoint]
every_steps = 5
[evaluation]
every_commits = {every_commits}
batches = 1
batch_size = 8
sample_tokens = 8
[lease]
seconds = 3.0
heartbeat_seconds = 0.3
"""


class Command:
    """One folder with a configuration and a store, and the command that trains there.

    Its processes are forked from one that has imported everything, unless `forked` is False.
    """

    def __init__(
        self,
        folder: Path,
        api_url: str,
        *,
        store: ObjectStore | None = None,
        environment: Mapping[str, str] | None = None,
        forked: bool = True,
        architecture: str = "gpt2",
    ) -> None:
        self.folder, self.api_url, self.architecture = folder, api_url, architecture
        self.store = store or LocalStore(folder / "store")
        self._environment = dict(environment or {})
        self._popen = fork_server().popen if forked else subprocess.Popen
        (folder / "run.toml").write_text(configuration(architecture=architecture), encoding="utf-8")
        self._count = 0

    def start(self, *extra: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start `cairn train` on the run; its output goes to files in the folder."""
        return self.start_verb("train", "run.toml", "--run-id", RUN, *extra, **variables)

    def start_verb(self, *arguments: str, program: str = PROGRAM, **variables: str) -> "subprocess.Popen[bytes]":
        """Start any verb of `cairn` on the store, with more environment if need be; its output goes to a file too.

        `program` stands before the verb where that is not `cairn` itself.
        """
        self._count += 1
        environment = {
            **os.environ,
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "CAIRN_CACHE": str(self.folder / "cache"),
            **self._environment,
            **variables,
        }
        url = self.store.url.removeprefix("file://")
        command = [sys.executable, "-m", program, *arguments, "--store", url]
        with (self.folder / f"command-{self._count}.txt").open("wb") as output:
            return self._popen(command, cwd=self.folder, env=environment, stdout=output, stderr=output)

    def train(self, *extra: str, exit_code: int = 0, **variables: str) -> None:
        """Run the command to its end and check how it left."""
        code = self.start(*extra, **variables).wait(timeout=patience_seconds())
        assert code == exit_code, f"exit {code}\n{self.output()}"

    def train_until(self, step: int, *extra: str) -> "subprocess.Popen[bytes]":
        """Start the command and return once its trainer has completed `step`, after which it waits for `let_go`."""
        process = self.start(*extra, CAIRN_FAULTS=f"pause@{step}")
        self.wait_for_fault(f"pause@{step}", process)
        return process

    def wait_for_fault(self, fault: str, process: "subprocess.Popen[bytes]") -> None:
        """Wait until a fault of `CAIRN_FAULTS` is met."""
        wait_for(lambda: self.has_met(fault), process, fault, self.output)

    def has_met(self, fault: str) -> bool:
        """Whether a fault of `CAIRN_FAULTS` was met."""
        return self.store.size(f"runs/{RUN}/faults/{fault.replace('@', '-')}.json") is not None

    def let_go(self, pause: str) -> None:
        """End a pause."""
        self.store.create(f"runs/{RUN}/faults/{pause.replace('@', '-')}-go.json", b"{}\n")

    def trained_steps(self) -> int:
        """Return the greatest step any attempt has trained."""
        records = read_step_records(self.store, f"runs/{RUN}", self.state().attempts)
        return max((line.step for line in records), default=0)

    def wait_until_trained(self, step: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait until an attempt has trained that far."""
        wait_for(lambda: self.trained_steps() >= step, process, f"step {step}", self.output)

    def output(self) -> str:
        """Return what the last command printed."""
        return (self.folder / f"command-{self._count}.txt").read_text(encoding="utf-8", errors="replace")

    def state(self) -> RunState:
        """Return the run's state as a stranger reads it."""
        return RunLog(self.store, RUN).refresh()

    def receipts(self) -> list[AttemptEnded]:
        """Return the receipt of every attempt; each must have left one."""
        ends = [attempt.ended for attempt in self.state().attempts]
        assert None not in ends, self.output()
        return [ended for ended in ends if ended is not None]

    def reasons(self) -> list[str]:
        """Return why each attempt has ended."""
        return [ended.reason for ended in self.receipts()]

    def champion(self) -> Promoted | None:
        """Return what the alias `champion` points at."""
        return Registry(self.store, "champion").refresh().champion

    def state_sha256(self) -> str:
        """Return the digest of the finished run."""
        finished = self.state().finished
        assert finished is not None, self.output()
        return finished.state_sha256
