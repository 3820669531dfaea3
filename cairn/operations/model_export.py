"""Exports a committed checkpoint in Hugging Face's layout, with its tokenizer and a model card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.model.configuration.network import family_of
from cairn.model.errors import InvalidInput
from cairn.operations.text_sampling import open_run_model
from cairn.reports.queries import alias_history, run_lookup
from cairn.reports.text import display_tables
from cairn.storage.logs import log_entry, run_state
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest
from cairn.storage.stores.document import encode
from cairn.storage.stores.object_store import WrittenObject, describe_file
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.text.format import format_value, one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The records of one committed model."""

    state: run_state.RunState
    reference: log_entry.CheckpointReference
    manifest: SnapshotManifest
    parameters: int
    end_of_text: str
    promotions: tuple[alias_history.AliasDecision, ...]


def write_card(facts: ModelFacts) -> str:
    """Return the card, from the records alone: use, provenance, measurements, promotions, limits, configuration."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("cairn.operations")
    pages = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "code": lambda text: "`{}`".format(one_line(text).replace("`", "'").replace("|", "\\|")),  # stays in its cell
        "document": lambda document: encode(document).decode(),
        "json": json.dumps,
        "markdown": display_tables.markdown_text,
        "number": lambda number: f"{number:,}",
        "time": format_value,
    }
    assert facts.state.opened is not None
    config = parse_stored_configuration(facts.state.opened.config)  # what is not frozen has its default
    return pages.get_template("model_card.md.j2").render(facts=facts, config=config, family=family_of(config.model))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """The files of an export by name, and their checkpoint."""

    folder: str
    files: Mapping[str, WrittenObject]
    run_id: str
    checkpoint: log_entry.CheckpointReference


def export_model(found: run_lookup.FoundCheckpoint, folder: Path) -> ExportedModel:
    """Verify and write the checkpoint; raises `InvalidConfiguration` for a folder with files, and `IntegrityError`."""
    from cairn.tasks.evaluator.checkpoint_model import require_empty, write_model_directory

    try:
        require_empty(folder)  # before the weights are read
        opened = open_run_model(found.log, found.reference)
        promotions = alias_history.list_promotions(found.log.store)
        facts = ModelFacts(
            state=found.log.state,
            reference=found.reference,
            manifest=opened.snapshot.manifest,
            parameters=opened.network.parameter_count,
            end_of_text=opened.tokenizer.decode([opened.tokenizer.end_of_text_id]),
            promotions=tuple(p for p in promotions if p.manifest_sha256 == found.reference.manifest_sha256),
        )
        write_model_directory(folder, opened, card=write_card(facts))
    except (TaskError, InvalidInput) as error:
        raise InvalidConfiguration(str(error)) from error
    files = {path.name: describe_file(path) for path in sorted(folder.iterdir())}
    return ExportedModel(folder=str(folder), files=files, run_id=found.log.run_id, checkpoint=found.reference)
