"""The learning rate of each step, as a pure function.

Owns warm-up and decay. Refuses to hold state: a resumed run asks for the rate of its step and gets it.
Source: Loshchilov and Hutter 2017, "SGDR" (cosine), with linear warm-up.
"""

import math


def learning_rate(step: int, *, steps: int, warmup_steps: int, lr: float, min_lr: float) -> float:
    """Return the rate of step number `step` (1-based, as in StepResult).

    Rises linearly to `lr` at step `warmup_steps`, falls as a cosine to `min_lr` at step `steps`, stays there after.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if step >= steps:
        return min_lr
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
