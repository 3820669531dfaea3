"""What the processes of Cairn do to a store, without tensors and without an orchestrator: the product's own functions.

Owns the order of calls as `cairn.flows.run.attempt` and the `cairn` verbs make them. Every function notes in the ledger
what it was answered, at once: what dies later has still been promised.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import cairn.storage.checkpoints.checkpoint as checkpoint
import cairn.tasks.attempt.attempt_entries as attempt_entries
import cairn.tasks.checkpoints.promotion as promotion
import cairn.tasks.checkpoints.retention as retention
import cairn.tasks.evaluator.evaluation_run as evaluation_run
from cairn.model.configuration.network import ModelConfig
from cairn.operations.person_decisions import roll_back
from cairn.operations.run_notes import note_run
from cairn.reports.errors import RunNotFound
from cairn.storage.checkpoints.checkpoint import (
    TensorGroup,
    UploadOptions,
    checkpoint_target,
)
from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy
from cairn.storage.errors import AppendUnknown, Fenced, IntegrityError, NotDurable, StorageError
from cairn.storage.logs.log_entry import CheckpointReference, Writer
from cairn.storage.logs.registry import Registry, SuiteReference
from cairn.storage.logs.run_entries import (
    AttemptStarted,
    EvaluationFailed,
    Placement,
    RunDeleted,
    RunFinished,
    StagedCheckpoint,
)
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import Heartbeat, write_heartbeat
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules, evaluations_of
from cairn.tasks.configuration.settings import BudgetsConfig, CheckpointConfig, LeaseConfig
from cairn.tasks.errors import CheckpointGone, GateRefused, TaskError
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, Suite
from cairn.tasks.evaluator.evaluator_process import Outcome
from tests.entries import NOON, ended, placement, started
from tests.protocol.raw_history import require, tell_run
from tests.protocol.world import Ledger, as_store
from tests.storage.builders import RUN, floats, opened, trainer_document
from tests.storage.faulty_store import Death

PREFIX = f"runs/{RUN}"
REFUSALS = (StorageError, TaskError, RunNotFound)
"""What a process may be told instead of an answer."""
ALIAS = "champion"
LEASE = LeaseConfig(seconds=0.75, heartbeat_seconds=0.25)
SUITE = Suite(
    name="held-out",
    batches=1,
    batch_size=1,
    prompts=(),
    sample_tokens=0,
    sample_seed=0,
    evaluator_version="1",
)
_PIDS = count(1)


@dataclass
class VirtualClock:
    """A process's own monotonic clock: only its own sleeping moves it."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class EventfulClock(VirtualClock):
    """Something happens whenever the process sleeps."""

    during_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.during_sleep()


@dataclass
class Process:
    """One process: its store, its identity, its clock, and the ledger that everybody shares."""

    store: Any
    ledger: Ledger
    host: str = "elsewhere"
    pid: int = field(default_factory=lambda: next(_PIDS))
    clock: VirtualClock = field(default_factory=VirtualClock)
    shard_bytes: int = 16
    mistaken: Callable[[], bool] = lambda: False
    run: str = RUN

    @property
    def placement(self) -> Placement:
        return placement(host=self.host, pid=self.pid)

    def believes_dead(self, pid: int) -> bool:
        """Whether it takes another process for dead: one that is, or, mistaken, any."""
        if pid not in self.ledger.dead and self.mistaken():
            self.ledger.mourned.add(pid)
        return pid in self.ledger.dead | self.ledger.mourned

    def writer(self, attempt: int | None = None) -> Writer:
        return Writer(host=self.host, pid=self.pid, attempt=attempt)

    def log(self) -> RunLog:
        return RunLog(as_store(self.store), self.run)

    @property
    def prefix(self) -> str:
        return f"runs/{self.run}"


Act = Callable[[Process], object]
"""What a process does."""
_PRESENT: ContextVar[Process] = ContextVar("present")


@contextmanager
def being(process: Process) -> Iterator[None]:
    """Within this, pins are taken, and others believed dead, in the name of the process."""
    token = _PRESENT.set(process)
    try:
        yield
    finally:
        _PRESENT.reset(token)


def present_placement(*, device: str, threads: int) -> Placement:
    """Stand in for `this_placement`: every process of these tests is this one process."""
    return _PRESENT.get().placement


def present_belief(other: Placement) -> bool:
    """Stand in for `is_known_dead`, for the same reason."""
    return _PRESENT.get().believes_dead(other.pid)


def attempt(act: Act, process: Process) -> None:
    """Act, and note what is refused; a process that dies does no more."""
    try:
        act(process)
    except Death:
        return
    except REFUSALS as error:
        process.ledger.acknowledge(f"{process.host}: {type(error).__name__}: {error}")


def open_run(process: Process) -> None:
    """Open the run unless it is open."""
    process.log().append(lambda state: opened() if state.opened is None else None, writer=process.writer())
    process.ledger.acknowledge("opened")


def claim(process: Process, log: RunLog, **named: Any) -> AttemptStarted:
    """Claim the next attempt as the flow does."""
    with being(process):
        claimed = attempt_entries.claim_attempt(log, claimant(process, **named), partial(_start, process))
    process.ledger.acknowledge(f"claimed {claimed.attempt}")
    return claimed


def claimant(process: Process, **named: Any) -> attempt_entries.Claimant:
    """Return who claims or deletes in the name of the process."""
    return attempt_entries.Claimant(
        lease=LEASE,
        budgets=BudgetsConfig(),
        writer=process.writer(),
        monotonic=process.clock.monotonic,
        sleep=process.clock.sleep,
        **named,
    )


def _start(process: Process, number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
    return started(number, placement=process.placement, resumed_from=reference)


def load(process: Process, reference: CheckpointReference | None) -> int:
    """Load what an attempt resumes from and return its step; the content must be what was once staged."""
    if reference is None:
        return 0
    read_policy = ReadPolicy(sleep=process.clock.sleep)
    loaded = checkpoint.load_checkpoint(as_store(process.store), reference, read_policy=read_policy)
    expected = process.ledger.committed.get(reference.prefix, loaded.manifest.state_sha256)
    require(loaded.manifest.state_sha256 == expected, "content", f"{reference.prefix} is not what was committed")
    require(loaded.trainer.step == reference.step, "content", f"{reference.prefix} is of step {loaded.trainer.step}")
    return reference.step


def stage(process: Process, *, step: int, attempt: int) -> StagedCheckpoint:
    """Stage a checkpoint of a few floats whose content depends on step and attempt."""
    weights = (floats("a", step, 1, 2), floats("b", attempt, 3, 4))
    return checkpoint.stage_checkpoint(
        as_store(process.store),
        target=checkpoint_target(process.run, step=step, attempt=attempt),
        groups=(TensorGroup(name="weights", records=weights),),
        trainer=trainer_document(step),
        uploads=UploadOptions(shard_bytes=process.shard_bytes),
    )


def commit(process: Process, log: RunLog, staged: StagedCheckpoint) -> None:
    """Commit, and once more where the outcome stayed unknown: it must not come to two commits or to a refusal."""
    act = partial(
        checkpoint.commit_checkpoint, log, staged, writer=process.writer(staged.attempt), tokens=1, gpu_seconds=1.0
    )
    try:
        act()
    except NotDurable:
        raise  # the run ends here too: what it reads back may vanish
    except AppendUnknown:
        _commit_again(process, staged.attempt, act)
    process.ledger.committed[staged.prefix] = staged.state_sha256


def _commit_again(process: Process, attempt: int, act: Callable[[], object]) -> None:
    try:
        act()
    except Fenced as error:
        told = tell_run(process.store.inner, process.prefix)
        require(told.owner != attempt, "committing again is harmless", error)
        raise


def beat(process: Process, attempt: int, step: int) -> None:
    """Show life."""
    heartbeat = Heartbeat(attempt=attempt, beat=step, step=step, train_loss=1.0, tokens=step, gpu_seconds=1.0)
    write_heartbeat(as_store(process.store), process.prefix, heartbeat)


def end_attempt(process: Process, log: RunLog, attempt: int, reason: str = "preempted", **named: Any) -> None:
    """Write the receipt of the own attempt."""
    log.append(lambda state: ended(attempt, reason, **named), writer=process.writer(attempt))
    process.ledger.acknowledge(f"ended {attempt}")


def finish_run(process: Process, log: RunLog, attempt: int) -> None:
    """Say that the last step is committed, as the flow does: once, on the newest state."""
    newest = log.refresh().newest_committed
    if newest is None or log.state.finished is not None:
        return
    body = RunFinished(
        attempt=attempt,
        step=newest.committed.step,
        manifest_sha256=newest.committed.manifest_sha256,
        state_sha256=newest.committed.state_sha256,
    )
    log.append(lambda state: body, writer=process.writer(attempt))
    process.ledger.acknowledge("finished")


def plan() -> EvaluationPlan:
    """How checkpoints are measured here: without a process."""
    model = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
    return EvaluationPlan(
        suite=SUITE,
        model=model,
        snapshot_id="d",
        cache_dir=Path("nowhere"),
        device="cpu",
        threads=1,
        timeout_seconds=1.0,
    )


def measured(loss: float) -> Callable[[bytes, float], Outcome]:
    """Return an evaluator that prints this loss, of eight windows."""
    of_windows = {"window_tokens": 4, "losses": {"val_loss": [loss] * 8}}
    result = json.dumps({"metrics": {"val_loss": loss}, "samples": [], **of_windows}).encode()
    return lambda order, timeout: Outcome(result=result, problem="")


def evaluate(
    process: Process,
    prefix: str,
    measure: Callable[[bytes, float], Outcome],
    during: int | None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Evaluate a committed checkpoint, reading its bytes as the evaluator would, after what happens meanwhile."""
    log = process.log()
    record = log.refresh().find(prefix)
    if record is None:
        return
    reference = record.committed.reference

    def read_and_measure(order: bytes, timeout: float) -> Outcome:
        meanwhile()
        try:
            load(process, reference)
        except IntegrityError as error:
            _require_gone_for_a_reason(process, prefix, during, error)
        return measure(order, timeout)

    with being(process):
        body = evaluation_run.record_evaluation(
            log,
            evaluation_run.Measurement(reference=reference, plan=PLAN, during_attempt=during, on_request=True),
            measure=read_and_measure,
            clock=lambda: NOON,
            monotonic=process.clock.monotonic,
        )
    failed = isinstance(body, EvaluationFailed)
    process.ledger.acknowledge(f"{'failed' if failed else 'evaluated'} {prefix}")


def _require_gone_for_a_reason(process: Process, prefix: str, during: int | None, error: IntegrityError) -> None:
    """Only damage, a later attempt, a deletion, or one that takes the evaluator for dead takes its bytes away."""
    told = tell_run(process.store.inner, process.prefix)
    is_over = told.deleted or (during is not None and during != told.claims)
    gone = is_over or prefix in process.ledger.broken or process.pid in process.ledger.mourned
    require(gone, "what is pinned stays", f"{prefix}: {error}")
    raise CheckpointGone(prefix) from error


def promote(process: Process, prefix: str) -> None:
    """Offer a checkpoint to the alias."""
    store = as_store(process.store)
    log = process.log()
    state = log.refresh()
    record = state.find(prefix)
    if record is None:
        return
    evaluations = evaluations_of(state, record.committed.manifest_sha256)
    candidate = Candidate(run_id=process.run, reference=record.committed.reference, evaluations=evaluations, by="me")
    rules = PromotionRules(required=(SuiteReference(name=SUITE.name, sha256=SUITE.sha256),))
    try:
        with being(process):
            promotion.offer(log, Registry(store, ALIAS), candidate, rules)
    except GateRefused:
        process.ledger.acknowledge(f"refused {prefix}")
        return
    process.ledger.acknowledge(f"promoted {prefix}")


def go_back(process: Process) -> None:
    """Roll the alias back."""
    view = roll_back(as_store(process.store), ALIAS, by="me")
    process.ledger.acknowledge(f"rolled back to {view.manifest_sha256}")


def sweep(process: Process) -> None:
    """Sweep the run as the verb and the flow do."""
    policy = CheckpointConfig(keep_last=process.ledger.keep_last, keep_best=0)
    with being(process):
        retention.sweep_run(process.log(), policy, SUITE.sha256)
    process.ledger.acknowledge("swept")


def delete(process: Process) -> None:
    """Delete the run as the verb does."""
    owner = claimant(process)
    deletion = RunDeleted(by="me", why="")
    with being(process):
        retention.delete_run(process.log(), deletion, owner)
    process.ledger.acknowledge("deleted")


def note(process: Process) -> None:
    """Write a note on the run as the verb does, whoever owns it."""
    with being(process):
        note_run(process.log(), "good", ("baseline",), ())
    process.ledger.acknowledge("noted")


def train(process: Process, *, commits: int, evaluated: bool = False, finish: bool = False) -> None:
    """One attempt from claim to receipt: resume, stage and commit so often, end."""
    log = process.log()
    number, step = claim_and_load(process, log)
    for _ in range(commits):
        step += 1
        beat(process, number, step)
        commit(process, log, stage(process, step=step, attempt=number))
        if evaluated:
            evaluate(
                process, checkpoint_target(process.run, step=step, attempt=number).prefix, measured(1 / step), number
            )
    if finish:
        finish_run(process, log, number)
    end_attempt(process, log, number, "completed" if finish else "preempted")


def claim_and_load(process: Process, log: RunLog) -> tuple[int, int]:
    """Claim the run and load what it resumes from; returns attempt and step.

    That it cannot be read is forgiven to an attempt that no longer owns the run, and for a broken checkpoint once:
    then the attempt ends, and the next claim looks at the bytes.
    """
    forgiven = set[str]()
    while True:
        claimed = claim(process, log)
        reference = claimed.resumed_from
        try:
            return claimed.attempt, load(process, reference)
        except IntegrityError as error:
            assert reference is not None
            if tell_run(process.store.inner, process.prefix).owner != claimed.attempt:
                raise
            is_forgiven = reference.prefix in process.ledger.broken - forgiven
            require(is_forgiven, "a resume point can be read", f"{claimed.attempt}: {error}")
            forgiven.add(reference.prefix)
            end_attempt(process, log, claimed.attempt, "storage", last_step=reference.step)


PLAN = plan()
