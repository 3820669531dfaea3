"""Harder text makes the loss jump without a loud gradient, and is no divergence; everything like it still is one."""

import numpy as np
import pytest

from cairn.tasks.policy.curve_statistics import Curve, jump_step
from cairn.tasks.policy.curve_verdict import VerdictKind, judge

STEPS, AT = 900, 600
SINCE = np.arange(STEPS - AT)


def curve(rise: np.ndarray, *, at: int = AT, loud: float = 2.0) -> Curve:
    """Return a falling curve with this rise from a step on, and a gradient that is so many times the usual there."""
    drawn = np.random.default_rng(0)
    losses = 2.5 + 3.0 * np.exp(-6.0 * np.arange(STEPS) / STEPS) + drawn.normal(0, 0.05, STEPS)
    losses[at:] += rise[: STEPS - at]
    norms = np.exp(drawn.normal(0, 0.2, STEPS))
    norms[at] = loud
    return Curve(steps=range(1, STEPS + 1), train_losses=losses, grad_norms=norms.tolist(), vocab_size=257)


FALLING_AGAIN = 0.8 * (1 + SINCE / 200) ** -0.5


def test_a_jump_to_harder_text_is_healthy_and_found_at_its_step() -> None:
    made = curve(FALLING_AGAIN)
    assert abs(jump_step(made, np.asarray(made.train_losses)) - (AT + 1)) <= 2
    assert judge(made).kind == VerdictKind.HEALTHY


@pytest.mark.parametrize(
    "made",
    [
        curve(FALLING_AGAIN, loud=20.0),
        curve(np.clip(SINCE / 60, 0, 1)),
        curve(0.8 + SINCE / 300),
        curve(FALLING_AGAIN + 1.0 * (SINCE > 150)),
    ],
    ids=["with a loud gradient", "within sixty steps", "that rises further", "after which it jumps back up loudly"],
)
def test_a_rise_is_diverging(made: Curve) -> None:
    if made.train_losses[AT + 200] > made.train_losses[AT + 100] + 0.5:
        made.grad_norms[AT + 151] = 50.0  # type: ignore[index]
    assert judge(made).kind == VerdictKind.DIVERGING


def test_the_train_loss_since_a_jump_is_flat_only_after_as_many_steps_as_that_of_a_run() -> None:
    assert judge(curve(np.full(STEPS, 1.5), at=750)).kind == VerdictKind.HEALTHY


@pytest.mark.parametrize("seed", range(10))
def test_a_tenth_of_harder_steps_is_no_jump(seed: int) -> None:
    made, drawn = curve(np.zeros(1)), np.random.default_rng(seed)
    losses = np.asarray(made.train_losses) + 1.5 * (drawn.random(STEPS) < 0.1)
    assert jump_step(made, losses) == 0
