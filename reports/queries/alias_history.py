"""The promotions in force of each alias, and every decision about it, with the JSON fields of `cairn models`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cairn.storage.logs import registry
from cairn.storage.logs.registry import Promoted, Refused, RegistryState, RolledBack, Withdrawn
from cairn.storage.stores.object_store import ObjectStore

_KINDS: Mapping[type, str] = {record: kind for kind, record in registry.MODEL_KINDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedEvaluation:
    """The evaluation that the gates compared: metrics under a suite, other required suites, the curve's verdict.

    `better_by` is how much lower the held-out loss is than the champion's before, in nats, `better_by_error` the
    standard error of that; `differences` has it and those of `promotion.gates`.
    """

    suite_sha256: str
    metrics: Mapping[str, float]
    data_snapshot: str | None
    required: tuple[registry.SuiteReference, ...]
    verdict: str | None
    better_by: float | None
    better_by_error: float | None
    differences: tuple[registry.MetricDifference, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasDecision:
    """One decision about an alias: promoted, refused (by `gate`, for `detail`), rolled-back or withdrawn.

    For a roll-back the checkpoint is the one that the alias points at afterwards, and `previous` the one it left. A
    withdrawn run is deleted: no roll-back goes to it any more. The alias points at what the `current` one says.
    """

    alias: str
    kind: str
    decided_at: datetime
    promoted_at: datetime | None
    run_id: str | None
    step: int | None
    manifest_sha256: str | None
    gate: str | None
    detail: str | None
    by: str
    why: str | None
    evaluation: PromotedEvaluation | None
    previous: str | None
    current: bool


def list_promotions(store: ObjectStore) -> tuple[AliasDecision, ...]:
    """Return the promotions of every alias, newest first, without those that were rolled back."""
    states = ((alias, registry.Registry(store, alias).refresh()) for alias in registry.list_aliases(store))
    return tuple(item for alias, state in states for item in list_alias_promotions(alias, state))


def list_alias_promotions(alias: str, state: RegistryState) -> tuple[AliasDecision, ...]:
    """Return the promotions of one alias, newest first; the first is the current one."""
    found = reversed(state.champions)
    return tuple(_describe(alias, at, body, body, current=body is state.champion) for at, body in found)


def list_decisions(store: ObjectStore) -> tuple[AliasDecision, ...]:
    """Return every decision about every alias, newest first: undone promotions, refusals and roll-backs too."""
    states = ((alias, registry.Registry(store, alias).refresh()) for alias in registry.list_aliases(store))
    return tuple(decision for alias, state in states for decision in list_alias_decisions(alias, state))


def list_alias_decisions(alias: str, state: RegistryState) -> tuple[AliasDecision, ...]:
    """Return every decision about one alias, newest first."""
    moves = [body for _, body in state.history if isinstance(body, Promoted | RolledBack)]
    promoted = {body.manifest_sha256: body for body in moves if isinstance(body, Promoted)}
    decisions = []
    for at, body in reversed(state.history):
        about = body if isinstance(body, Promoted | Refused) else None
        if isinstance(body, RolledBack):
            about = promoted.get(body.manifest_sha256 or "")
        decisions.append(_describe(alias, at, body, about, current=any(body is move for move in moves[-1:])))
    return tuple(decisions)


def _describe(
    alias: str, at: datetime, body: registry.ModelDecision, about: Promoted | Refused | None, *, current: bool
) -> AliasDecision:
    """Return a decision with what was measured of the weights that it is `about`."""
    evaluation, previous = None, body.previous if isinstance(body, Promoted) else None
    if about is not None and about.suite_sha256 is not None:
        promoted = about if isinstance(about, Promoted) else None
        first = next(iter(about.differences), None)
        evaluation = PromotedEvaluation(
            suite_sha256=about.suite_sha256,
            metrics=about.metrics,
            data_snapshot=promoted.data_snapshot if promoted else None,
            required=promoted.required if promoted else (),
            verdict=promoted.verdict if promoted else None,
            better_by=first.better_by if first else None,
            better_by_error=first.error if first else None,
            differences=about.differences,
        )
    if isinstance(body, RolledBack):
        previous = body.left_manifest_sha256
    return AliasDecision(
        alias=alias,
        kind=_KINDS[type(body)],
        decided_at=at,
        promoted_at=at if isinstance(body, Promoted) else None,
        run_id=body.run_id if isinstance(body, Withdrawn) else about.run_id if about else None,
        step=about.step if about else None,
        manifest_sha256=None if isinstance(body, Withdrawn) else body.manifest_sha256,
        gate=body.gate if isinstance(body, Refused) else None,
        detail=body.detail if isinstance(body, Refused) else None,
        by=body.by,
        why=body.why or None,
        evaluation=evaluation,
        previous=previous,
        current=current,
    )
