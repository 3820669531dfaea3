"""Where a fork begins: with a checkpoint of another run instead of step 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.logs.log_entry import CheckpointReference


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkOrigin:
    """The checkpoint of another run that a run begins with: weights, optimizer, generators and step.

    `quarantined_windows` are those of the same data that the other run did not draw from there on, `config` is the
    whole configuration that the first attempt gets where nobody gives one.
    """

    run_id: str
    checkpoint: CheckpointReference
    state_sha256: str
    quarantined_windows: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
