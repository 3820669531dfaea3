"""The sizes an attempt trains with: its micro-batch, and the steps of its next segment. Pure functions."""

from dataclasses import dataclass

from model.configuration.training import TrainingConfig
from storage.logs.run_state import RunState
from tasks.configuration.settings import CheckpointConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSizes:
    """Windows in a micro-batch, and whether activations are recomputed in the backward pass."""

    micro_batch: int
    activation_checkpointing: bool


def next_sizes(state: RunState, training: TrainingConfig, *, chosen: int | None = None) -> AttemptSizes:
    """Return the sizes of the run's next attempt, which include what earlier attempts changed after out-of-memory.

    `auto` is resolved once, because the micro-batch can change bits: to the newest attempt's, else to `chosen`, else to
    the global batch.
    """
    configured = training.micro_batch
    if configured == "auto":
        earlier = state.attempts[-1].started.micro_batch if state.attempts else chosen
        configured = earlier or training.global_batch
    return AttemptSizes(
        micro_batch=min(configured, state.smallest_micro_batch or configured),
        activation_checkpointing=training.activation_checkpointing or state.recomputes_activations,
    )


def segment_end(step: int, checkpoint: CheckpointConfig, *, total_steps: int, step_seconds: float | None) -> int:
    """Return the step to train to from `step`: the next multiple of `every_steps`, or before it after `every_seconds`.

    Multiples are never skipped, because evaluations are scheduled there. Until `step_seconds` is known, a segment
    limited by time has one step.
    """
    border = min(total_steps, (step // checkpoint.every_steps + 1) * checkpoint.every_steps)
    if checkpoint.every_seconds is None:
        return border
    steps = 1 if step_seconds is None else max(int(checkpoint.every_seconds / step_seconds), 1)
    return min(border, step + steps)
