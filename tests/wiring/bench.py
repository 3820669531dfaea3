"""What a case of the key table works with: trainers in this process, and the flow without Prefect."""

from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

import pytest

from tests.tasks.trainer_in_process import Trained, TrainingWorld
from tests.wiring.flow_in_process import FlowWorld

_NUMBERS = count(1)


@cache
def _plain_digest(world: TrainingWorld) -> str:
    """Return the bits with which a run of two steps ends that has no other settings than the world's."""
    return world.train(world.spec(next(_NUMBERS)), 2).staged.state_sha256


class Bench:
    """One of each; a training world is shared by all cases, a flow's world belongs to one."""

    def __init__(self, world: TrainingWorld, flow: FlowWorld, patch: pytest.MonkeyPatch) -> None:
        self.world, self.flow, self.patch = world, flow, patch

    def train(
        self,
        until: int = 2,
        *,
        model: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Trained:
        """Train a new run of the training world with these settings."""
        spec = self.world.spec(next(_NUMBERS), model=model, training=training, **changes)
        return self.world.train(spec, until)

    def differs(self, **changes: Any) -> bool:
        """Whether a run of two steps ends with other bits than one without these settings."""
        return self.train(**changes).staged.state_sha256 != _plain_digest(self.world)
