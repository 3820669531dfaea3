"""What the parent and an evaluator process exchange: one JSON document each way. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from model.configuration.network import ModelConfig
from storage.logs.log_entry import CheckpointReference
from tasks.evaluator.evaluation_suite import CommandSuite, Suite


class EvaluationSpec(BaseModel):
    """Everything an evaluator needs; `number` counts the run's evaluations, `folder` is for a command's model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_url: str
    snapshot_id: str
    model: ModelConfig
    checkpoint: CheckpointReference
    suite: Suite | CommandSuite
    cache_dir: Path
    device: str
    threads: int
    mask_documents: bool
    folder: Path | None
    run_id: str
    run_prefix: str
    number: int
    faults: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """What was measured: losses in nats per token, and the text after each prompt."""

    metrics: dict[str, float]
    samples: tuple[str, ...]
