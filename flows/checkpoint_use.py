"""What a person does with one committed checkpoint: measure it, let it write.

Owns how these follow from the run's own log: its configuration, its data, its suite. Imports torch and the
orchestrator only in the function that needs them.
"""

import os
from dataclasses import dataclass

from flows.run_lookup import FoundCheckpoint, configuration_of
from flows.work_folder import work_folder
from storage.run_entries import EvaluationFailed, EvaluationRecorded


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """How text is drawn; temperature 0 takes the likeliest token, `top_k` 0 leaves every token in."""

    prompt: str
    tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text that exact weights wrote."""

    run_id: str
    step: int
    manifest_sha256: str
    prompt: str
    text: str
    seed: int


def measure(found: FoundCheckpoint) -> EvaluationRecorded | EvaluationFailed:
    """Evaluate under the run's own suite; what is already on record is not measured again."""
    from flows.evaluation_planning import plan_evaluation
    from tasks.evaluation_run import record_evaluation
    from tasks.this_machine import usable_cores

    config = configuration_of(found.log.state)
    threads = config.training.threads or usable_cores()
    plan = plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ), threads=threads)
    return record_evaluation(found.log, found.reference, plan)


def write_sample(found: FoundCheckpoint, request: SampleRequest) -> Sample:
    """Load the verified weights on the CPU and let them write on from the prompt."""
    import torch

    from model.configuration import ModelConfig
    from model.generation import generate
    from tasks.checkpoint_model import open_model, prompt_ids

    opened = open_model(
        found.log.store,
        found.reference,
        model=ModelConfig.model_validate(found.opened.config["model"]),
        snapshot_id=found.opened.data_snapshot,
        cache_dir=work_folder(os.environ) / "snapshots",
        device=torch.device("cpu"),
        mask_documents=configuration_of(found.log.state).training.mask_documents,
    )
    ids = generate(
        opened.network,
        prompt_ids(opened.tokenizer, request.prompt),
        new_tokens=request.tokens,
        temperature=request.temperature,
        top_k=request.top_k or None,
        seed=request.seed,
    )
    return Sample(
        run_id=found.log.run_id,
        step=found.reference.step,
        manifest_sha256=found.reference.manifest_sha256,
        prompt=request.prompt,
        text=opened.tokenizer.decode(ids),
        seed=request.seed,
    )
