"""The keys of all other sections, each seen in a run of the flow, in its data, or in what its log says."""

import json
import os
import signal
import threading
from typing import Any

import pytest

from flows.operations.promotion_by_person import promotion_rules
from flows.orchestrator.promotion_approval import Question
from flows.preparation import preflight
from flows.preparation.memory_check import AvailableMemory
from flows.run import active_run, run_promotion
from flows.run import attempt as attempt_flow
from flows.run.attempt import Attempt, claim_next_attempt
from flows.run.trainer_observation import TrainerObservation
from model.estimates.size_estimate import TrainingPlace
from storage.logs.registry import Registry
from storage.snapshots.data_snapshot import read_manifest
from storage.snapshots.snapshot_manifest import SnapshotManifest
from tasks.attempt.preemption_notice import AwsMetadata, notice_sources
from tasks.data.document import InvalidCorpus
from tasks.errors import InvalidConfiguration
from tasks.evaluator.evaluation_suite import CommandSuite
from tasks.policy.error_kind import ErrorKind
from tasks.policy.failures import Evidence, ExceptionReport
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import TEXT, FlowWorld
from tests.wiring.key_table import acts, seen_by
from tests.wiring.tensorless_trainer import loss_of

FLOW, EVALUATOR, TRAINER = (f"tests/wiring/test_{name}.py" for name in ("flow", "evaluator", "trainer"))
EARLY_STOP, REPORT = "tests/tasks/test_early_stop.py", "tests/cairn/test_report_command.py"
EXPORTERS = "tests/reports/test_exporters.py"
SPIKE = f"{TRAINER}::test_a_diverged_run_blames_exactly_the_windows_of_the_spike"
BUDGETS = ("retries", "total", "wasted_gpu_seconds", "backoff_seconds", "samples")
seen_by(f"{FLOW}::test_a_run_is_opened_with_the_frozen_part_of_its_configuration", "model_family")
seen_by("tests/flows/test_training_request.py::test_a_url_in_the_configuration_is_taken_as_it_is", "store")
seen_by(
    "tests/tasks/test_weighted_training.py::test_batches_follow_the_weights_and_mix_no_two_sources_in_a_window",
    "data.weights",
)
seen_by(f"{FLOW}::test_segments_end_where_the_configuration_commits", "checkpoint.every_steps")
seen_by(f"{FLOW}::test_a_limit_in_seconds_ends_segments_by_the_speed_of_the_last_step", "checkpoint.every_seconds")
seen_by(f"{FLOW}::test_the_grace_of_a_trainer_is_that_of_the_configuration", "checkpoint.grace_seconds")
seen_by(
    f"{EVALUATOR}::test_a_failed_evaluator_is_run_again_as_often_as_its_budget_says", "budgets.evaluator-failed.retries"
)
seen_by(f"{FLOW}::test_a_run_that_stops_early_stops_where_its_policy_says", "early_stop.patience")
seen_by(
    f"{EARLY_STOP}::test_a_verdict_stops_where_the_policy_says_so", "early_stop.on_divergence", "early_stop.on_stuck"
)
seen_by(SPIKE, "divergence.patience_steps", "divergence.rise_nats")
seen_by(f"{FLOW}::test_a_trainer_that_is_silent_for_too_long_is_killed_as_hung", "watchdog.startup_seconds")
seen_by(f"{REPORT}::test_the_price_of_the_configuration_is_used", "cost.gpu_hour_price")
seen_by(f"{REPORT}::test_money_is_an_estimate_and_absent_without_a_price", "cost.currency")
seen_by(f"{EXPORTERS}::test_both_mirrors_of_a_configuration_are_kept", "mirrors.mlflow")


def built(bench: Bench, *overrides: str) -> SnapshotManifest:
    """Return the manifest of the snapshot that a run with these settings is opened with."""
    with bench.flow.opened(*overrides) as run:
        return read_manifest(run.log.store, run.origin.snapshot_id)


def documents(manifest: SnapshotManifest) -> int:
    return manifest.split("train").documents + manifest.split("val").documents


@acts("data.sources", "data.text_field")
def the_text_of_other_files(bench: Bench) -> None:
    lines = [json.dumps({"body": f"line {number} of its body", "text": "x"}) for number in range(80)]
    (bench.flow.folder / "lines.jsonl").write_text("\n".join(lines))
    manifest = built(bench, 'data.sources=["lines.jsonl"]', "data.text_field=body")
    assert [source.name for source in manifest.sources] == ["lines.jsonl"] and documents(manifest) == 80
    assert manifest.split("train").bytes + manifest.split("val").bytes == sum(
        len(json.loads(line)["body"]) for line in lines
    )


@acts("data.val_fraction")
def the_share_that_is_held_out(bench: Bench) -> None:
    manifest = built(bench, "data.val_fraction=0.8")
    assert manifest.split("val").documents > 2 * manifest.split("train").documents


@acts("data.tokenizer", "data.tokenizer_bytes")
def what_a_tokenizer_learns_from(bench: Bench) -> None:
    """A tokenizer of a little of the text has other tokens than one of all of it; both have as many as asked."""

    def tokenizer(name: str, *overrides: str) -> tuple[int, str]:
        folder = bench.flow.folder / name
        folder.mkdir()
        world = FlowWorld(folder)
        (folder / "text.txt").write_text(f"{TEXT}\n\n" + "\n\n".join(f"zzyzx {number} qqvq" for number in range(60)))
        with world.opened("data.tokenizer=bpe:290", *overrides) as run:
            manifest = read_manifest(run.log.store, run.origin.snapshot_id)
        (found,) = [item.sha256 for item in manifest.objects if item.key == "tokenizer.json"]
        return manifest.vocab_size, found

    (whole_size, whole), (part_size, part) = tokenizer("whole"), tokenizer("part", "data.tokenizer_bytes=900")
    assert (whole_size, part_size) == (290, 290) and whole != part


@acts("data.max_document_bytes", "data.max_rejected_fraction")
def long_documents_left_out(bench: Bench) -> None:
    (bench.flow.folder / "text.txt").write_text(f"{TEXT}\n\n{'long ' * 100}")
    with pytest.raises(InvalidCorpus):
        built(bench, "data.max_document_bytes=100", "data.max_rejected_fraction=0.001")
    assert documents(built(bench, "data.max_document_bytes=100", "data.max_rejected_fraction=0.5")) == 60


@acts("data.deduplicate")
def equal_documents_left_out(bench: Bench) -> None:
    (bench.flow.folder / "text.txt").write_text(f"{TEXT}\n\n{TEXT}")
    assert documents(built(bench, "data.deduplicate=true")) == 60


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
        assert run.retry.policy.total_seconds == 83.5
        assert attempt_flow._trainer_spec(run, claim_next_attempt(run)).patience_seconds == 83.5
    with bench.world.opened(bench.world.spec(910, patience_seconds=83.5)) as (trainer, _):
        assert trainer._staging._retry_policy.total_seconds == 83.5


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
    suite: dict[str, Any] = bench.flow.evaluators.specs[-1]["suite"]
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
    suites = [spec["suite"] for spec in bench.flow.evaluators.specs if "command" in spec["suite"]]
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
    assert isinstance(suite, CommandSuite) and (suite.command, suite.required) == (("true", "{model}"), True)


@acts("early_stop.min_delta")
def how_much_better_is_better(bench: Bench) -> None:
    bench.flow.evaluators.losses[:] = [2.0, 1.9, 1.8]
    bench.flow.train("checkpoint.every_steps=5", "early_stop.patience=1", "early_stop.min_delta=0.5")
    finished = bench.flow.log.state.finished
    assert finished is not None and (finished.step, finished.rule) == (10, "patience")


@acts("early_stop.overfit_ratio", "early_stop.overfit_patience")
def how_far_the_held_out_loss_may_lie_above(bench: Bench) -> None:
    bench.flow.evaluators.losses[:] = [1.1 * loss_of(50), 1.5 * loss_of(100), 1.5 * loss_of(150)]
    overfit = ("early_stop.overfit_ratio=1.3", "early_stop.overfit_patience=2")
    bench.flow.train("training.steps=250", "checkpoint.every_steps=50", *overfit)
    finished = bench.flow.log.state.finished
    assert finished is not None and (finished.step, finished.rule) == (150, "overfit_ratio")


@acts("promotion.alias", "promotion.min_improvement")
def an_alias_and_how_much_better_it_must_become(bench: Bench) -> None:
    ours = ("promotion.alias=best", "promotion.min_improvement=0.5")
    bench.flow.train(*ours)
    bench.flow.evaluators.losses[:] = [1.75]
    state = bench.flow.train(*ours, run_id="second")
    champion = Registry(bench.flow.store, "best").refresh().champion
    assert champion is not None and champion.run_id == "bard"
    assert "by 0.5 (promotion.min_improvement)" in state.message
    assert Registry(bench.flow.store, "champion").refresh().champion is None


@acts("promotion.refuse_verdicts")
def verdicts_that_refuse(bench: Bench) -> None:
    with bench.flow.opened('promotion.refuse_verdicts=["plateau"]') as run:
        assert promotion_rules(run.config).refuse_verdicts == ("plateau",)


@acts("promotion.require_approval", "promotion.approval_timeout_seconds")
def a_person_is_asked(bench: Bench) -> None:
    asked: list[Question] = []
    bench.patch.setattr(run_promotion, "ask", lambda question, *_: asked.append(question) or "nobody is here")
    state = bench.flow.train("promotion.require_approval=true", "promotion.approval_timeout_seconds=61.5")
    assert [question.timeout_seconds for question in asked] == [61.5]
    assert "waits for approval" in state.message
    assert Registry(bench.flow.store, "champion").refresh().champion is None


def report(kind: ErrorKind, **more: Any) -> ExceptionReport:
    return ExceptionReport(kind=kind, exception="E", message="by the test", traceback=(), **more)


ENDS = {
    "preempted": Evidence(stop_signal="SIGTERM"),
    "lost": Evidence(exit_code=-9),
    "oom": Evidence(exit_code=-9, oom_kills=1),
    "bad-data": Evidence(last_words=report(ErrorKind.BAD_DATA, step=3, windows=(1, 2))),
    "diverged": Evidence(last_words=report(ErrorKind.DIVERGED, step=3, spike_step=2, windows=(1, 2))),
    "storage": Evidence(store_error="away"),
    "hung": Evidence(silent_seconds=90.0, allowed_seconds=60.0),
}


def enter_budget(reason: str) -> None:
    """Enter the case of a reason's budget: the receipt of an attempt that ends so says what is left of each limit."""

    def budget(bench: Bench) -> None:
        section = reason.replace("-", "_")
        values = {"retries": 7, "total": 5, "wasted_gpu_seconds": 11.5, "backoff_seconds": 64.0, "samples": 9}
        with bench.flow.opened(*(f"budgets.{section}.{name}={value}" for name, value in values.items())) as run:
            ended = Attempt(run, claim_next_attempt(run))._end(ENDS[reason])
        assert (ended.reason, ended.decision.charged) == (reason, reason)
        quarantined = 2 if reason in ("bad-data", "diverged") else 0
        left = {"retries": 6, "total": 4, "wasted_gpu_seconds": 11, "samples": 9 - quarantined}
        assert ended.decision.left == left and 32.0 <= ended.decision.delay_seconds <= 64.0

    budget.__name__ = f"the_budget_of_{reason}"
    acts(*(f"budgets.{reason}.{name}" for name in BUDGETS))(budget)


for ending in ENDS:
    enter_budget(ending)


@acts("training.on_oom")
def what_is_tried_first_after_out_of_memory(bench: Bench) -> None:
    changed = []
    for remedy in ("halve", "recompute"):
        with bench.flow.opened(f"training.on_oom={remedy}") as run:
            changed.append(Attempt(run, claim_next_attempt(run))._end(ENDS["oom"]).decision.changed)
    assert "bits differ from here" in changed[0] and "bits stay equal" in changed[1]


@acts("lease.seconds", "lease.heartbeat_seconds")
def how_a_live_attempt_is_recognized(bench: Bench) -> None:
    seen: list[Any] = []
    claim, beat = attempt_flow.claim_attempt, attempt_flow.writing_heartbeats

    def noting_claim(log: Any, claimant: Any, start: Any) -> Any:
        seen.append(claimant.lease.seconds)
        return claim(log, claimant, start)

    def noting_beat(*arguments: Any, every_seconds: float) -> Any:
        seen.append(every_seconds)
        return beat(*arguments, every_seconds=every_seconds)

    bench.patch.setattr(attempt_flow, "claim_attempt", noting_claim)
    bench.patch.setattr(attempt_flow, "writing_heartbeats", noting_beat)
    bench.flow.train("lease.seconds=45.5", "lease.heartbeat_seconds=1.25")
    assert seen == [45.5, 1.25]


@acts("watchdog.factor", "watchdog.floor_seconds")
def how_long_a_trainer_may_be_silent(bench: Bench) -> None:
    with bench.flow.opened("watchdog.factor=3", "watchdog.floor_seconds=5") as run:
        watch = TrainerObservation(run.config, run.shutdown, run.cancellation).watch
    watch._gaps.extend([1.0, 1.5, 1.0, 1.0])
    assert watch.heartbeat_gap().allowed_seconds == 5.0
    watch._gaps.append(4.0)
    assert watch.heartbeat_gap().allowed_seconds == 12.0


@acts("preemption.notice_file", "preemption.poll_seconds", "preemption.metadata")
def notices_besides_signals(bench: Bench) -> None:
    polled: list[float] = []
    poll = active_run.polling_notices

    def noting(*arguments: Any, poll_seconds: float, **rest: Any) -> Any:
        polled.append(poll_seconds)
        return poll(*arguments, poll_seconds=0.01, **rest)

    bench.patch.setattr(active_run, "polling_notices", noting)
    notice = bench.flow.folder / "leave"
    notice.write_text("now")
    with bench.flow.opened(f"preemption.notice_file={notice}", "preemption.poll_seconds=2.5") as run:
        noticed = threading.Event()
        with run.running_services(), run.shutdown.on_shutdown(noticed.set):
            assert noticed.wait(60)
        assert polled == [2.5] and str(notice) in run.shutdown.detail
    with bench.flow.opened("preemption.metadata=aws") as run:
        (source,) = notice_sources(run.config.preemption, {})
        assert isinstance(source, AwsMetadata)


@acts("training.memory_check")
def whether_a_size_that_cannot_fit_is_refused(bench: Bench) -> None:
    little = AvailableMemory(bytes=1000, place=TrainingPlace(on_cuda=False, processes=1))
    bench.patch.setattr(preflight, "available_memory", lambda *_: little)
    with pytest.raises(InvalidConfiguration, match=r"training\.memory_check = false"):
        bench.flow.check()
    assert not bench.flow.check("training.memory_check=false").training.memory_check


@acts("preemption.signal")
def a_signal_of_the_scheduler(bench: Bench) -> None:
    unheard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: unheard.append(number))
    try:
        with bench.flow.opened("preemption.signal=SIGUSR1") as run, run.running_services():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (run.shutdown.signal, unheard) == ("SIGUSR1", [])
    finally:
        signal.signal(signal.SIGUSR1, before)


@acts("mirrors.tensorboard")
def a_folder_that_tensorboard_reads(bench: Bench) -> None:
    bench.flow.train("mirrors.tensorboard=board")
    assert [path for path in (bench.flow.folder / "board").rglob("*tfevents*") if path.stat().st_size]
