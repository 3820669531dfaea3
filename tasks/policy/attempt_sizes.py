"""With which micro-batch an attempt trains: the configured one, or the smaller one that earlier attempts arrived at.

Owns that what running out of memory once taught is not learned again. Pure.
"""

from dataclasses import dataclass

from model.configuration.training import TrainingConfig
from storage.logs.run_state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSizes:
    """Windows in a micro-batch, and whether activations are computed again for the backward pass."""

    micro_batch: int
    activation_checkpointing: bool


def next_sizes(state: RunState, training: TrainingConfig, *, chosen: int | None = None) -> AttemptSizes:
    """Return what the next attempt of this run would train with.

    With `auto` it is what the newest attempt had, and of a run without one what was `chosen`: the micro-batch can
    change bits, so it is chosen once. Without a choice it is the whole global batch.
    """
    decisions = [attempt.ended.decision for attempt in state.attempts if attempt.ended is not None]
    smaller = [decision.micro_batch for decision in decisions if decision.micro_batch]
    configured = training.micro_batch
    if configured == "auto":
        earlier = state.attempts[-1].started.micro_batch if state.attempts else chosen
        configured = earlier or training.global_batch
    return AttemptSizes(
        micro_batch=min([configured, *smaller]),
        activation_checkpointing=training.activation_checkpointing
        or any(decision.activation_checkpointing for decision in decisions),
    )
