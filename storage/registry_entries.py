"""What the model registry's log can say: promoted, refused, rolled-back. Same log class, other bodies."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """An alias now points at these weights, and why."""

    alias: str
    run_id: str
    step: int
    prefix: str
    manifest_sha256: str
    suite_sha256: str
    metrics: Mapping[str, float]
    by: str
    why: str
    previous: str | None
    hold_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A promotion that a gate refused: nothing changed, and it is on record."""

    alias: str
    run_id: str
    step: int
    manifest_sha256: str
    gate: str
    detail: str
    by: str
    hold_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """An alias went back to what it pointed at before."""

    alias: str
    manifest_sha256: str | None
    by: str
    why: str


MODEL_KINDS: Mapping[str, type] = {"promoted": Promoted, "refused": Refused, "rolled-back": RolledBack}
