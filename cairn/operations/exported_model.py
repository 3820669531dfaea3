"""Exports a committed checkpoint for other programs, with a card that says where it comes from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.model.errors import InvalidInput
from cairn.operations.trained_models import open_run_model
from cairn.reports.queries import alias_history, run_lookup
from cairn.reports.text import display_tables
from cairn.storage.logs import log_entry
from cairn.storage.stores import codec, object_store
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.text.format import format_value, one_line

if TYPE_CHECKING:
    from cairn.tasks.evaluator.checkpoint_model import CheckpointModel
    from cairn.tasks.trainer.initial_weights import WeightsSource


def write_card(
    found: run_lookup.FoundCheckpoint, opened: "CheckpointModel", source: "WeightsSource | None", is_adapter: bool
) -> str:
    """Return the card, from the records alone: use, provenance, measurements, promotions, limits, configuration."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from cairn.model.configuration.network import family_of
    from cairn.tasks.configuration.stored_configuration import parse_stored_configuration

    loader = PackageLoader("cairn.operations")
    pages = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "code": lambda text: "`{}`".format(one_line(text).replace("`", "'").replace("|", "\\|")),  # stays in its cell
        "document": lambda document: codec.encode(document).decode(),
        "json": json.dumps,
        "markdown": display_tables.markdown_text,
        "number": lambda number: f"{number:,}",
        "time": format_value,
    }
    config = parse_stored_configuration(found.opened.config)  # what is not frozen has its default
    promotions = alias_history.list_promotions(found.log.store)
    path, _, entry = (config.model.module or "").rpartition(":")
    given = ", ".join(f"{name}={value!r}" for name, value in getattr(opened.network, "called_with", {}).items())
    return pages.get_template("model_card.md.j2").render(
        found=found,
        made=opened,
        end_of_text=opened.tokenizer.decode([opened.tokenizer.end_of_text_id]),
        promotions=[view for view in promotions if view.manifest_sha256 == found.reference.manifest_sha256],
        config=config,
        family=family_of(config.model),
        entry=(Path(path).stem, entry),
        call=f"{entry}({given})",
        source=source,
        is_adapter=is_adapter,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """The files of an export by name, and their checkpoint."""

    folder: str
    files: Mapping[str, object_store.WrittenObject]
    run_id: str
    checkpoint: log_entry.CheckpointReference


def export_model(found: run_lookup.FoundCheckpoint, folder: Path, *, adapter: bool = False) -> ExportedModel:
    """Verify and write the checkpoint, or its `adapter` alone; raises `InvalidConfiguration`, and `IntegrityError`."""
    from cairn.tasks.evaluator import checkpoint_model
    from cairn.tasks.trainer.initial_weights import read_source

    lora = run_lookup.configuration_of(found.log.state).training.lora
    if adapter and lora is None:
        problem = f"--adapter: run {found.log.run_id} was trained without training.lora"
        raise InvalidConfiguration(f"{problem}; leave it out for the whole model")
    try:
        checkpoint_model.require_empty(folder)  # before the weights are read
        kept = found.opened.initial_source_sha256
        source = read_source(found.log.store, kept) if kept else None
        opened = open_run_model(found.log, found.reference)
        card = write_card(found, opened, source, adapter)
        if adapter and lora is not None:
            trained, _ = checkpoint_model.read_trained(found.log.store, found.reference)
            shape, base = opened.network.config, source.name if source else ""
            checkpoint_model.write_adapter_directory(folder, trained, shape, lora, card=card, base=base)
        else:
            checkpoint_model.write_model_directory(folder, opened, card=card, source=source)
    except (TaskError, InvalidInput) as error:
        raise InvalidConfiguration(str(error)) from error
    files = {path.name: object_store.describe_file(path) for path in sorted(folder.iterdir())}
    return ExportedModel(folder=str(folder), files=files, run_id=found.log.run_id, checkpoint=found.reference)
