"""What the model registry's log can say: promoted, refused, rolled-back. Same log class, other bodies."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteReference:
    """Names one suite: what people call it, and its identity."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """An alias now points at these weights, and why.

    `suite_sha256`, `data_snapshot` and `metrics` are the evaluation that was compared; `required` names every suite
    under which these weights had to be measured; `verdict` is what was said of the loss curve.
    """

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
    data_snapshot: str | None = None
    required: tuple[SuiteReference, ...] = ()
    verdict: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A promotion that a gate refused: nothing changed, and it is on record with what the gate looked at."""

    alias: str
    run_id: str
    step: int
    manifest_sha256: str
    gate: str
    detail: str
    by: str
    hold_id: str | None = None
    why: str = ""
    suite_sha256: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """An alias went back to what it pointed at before; `left_manifest_sha256` is what it pointed at until then."""

    alias: str
    manifest_sha256: str | None
    by: str
    why: str
    left_manifest_sha256: str | None = None


MODEL_KINDS: Mapping[str, type] = {"promoted": Promoted, "refused": Refused, "rolled-back": RolledBack}
