"""The rows of the promotions table: every decision on every alias, read from the registry at each query."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from storage.logs.registry import ModelDecision, Registry, list_aliases
from storage.logs.registry_entries import MODEL_KINDS, Promoted, Refused, RolledBack
from storage.stores.object_store import ObjectStore
from storage.tables.run_tables import PromotionRow

_KINDS = {record: kind for kind, record in MODEL_KINDS.items()}
_COLUMNS = tuple(PromotionRow.__slots__)
_OF_TARGET = ("run_id", "step", "suite_sha256", "metrics")


def read_promotions(store: ObjectStore) -> list[PromotionRow]:
    """Return the rows of all aliases of the store, each alias oldest first."""
    histories = ((alias, Registry(store, alias).refresh().history) for alias in list_aliases(store))
    return [row for alias, history in histories for row in promotion_rows(alias, history)]


def promotion_rows(alias: str, decisions: Sequence[tuple[datetime, ModelDecision]]) -> list[PromotionRow]:
    """Return a row for every decision on an alias, oldest first."""
    rows: list[PromotionRow] = []
    points_at: str | None = None
    promoted: dict[str | None, Promoted] = {}
    for decided_at, body in decisions:
        values = _values(body, _COLUMNS) | {"alias": alias, "kind": _KINDS[type(body)], "decided_at": decided_at}
        match body:
            case Promoted():
                values["promoted_at"] = decided_at
                promoted[body.manifest_sha256] = body
            case Refused():
                values["why"] = body.why or None
            case RolledBack():
                target = promoted.get(body.manifest_sha256)
                values |= {"previous": points_at, **(_values(target, _OF_TARGET) if target else {"metrics": {}})}
        values |= {"val_loss": values["metrics"].get("val_loss"), "current": False}
        rows.append(PromotionRow(**{**dict.fromkeys(_COLUMNS), **values}))
        points_at = points_at if isinstance(body, Refused) else body.manifest_sha256
    newest = max((n for n, row in enumerate(rows) if row.kind != "refused"), default=None)
    return [replace(row, current=n == newest) for n, row in enumerate(rows)]


def _values(record: ModelDecision, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names if hasattr(record, name)}
