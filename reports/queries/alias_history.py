"""What each alias points at, and every decision about it, with the JSON fields of `cairn models`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cairn.storage.logs import registry
from cairn.storage.logs.registry import Promoted, Refused, RegistryState, RolledBack, list_aliases
from cairn.storage.stores.document import project
from cairn.storage.stores.object_store import ObjectStore

_DECISIONS: Mapping[type, str] = {record: kind for kind, record in registry.MODEL_KINDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedEvaluation:
    """What the gates compared: metrics under one suite, the other suites they required, the verdict on the curve."""

    suite_sha256: str
    metrics: Mapping[str, float]
    data_snapshot: str | None = None
    required: tuple[registry.SuiteReference, ...] = ()
    verdict: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasPromotion:
    """A promotion; `current` says that the alias points at it now, `previous` names what it pointed at before."""

    alias: str
    run_id: str
    step: int
    manifest_sha256: str
    evaluation: PromotedEvaluation
    promoted_at: datetime
    by: str
    why: str
    previous: str | None
    current: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasDecision:
    """One decision about an alias: promoted, refused (by `gate`, for `detail`), rolled-back or withdrawn.

    For a roll-back the checkpoint is the one that the alias points at afterwards, and `previous` the one it left. A
    withdrawn run is deleted: no roll-back goes to it any more. The alias points at what the `current` one says.
    """

    alias: str
    decision: str
    at: datetime
    run_id: str | None
    step: int | None = None
    manifest_sha256: str | None = None
    gate: str | None = None
    detail: str | None = None
    by: str
    why: str | None
    evaluation: PromotedEvaluation | None
    previous: str | None = None
    current: bool


def list_promotions(store: ObjectStore) -> tuple[AliasPromotion, ...]:
    """Return the promotions of every alias, newest first, without those that were rolled back."""
    states = ((alias, registry.Registry(store, alias).refresh()) for alias in list_aliases(store))
    return tuple(item for alias, state in states for item in list_alias_promotions(alias, state))


def list_alias_promotions(alias: str, state: RegistryState) -> tuple[AliasPromotion, ...]:
    """Return the promotions of one alias, newest first."""
    return tuple(
        project(
            promoted,
            AliasPromotion,
            alias=alias,
            evaluation=project(promoted, PromotedEvaluation),
            promoted_at=at,
            current=promoted is state.champion,
        )
        for at, promoted in reversed(state.champions)
    )


def list_decisions(store: ObjectStore) -> tuple[AliasDecision, ...]:
    """Return every decision about every alias, newest first: undone promotions, refusals and roll-backs too."""
    states = ((alias, registry.Registry(store, alias).refresh()) for alias in list_aliases(store))
    return tuple(decision for alias, state in states for decision in list_alias_decisions(alias, state))


def list_alias_decisions(alias: str, state: RegistryState) -> tuple[AliasDecision, ...]:
    """Return every decision about one alias, newest first."""
    moves = [body for _, body in state.history if isinstance(body, Promoted | RolledBack)]
    promoted = {body.manifest_sha256: body for body in moves if isinstance(body, Promoted)}
    decisions = []
    for at, body in reversed(state.history):
        about: Promoted | Refused | None = body if isinstance(body, Promoted | Refused) else None
        facts: dict[str, Any] = {}
        if isinstance(body, RolledBack):
            about, previous = promoted.get(body.manifest_sha256 or ""), body.left_manifest_sha256
            facts = {"run_id": about and about.run_id, "step": about and about.step, "previous": previous}
        decision = project(
            body,
            AliasDecision,
            alias=alias,
            decision=_DECISIONS[type(body)],
            at=at,
            why=body.why or None,
            evaluation=project(about, PromotedEvaluation) if about and about.suite_sha256 is not None else None,
            current=any(body is move for move in moves[-1:]),
            **facts,
        )
        decisions.append(decision)
    return tuple(decisions)
