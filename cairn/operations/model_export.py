"""Exports a committed checkpoint in Hugging Face's layout, with its tokenizer and a model card."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.operations.model_card import ModelFacts, write_card
from cairn.operations.text_sampling import open_run_model
from reports.queries.alias_history import list_promotions
from reports.queries.run_lookup import FoundCheckpoint
from storage.stores.verified_object import describe_file
from tasks.errors import InvalidConfiguration

if TYPE_CHECKING:
    from tasks.evaluator.checkpoint_model import CheckpointModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModelFile:
    """A file that was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """The files of an export, and their checkpoint."""

    folder: str
    files: tuple[ExportedModelFile, ...]
    run_id: str
    step: int
    manifest_sha256: str


def export_model(found: FoundCheckpoint, folder: Path) -> ExportedModel:
    """Verify and write the checkpoint; raises `InvalidConfiguration` for a folder with files, and `IntegrityError`."""
    from tasks.errors import TaskError
    from tasks.evaluator.model_directory import require_empty, write_model_directory

    try:
        require_empty(folder)  # before the weights are read
        opened = open_run_model(found.log, found.reference)
        write_model_directory(folder, opened, card=write_card(_facts(found, opened)))
    except TaskError as error:
        raise InvalidConfiguration(str(error)) from error
    return ExportedModel(
        folder=str(folder),
        files=tuple(
            ExportedModelFile(name=path.name, bytes=written.bytes, sha256=written.sha256)
            for path in sorted(folder.iterdir())
            for written in [describe_file(path)]
        ),
        run_id=found.log.run_id,
        step=found.reference.step,
        manifest_sha256=found.reference.manifest_sha256,
    )


def _facts(found: FoundCheckpoint, opened: "CheckpointModel") -> ModelFacts:
    promotions = list_promotions(found.log.store)
    return ModelFacts(
        state=found.log.state,
        opened=found.opened,
        reference=found.reference,
        manifest=opened.snapshot.manifest,
        snapshot_id=found.opened.data_snapshot,
        parameters=opened.network.parameter_count,
        end_of_text=opened.tokenizer.decode([opened.tokenizer.end_of_text_id]),
        promotions=tuple(view for view in promotions if view.manifest_sha256 == found.reference.manifest_sha256),
    )
