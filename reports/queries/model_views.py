"""What readers see of the model registry: what each alias points at and every decision about it, and how it goes back.

Owns the field names of `cairn models`. Refuses to know gates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from reports.errors import RunNotFound
from storage.checkpoints.checkpoint import read_manifest
from storage.errors import IntegrityError
from storage.logs.registry import ModelDecision, Registry, RegistryState, list_aliases
from storage.logs.registry_entries import Promoted, Refused, RolledBack, SuiteReference
from storage.logs.run_log import RunLog
from storage.logs.run_state import COMMITTED
from storage.stores.object_store import ObjectStore

PROMOTED, REFUSED, ROLLED_BACK = "promoted", "refused", "rolled-back"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedEvaluation:
    """What the gates looked at: the evaluation that was compared, what else was required, the verdict on the curve."""

    suite_sha256: str
    metrics: Mapping[str, float]
    data_snapshot: str | None = None
    required: tuple[SuiteReference, ...] = ()
    verdict: str | None = None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionView:
    """One decision about an alias: promoted, refused (by `gate`) or rolled-back; the checkpoint is the one it is about.

    Of a roll-back that is the checkpoint the alias points at since, and `previous` the one it left.
    """

    alias: str
    decision: str
    at: datetime
    run_id: str | None
    step: int | None
    manifest_sha256: str | None
    gate: str | None
    by: str
    why: str
    evaluation: PromotedEvaluation | None
    previous: str | None


def view_models(store: ObjectStore) -> tuple[ModelView, ...]:
    """Return the history of every alias, newest first; promotions that were rolled back are not in it."""
    return tuple(view for alias in list_aliases(store) for view in view_alias(alias, Registry(store, alias).refresh()))


def view_alias(alias: str, state: RegistryState) -> tuple[ModelView, ...]:
    """Return the history of one alias, newest first."""
    return tuple(
        _view(alias, at, promoted, current=promoted is state.champion) for at, promoted in reversed(state.champions)
    )


def view_history(store: ObjectStore) -> tuple[DecisionView, ...]:
    """Return every decision about every alias, newest first: undone promotions, refusals and roll-backs too."""
    states = [(alias, Registry(store, alias).refresh()) for alias in list_aliases(store)]
    return tuple(_decision(alias, at, body, state) for alias, state in states for at, body in reversed(state.history))


def roll_back(store: ObjectStore, alias: str, *, by: str, why: str = "") -> ModelView:
    """Point the alias at what it pointed at before; raises `RunNotFound` where there is nothing before.

    Weights that can no longer be read are passed over; raises `IntegrityError` where none before can be.
    """
    registry = Registry(store, alias)

    def decide(state: RegistryState) -> RolledBack:
        before = _newest_readable(store, alias, state)
        leaving = state.champions[-1][1]
        facts = f"from {leaving.run_id}@{leaving.step} back to {before.run_id}@{before.step}"
        return RolledBack(
            alias=alias,
            manifest_sha256=before.manifest_sha256,
            by=by,
            why=f"{facts}: {why}" if why else facts,
            left_manifest_sha256=leaving.manifest_sha256,
        )

    return view_alias(alias, registry.append(decide))[0]


def _newest_readable(store: ObjectStore, alias: str, state: RegistryState) -> Promoted:
    if len(state.champions) < 2:
        held = "one promotion and nothing before it" if state.champions else "no promotion"
        raise RunNotFound(f"alias {alias!r} has {held}; `cairn models` shows the history, `cairn promote` adds to it")
    problems = []
    for _, promoted in reversed(state.champions[:-1]):
        problem = _unreadable(store, promoted)
        if not problem:
            return promoted
        problems.append(f"{promoted.run_id}@{promoted.step} {problem}")
    raise IntegrityError(
        f"alias {alias!r} stays where it is, nothing before it can be read: {'; '.join(problems)}; "
        "`cairn promote RUN@STEP --alias NAME` points another alias at what is left"
    )


def _unreadable(store: ObjectStore, promoted: Promoted) -> str:
    """Return why these weights cannot be gone back to, or nothing: they are committed and their bytes are there."""
    record = RunLog(store, promoted.run_id).refresh().find(promoted.prefix)
    if record is None or record.state != COMMITTED:
        return "is not in its run's log" if record is None else f"is {record.state}: {record.detail}"
    try:
        manifest = read_manifest(store, promoted.prefix, promoted.manifest_sha256)
    except IntegrityError as error:
        return f"has no manifest: {error}"
    short = [item.name for item in manifest.objects if store.size(f"{promoted.prefix}/{item.name}") != item.bytes]
    return f"has lost bytes: {', '.join(short)}" if short else ""


def _view(alias: str, at: datetime, promoted: Promoted, *, current: bool) -> ModelView:
    return ModelView(
        alias=alias,
        run_id=promoted.run_id,
        step=promoted.step,
        manifest_sha256=promoted.manifest_sha256,
        evaluation=_evaluation(promoted),
        promoted_at=at,
        by=promoted.by,
        why=promoted.why,
        previous=promoted.previous,
        current=current,
    )


def _evaluation(promoted: Promoted) -> PromotedEvaluation:
    return PromotedEvaluation(
        suite_sha256=promoted.suite_sha256,
        metrics=promoted.metrics,
        data_snapshot=promoted.data_snapshot,
        required=promoted.required,
        verdict=promoted.verdict,
    )


def _decision(alias: str, at: datetime, body: ModelDecision, state: RegistryState) -> DecisionView:
    about: Promoted | Refused | None
    about = _promotion(state, body.manifest_sha256) if isinstance(body, RolledBack) else body
    evaluation = None
    if isinstance(about, Promoted):
        evaluation = _evaluation(about)
    elif about is not None and about.suite_sha256 is not None:
        evaluation = PromotedEvaluation(suite_sha256=about.suite_sha256, metrics=about.metrics)
    previous = {Promoted: "previous", RolledBack: "left_manifest_sha256"}.get(type(body), "")
    said = f"{body.detail}; offered because {body.why}" if isinstance(body, Refused) and body.why else None
    return DecisionView(
        alias=alias,
        decision={Promoted: PROMOTED, Refused: REFUSED, RolledBack: ROLLED_BACK}[type(body)],
        at=at,
        run_id=about.run_id if about else None,
        step=about.step if about else None,
        manifest_sha256=body.manifest_sha256,
        gate=body.gate if isinstance(body, Refused) else None,
        by=body.by,
        why=said or (body.detail if isinstance(body, Refused) else body.why),
        evaluation=evaluation,
        previous=getattr(body, previous, None) if previous else None,
    )


def _promotion(state: RegistryState, manifest_sha256: str | None) -> Promoted | None:
    promotions = [body for _, body in state.history if isinstance(body, Promoted)]
    return next((body for body in reversed(promotions) if body.manifest_sha256 == manifest_sha256), None)
