"""The chain of `train-gpt` in this very process by its plain steps; a trainer without tensors trains.

Configuration, log, store, claims, receipts, commits, evaluations' records and promotion are the product's own. An
evaluator's process is replaced by what it would print.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State

from cairn.flows.orchestrator import flow_run
from cairn.flows.orchestrator.flow_run import FlowRun
from cairn.flows.preparation.preflight import check_before_start
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest, resolve_request
from cairn.flows.run import run_start
from cairn.flows.run.active_run import ActiveRun, Host
from cairn.flows.run.attempt_trainer import AttemptTrainer, record_end
from cairn.flows.run.steps import PLAIN, Steps
from cairn.flows.train_gpt import train
from cairn.operations.prefect_session import plan_rungs, train_in_turn
from cairn.storage.logs.run_entries import AttemptEnded, AttemptStarted
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.configuration_source import expand_set
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.evaluator import evaluation_run
from cairn.tasks.evaluator.evaluator_process import Outcome
from cairn.tasks.policy.failures import Evidence
from cairn.tasks.trainer.trainer_process import TrainerChild, WarmTrainer
from cairn.tasks.trainer.trainer_protocol import Finish, TrainerSpec, TrainUntil, decode_message
from tests.processes.fork_server import fork_server
from tests.wiring.tensorless_trainer import heard_by

ROOT = Path(__file__).parents[2]
RUN, PROGRAM = "bard", "tests.wiring.tensorless_trainer"
CONFIG = """
model_family = "gpt2-wiring"
[data]
sources = ["text.txt"]
tokenizer = "bytes"
val_fraction = 0.3
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
[training]
steps = 20
global_batch = 4
device = "cpu"
precision = "fp32"
kernels = "stock"
threads = 1
[checkpoint]
every_steps = 10
"""
TEXT = "\n\n".join(f"paragraph {number} of stone {number * number % 97}" for number in range(60))


class NotedWarmTrainer(WarmTrainer):
    """Starts trainers without tensors; notes how long the flow wants to wait between attempts, and does not wait."""

    def __init__(self, *arguments: str, modules: tuple[str, ...] = (PROGRAM,)) -> None:
        """Fork trainers from the server that has these modules alone, or from the one of all programs without any."""
        super().__init__(partial(_fork_trainer, modules, (sys.executable, "-m", PROGRAM, *arguments)))
        self.waited: list[float] = []
        self._acquired: list[TrainerChild] = []

    def start(self, work_dir: Path) -> None:
        """Start none ahead: most tests only open the run."""

    def acquire(self, work_dir: Path) -> TrainerChild:
        super().start(work_dir)
        self._acquired.append(super().acquire(work_dir))
        return self._acquired[-1]

    def close_all(self) -> None:
        """End every trainer, and close its pipes."""
        self.close()
        for child in self._acquired:
            child.discard()


def _fork_trainer(modules: tuple[str, ...], command: tuple[str, ...], work_dir: Path) -> TrainerChild:
    with fork_server(*modules).forking():
        return TrainerChild(work_dir, command)


@dataclass(kw_only=True, slots=True)
class Evaluators:
    """What evaluators were given, and what they print: the losses in turn, the last one for ever; or why they fail.

    The first `failures` of them fail, all of them if there is a `problem`.
    """

    losses: list[float] = field(default_factory=lambda: [2.0])
    problem: str = ""
    failures: int = 0
    specs: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)

    def run(self, spec: bytes, timeout_seconds: float, **rest: Any) -> Outcome:
        self.specs.append(json.loads(spec))
        self.timeouts.append(timeout_seconds)
        self.failures -= 1
        if self.problem or self.failures >= 0:
            return Outcome(result=b"", problem=self.problem or "by the test")
        loss = self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]
        return Outcome(result=json.dumps({"metrics": {"val_loss": loss}, "samples": []}).encode(), problem="")


class FlowWorld:
    """A folder with text and a store, and runs of the flow in it."""

    def __init__(self, folder: Path) -> None:
        (folder / "text.txt").write_text(TEXT)
        self.folder, self.store, self.evaluators = folder, LocalStore(folder / "store"), Evaluators()
        self.said: list[str] = []

    def config(self, text: str = CONFIG) -> str:
        """Write a configuration and return its path; without a text there is none, and the run is continued by id."""
        path = self.folder / "run.toml"
        path.write_text(text)
        return str(path) if text else ""

    @property
    def log(self) -> RunLog:
        log = RunLog(self.store, RUN)
        log.refresh()
        return log

    @contextmanager
    def opened(
        self,
        *overrides: str,
        text: str = CONFIG,
        warm: NotedWarmTrainer | None = None,
        shutdown: ShutdownSignal | None = None,
    ) -> Iterator[ActiveRun]:
        """Yield the run as the flow opens or continues it."""
        trainers = warm or NotedWarmTrainer()
        try:
            yield run_start.open_run(self._request(text, overrides), PLAIN, self._host(trainers, shutdown))
        finally:
            trainers.close_all()

    def train(
        self,
        *overrides: str,
        run_id: str = RUN,
        text: str = CONFIG,
        warm: NotedWarmTrainer | None = None,
        store: str | None = None,
        steps: Steps = PLAIN,
        shutdown: ShutdownSignal | None = None,
    ) -> State[Any]:
        """Train to the end and return the state that Prefect would show; `store` is the world's unless it is given."""
        trainers = warm or NotedWarmTrainer()
        try:
            resolved = self._request(text, overrides, run_id=run_id, store=store)
            return flow_run.shown_state(train(resolved, steps, self._host(trainers, shutdown)))
        finally:
            trainers.close_all()

    def train_set(self, *overrides: str) -> dict[str, RunLog]:
        """Train a set of runs as the command does; returns their logs by the name that each has within the set."""
        members = [
            self._request(CONFIG, member.overrides, run_id=member.run_id) for member in expand_set("set", overrides)
        ]
        for member in train_in_turn(members, plan_rungs(members, os.environ), os.environ, self.said.append):
            trainers = NotedWarmTrainer()
            try:
                train(member, PLAIN, self._host(trainers))
            finally:
                trainers.close_all()
        logs = {member.run_id.partition("=")[2]: member.open_log() for member in members}
        for log in logs.values():
            log.refresh()
        return logs

    def check(self, *overrides: str) -> RunConfig:
        """Check a new run as the command does before it starts anything; returns its configuration."""
        return check_before_start(self._request(CONFIG, overrides), self.log, os.environ)

    def _host(self, warm: WarmTrainer, shutdown: ShutdownSignal | None = None) -> Host:
        by = run_start.starter(os.environ)
        return Host(shutdown=shutdown or ShutdownSignal(), warm=warm, flow_run=FlowRun(), continued_by=by)

    def _request(
        self, text: str, overrides: tuple[str, ...], *, run_id: str = RUN, store: str | None = None
    ) -> ResolvedRequest:
        where = str(self.folder / "store") if store is None else store
        given = TrainingRequest(config=self.config(text), run_id=run_id, overrides=overrides, store=where)
        return resolve_request(given, os.environ)

    def heard(self, attempt: int = 1) -> tuple[TrainerSpec, list[TrainUntil | Finish]]:
        """Return what the trainer of an attempt was sent: its spec and its commands."""
        [folder] = (self.folder / "cache" / "work").glob(f"{RUN}-*")
        path = heard_by(folder, attempt)
        spec, *commands = path.read_bytes().splitlines(keepends=True)
        return TrainerSpec.model_validate_json(spec), [decode_message(line) for line in commands]  # type: ignore[misc]


def end_with(run: ActiveRun, evidence: Evidence, started: AttemptStarted | None = None) -> AttemptEnded:
    """Claim the next attempt, unless it is given, and append its receipt by this evidence."""
    trainer = AttemptTrainer(run, started or run_start.claim_next_attempt(run))
    return record_end(run, evidence, trainer.heartbeat(0))


def answer_for_evaluators(patch: pytest.MonkeyPatch, world: FlowWorld) -> None:
    """Take the evaluator's process, waits and the store's probe out of the chain; its work folder is the world's cache.

    The probe (`tests/storage/stores/test_store_probe.py`) takes half of the time in which a run is opened.
    """

    def note_wait(run: ActiveRun, seconds: float) -> None:
        warm: Any = run.host.warm
        warm.waited.append(seconds)

    patch.setattr(ActiveRun, "wait", note_wait)
    patch.setattr(run_start.store_probe, "probe_store", lambda store: "")
    patch.setattr(evaluation_run.evaluator_process, "run_evaluator", world.evaluators.run)
    patch.setenv("CAIRN_CACHE", str(world.folder / "cache"))
    patch.setenv("PYTHONPATH", str(ROOT))
