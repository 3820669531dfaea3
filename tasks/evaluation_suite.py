"""A suite: exactly what is measured, so that two evaluations under equal hashes can be compared.

Owns the record and its identity. Refuses to know weights and results.
"""

from dataclasses import dataclass

from storage.document import encode, sha256
from tasks.settings import EvaluationConfig

EVALUATOR_VERSION = "1"
SAMPLE_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A fixed slice of held-out windows and fixed prompts with a fixed seed."""

    name: str
    batches: int
    batch_size: int
    prompts: tuple[str, ...]
    sample_tokens: int
    sample_seed: int
    evaluator_version: str

    @property
    def sha256(self) -> str:
        """The suite's identity."""
        return sha256(encode(self))


def suite_of(evaluation: EvaluationConfig) -> Suite:
    """Return the suite a run's evaluation section describes."""
    return Suite(
        name="held-out",
        batches=evaluation.batches,
        batch_size=evaluation.batch_size,
        prompts=evaluation.prompts,
        sample_tokens=evaluation.sample_tokens,
        sample_seed=SAMPLE_SEED,
        evaluator_version=EVALUATOR_VERSION,
    )
