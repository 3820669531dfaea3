"""The model card (README) of exported weights, written from the records alone: equal records give equal cards."""

import json
from dataclasses import dataclass

from reports.pages.markdown import markdown_text
from reports.queries.alias_history import AliasPromotion
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_entries import EvaluationRecorded, RunOpened
from storage.logs.run_state import RunState
from storage.snapshots.snapshot_manifest import SnapshotManifest
from storage.stores.document import encode
from tasks.configuration.run_configuration import RunConfig
from tasks.configuration.stored_configuration import parse_stored_configuration
from tasks.text.format import format_value, one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The records of one committed model; `parameters` leaves out the position table."""

    state: RunState
    opened: RunOpened
    reference: CheckpointReference
    manifest: SnapshotManifest
    snapshot_id: str
    parameters: int
    end_of_text: str
    promotions: tuple[AliasPromotion, ...]

    @property
    def config(self) -> RunConfig:
        """The run's frozen configuration; what is not frozen has its default."""
        return parse_stored_configuration(self.opened.config)

    @property
    def evaluations(self) -> list[EvaluationRecorded]:
        """The evaluations of exactly these weights."""
        return [item for item in self.state.evaluations if item.manifest_sha256 == self.reference.manifest_sha256]


def write_card(facts: ModelFacts) -> str:
    """Return the card: front matter, use, provenance, measurements, promotions, limits, configuration."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("cairn.operations")
    pages = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "code": _code,
        "document": lambda document: encode(document).decode(),
        "json": json.dumps,
        "markdown": markdown_text,
        "number": lambda number: f"{number:,}",
        "time": format_value,
    }
    return pages.get_template("model_card.md.j2").render(facts=facts)


def _code(text: str) -> str:
    """Return text as code that stays within its cell."""
    quoted = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{quoted}`"
