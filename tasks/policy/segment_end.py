"""Where the next segment ends: at the next multiple of `every_steps`, or before it where that would take too long.

Owns the choice. Multiples are where evaluations are due, so they are never passed over, and what is evaluated depends
on no clock. Refuses to measure: it is told how long a step takes.
"""

from tasks.configuration.settings import CheckpointConfig


def segment_end(step: int, checkpoint: CheckpointConfig, *, total_steps: int, step_seconds: float | None) -> int:
    """Return the step to train to from `step`; with `every_seconds`, a single one while no step was timed yet."""
    border = min(total_steps, (step // checkpoint.every_steps + 1) * checkpoint.every_steps)
    if checkpoint.every_seconds is None:
        return border
    steps = 1 if step_seconds is None else max(int(checkpoint.every_seconds / step_seconds), 1)
    return min(border, step + steps)
