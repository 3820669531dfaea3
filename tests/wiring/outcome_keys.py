"""The keys that say how a run ends and what is told of it: early stop, promotion, notices, cost, exporters."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.orchestrator.run_notices import all_receivers
from cairn.flows.run import active_run, run_decisions
from cairn.reports.errors import ReportError
from cairn.reports.exporters import exporters
from cairn.reports.exporters.tracking_tools import TensorBoardExporter
from cairn.reports.notices.notice import silent_notice
from cairn.reports.pages.report_pages import markdown_report
from cairn.reports.pages.run_report import gather_report
from cairn.reports.queries.run_status import read_status
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import BudgetExhausted
from tests.processes.waiting import patience_seconds
from tests.reports.tracking_server import tracking_server
from tests.reports.webhook import serving_hook
from tests.tasks.metadata_service import ACTION, TERMINATE, Cloud, served
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import CONFIG, RUN, NotedWarmTrainer
from tests.wiring.key_table import acts, seen_by
from tests.wiring.tensorless_trainer import STEP_GPU_SECONDS, loss_of

STUCK, DIVERGING = "5.6", "7.5"
"""Losses that fall from here are those of a uniform guess among 257 tokens, ln(257) = 5.55, or worse."""
seen_by("tests/crash/test_notify_block.py::test_a_block_of_the_server_passes_the_words_on", "notify.block")
OF_25_STEPS = ("training.steps=25", "checkpoint.every_steps=25")


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


@acts("set.halving")
def how_many_runs_of_a_set_go_on(bench: Bench) -> None:
    bench.flow.evaluators.losses[:] = [2.5, 2.0, 1.0]  # at step 10 in turn; then of the one that goes on
    logs = bench.flow.train_set("training.seed=1,2", "set.halving=2")
    lost, won = logs["1"].state, logs["2"].state
    assert lost.finished is not None and (lost.finished.step, lost.finished.rule) == (10, "set.halving")
    assert won.finished is not None and (won.finished.step, won.finished.rule) == (20, "")
    assert [item.ended.reason for item in won.attempts if item.ended] == ["paused", "completed"]
    status = read_status(logs["1"])
    assert status.state == "finished" and status.stopped_early == (
        "stopped early at step 10: it lost at rung 1 of 1: held-out loss 2.5000 (held-out of step 10, manifest "
        f"{lost.finished.manifest_sha256[:12]}) is not among the best 1 of 2 runs, which go on (set.halving)"
    )


@acts("set.steps")
def how_many_steps_a_set_may_take(bench: Bench) -> None:
    first, second = bench.flow.train_set("training.seed=1,2", "set.steps=27").values()
    assert (first.state.resume_step, second.state.resume_step) == (20, 7)
    status = read_status(second)
    assert status.state == "paused" and "its set has spent set.steps = 27" in status.next
    assert bench.flow.said == ["the budget of the set is spent; not trained to the end: set.seed=2"]
    again = bench.flow.train_set("training.seed=1,2", "set.steps=40").values()
    assert [log.state.resume_step for log in again] == [20, 20]


@acts("set.device_hours")
def how_much_device_time_a_set_may_use(bench: Bench) -> None:
    hours = f"set.device_hours={12 * STEP_GPU_SECONDS / 3600}"
    first, second = bench.flow.train_set("training.seed=1,2", hours, "checkpoint.every_steps=5").values()
    assert (first.state.resume_step, second.state.opened) == (15, None), "the commit after the twelfth step is the last"
    (ended,) = (item.ended for item in first.state.attempts)
    assert ended is not None and ended.reason == "paused" and "set.device_hours" in ended.detail


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


@acts(
    "promotion.gates",
    *(f"promotion.gates.{name}" for name in ("metric", "suite", "direction", "margin", "no_regression")),
)
def further_comparisons_with_the_champion(bench: Bench) -> None:
    asked = '{metric="val_loss", suite="held-out", direction="higher", margin=0.75, no_regression=true}'
    ours = (f"promotion.gates=[{asked}]",)
    bench.flow.train(*ours)
    before = Registry(bench.flow.store, "champion").refresh().champion
    assert before is not None
    for below, refused in ((0.8, "must not be below"), (0.5, "champion is step")):
        bench.flow.evaluators.losses[:] = [before.metrics["val_loss"] - below]
        assert refused in bench.flow.train(*ours, run_id=f"below-by-{below}").message


@acts("promotion.refuse_verdicts")
def verdicts_that_refuse(bench: Bench) -> None:
    refused = ('promotion.refuse_verdicts=["stuck"]', *OF_25_STEPS)
    state = bench.flow.train(*refused, warm=NotedWarmTrainer("--first-loss", STUCK))
    assert "stuck" in state.message and Registry(bench.flow.store, "champion").refresh().champion is None
    bench.flow.train(*refused, run_id="second")
    champion = Registry(bench.flow.store, "champion").refresh().champion
    assert champion is not None and champion.run_id == "second"


@acts("early_stop.on_divergence", "early_stop.on_stuck")
def verdicts_that_stop(bench: Bench) -> None:
    for key, first_loss in (("on_divergence", DIVERGING), ("on_stuck", STUCK)):
        warm = NotedWarmTrainer("--first-loss", first_loss)
        bench.flow.train(*OF_25_STEPS, "training.steps=50", f"early_stop.{key}=true", run_id=key, warm=warm)
        finished = RunLog(bench.flow.store, key).refresh().finished
        assert finished is not None and (finished.step, finished.rule) == (25, key)


@acts("promotion.require_approval", "promotion.approval_timeout_seconds")
def a_person_is_asked(bench: Bench) -> None:
    asked: list[float] = []
    bench.patch.setattr(run_decisions, "ask", lambda *given: asked.append(given[-1]) or "nobody is here")
    state = bench.flow.train("promotion.require_approval=true", "promotion.approval_timeout_seconds=61.5")
    assert asked == [61.5]
    assert "waits for approval" in state.message
    assert Registry(bench.flow.store, "champion").refresh().champion is None


@acts("preemption.notice_file", "preemption.poll_seconds")
def notices_besides_signals(bench: Bench) -> None:
    polled: list[float] = []
    poll = active_run.preemption_notice.polling_notices

    def noting(*arguments: Any, poll_seconds: float, **rest: Any) -> Any:
        polled.append(poll_seconds)
        return poll(*arguments, poll_seconds=0.01, **rest)

    bench.patch.setattr(active_run.preemption_notice, "polling_notices", noting)
    notice = bench.flow.folder / "leave"
    notice.write_text("now")
    with bench.flow.opened(f"preemption.notice_file={notice}", "preemption.poll_seconds=2.5") as run:
        noticed = threading.Event()
        with run.running_services(), run.host.shutdown.on_shutdown(noticed.set):
            assert noticed.wait(patience_seconds())
        assert polled == [2.5] and str(notice) in run.host.shutdown.detail


@acts("preemption.signal")
def a_signal_of_the_scheduler(bench: Bench) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # with a handler it would be heard anyway
    try:
        with bench.flow.opened("preemption.signal=SIGUSR1") as run, run.running_services():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert run.host.shutdown.signal == "SIGUSR1"
    finally:
        signal.signal(signal.SIGUSR1, before)


@acts("exporters.tensorboard")
def a_folder_that_tensorboard_reads(bench: Bench) -> None:
    bench.flow.train("exporters.tensorboard=board")
    assert [path for path in (bench.flow.folder / "board").rglob("*tfevents*") if path.stat().st_size]


@acts("exporters.wandb")
def a_folder_for_wandb(bench: Bench) -> None:
    with bench.flow.opened("exporters.wandb=board") as run:
        made = list[Path]()

        def noted(folder: Path, run_id: str) -> TensorBoardExporter:
            made.append(folder)
            return TensorBoardExporter(folder, run_id, run.log.store.url)

        bench.patch.setattr("cairn.reports.exporters.tracking_tools.WandbExporter", noted)
        with exporters.run_exporters(run.log, run.config.exporters, {}, lambda line: None):
            assert made == [bench.flow.folder / "board"]


@acts("preemption.metadata")
def a_cloud_that_announces_the_end(bench: Bench) -> None:
    cloud = Cloud()
    cloud.answers[ACTION] = TERMINATE
    with served(cloud) as host:
        bench.patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
        with bench.flow.opened("preemption.metadata=aws") as run:
            noticed = threading.Event()
            with run.running_services(), run.host.shutdown.on_shutdown(noticed.set):
                assert noticed.wait(patience_seconds())
    assert "AWS announced: terminate" in run.host.shutdown.detail


@acts("exporters.mlflow")
def a_server_that_mlflow_reads(bench: Bench) -> None:
    with tracking_server() as tracking:
        bench.flow.train(f"exporters.mlflow={tracking.url}")
    assert tracking.values("train.loss")[-1] == (20, loss_of(20))


@acts("notify.command")
def a_command_that_is_told(bench: Bench) -> None:
    bench.flow.train(f"notify.command=tee {bench.flow.folder / 'told'}")
    assert json.loads((bench.flow.folder / "told").read_text())["kind"] == "finished"


@acts("notify.webhook")
def an_address_that_is_told(bench: Bench) -> None:
    with serving_hook() as hook:
        bench.flow.train(f"notify.webhook={hook.url}")
    assert [item["kind"] for item in hook.posted] == ["finished"]


@acts("notify.timeout_seconds")
def how_long_it_may_take(bench: Bench) -> None:
    with bench.flow.opened("notify.command=sleep 600", "notify.timeout_seconds=0.25") as run:
        (receiver,) = all_receivers(run.config.notify)
        with pytest.raises(ReportError, match=r"more than 0\.25 s"):
            receiver.receive(silent_notice(RUN, "", 1, 2, 3.0))


@acts("cost.limit")
def how_much_a_run_may_cost(bench: Bench) -> None:
    spent = ("checkpoint.every_steps=5", f"cost.limit={13 * STEP_GPU_SECONDS / 3600}")
    with pytest.raises(BudgetExhausted, match=r"cost.limit = .*and the next 5 steps would take .*a higher cost.limit"):
        bench.flow.train(*spent)
    assert bench.flow.log.state.resume_step == 10, "the segment to step 15 would pass the limit"
    (ended,) = (item.ended for item in bench.flow.log.state.attempts)
    assert ended is not None and ended.reason == "paused" and "cost.limit" in ended.detail
    status = read_status(bench.flow.log)
    assert status.state == "paused" and "with a higher one `cairn train" in status.next
    bench.flow.train("checkpoint.every_steps=5", "cost.limit=1e9")
    assert bench.flow.log.state.finished is not None


@acts("cost.gpu_hour_price", "cost.currency")
def what_an_hour_of_a_device_costs(bench: Bench) -> None:
    bench.flow.train("cost.gpu_hour_price=3600", "cost.currency=CHF")
    money = f"about {20 * STEP_GPU_SECONDS:.2f} CHF"
    assert money in markdown_report(gather_report(bench.flow.log, {})[0])


@acts("store")
def where_a_run_is_kept(bench: Bench) -> None:
    kept = bench.flow.folder / "elsewhere"
    bench.flow.train(text=f"store = {str(kept)!r}\n{CONFIG}", store="")
    assert RunLog(LocalStore(kept), RUN).refresh().finished is not None and bench.flow.store.keys("runs") == []
