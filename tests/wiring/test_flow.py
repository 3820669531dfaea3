"""What the configuration says reaches trainer, log and evaluator through the flow: nothing but Prefect is left out."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.preparation.preflight import AvailableMemory
from cairn.flows.run import attempt_trainer, run_start
from cairn.flows.run.attempt_trainer import AttemptTrainer
from cairn.flows.run.run_start import claim_next_attempt
from cairn.flows.run.steps import PLAIN
from cairn.flows.train_gpt import train_attempt
from cairn.model.configuration.data import TrainedBefore
from cairn.model.estimates.size_estimate import TrainingPlace
from cairn.operations.person_decisions import fork_run
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.errors import Fenced, StoreUnsound
from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_entries import DataQuarantined
from cairn.storage.logs.step_log import Heartbeat, read_heartbeat
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.errors import BudgetExhausted, TrainerGone
from cairn.tasks.evaluator import curve_reader
from cairn.tasks.evaluator.curve_reader import CurveReader
from cairn.tasks.machine.machine_speed import device_name
from cairn.tasks.machine.placement import resolved_device, usable_cores
from cairn.tasks.policy.failures import Evidence
from cairn.tasks.train_segment import Segment
from cairn.tasks.trainer import trainer_process
from cairn.tasks.trainer.trainer_process import ReceivedEvents
from cairn.tasks.trainer.trainer_protocol import Finish, SegmentDone, TrainerSpec, TrainUntil
from tests.wiring.flow_in_process import RUN, FlowWorld, NotedWarmTrainer, answer_for_evaluators, end_with
from tests.wiring.tensorless_trainer import PEAK, STEP_GPU_SECONDS, STEP_TOKENS, TOKENS_PER_SECOND, loss_of

SET = (
    "training.micro_batch=2",
    "training.threads=3",
    "training.activation_checkpointing=true",
    "divergence.rise_nats=0.75",
    "checkpoint.patience_seconds=41.5",
    'evaluation.prompts=["The first","The last"]',
)

Deaf = Callable[[float], AbstractContextManager[AttemptTrainer]]
"""A trainer that ignores SIGTERM, by the grace that it is given."""


def quarantine(flow: FlowWorld, windows: tuple[int, ...]) -> None:
    body = DataQuarantined(attempt=1, reason="bad-data", windows=windows, detail="by the test")
    flow.log.append(lambda state: body, writer=this_writer())


def kill(flow: FlowWorld) -> FlowWorld:
    """Leave a run whose only attempt was killed after step 13; its budget was spent by that."""
    flow.train(
        "training.micro_batch=2",
        "training.threads=3",
        "budgets.lost.retries=0",
        warm=NotedWarmTrainer("--die-at", "13"),
    )
    return flow


def test_no_run_is_opened_in_a_store_that_its_probe_finds_unsound(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: ObjectStore) -> str:
        raise StoreUnsound(f"{store.url}: create-if-absent is not atomic")

    monkeypatch.setattr(run_start.store_probe, "probe_store", refuse)
    with pytest.raises(StoreUnsound), flow.opened():
        pass
    assert flow.store.keys("runs") == []


def test_what_is_left_of_a_budget_is_said_in_words(flow: FlowWorld, capsys: pytest.CaptureFixture[str]) -> None:
    flow.train("training.threads=3", "budgets.lost.retries=1", warm=NotedWarmTrainer("--die-at", "13"))
    shown = capsys.readouterr().err
    assert "lost: resume from the newest committed checkpoint; left: retries 0" in shown and "{" not in shown


def test_an_attempt_says_which_newer_checkpoint_it_does_not_begin_with_and_why(
    flow: FlowWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    flow.train("budgets.lost.retries=0", "checkpoint.every_steps=5", warm=NotedWarmTrainer("--die-at", "13"))
    newest = flow.log.refresh().newest_committed
    assert newest is not None and newest.committed.step == 10
    quarantine_checkpoint(flow.log, newest.committed, "weights: a flipped byte", writer=this_writer())
    flow.train("checkpoint.every_steps=5")
    assert "not from step 10, which is quarantined: weights: a flipped byte" in capsys.readouterr().err


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> FlowWorld:
    """A killed run that tests only read."""
    world = FlowWorld(tmp_path_factory.mktemp("killed"))
    with pytest.MonkeyPatch.context() as patch:
        answer_for_evaluators(patch, world)
        return kill(world)


def test_the_spec_that_a_trainer_is_sent_says_what_configuration_and_log_say(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_FAULTS", "hang@4711")
    kill(flow)
    quarantine(flow, (7, 3))
    flow.train(*SET)
    spec, _ = flow.heard(2)
    config, state = spec.training, flow.log.state
    assert state.opened is not None
    assert (spec.run_id, spec.attempt, spec.store_url, spec.snapshot_id) == (
        RUN,
        2,
        flow.store.url,
        state.opened.data_snapshot,
    )
    assert (spec.micro_batch, config.global_batch, spec.activation_checkpointing) == (2, 4, True)
    assert (spec.quarantined, spec.divergence.rise_nats, spec.patience_seconds) == ((3, 7), 0.75, 41.5)
    assert (spec.threads, spec.prompt, spec.faults) == (3, "The first", "hang@4711")
    assert spec.resume == state.checkpoints[0].committed.reference and spec.resume.step == 10
    assert (spec.data.val_fraction, spec.model.n_embd, config.steps) == (0.3, 8, 20)


def test_a_receipt_has_the_device_that_trained_and_the_versions_that_computed(killed: FlowWorld) -> None:
    started = killed.log.state.attempts[0].started
    assert started.placement.device == "cpu"
    assert started.versions["torch"] == version("torch")
    assert {"python", "prefect", "cairn"} < set(started.versions)


@pytest.mark.parametrize(
    ("wanted", "on_cuda", "processes", "device"),
    [
        ("auto", False, 1, "cpu"),
        ("auto", True, 1, "cuda:0"),
        ("cuda", True, 1, "cuda:0"),
        ("auto", True, 8, "cuda"),
        ("cuda:3", True, 1, "cuda:3"),
        ("cpu", True, 1, "cpu"),
    ],
)
def test_the_device_of_a_receipt_is_one_that_exists(wanted: str, on_cuda: bool, processes: int, device: str) -> None:
    assert resolved_device(wanted, on_cuda=on_cuda, processes=processes) == device


def test_an_attempt_records_what_it_was_started_with(flow: FlowWorld) -> None:
    quarantine(kill(flow), (7, 3))
    with flow.opened(*SET) as run:
        claim_next_attempt(run)
    first, second = (record.started for record in flow.log.state.attempts)
    assert (first.quarantined_samples, second.quarantined_samples) == (0, 2)
    assert (second.micro_batch, second.activation_checkpointing, second.changed) == (2, True, "after lost")
    assert (second.placement.threads, second.placement.device, second.placement.pid) == (3, "cpu", os.getpid())
    assert second.config["divergence"]["rise_nats"] == 0.75 and first.config["divergence"]["rise_nats"] == 1.5


def test_after_out_of_memory_sizes_that_cannot_fit_are_passed_over(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = AvailableMemory(bytes=1, cores=1, place=TrainingPlace())
    monkeypatch.setattr(attempt_trainer, "available_memory", lambda *_: scarce)
    with flow.opened() as run:
        ended = end_with(run, Evidence(exit_code=-9, oom_kills=1))
        assert ended.decision.changed.endswith("micro-batch 4 to 1, bits differ from here")
        following = claim_next_attempt(run)
    assert (following.micro_batch, following.activation_checkpointing) == (1, True)


def test_segments_end_where_the_configuration_commits(flow: FlowWorld) -> None:
    flow.train("checkpoint.every_steps=7")
    _, commands = flow.heard()
    assert [command.step for command in commands if isinstance(command, TrainUntil)] == [7, 14, 20]
    assert commands[-1] == Finish()


SHORT = ("checkpoint.every_steps=2", "evaluation.every_commits=7")


def test_segments_that_end_during_an_upload_are_trained_and_get_no_commit_but_the_last(
    flow: FlowWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    flow.train(*SHORT, warm=NotedWarmTrainer("--slow-upload", "4"))
    state = flow.log.refresh()
    assert [record.committed.step for record in state.checkpoints] == [2, 4, 20] and state.finished is not None
    said = capsys.readouterr()
    for step in range(6, 20, 2):
        assert f"no checkpoint of step {step}: that of step 4 is still on its way" in said.out + said.err


class ScriptedTrainer:
    """Stands for a trainer whose segments end as a test says."""

    def __init__(self, *ends: SegmentDone) -> None:
        self.received, self._ends = ReceivedEvents(), iter(ends)

    def train(self, until: int, *, stall_seconds: float | None) -> SegmentDone:
        return next(self._ends)


def test_the_heartbeat_says_that_a_step_has_no_checkpoint_until_one_is_staged_again(flow: FlowWorld) -> None:
    done = SegmentDone(step=9, stopped=False, tokens=1, gpu_seconds=1.0)
    with flow.opened() as run:
        trainer, process = AttemptTrainer(run, claim_next_attempt(run)), ScriptedTrainer(replace(done, behind=5), done)
        trainer._process = process  # type: ignore[assignment]
        trainer.train(Segment(attempt=1, first=0, until=9))
        assert "no checkpoint of step 9: that of step 5" in trainer.heartbeat(1).symptom
        trainer.train(Segment(attempt=1, first=0, until=9))
        assert trainer.heartbeat(2).symptom == ""


def test_a_run_told_to_end_after_a_segment_without_a_checkpoint_commits_it_all_the_same(flow: FlowWorld) -> None:
    shutdown, warm = ShutdownSignal(), NotedWarmTrainer("--slow-upload", "4", "--stop-parent")
    with flow.opened(*SHORT, warm=warm, shutdown=shutdown) as run, shutdown.listening():
        ended = train_attempt(run, claim_next_attempt(run), PLAIN)
    steps = [record.committed.step for record in flow.log.refresh().checkpoints]
    assert (ended.reason, steps) == ("preempted", [2, 4, 6])


def test_a_notice_to_another_machine_is_the_reason_even_where_its_part_of_the_checkpoint_is_lost(
    flow: FlowWorld,
) -> None:
    with flow.opened(warm=NotedWarmTrainer("--leave-at", "5")) as run:
        ended = train_attempt(run, claim_next_attempt(run), PLAIN)
    steps = [record.committed.step for record in flow.log.refresh().checkpoints]
    assert (ended.reason, ended.last_step, steps) == ("preempted", 5, [5])


def test_an_attempt_that_the_loss_of_a_rank_ends_says_which_and_that_the_budget_is_spent(flow: FlowWorld) -> None:
    flow.train("budgets.lost.retries=0", warm=NotedWarmTrainer("--once", "lose-rank@5"))
    (record,) = flow.log.state.attempts
    assert record.ended is not None and record.ended.reason == "lost"
    assert record.ended.detail == "rank 1 lost after step 5, and budget lost is spent"
    assert flow.log.state.charges["lost"].total == 1 and not flow.log.state.member_changes


def test_all_verdicts_of_a_run_read_on_in_one_curve(flow: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    made, reader = list[CurveReader](), CurveReader

    def make(*arguments: Any) -> CurveReader:
        made.append(reader(*arguments))
        return made[-1]

    monkeypatch.setattr(curve_reader, "CurveReader", make)
    flow.train("checkpoint.every_steps=2", "budgets.lost.retries=1", warm=NotedWarmTrainer("--die-at", "13"))
    assert len([item for item in flow.log.state.evaluations if item.verdict]) > 2 and len(made) == 1


def test_a_trainer_that_dies_between_two_commits_ends_the_attempt_there(flow: FlowWorld) -> None:
    warm = NotedWarmTrainer("--die-at", "13")
    flow.train("checkpoint.every_steps=2", "budgets.lost.retries=0", warm=warm)
    (record,) = flow.log.state.attempts
    assert record.ended is not None and (record.ended.reason, record.ended.last_step) == ("lost", 13)
    assert record.last_committed_step == 12


def test_a_limit_in_seconds_ends_segments_by_the_speed_of_the_last_step(flow: FlowWorld) -> None:
    seconds_a_step = 4 * 8 / 1000
    flow.train(f"checkpoint.every_seconds={4.5 * seconds_a_step}")
    _, commands = flow.heard()
    assert [command.step for command in commands[:-1] if isinstance(command, TrainUntil)] == [1, 5, 9, 10, 14, 18, 20]


def test_a_finished_run_waits_for_no_other_attempt_and_starts_no_trainer_for_one(flow: FlowWorld) -> None:
    warm = NotedWarmTrainer()
    flow.train(warm=warm)
    assert warm.waited == [] and len(warm._acquired) == 1


def test_the_flow_waits_between_attempts_as_the_budget_says_until_it_is_spent(flow: FlowWorld) -> None:
    warm = NotedWarmTrainer("--die-at", "13")
    state = flow.train("budgets.lost.retries=2", "budgets.lost.backoff_seconds=8", warm=warm)
    first, second = warm.waited
    assert 4 <= first <= 8 and 8 <= second <= 16
    decided = [record.ended.decision.delay_seconds for record in flow.log.state.attempts if record.ended]
    assert (decided, state.name) == ([first, second, 0.0], "Failed")


def test_device_time_lost_over_the_run_is_a_budget_too(flow: FlowWorld) -> None:
    lost = 3 * STEP_GPU_SECONDS
    flow.train(
        "budgets.lost.retries=9",
        f"budgets.lost.wasted_gpu_seconds={1.5 * lost}",
        warm=NotedWarmTrainer("--die-at", "13"),
    )
    assert len(flow.log.state.attempts) == 2


def test_a_receipt_counts_what_the_trainer_did_and_what_of_it_was_lost(killed: FlowWorld) -> None:
    (record,) = killed.log.state.attempts
    ended = record.ended
    assert ended is not None and (ended.reason, ended.last_step) == ("lost", 13)
    assert ended.tokens == 13 * STEP_TOKENS
    assert (ended.gpu_seconds, ended.useful_gpu_seconds, ended.wasted_gpu_seconds) == (
        13 * STEP_GPU_SECONDS,
        10 * STEP_GPU_SECONDS,
        3 * STEP_GPU_SECONDS,
    )
    assert ended.evidence["exit_code"] == -signal.SIGKILL and ended.evidence["heartbeat_step"] == 13


def test_a_commit_counts_tokens_and_device_time_up_to_its_step(killed: FlowWorld) -> None:
    committed = killed.log.state.checkpoints[0].committed
    assert (committed.tokens, committed.gpu_seconds) == (10 * STEP_TOKENS, 10 * STEP_GPU_SECONDS)


def test_the_last_heartbeat_says_how_far_the_trainer_got(killed: FlowWorld) -> None:
    heartbeat = read_heartbeat(killed.store, killed.log.prefix, 1)
    assert heartbeat is not None
    assert heartbeat == Heartbeat(
        attempt=1,
        beat=heartbeat.beat,
        step=13,
        train_loss=loss_of(13),
        tokens_per_second=TOKENS_PER_SECOND,
        tokens=13 * STEP_TOKENS,
        gpu_seconds=13 * STEP_GPU_SECONDS,
        at=heartbeat.at,
        peak=PEAK,
        starting_seconds=heartbeat.starting_seconds,
        claim_id=killed.log.state.attempts[0].started.claim_id,
    )


def test_the_end_of_an_attempt_has_the_peak_and_how_long_its_trainer_started(killed: FlowWorld) -> None:
    ended, heartbeat = killed.log.state.attempts[0].ended, read_heartbeat(killed.store, killed.log.prefix, 1)
    assert ended is not None and heartbeat is not None and ended.peak == PEAK
    assert ended.starting_seconds == heartbeat.starting_seconds and heartbeat.at is not None


def test_a_receipt_names_the_device_and_counts_cores_and_the_faults_to_inject(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_FAULTS", "hang@4711")
    with flow.opened() as run:
        started = claim_next_attempt(run)
    assert started.faults == "hang@4711" and started.placement.nodes == started.placement.nodes_wanted == 1
    assert (started.placement.device_name, started.placement.cores) == (device_name("cpu"), usable_cores())


@pytest.mark.parametrize("said", ["", "slurm job 4711"])
def test_opening_and_receipt_say_who_starts_the_run_again(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("CAIRN_CONTINUED_BY", said)
    with flow.opened() as run:
        started = claim_next_attempt(run)
    opened = run.log.state.opened
    assert opened is not None
    assert opened.continued_by == started.placement.continued_by == (said or "person")


def test_the_run_ends_with_the_digest_of_its_last_checkpoint(flow: FlowWorld) -> None:
    state = flow.train()
    finished, newest = flow.log.state.finished, flow.log.state.newest_committed
    assert finished is not None and newest is not None and state.name == "Completed"
    assert (finished.step, finished.state_sha256) == (20, newest.committed.state_sha256)
    assert finished.manifest_sha256 == newest.committed.manifest_sha256


def test_a_run_that_stops_early_stops_where_its_policy_says(flow: FlowWorld) -> None:
    flow.evaluators.losses[:] = [2.0, 2.5]
    flow.train("checkpoint.every_steps=5", "early_stop.patience=1")
    finished = flow.log.state.finished
    assert finished is not None and (finished.step, finished.rule) == (10, "patience")


@pytest.fixture
def deaf(flow: FlowWorld) -> Deaf:
    """A trainer that ignores SIGTERM, as soon as SIGTERM was passed on to it, with this grace."""

    @contextmanager
    def trainer_of(grace: float) -> Iterator[AttemptTrainer]:
        shutdown, warm = ShutdownSignal(), NotedWarmTrainer("--deaf")
        with flow.opened(f"checkpoint.grace_seconds={grace}", warm=warm, shutdown=shutdown) as run:
            trainer = AttemptTrainer(run, claim_next_attempt(run))
            with trainer.running():
                assert trainer._process is not None
                trainer._process.wait_ready()
                shutdown.request("SIGTERM")
                yield trainer

    return trainer_of


def test_a_deaf_trainer_is_killed_when_its_grace_is_over(deaf: Deaf) -> None:
    with deaf(0.05) as trainer:
        evidence = trainer.evidence(TrainerGone())
    assert (evidence.grace_ended, evidence.exit_code, evidence.stop_signal) == (True, -signal.SIGKILL, "SIGTERM")


def test_the_grace_of_a_trainer_is_that_of_the_configuration(deaf: Deaf) -> None:
    with deaf(612.0) as trainer:
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        evidence = trainer.evidence(Fenced("by the test"))
    assert 612.0 in [timer.interval for timer in timers] and not evidence.grace_ended
    for timer in timers:
        timer.cancel()


def test_a_run_is_finished_after_its_trainer_has_ended_which_has_a_limit(flow: FlowWorld) -> None:
    state = flow.train("checkpoint.grace_seconds=0.3", warm=NotedWarmTrainer("--linger"))
    (record,) = flow.log.state.attempts
    assert record.ended is not None and (state.name, record.ended.reason) == ("Completed", "completed")
    assert not list(flow.folder.rglob("finished-before-its-trainer"))


def test_a_trainer_that_is_silent_for_too_long_is_killed_as_hung_and_its_silence_is_wasted(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "_STACKS_POLL_SECONDS", 0.0)  # this trainer has no stacks to wait for
    state = flow.train("watchdog.startup_seconds=0.5", "budgets.hung.retries=0", warm=NotedWarmTrainer("--deaf"))
    (record,) = flow.log.state.attempts
    assert record.ended is not None and (state.name, record.ended.reason) == ("Failed", "hung")
    silent = record.ended.evidence["silent_seconds"]
    assert record.ended.evidence["allowed_seconds"] == 0.5 < silent <= record.ended.wasted_gpu_seconds


def test_a_claim_charges_the_lost_attempt_to_the_budget_of_the_configuration(flow: FlowWorld) -> None:
    with flow.opened("budgets.lost.retries=0", "lease.seconds=0.4", "lease.heartbeat_seconds=0.1") as run:
        started = claim_next_attempt(run)
        elsewhere = replace(started, attempt=2, placement=replace(started.placement, host="elsewhere"))
        end_with(run, Evidence(stop_signal="SIGTERM"), started)
        run.log.append(lambda state: elsewhere, writer=this_writer())
        with pytest.raises(BudgetExhausted):
            claim_next_attempt(run)


def test_a_run_is_opened_with_the_frozen_part_of_its_configuration(flow: FlowWorld) -> None:
    with flow.opened() as run:
        opened = run.log.state.opened
    assert opened is not None and (opened.model_family, opened.total_steps) == ("gpt2-wiring", 20)
    assert opened.config == run.config.frozen() and opened.config_sha256 == run.config.frozen_sha256()


TWIN = "twin"


def test_the_trainer_of_a_fork_is_sent_what_lies_before_it(flow: FlowWorld) -> None:
    flow.train("training.micro_batch=2", "budgets.lost.retries=0", warm=NotedWarmTrainer("--die-at", "13"))
    found = find_checkpoint(flow.store, f"{RUN}@10")
    fork_run(found, TWIN, ("training.global_batch=2",), {}, flow.folder)
    flow.train(text="", run_id=TWIN)
    heard = [path.read_bytes().splitlines()[0] for path in (flow.folder / "cache").rglob("*.heard")]
    (spec,) = (spec for spec in map(TrainerSpec.model_validate_json, heard) if spec.run_id == TWIN)
    assert spec.before == TrainedBefore(step=10, draws=40, tokens=320, component_draws=(40,))


class Noting(NotedWarmTrainer):
    """Notes the committed steps whenever a trainer is started."""

    def __init__(self, flow: FlowWorld) -> None:
        super().__init__()
        self._flow = flow
        self.starts: list[list[str]] = []

    def start(self, work_dir: Path) -> None:
        committed = self._flow.log.state.live_checkpoints
        self.starts.append([str(record.committed.step) for record in committed])


@pytest.mark.parametrize(("is_of_set", "expected"), [(True, [["10", "20"]]), (False, [])])
def test_the_trainer_of_the_next_run_is_started_once_this_one_has_trained(
    flow: FlowWorld, is_of_set: bool, expected: list[list[str]]
) -> None:
    warm = Noting(flow)
    warm.is_of_set = is_of_set
    flow.train(warm=warm)
    assert warm.starts[2:] == expected, "after those of its own: when the run is opened, and when it is claimed"
