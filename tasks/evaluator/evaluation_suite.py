"""The suites of an evaluation, and the result that an evaluator process returns. Imports no torch."""

from dataclasses import dataclass

from cairn.storage.stores.document import encode, sha256
from cairn.tasks.configuration.settings import EVALUATOR_VERSION, EvaluationConfig, EvaluatorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A fixed slice of held-out windows and fixed prompts with a fixed seed."""

    name: str
    batches: int
    batch_size: int
    prompts: tuple[str, ...]
    sample_tokens: int
    sample_seed: int
    evaluator_version: str = EVALUATOR_VERSION

    @property
    def sha256(self) -> str:
        """The suite's identity."""
        return sha256(encode(self))


AnySuite = Suite | EvaluatorConfig
"""A slice of held-out windows with prompts, or a command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """An evaluator's measurements: losses in nats per token, the text after each prompt; and its command's boundary."""

    metrics: dict[str, float]
    samples: tuple[str, ...] = ()
    boundary: str = ""


def suite_of(evaluation: EvaluationConfig) -> Suite:
    """Return the held-out suite of a run's evaluation section, by which its checkpoints are compared."""
    return Suite(
        name=evaluation.name,
        batches=evaluation.batches,
        batch_size=evaluation.batch_size,
        prompts=evaluation.prompts,
        sample_tokens=evaluation.sample_tokens,
        sample_seed=evaluation.sample_seed,
    )


def required_suites_of(evaluation: EvaluationConfig) -> tuple[AnySuite, ...]:
    """Return the suites that must have measured a checkpoint before it may be promoted."""
    return (suite_of(evaluation), *(suite for suite in evaluation.evaluators if suite.required))
