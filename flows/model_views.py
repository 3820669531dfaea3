"""What readers see of the model registry: every promotion in force or superseded, and how an alias goes back.

Owns the field names of `cairn models`. Refuses to know gates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from flows.errors import RunNotFound
from storage.object_store import ObjectStore
from storage.registry import Registry, RegistryState, list_aliases
from storage.registry_entries import Promoted, RolledBack


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedEvaluation:
    """What the gates looked at."""

    suite_sha256: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """A promotion; `current` says that the alias points at it now, `previous` what it pointed at before."""

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


def view_models(store: ObjectStore) -> tuple[ModelView, ...]:
    """Return the history of every alias, newest first; promotions that were rolled back are not in it."""
    return tuple(view for alias in list_aliases(store) for view in view_alias(alias, Registry(store, alias).refresh()))


def view_alias(alias: str, state: RegistryState) -> tuple[ModelView, ...]:
    """Return the history of one alias, newest first."""
    return tuple(
        _view(alias, at, promoted, current=promoted is state.champion) for at, promoted in reversed(state.champions)
    )


def roll_back(store: ObjectStore, alias: str, *, by: str) -> ModelView:
    """Point the alias at what it pointed at before; raises `RunNotFound` where there is nothing before."""
    registry = Registry(store, alias)

    def decide(state: RegistryState) -> RolledBack:
        if len(state.champions) < 2:
            held = "one promotion and nothing before it" if state.champions else "no promotion"
            raise RunNotFound(
                f"alias {alias!r} has {held}; `cairn models` shows the history, `cairn promote` adds to it"
            )
        leaving, before = state.champions[-1][1], state.champions[-2][1]
        why = f"from {leaving.run_id}@{leaving.step} back to {before.run_id}@{before.step}"
        return RolledBack(alias=alias, manifest_sha256=before.manifest_sha256, by=by, why=why)

    return view_alias(alias, registry.append(decide))[0]


def _view(alias: str, at: datetime, promoted: Promoted, *, current: bool) -> ModelView:
    return ModelView(
        alias=alias,
        run_id=promoted.run_id,
        step=promoted.step,
        manifest_sha256=promoted.manifest_sha256,
        evaluation=PromotedEvaluation(suite_sha256=promoted.suite_sha256, metrics=promoted.metrics),
        promoted_at=at,
        by=promoted.by,
        why=promoted.why,
        previous=promoted.previous,
        current=current,
    )
