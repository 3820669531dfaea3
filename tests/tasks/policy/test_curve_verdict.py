"""The verdict on made-up curves: the borders of each rule, ten points and a hundred thousand.

Harder text makes the loss jump without a loud gradient, and is no divergence; everything like it still is one.
"""

import math
from typing import Any

import numpy as np
import pytest

from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy.curve_statistics import Curve, jump_step, level_of
from cairn.tasks.policy.curve_verdict import VerdictKind, judge

VOCAB = 257
UNIFORM = math.log(VOCAB)


def falling(count: int, *, noise: float = 0.05, seed: int = 0) -> np.ndarray:
    steps = np.arange(count)
    return 2.5 + 3.0 * np.exp(-4.0 * steps / count) + np.random.default_rng(seed).normal(0, noise, count)


def curve(losses: np.ndarray, *, val: tuple[tuple[int, float], ...] = (), **fields: object) -> Curve:
    return Curve(steps=range(1, len(losses) + 1), train_losses=losses, val=val, vocab_size=VOCAB, **fields)


def spiked(*spikes: int, loud: float = 12.0, warm: int = 0, count: int = 400) -> CurveVerdict:
    """Judge a falling curve with 3 nats more at these steps, whose gradients are so many times the usual."""
    losses, norms, at = falling(count), np.ones(count), np.array(spikes) - 1
    losses[at] += 3.0
    norms[at] = loud
    rates = np.minimum(np.arange(1, count + 1) / max(warm, 1), 1.0) * 1e-3
    return judge(curve(losses, grad_norms=norms.tolist(), learning_rates=rates.tolist()))


def kind(losses: np.ndarray, **fields: object) -> str:
    return judge(curve(losses, **fields)).kind


FALLING, UNKNOWING = falling(400), np.full(60, UNIFORM)
GAP = tuple((step, 1.4 * float(FALLING[step - 1])) for step in range(50, 401, 50))
IMPROVING = tuple((step, max(2.6, float(FALLING[step - 1]))) for step in range(20, 201, 20))
LONG_AGO = ((100, 2.6), *((step, 6.6 - step / 100) for step in range(180, 401)))
FLAT = (*IMPROVING, *((step, IMPROVING[-1][1]) for step in range(220, 401, 20)))
KINDS: dict[str, tuple[np.ndarray, dict[str, Any], VerdictKind]] = {
    **{f"{count} steps": (falling(10)[:count], {}, VerdictKind.TOO_EARLY) for count in (0, 1, 9)},
    "a held-out loss that is not finite": (falling(50), {"val": ((50, math.inf),)}, VerdictKind.DIVERGING),
    "worse than guessing, though it falls": (np.linspace(40, 9, 100), {}, VerdictKind.DIVERGING),
    "near ln of the vocabulary while the rate still rises": (
        UNKNOWING, {"learning_rates": list(np.linspace(0, 1e-3, 60))}, VerdictKind.TOO_EARLY
    ),
    "near ln of the vocabulary after the rate rose and fell again": (
        UNKNOWING, {"learning_rates": [1e-3] * 56 + [2e-3, 2e-3, 1e-3, 1e-3]}, VerdictKind.STUCK
    ),
    "a loud gradient without a rise of the loss": (
        FALLING, {"grad_norms": [*[1.0] * 349, 500.0, *[1.0] * 50]}, VerdictKind.HEALTHY
    ),
    "a constant gap between the losses": (FALLING, {"val": GAP}, VerdictKind.HEALTHY),
    "a held-out loss that no longer improves": (FALLING, {"val": FLAT}, VerdictKind.PLATEAU),
    "a held-out loss that was as good hundreds of evaluations ago": (FALLING, {"val": LONG_AGO}, VerdictKind.PLATEAU),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_a_curve_gets_the_kind_of_its_course(case: str) -> None:
    losses, fields, expected = KINDS[case]
    assert kind(losses, **fields) == expected


@pytest.mark.parametrize("count", [10, 11, 100, 5_000, 100_000])
def test_a_falling_curve_is_healthy_however_long_it_is(count: int) -> None:
    val = tuple(
        (step, float(2.6 + 3.0 * math.exp(-4.0 * step / count))) for step in range(1, count, max(1, count // 20))
    )
    assert kind(falling(count), val=val) == VerdictKind.HEALTHY


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_no_spike_and_no_divergence(seed: int) -> None:
    assert kind(falling(400, noise=0.2, seed=seed)) == VerdictKind.HEALTHY


def test_a_loss_that_is_not_a_number_is_diverging_and_names_its_step() -> None:
    losses = falling(50)
    losses[30] = math.nan
    assert judge(curve(losses)).numbers == {"step": 31}


@pytest.mark.parametrize(("step", "counts"), [(0, False), (1, True)])
def test_a_held_out_loss_counts_from_the_first_step_of_the_curve_on(step: int, counts: bool) -> None:
    assert judge(curve(falling(50), val=((step, 3.0),))).numbers.get("val_loss") == (3.0 if counts else None)


def test_a_level_far_above_the_best_is_diverging_with_both_levels_as_numbers() -> None:
    losses = falling(300)
    losses[260:] += np.linspace(0, 2, 40)
    verdict = judge(curve(losses))
    assert verdict.kind == VerdictKind.DIVERGING
    assert verdict.numbers["train_loss"] > verdict.numbers["best_train_loss"] + 0.5


def test_near_ln_of_the_vocabulary_is_stuck_and_says_the_rate() -> None:
    losses = np.full(60, UNIFORM) + np.random.default_rng(0).normal(0, 0.01, 60)
    verdict = judge(curve(losses, learning_rates=[0.0] * 60))
    assert verdict.kind == VerdictKind.STUCK and "the learning rate is 0" in verdict.why


def test_without_a_known_vocabulary_nothing_is_held_against_a_uniform_guess() -> None:
    losses = np.full(60, UNIFORM)
    assert judge(Curve(steps=range(60), train_losses=losses)).kind not in (VerdictKind.STUCK, VerdictKind.DIVERGING)


def test_one_wild_step_is_one_spike_with_step_height_and_gradient() -> None:
    verdict = spiked(350)
    assert verdict.kind == VerdictKind.SPIKING
    assert (verdict.numbers["spikes"], verdict.numbers["worst_spike_step"]) == (1, 350)
    assert "gradient norm 12.0 × its median" in verdict.why


def test_a_spike_long_ago_is_forgiven() -> None:
    assert spiked(1_001, count=5_000).kind == VerdictKind.HEALTHY


@pytest.mark.parametrize(
    "norms", [(), [None] * 400, [1.0] * 400, [0.0] * 400], ids=["none", "unknown", "usual", "zero"]
)
def test_a_rise_of_the_loss_without_a_loud_gradient_is_no_spike(norms: list[float | None]) -> None:
    losses = falling(400)
    losses[349] += 3.0
    assert kind(losses, grad_norms=norms) == VerdictKind.HEALTHY


def test_a_loud_step_that_rises_no_more_than_several_quiet_ones_is_no_spike() -> None:
    losses, norms = falling(400), [1.0] * 400
    losses[[250, 280, 310, 349]] += 1.0
    norms[349] = 99.0
    assert kind(losses, grad_norms=norms) == VerdictKind.HEALTHY
    losses[349] += 1.0
    assert kind(losses, grad_norms=norms) == VerdictKind.SPIKING


def test_a_gradient_that_is_not_finite_is_loud_and_says_no_ratio() -> None:
    losses = falling(400)
    losses[349] += 3.0
    verdict = judge(curve(losses, grad_norms=[*[1.0] * 349, None, *[1.0] * 50]))
    assert verdict.kind == VerdictKind.SPIKING and "gradient norm" not in verdict.why


def test_one_spike_in_the_warm_up_is_forgotten() -> None:
    assert spiked(60, warm=60).kind == VerdictKind.HEALTHY
    assert spiked(61, warm=60).kind == VerdictKind.SPIKING


def test_a_second_spike_in_the_warm_up_is_not_forgotten_and_neither_is_the_first() -> None:
    assert spiked(22, 59, warm=60).numbers["spikes"] == 2


def test_a_spike_after_the_warm_up_is_reported_without_the_forgotten_one() -> None:
    verdict = spiked(40, 350, warm=60)
    assert (verdict.numbers["spikes"], verdict.numbers["worst_spike_step"]) == (1, 350)


def test_held_out_loss_that_rises_while_the_train_loss_falls_is_overfitting() -> None:
    val = tuple((step, 3.0 + abs(step - 150) / 100) for step in range(50, 401, 50))
    verdict = judge(curve(falling(400), val=val))
    assert verdict.kind == VerdictKind.OVERFITTING and "never better than at step 150" in verdict.why


def test_every_number_is_finite_so_that_json_can_hold_it() -> None:
    verdicts = [judge(curve(losses)) for losses in (falling(400), np.full(40, UNIFORM), np.linspace(1, 400, 40))]
    assert all(math.isfinite(value) for verdict in verdicts for value in verdict.numbers.values())


def test_a_verdict_does_not_depend_on_the_container_of_the_losses() -> None:
    losses = falling(400)
    assert judge(curve(losses)) == judge(curve(losses.tolist()))


def test_a_level_is_the_median_of_the_newest_window() -> None:
    losses = np.array([9.0] * 5 + [4.0] * 4 + [100.0])
    assert level_of(curve(losses), losses).now == 4.0


def test_spikes_that_follow_each_other_are_one() -> None:
    assert spiked(301, 302, 303, 304).numbers["spikes"] == 1


STEPS, AT = 900, 600
SINCE = np.arange(STEPS - AT)


def jumping(rise: np.ndarray, *, at: int = AT, loud: float = 2.0) -> Curve:
    """Return a falling curve with this rise from a step on, and a gradient that is so many times the usual there."""
    drawn = np.random.default_rng(0)
    losses = 2.5 + 3.0 * np.exp(-6.0 * np.arange(STEPS) / STEPS) + drawn.normal(0, 0.05, STEPS)
    losses[at:] += rise[: STEPS - at]
    norms = np.exp(drawn.normal(0, 0.2, STEPS))
    norms[at] = loud
    return Curve(steps=range(1, STEPS + 1), train_losses=losses, grad_norms=norms.tolist(), vocab_size=257)


FALLING_AGAIN = 0.8 * (1 + SINCE / 200) ** -0.5


def test_a_jump_to_harder_text_is_healthy_and_found_at_its_step() -> None:
    made = jumping(FALLING_AGAIN)
    assert abs(jump_step(made, np.asarray(made.train_losses)) - (AT + 1)) <= 2
    assert judge(made).kind == VerdictKind.HEALTHY


@pytest.mark.parametrize(
    "made",
    [
        jumping(FALLING_AGAIN, loud=20.0),
        jumping(np.clip(SINCE / 60, 0, 1)),
        jumping(0.8 + SINCE / 300),
        jumping(FALLING_AGAIN + 1.0 * (SINCE > 150)),
    ],
    ids=["with a loud gradient", "within sixty steps", "that rises further", "after which it jumps back up loudly"],
)
def test_a_rise_is_diverging(made: Curve) -> None:
    if made.train_losses[AT + 200] > made.train_losses[AT + 100] + 0.5:
        made.grad_norms[AT + 151] = 50.0  # type: ignore[index]
    assert judge(made).kind == VerdictKind.DIVERGING


def test_the_train_loss_since_a_jump_is_flat_only_after_as_many_steps_as_that_of_a_run() -> None:
    assert judge(jumping(np.full(STEPS, 1.5), at=750)).kind == VerdictKind.HEALTHY


@pytest.mark.parametrize("seed", range(10))
def test_a_tenth_of_harder_steps_is_no_jump(seed: int) -> None:
    made, drawn = jumping(np.zeros(1)), np.random.default_rng(seed)
    losses = np.asarray(made.train_losses) + 1.5 * (drawn.random(STEPS) < 0.1)
    assert jump_step(made, losses) == 0
