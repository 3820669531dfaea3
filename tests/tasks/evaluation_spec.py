"""What an external evaluator is asked, by a test that gives it a folder."""

from pathlib import Path
from types import SimpleNamespace

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.tasks.evaluator.evaluation_run import EvaluationSpec


def evaluation_spec(folder: Path) -> EvaluationSpec:
    """Return a specification whose model and scratch folders are made, empty, in `folder`."""
    (folder / "model").mkdir()
    (folder / "scratch").mkdir()
    reference = CheckpointReference(step=7, attempt=1, prefix="runs/r/c", manifest_sha256="m" * 64)
    plan = SimpleNamespace(device="cpu", threads=1)
    return EvaluationSpec.model_construct(folder=folder, run_id="bard", checkpoint=reference, plan=plan)
