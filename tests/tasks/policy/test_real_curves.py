"""How often verdicts are wrong: on real curves of tiny networks and of the tutorial, and on 3,000 made-up ones.

The real ones were trained once and stored; thresholds were chosen on the first half of the seeds of the others.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy.curve_verdict import VerdictKind, judge
from tests.tasks.policy.real_runs import RUNS, StoredRun, stored_runs
from tests.tasks.policy.synthetic_curves import FAMILIES, example

PAGE = Path(__file__).parents[3] / "docs/decisions/13-evaluation.md"
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


CURVES, CHOSEN_ON = 3_000, 1_500
FALSE, MISSED = 0.01, 0.02


def upper_bound(wrong: int, count: int) -> float:
    """Return the largest rate at which so few wrong ones or fewer still have a chance of 5 % (Clopper and Pearson)."""
    low, high = wrong / count, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(
            math.comb(count, found) * rate**found * (1 - rate) ** (count - found) for found in range(wrong + 1)
        )
        low, high = (rate, high) if chance > 0.05 else (low, rate)
    return high


def count_wrong(seeds: Iterable[int]) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of curves and of wrong verdicts by family."""
    counted, wrong = Counter[str](), Counter[str]()
    for seed in seeds:
        made = example(seed)
        counted[made.family] += 1
        wrong[made.family] += judge(made.curve).kind not in made.right
    return counted, wrong


def test_the_bound_is_that_of_the_table() -> None:
    assert [round(upper_bound(*pair), 4) for pair in ((0, 100), (1, 100), (5, 100))] == [0.0295, 0.0466, 0.1023]


def test_one_spike_is_missed_of_the_first_six_measured_curves_of_each_family() -> None:
    counted, wrong = count_wrong(range(CHOSEN_ON, CHOSEN_ON + 6 * len(FAMILIES)))
    assert (set(counted.values()), +wrong) == ({6}, Counter(recovering_spike=1))


@pytest.mark.slow
def test_false_alarms_and_misses_are_below_their_bounds_and_the_page_has_the_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = []
    for seeds in (range(CHOSEN_ON), range(CHOSEN_ON, CURVES)):
        counted, wrong = count_wrong(seeds)
        cells = [f"{seeds.start} to {seeds.stop - 1}"]
        for families, most in ((FAMILIES[:7], FALSE), (FAMILIES[7:], MISSED)):
            names = [family.__name__ for family in families]
            bad, of = sum(wrong[name] for name in names), sum(counted[name] for name in names)
            assert upper_bound(bad, of) < most, +wrong
            cells.append(f"{bad} of {of} ({upper_bound(bad, of):.2%})")
        rows.append(f"| {' | '.join(cells)} |")
    assert [row for row in rows if row not in page] == []
