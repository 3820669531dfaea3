"""The verdict of `cairn train --overfit-one-batch`, from the losses alone."""

from collections.abc import Sequence
from dataclasses import dataclass

BY_HEART = 0.1
"""Nats a token: far below what any text allows a network that has not seen it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOverfit:
    """Whether one batch was learned by heart, and why; losses are in nats per token, `losses` one for each step."""

    sound: bool
    why: str
    windows: int
    tokens: int
    parameters: int
    lr: float
    precision: str
    device: str
    losses: tuple[float, ...]


def judge_losses(losses: Sequence[float], problem: str, *, lr: float) -> tuple[bool, str]:
    """Return whether the batch was learned, and why; `problem` says why there are no more losses, empty for none."""
    lower = f"lower training.lr (now {lr:g})"
    if problem:
        return False, f"{problem}: {lower}, or try training.precision = fp32"
    course = f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    if losses[-1] < BY_HEART:
        return True, f"{course}: text, network and optimizer fit together, and the batch is known by heart"
    if losses[-1] > losses[0] or min(losses) < losses[-1] / 2:
        return False, f"{course} and was {min(losses):.3f} in between: it jumps; {lower}"
    why = f"raise training.lr (now {lr:g}) or make the network larger"
    return False, f"{course}, and {BY_HEART:g} is by heart: too slow or too small; {why}"
