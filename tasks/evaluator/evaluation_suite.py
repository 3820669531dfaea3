"""The suites of an evaluation, and the result that an evaluator process returns. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cairn.storage.stores.document import encode, sha256
from cairn.tasks.configuration.settings import EvaluationConfig


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSuite:
    """A command that gets a model directory and prints numbers; `files` are the sha256 of the files that it names."""

    name: str
    command: tuple[str, ...]
    folder: str
    timeout_seconds: float
    required: bool
    evaluator_version: str
    files: Mapping[str, str] = field(default_factory=dict)
    logged: bool = False

    @property
    def sha256(self) -> str:
        """The suite's identity: the contents of its files count, their paths and the timeout do not."""
        command = []
        for argument in self.command:
            option, equals, value = ("", "", argument) if argument in self.files else argument.partition("=")
            command.append(f"{option}{equals}sha256:{self.files[value]}" if value in self.files else argument)
        measured = {"kind": "command", "name": self.name, "command": command}
        return sha256(encode(measured | {"evaluator_version": self.evaluator_version}))


AnySuite = Suite | CommandSuite


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
        evaluator_version="1",
    )


def command_suites_of(evaluation: EvaluationConfig) -> tuple[CommandSuite, ...]:
    """Return the suites of the section's commands, in the order they run."""
    return tuple(
        CommandSuite(
            name=evaluator.name,
            command=evaluator.command,
            folder=evaluator.folder,
            timeout_seconds=evaluator.timeout_seconds,
            required=evaluator.required,
            evaluator_version="1",
            files=evaluator.files or {},
            logged=evaluator.logged,
        )
        for evaluator in evaluation.evaluators
    )


def required_suites_of(evaluation: EvaluationConfig) -> tuple[AnySuite, ...]:
    """Return the suites that must have measured a checkpoint before it may be promoted."""
    return (suite_of(evaluation), *(suite for suite in command_suites_of(evaluation) if suite.required))
