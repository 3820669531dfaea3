"""The keys of checkpoints, evaluations, budgets, lease and watchdog, each seen in a run of the flow or its log."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from cairn.flows.operations.checkpoint_operations import promotion_rules
from cairn.flows.preparation import preflight
from cairn.flows.preparation.preflight import AvailableMemory
from cairn.flows.run import attempt_trainer
from cairn.flows.run.attempt_trainer import AttemptTrainer
from cairn.flows.run.node_service import gather_machines
from cairn.flows.run.run_start import claim_next_attempt
from cairn.flows.run.steps import PLAIN
from cairn.flows.train_gpt import train_attempt
from cairn.model.estimates.size_estimate import TrainingPlace
from cairn.storage.logs.run_entries import EvaluationFailed
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.configuration.settings import EvaluatorConfig
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport
from cairn.tasks.trainer.trainer_protocol import TrainUntil
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import end_with
from tests.wiring.key_table import acts, seen_by

FLOW, EVALUATOR, TRAINER = (f"tests/wiring/test_{name}.py" for name in ("flow", "evaluator", "trainer"))
SPIKE = f"{TRAINER}::test_a_diverged_run_blames_exactly_the_windows_of_the_spike"
BUDGETS = ("retries", "total", "wasted_gpu_seconds", "backoff_seconds", "samples")
seen_by(f"{FLOW}::test_a_run_is_opened_with_the_frozen_part_of_its_configuration", "model_family")
seen_by(f"{FLOW}::test_segments_end_where_the_configuration_commits", "checkpoint.every_steps")
seen_by(f"{FLOW}::test_a_limit_in_seconds_ends_segments_by_the_speed_of_the_last_step", "checkpoint.every_seconds")
seen_by(f"{FLOW}::test_the_grace_of_a_trainer_is_that_of_the_configuration", "checkpoint.grace_seconds")
seen_by(
    f"{EVALUATOR}::test_a_failed_evaluator_is_run_again_as_often_as_its_budget_says", "budgets.evaluator-failed.retries"
)
seen_by(f"{FLOW}::test_a_run_that_stops_early_stops_where_its_policy_says", "early_stop.patience")
seen_by(SPIKE, "divergence.patience_steps", "divergence.rise_nats")
seen_by(
    f"{FLOW}::test_a_trainer_that_is_silent_for_too_long_is_killed_as_hung_and_its_silence_is_wasted",
    "watchdog.startup_seconds",
)


@acts("checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.keep_every")
def which_checkpoints_stay(bench: Bench) -> None:
    bench.flow.evaluators.losses[:] = [3.0, 2.5, 1.0, 0.75, 2.0, 0.5]
    kept = ("checkpoint.keep_last=2", "checkpoint.keep_best=3", "checkpoint.keep_every=10")
    bench.flow.train("training.steps=30", "checkpoint.every_steps=5", *kept)
    readable = sorted(record.committed.step for record in bench.flow.log.state.readable)
    assert readable == [10, 15, 20, 25, 30], "10 is a multiple, 15 only the third best, 25 only one of the newest"


@acts("checkpoint.patience_seconds")
def how_long_the_store_is_waited_for(bench: Bench) -> None:
    with bench.flow.opened("checkpoint.patience_seconds=83.5") as run:
        assert run.retry.total_seconds == 83.5
        assert attempt_trainer._trainer_spec(run, claim_next_attempt(run)).patience_seconds == 83.5
    with bench.world.opened(bench.world.spec(910, patience_seconds=83.5)) as (trainer, _):
        assert trainer._staging._retry_policy.total_seconds == 83.5


@acts("checkpoint.stall_seconds")
def how_long_training_waits_for_an_upload(bench: Bench) -> None:
    bench.flow.train("checkpoint.stall_seconds=7.5")
    _, commands = bench.flow.heard()
    waits = [command.stall_seconds for command in commands if isinstance(command, TrainUntil)]
    assert waits == [7.5, None], "the last step is committed however long that takes"


@acts("evaluation.every_commits", "evaluation.timeout_seconds")
def when_a_checkpoint_is_evaluated(bench: Bench) -> None:
    bench.flow.train("checkpoint.every_steps=4", "evaluation.every_commits=2", "evaluation.timeout_seconds=71")
    assert [spec["checkpoint"]["step"] for spec in bench.flow.evaluators.specs] == [8, 16, 20]
    assert set(bench.flow.evaluators.timeouts) == {71.0}


SUITE: dict[str, Any] = {
    "name": "own-words",
    "batches": 3,
    "batch_size": 5,
    "prompts": ["One ", "Two "],
    "sample_tokens": 7,
    "sample_seed": 11,
}


def suite_of_run(bench: Bench, *overrides: str) -> dict[str, Any]:
    """Return what the evaluator of the run's last checkpoint was told to measure, without its version."""
    bench.flow.train(*overrides)
    suite: dict[str, Any] = bench.flow.evaluators.specs[-1]["plan"]["suite"]
    return {name: suite[name] for name in SUITE}


@acts(*(f"evaluation.{name}" for name in SUITE))
def what_is_measured(bench: Bench) -> None:
    assert suite_of_run(bench, *(f"evaluation.{name}={json.dumps(value)}" for name, value in SUITE.items())) == SUITE


@acts("evaluation.suite")
def what_a_file_says_is_measured(bench: Bench) -> None:
    lines = (f"{name} = {json.dumps(value)}" for name, value in SUITE.items())
    (bench.flow.folder / "suite.toml").write_text("\n".join(lines))
    assert suite_of_run(bench, "evaluation.suite=suite.toml") == SUITE


@acts(
    "evaluation.evaluators",
    *(f"evaluation.evaluators.{name}" for name in ("name", "command", "timeout_seconds", "required")),
)
def commands_that_measure(bench: Bench) -> None:
    one = '{name = "words", command = "true {model}", timeout_seconds = 12.5, required = true}'
    two = '{name = "more", command = "false"}'
    bench.flow.train(f"evaluation.evaluators=[{one}, {two}]")
    suites = [spec["plan"]["suite"] for spec in bench.flow.evaluators.specs if "command" in spec["plan"]["suite"]]
    assert [(suite["name"], suite["command"]) for suite in suites[:2]] == [
        ("words", ["true", "{model}"]),
        ("more", ["false"]),
    ]
    assert bench.flow.evaluators.timeouts[1:3] == [12.5, 600.0]
    with bench.flow.opened(f"evaluation.evaluators=[{one}, {two}]") as run:
        assert [suite.name for suite in promotion_rules(run.config).required] == ["held-out", "words"]


@acts("evaluation.command")
def the_short_form_of_a_command(bench: Bench) -> None:
    with bench.flow.opened("evaluation.command=true {model}") as run:
        (suite,) = [plan.suite for plan in run.evaluation.following]
    assert isinstance(suite, EvaluatorConfig) and (suite.command, suite.required) == (("true", "{model}"), True)


def report(kind: ErrorKind, **more: Any) -> ExceptionReport:
    return ExceptionReport(kind=kind, exception="E", message="by the test", traceback=(), **more)


ENDS = {
    "preempted": Evidence(stop_signal="SIGTERM", exit_code=0),
    "lost": Evidence(exit_code=-9),
    "oom": Evidence(exit_code=-9, oom_kills=1),
    "bad-data": Evidence(last_words=report(ErrorKind.BAD_DATA, step=3, windows=(1, 2))),
    "diverged": Evidence(last_words=report(ErrorKind.DIVERGED, step=3, spike_step=2, windows=(1, 2))),
    "storage": Evidence(store_error="away"),
    "hung": Evidence(silent_seconds=90.0, allowed_seconds=60.0),
    "too-few-machines": Evidence(too_few_machines="1 of 2"),
}


def enter_budget(reason: str) -> None:
    """Enter the case of a reason's budget: the receipt of an attempt that ends so says what is left of each limit."""

    def budget(bench: Bench) -> None:
        section = reason.replace("-", "_")
        values = {"retries": 7, "total": 5, "wasted_gpu_seconds": 11.5, "backoff_seconds": 64.0, "samples": 9}
        with bench.flow.opened(*(f"budgets.{section}.{name}={value}" for name, value in values.items())) as run:
            ended = end_with(run, ENDS[reason])
        assert (ended.reason, ended.decision.charged) == (reason, reason)
        quarantined = 2 if reason in ("bad-data", "diverged") else 0
        left = {"retries": 6, "total": 4, "wasted_gpu_seconds": 11, "samples": 9 - quarantined}
        assert ended.decision.left == left and 32.0 <= ended.decision.delay_seconds <= 64.0

    budget.__name__ = f"the_budget_of_{reason}"
    acts(*(f"budgets.{reason}.{name}" for name in BUDGETS))(budget)


for ending in ENDS:
    enter_budget(ending)


@acts(*(f"budgets.evaluator-failed.{name}" for name in ("total", "wasted_gpu_seconds", "backoff_seconds")))
def what_failing_evaluators_may_spend(bench: Bench) -> None:
    def tries(run_id: str, *limits: str) -> Sequence[EvaluationFailed]:
        given = (f"budgets.evaluator-failed.{limit}" for limit in ("retries=2", *limits))
        bench.flow.train(*given, run_id=run_id)
        return list(RunLog(bench.flow.store, run_id).refresh().failed_evaluations)

    bench.flow.evaluators.problem = "it fell over"
    first, second, third, *others = tries("total", "total=3", "backoff_seconds=0.02")
    assert [failed.step for failed in (first, second, third, *others)] == [10, 10, 10, 20, 20]
    assert (second.started_at - first.started_at).total_seconds() >= 0.02
    assert (third.started_at - second.started_at).total_seconds() >= 0.04
    assert [failed.step for failed in tries("wasted", "wasted_gpu_seconds=0")] == [10, 20]


@acts("training.on_oom")
def what_is_tried_first_after_out_of_memory(bench: Bench) -> None:
    changed = []
    for remedy in ("halve", "recompute"):
        with bench.flow.opened(f"training.on_oom={remedy}") as run:
            changed.append(end_with(run, ENDS["oom"]).decision.changed)
    assert "bits differ from here" in changed[0] and "bits stay equal" in changed[1]


@acts("lease.seconds", "lease.heartbeat_seconds")
def how_a_live_attempt_is_recognized(bench: Bench) -> None:
    seen: list[Any] = []
    claim, beat = attempt_trainer.attempt_entries.claim_attempt, attempt_trainer.attempt_entries.writing_heartbeats

    def noting_claim(log: Any, claimant: Any, start: Any) -> Any:
        seen.append(claimant.lease.seconds)
        return claim(log, claimant, start)

    def noting_beat(*arguments: Any, every_seconds: float) -> Any:
        seen.append(every_seconds)
        return beat(*arguments, every_seconds=every_seconds)

    bench.patch.setattr(attempt_trainer.attempt_entries, "claim_attempt", noting_claim)
    bench.patch.setattr(attempt_trainer.attempt_entries, "writing_heartbeats", noting_beat)
    bench.flow.train("lease.seconds=45.5", "lease.heartbeat_seconds=1.25")
    assert seen == [45.5, 1.25]


@acts("machines.at_least", "machines.wait_seconds")
def how_long_other_machines_are_waited_for_and_how_many_are_enough(bench: Bench) -> None:
    bench.patch.setenv("CAIRN_NODES", "3")
    bench.patch.setenv("CAIRN_RENDEZVOUS", "127.0.0.1:9")
    bench.patch.setenv("CAIRN_RENDEZVOUS_SECRET", "0123456789abcdef")
    soon = "machines.wait_seconds=0.25"
    for enough in ("0", "2", "4"):
        with bench.flow.opened(soon, f"machines.at_least={enough}") as run:
            gather_machines(run)
            assert run.too_few_machines.startswith("1 of 3 machines were here after")
            assert train_attempt(run, claim_next_attempt(run), PLAIN).reason == "too-few-machines"
    with bench.flow.opened(soon, "machines.at_least=1") as run:
        gather_machines(run)
        assert 0.25 <= run.gathering_seconds < 60
        started = claim_next_attempt(run)
    assert started.gathering_seconds == run.gathering_seconds
    assert (started.placement.nodes, started.placement.nodes_wanted, started.placement.world_size) == (1, 3, 1)


@acts("machines.spares")
def how_many_machines_wait_for_one_to_be_lost(bench: Bench) -> None:
    bench.patch.setenv("CAIRN_NODES", "4")
    bench.patch.setenv("CAIRN_RENDEZVOUS", "127.0.0.1:9")
    bench.patch.setenv("CAIRN_RENDEZVOUS_SECRET", "0123456789abcdef")
    for spares, nodes in ((0, 4), (1, 3), (2, 2)):
        with bench.flow.opened(f"machines.spares={spares}") as run:
            assert (run.group.nodes, run.machines.nodes) == (nodes, nodes)
    refused = r"machines\.spares=3 of CAIRN_NODES=4; rule: at least two machines"
    with pytest.raises(TaskError, match=refused), bench.flow.opened("machines.spares=3"):
        pass


@acts("machines.check")
def what_a_machine_passes_before_it_joins(bench: Bench) -> None:
    bench.patch.setenv("CAIRN_NODES", "2")
    bench.patch.setenv("CAIRN_RENDEZVOUS", "127.0.0.1:9")
    bench.patch.setenv("CAIRN_RENDEZVOUS_SECRET", "0123456789abcdef")
    for command, said in (
        ("sh -c 'echo bad GPU >&2; exit 3'", "left with 3: bad GPU"),
        ("/bin/true", "1 of 2 machines"),
    ):
        with bench.flow.opened("machines.wait_seconds=0.25", f"machines.check={command}") as run:
            gather_machines(run)
            assert said in run.too_few_machines


@acts("watchdog.factor", "watchdog.floor_seconds")
def how_long_a_trainer_may_be_silent(bench: Bench) -> None:
    with bench.flow.opened("watchdog.factor=3", "watchdog.floor_seconds=5") as run:
        watch = AttemptTrainer(run, claim_next_attempt(run))._detector
    watch._gaps.extend([1.0, 1.5, 1.0, 1.0])
    assert watch.heartbeat_gap().allowed_seconds == 5.0
    watch._gaps.append(4.0)
    assert watch.heartbeat_gap().allowed_seconds == 12.0


@acts("training.memory_check")
def whether_a_size_that_cannot_fit_is_refused(bench: Bench) -> None:
    little = AvailableMemory(bytes=1000, cores=1, place=TrainingPlace(on_cuda=False, processes=1))
    bench.patch.setattr(preflight, "available_memory", lambda *_: little)
    with pytest.raises(InvalidConfiguration, match=r"training\.memory_check = false"):
        bench.flow.check()
    assert not bench.flow.check("training.memory_check=false").training.memory_check
