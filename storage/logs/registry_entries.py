"""The kinds of model registry entries: promoted, refused, rolled-back."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteReference:
    """A suite: its display name and its identity."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """An alias now points at these weights, and why.

    `suite_sha256`, `data_snapshot` and `metrics` are the compared evaluation, `required` the suites under which the
    weights had to be evaluated, `verdict` the verdict on the loss curve.
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
    """A promotion that a gate refused, with the values it was refused for; the alias did not change."""

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
    """An alias went back to an earlier promotion; `left_manifest_sha256` is what it pointed at until then."""

    alias: str
    manifest_sha256: str | None
    by: str
    why: str
    left_manifest_sha256: str | None = None


MODEL_KINDS: Mapping[str, type] = {"promoted": Promoted, "refused": Refused, "rolled-back": RolledBack}
