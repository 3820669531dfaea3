"""The symptoms that losses do not show, at their thresholds, and none of them on a run that has none."""

from typing import Any

import numpy as np
import pytest

from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy.curve_statistics import Curve
from cairn.tasks.policy.curve_verdict import ThroughputWatch, VerdictKind, judge
from tests.text.shakespeare import TINY_SHAKESPEARE

ENGLISH = TINY_SHAKESPEARE.read_text(encoding="utf-8")
STEPS = 400
LOSSES = 2.5 + 3.0 * np.exp(-4.0 * np.arange(STEPS) / STEPS)
RATES = [*np.linspace(0.0, 1e-3, 40), *[1e-3] * (STEPS - 40)]
LOOP = "and the king said to the king and the king said " * 4


def verdict(**fields: Any) -> CurveVerdict:
    return judge(Curve(steps=range(1, STEPS + 1), train_losses=LOSSES, vocab_size=257, **fields))


def norms(times: float) -> list[float]:
    """Return the norms of a run that are so many times as long as a grad_clip of 1 after the warm-up, by the median."""
    return [*[9.0] * 39, *(times * (0.9 + step * 37 % 101 / 500) for step in range(STEPS - 39))]


def speeds(slow: range, *, tokens_per_second: float = 276.0) -> dict[str, list[float]]:
    """Return the rates of a run of 8,192 tokens a step whose `slow` steps collapsed."""
    rates = [tokens_per_second if step in slow else 8129.0 for step in range(1, STEPS + 1)]
    return {"tokens_per_second": rates, "seconds": [8192 / rate for rate in rates]}


def test_gradients_that_are_usually_three_times_the_clip_norm_are_clipping() -> None:
    found = verdict(grad_norms=norms(3.1), learning_rates=RATES, grad_clip=1.0)
    assert found.kind == VerdictKind.CLIPPING and "100% of the last 361 gradients" in found.why
    assert "median 3.1, 3.1 times it" in found.why


@pytest.mark.parametrize("given", [{"grad_norms": norms(2.9)}, {"grad_norms": norms(9.0), "grad_clip": 0.0}])
def test_gradients_that_are_a_little_clipped_or_not_at_all_are_healthy(given: dict[str, object]) -> None:
    assert verdict(**{"learning_rates": RATES, "grad_clip": 1.0, **given}).kind == VerdictKind.HEALTHY


def test_gradients_clipped_during_the_warm_up_are_healthy() -> None:
    assert verdict(grad_norms=norms(0.5), learning_rates=RATES, grad_clip=1.0).kind == VerdictKind.HEALTHY


def test_steps_at_a_thirtieth_of_the_median_throughput_are_slow_with_both_numbers() -> None:
    found = verdict(**speeds(range(300, 321)))
    assert found.kind == VerdictKind.SLOW
    assert "steps 300 to 320 ran at 276 tokens/s, 3% of the run's median of 8,129" in found.why


def test_a_single_slow_step_and_half_the_throughput_are_healthy() -> None:
    assert verdict(**speeds(range(300, 301))).kind == VerdictKind.HEALTHY
    assert verdict(**speeds(range(200, 401), tokens_per_second=4000.0)).kind == VerdictKind.HEALTHY


def test_steps_that_are_slow_for_a_moment_only_are_healthy() -> None:
    given = speeds(range(300, 321))
    assert verdict(**{**given, "seconds": [0.001] * STEPS}).kind == VerdictKind.HEALTHY


def test_samples_that_loop_are_repeating() -> None:
    found = verdict(samples=[ENGLISH[:180], LOOP, LOOP[3:], LOOP[9:]])
    assert found.kind == VerdictKind.REPEATING and "of each of the newest 3 samples repeats" in found.why


def test_the_same_text_at_every_probe_is_repeating() -> None:
    assert verdict(samples=[ENGLISH[:180]] * 3).kind == VerdictKind.REPEATING


def test_samples_of_real_text_are_healthy_even_if_one_loops() -> None:
    real = [ENGLISH[at : at + 180] for at in range(0, 5400, 180)]
    assert all(verdict(samples=real[:count]).kind == VerdictKind.HEALTHY for count in range(len(real)))
    assert verdict(samples=[*real, LOOP]).kind == VerdictKind.HEALTHY


def test_a_symptom_beside_a_worse_verdict_is_said_with_it() -> None:
    losses = LOSSES.copy()
    losses[350] += 3.0
    loud = [1.0 + 50.0 * (step == 350) for step in range(STEPS)]
    rest = {"grad_norms": loud, **speeds(range(300, 321))}
    found = judge(Curve(steps=range(1, STEPS + 1), train_losses=losses, vocab_size=257, **rest))
    assert found.kind == VerdictKind.SPIKING and "; also: steps 300 to 320 ran at 276 tokens/s" in found.why


def test_a_rank_that_the_others_wait_for_in_most_steps_is_named() -> None:
    slowest = [("rank 3 on n1", 1.8) if step % 4 else ("rank 0 on n0", 1.3) for step in range(STEPS)]
    found = verdict(slowest_ranks=slowest)
    assert found.kind == VerdictKind.STRAGGLING
    assert "rank 3 on n1 was the slowest in 150 of the last 200 steps" in found.why and "1.8 times" in found.why


@pytest.mark.parametrize(
    "slowest",
    [
        [(f"rank {step % 4}", 1.8) for step in range(STEPS)],
        [("rank 3", 1.2)] * STEPS,
        [None] * STEPS,
        [*[("rank 3", 1.8)] * (STEPS - 200), *[("rank 1", 1.1)] * 200],
    ],
    ids=["another each time", "by little", "one rank", "no longer"],
)
def test_ranks_that_take_turns_or_are_about_equal_are_healthy(slowest: list[tuple[str, float] | None]) -> None:
    assert verdict(slowest_ranks=slowest).kind == VerdictKind.HEALTHY


def test_training_warns_while_it_is_slow_and_no_longer_afterwards() -> None:
    watch = ThroughputWatch()
    normal = [watch.add(8129.0, 1.0) for _ in range(30)]
    slow = [watch.add(276.0, 29.0) for _ in range(40)]
    assert (set(normal), set(slow[:4])) == ({""}, {""})
    assert set(slow[4:]) == {"training runs at 276 tokens/s, 3% of its own median of 8,129"}
    assert watch.add(8000.0, 1.0) == ""


def test_a_few_slow_seconds_are_no_warning() -> None:
    watch = ThroughputWatch()
    assert {watch.add(rate, 0.01) for rate in (*[8129.0] * 30, *[276.0] * 40)} == {""}
