"""Points an alias back at the promotion before its newest one, where those weights can still be read."""

from reports.errors import RunNotFound
from reports.queries.alias_history import AliasPromotion, list_alias_promotions
from storage.checkpoints.checkpoint import find_wrong_sizes, read_manifest
from storage.errors import IntegrityError
from storage.logs.registry import Promoted, Registry, RegistryState, RolledBack
from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore


def roll_back(store: ObjectStore, alias: str, *, by: str, why: str = "") -> AliasPromotion:
    """Point the alias at the last readable promotion before and return it; raises `RunNotFound` or `IntegrityError`."""
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

    return list_alias_promotions(alias, registry.append(decide))[0]


def _newest_readable(store: ObjectStore, alias: str, state: RegistryState) -> Promoted:
    if len(state.champions) < 2:
        has = "one promotion and nothing before it" if state.champions else "no promotion"
        raise RunNotFound(f"alias {alias!r} has {has}; `cairn models` shows the history, `cairn promote` adds to it")
    problems = []
    for _, promoted in reversed(state.champions[:-1]):
        problem = _find_problem(store, promoted)
        if not problem:
            return promoted
        problems.append(f"{promoted.run_id}@{promoted.step} {problem}")
    raise IntegrityError(
        f"alias {alias!r} stays where it is, nothing before it can be read: {'; '.join(problems)}; "
        "`cairn promote RUN@STEP --alias NAME` points another alias at what is left"
    )


def _find_problem(store: ObjectStore, promoted: Promoted) -> str:
    """Return why these weights cannot be used; empty where they are committed and all their bytes are there."""
    record = RunLog(store, promoted.run_id).refresh().find(promoted.prefix)
    if record is None or not record.is_committed:
        return "is not in its run's log" if record is None else f"is {record.state}: {record.detail}"
    try:
        manifest = read_manifest(store, promoted.prefix, promoted.manifest_sha256)
    except IntegrityError as error:
        return f"has no manifest: {error}"
    short = [damage.key.rsplit("/", 1)[1] for damage in find_wrong_sizes(store, promoted.prefix, manifest)]
    return f"has lost bytes: {', '.join(short)}" if short else ""
