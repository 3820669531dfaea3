"""Evaluations that take longer than training: what they leave is swept one by one, and a person sees how many wait."""

import io
import threading
from contextlib import redirect_stderr
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from cairn.flows.run import active_run
from cairn.flows.run.run_decisions import AttemptEvaluations
from cairn.reports.queries.run_status import read_status
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.evaluator.evaluator_process import Outcome
from tests.wiring.flow_in_process import RUN, Evaluators, FlowWorld, answer_for_evaluators

KEEP_ONE = ("checkpoint.every_steps=5", "checkpoint.keep_last=1", "checkpoint.keep_best=0")


class SlowEvaluators(Evaluators):
    """The first waits until training is over, each other one until the first checkpoint has been swept."""

    def __init__(self, flow: FlowWorld, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._flow, self._over, self._swept = flow, threading.Event(), SimpleQueue[object]()
        self.outstanding, self.shown = list[int](), ""
        finish = AttemptEvaluations.finish

        def end_training(evaluations: AttemptEvaluations) -> None:
            shut_down = evaluations._beside.shutdown  # comes after the line that counts them

            def count_first() -> None:
                self._over.set()
                shut_down()

            patch.setattr(evaluations._beside, "shutdown", count_first)
            finish(evaluations)

        def sweep_and_note(*arguments: Any, **named: Any) -> object:
            report = sweep_run(*arguments, **named)
            self._swept.put(report)
            return report

        patch.setattr(AttemptEvaluations, "finish", end_training)
        patch.setattr(active_run, "sweep_run", sweep_and_note)

    def run(self, spec: bytes, timeout_seconds: float, **rest: Any) -> Outcome:
        assert self._over.wait(120)
        first = Path(self._flow.folder / "store" / "runs" / RUN / "checkpoints" / "step-00000005-attempt-0001")
        while self.specs and first.exists():
            self._swept.get(timeout=30)
        self.outstanding.append(read_status(self._flow.log).evaluations_outstanding)
        return super().run(spec, timeout_seconds, **rest)


@pytest.fixture(scope="module")
def evaluators(tmp_path_factory: pytest.TempPathFactory) -> SlowEvaluators:
    """Train one run beside slow evaluators; keep what its command said."""
    world = FlowWorld(tmp_path_factory.mktemp("slow"))
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as shown:
        answer_for_evaluators(patch, world)
        slow = SlowEvaluators(world, patch)
        patch.setattr("cairn.tasks.evaluator.evaluation_run.evaluator_process.run_evaluator", slow.run)
        world.train(*KEEP_ONE)
    slow.shown = shown.getvalue()
    return slow


def test_a_checkpoint_is_swept_when_its_evaluation_ends_and_not_when_the_last_one_does(
    evaluators: SlowEvaluators,
) -> None:
    assert len(evaluators.specs) == 4  # the second began only after the first checkpoint was gone


def test_the_command_says_how_many_evaluations_are_outstanding(evaluators: SlowEvaluators) -> None:
    assert "  4 evaluations outstanding" in evaluators.shown
    assert "evaluated step 15, 1 evaluation outstanding" in evaluators.shown


def test_the_status_says_how_many_evaluations_are_outstanding(evaluators: SlowEvaluators) -> None:
    assert evaluators.outstanding == [4, 3, 2, 1]
