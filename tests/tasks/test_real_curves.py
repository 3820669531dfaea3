"""The verdict on real curves: tiny networks on real text, and the two runs of the tutorial; trained once and stored."""

from dataclasses import replace
from pathlib import Path

import pytest

from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy.curve_verdict import VerdictKind, judge
from tests.tasks.real_runs import RUNS, StoredRun, stored_runs

PAGE = Path(__file__).parents[2] / "docs/decisions/13-evaluation.md"
STORED = {run.name: run for run in stored_runs()}


def at_evaluations(run: StoredRun) -> list[CurveVerdict]:
    """Return the verdict at every evaluation of the run."""
    curve, found = run.curve, list[CurveVerdict]()
    for number, (step, _) in enumerate(curve.val, 1):
        end = curve.steps.index(step) + 1
        columns = ("steps", "train_losses", "grad_norms", "learning_rates")
        cut = {name: getattr(curve, name)[:end] for name in columns}
        found.append(judge(replace(curve, **cut, val=curve.val[:number])))
    return found


def test_44_of_46_real_curves_get_their_verdict_and_the_page_names_the_others() -> None:
    wrong = {name: judge(run.curve).kind for name, run in STORED.items() if judge(run.curve).kind != run.expected}
    assert (len(STORED), wrong) == (46, {"batch-of-two-1": VerdictKind.HEALTHY, "diverging-2": VerdictKind.PLATEAU})
    page = PAGE.read_text(encoding="utf-8")
    assert "Of 46 real runs" in page and all(f"`{name}`" in page for name in wrong)


HEALTHY = [name for name, run in STORED.items() if run.expected == VerdictKind.HEALTHY]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_healthy_at_every_evaluation_or_too_early(name: str) -> None:
    kinds = [verdict.kind for verdict in at_evaluations(STORED[name])]
    assert set(kinds) <= {VerdictKind.HEALTHY, VerdictKind.TOO_EARLY} and VerdictKind.TOO_EARLY not in kinds[2:]


@pytest.mark.parametrize("name", ["tutorial", "tutorial-fork"])
def test_the_runs_of_the_tutorial_are_neither_spiking_nor_clipping(name: str) -> None:
    assert [verdict.kind for verdict in at_evaluations(STORED[name])] == [VerdictKind.HEALTHY] * 3


def test_three_hundred_times_the_learning_rate_diverges_from_the_first_evaluation_with_ten_steps_on() -> None:
    assert {verdict.kind for verdict in at_evaluations(STORED["diverging-1"])[3:]} == {VerdictKind.DIVERGING}


def test_no_learning_rate_to_speak_of_is_stuck_near_the_loss_of_a_uniform_guess() -> None:
    assert "ln(257) = 5.55" in judge(STORED["no-rate-1"].curve).why


@pytest.mark.parametrize("name", ["poisoned-1", "poisoned-2", "poisoned-unclipped-1", "poisoned-unclipped-2"])
def test_a_batch_of_noise_is_a_spike_at_its_step(name: str) -> None:
    before, after = at_evaluations(STORED[name])[7], judge(STORED[name].curve)
    assert before.kind == VerdictKind.HEALTHY and after.numbers["worst_spike_step"] == 161


def test_every_run_of_the_table_is_stored_with_its_verdict() -> None:
    table = {run.name: run.expected for run in RUNS} | {"tutorial": "healthy", "tutorial-fork": "healthy"}
    assert {name: run.expected for name, run in STORED.items()} == table


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain-1", "poisoned-1", "reread-1"])
def test_the_run_trained_again_gets_the_verdict_of_its_stored_curve(name: str) -> None:
    run = next(run for run in RUNS if run.name == name)
    assert judge(run.trained_curve()).kind == run.expected
