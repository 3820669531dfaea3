"""The columns people see of aliases: what they point at, and every decision about them; scripts take --json.

Owns which fields are worth a column. Refuses to fetch anything.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.text.format import short_digest
from tasks.text.output import print_table

if TYPE_CHECKING:
    from reports.queries.alias_history import AliasDecision, AliasPromotion


def print_models(views: "Sequence[AliasPromotion]") -> None:
    """Print the history of every alias."""
    columns = ("alias", "points at", "promoted (UTC)", "by", "why", "manifest", "previous")
    print_table(
        columns,
        [
            (
                f"{view.alias} *" if view.current else view.alias,
                f"{view.run_id}@{view.step}",
                view.promoted_at,
                view.by,
                view.why,
                short_digest(view.manifest_sha256),
                short_digest(view.previous),
            )
            for view in views
        ],
        empty="nothing is promoted yet; a run that finishes offers its best checkpoint",
    )


def print_decisions(views: "Sequence[AliasDecision]") -> None:
    """Print every decision about every alias."""
    columns = ("alias", "decision", "checkpoint", "at (UTC)", "by", "why", "manifest")
    print_table(
        columns,
        [
            (
                view.alias,
                f"{view.decision}: {view.gate}" if view.gate else view.decision,
                f"{view.run_id}@{view.step}" if view.run_id else None,
                view.at,
                view.by,
                view.why,
                short_digest(view.manifest_sha256),
            )
            for view in views
        ],
        empty="nothing was decided yet; a run that finishes offers its best checkpoint",
    )
