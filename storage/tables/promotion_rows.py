"""Every decision on every alias as rows: promotions, refusals, roll-backs.

Owns which value goes into which column, and what a roll-back went back to. Read from the registry's entries at every
question: they are few. Refuses to know SQL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from storage.logs.entry_log import EntryLog
from storage.logs.registry import list_aliases
from storage.logs.registry_entries import MODEL_KINDS, Promoted, Refused, RolledBack
from storage.stores.object_store import ObjectStore
from storage.tables.run_tables import PromotionRow


def read_promotions(store: ObjectStore) -> list[PromotionRow]:
    """Return the rows of all aliases of the store, each alias oldest first."""
    rows: list[PromotionRow] = []
    for alias in list_aliases(store):
        log = EntryLog(store=store, prefix=f"models/{alias}/log", kinds=MODEL_KINDS)
        rows += promotion_rows(alias, [(read.entry.at, read.entry.body) for read in log.read_after(None)])
    return rows


def promotion_rows(alias: str, decisions: Sequence[tuple[datetime, Any]]) -> list[PromotionRow]:
    """Return every decision on an alias, oldest first; entries of a kind this reader does not know are left out."""
    rows: list[PromotionRow] = []
    points_at: str | None = None
    promoted: dict[str, Promoted] = {}
    for decided_at, body in decisions:
        match body:
            case Promoted():
                promoted[body.manifest_sha256] = body
                points_at = body.manifest_sha256
                rows.append(_promoted_row(body, decided_at))
            case Refused():
                rows.append(_refused_row(alias, body, decided_at))
            case RolledBack():
                rows.append(_rolled_back_row(alias, body, decided_at, promoted, previous=points_at))
                points_at = body.manifest_sha256
    newest = max((n for n, row in enumerate(rows) if row.kind != "refused"), default=None)
    return [replace(row, current=n == newest) for n, row in enumerate(rows)]


def _promoted_row(body: Promoted, decided_at: datetime) -> PromotionRow:
    return PromotionRow(
        alias=body.alias,
        kind="promoted",
        decided_at=decided_at,
        promoted_at=decided_at,
        run_id=body.run_id,
        model_family=None,
        step=body.step,
        manifest_sha256=body.manifest_sha256,
        previous=body.previous,
        current=False,
        by=body.by,
        why=body.why,
        gate=None,
        detail=None,
        suite_sha256=body.suite_sha256,
        val_loss=body.metrics.get("val_loss"),
        metrics=body.metrics,
        verdict=getattr(body, "verdict", None),
    )


def _refused_row(alias: str, body: Refused, decided_at: datetime) -> PromotionRow:
    metrics: Mapping[str, float] = getattr(body, "metrics", {})
    return PromotionRow(
        alias=alias,
        kind="refused",
        decided_at=decided_at,
        promoted_at=None,
        run_id=body.run_id,
        model_family=None,
        step=body.step,
        manifest_sha256=body.manifest_sha256,
        previous=None,
        current=False,
        by=body.by,
        why=getattr(body, "why", None) or None,
        gate=body.gate,
        detail=body.detail,
        suite_sha256=getattr(body, "suite_sha256", None),
        val_loss=metrics.get("val_loss"),
        metrics=metrics,
        verdict=None,
    )


def _rolled_back_row(
    alias: str, body: RolledBack, decided_at: datetime, promoted: Mapping[str, Promoted], *, previous: str | None
) -> PromotionRow:
    target = promoted.get(body.manifest_sha256 or "")
    metrics = target.metrics if target else {}
    return PromotionRow(
        alias=alias,
        kind="rolled-back",
        decided_at=decided_at,
        promoted_at=None,
        run_id=target.run_id if target else None,
        model_family=None,
        step=target.step if target else None,
        manifest_sha256=body.manifest_sha256,
        previous=previous,
        current=False,
        by=body.by,
        why=body.why,
        gate=None,
        detail=None,
        suite_sha256=target.suite_sha256 if target else None,
        val_loss=metrics.get("val_loss"),
        metrics=metrics,
        verdict=None,
    )
