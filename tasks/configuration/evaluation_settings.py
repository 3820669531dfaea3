"""The sections `[evaluation]`, `[early_stop]` and `[promotion]`: what is measured and what follows from it."""

import shlex
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from model.configuration.network import NotNegative, NotNegativeNumber, Positive, Section
from tasks.configuration.settings import Name, Seconds

METRIC = "val_loss"
"""The held-out loss in an evaluation's metrics, by which checkpoints are ranked, promoted and stopped."""
SUITE_KEYS = ("name", "batches", "batch_size", "prompts", "sample_tokens", "sample_seed", "evaluators")
"""The keys that say what is measured: those that a suite file may hold."""


Command = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda command: tuple(shlex.split(command)) if isinstance(command, str) else command),
    Field(json_schema_extra={"rule": "a command line, or a list of its words"}),
]
Verdict = Literal["diverging", "stuck", "spiking", "overfitting", "clipping", "repeating", "plateau", "too-early"]


class EvaluatorConfig(Section):
    """A command that is given a model directory and prints numbers as JSON."""

    name: Name = Field(description="name of its suite in the log")
    command: Annotated[Command, Field(min_length=1)] = Field(
        description="command that measures; {model} in it, or a further last word, is the model directory"
    )
    timeout_seconds: Seconds = Field(600.0, description="time limit, writing the model directory included")
    required: bool = Field(False, description="promotion waits for it; otherwise its failure is only recorded")
    folder: str = Field("", description="working directory of the command", json_schema_extra={"internal": True})
    files: dict[str, str] | None = Field(
        None, description="sha256 of every file that the command names", json_schema_extra={"internal": True}
    )
    logged: bool = Field(False, description="only a run's log names the command", json_schema_extra={"internal": True})

    @model_validator(mode="after")
    def _files_come_with_their_folder(self) -> Self:
        if (self.files is None) != (not self.folder):
            raise ValueError(f"folder={self.folder!r}: folder and files are filled in on reading; leave both out")
        return self


class EvaluationConfig(Section):
    """The suites that measure committed checkpoints, each in a process of its own."""

    every_commits: Positive = Field(1, description="multiples of checkpoint.every_steps between evaluations")
    timeout_seconds: Seconds = Field(600.0, description="time limit of one suite")
    suite: str = Field("", description="TOML file that says what is measured, instead of the keys below")
    name: Name = Field("held-out", description="name of the built-in suite in the log")
    batches: Positive = Field(20, description="held-out batches that the loss is measured on")
    batch_size: Positive = Field(16, description="windows in a held-out batch", json_schema_extra={"unit": "windows"})
    prompts: tuple[str, ...] = Field(("The ",), description="texts that samples begin with")
    sample_tokens: NotNegative = Field(120, description="length of each sample; 0 draws none")
    sample_seed: NotNegative = Field(0, description="seed of the samples")
    command: Command = Field((), description='short for one required evaluator called "command"')
    evaluators: tuple[EvaluatorConfig, ...] = Field(
        (), description="further evaluators, each with the keys of evaluation.evaluators"
    )

    @model_validator(mode="after")
    def _suites_are_clear(self) -> Self:
        both = sorted(self.model_fields_set & {*SUITE_KEYS, "command"})
        if self.suite and both:
            raise ValueError(f"suite={self.suite!r} says what is measured; remove {', '.join(both)} or suite")
        names = [self.name, *(evaluator.name for evaluator in self.evaluators)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"evaluators: {', '.join(twice)}: every suite needs a name of its own")
        return self


class EarlyStopConfig(Section):
    """When a run ends before its last step; off by default. Held-out losses decide, in the order of steps."""

    patience: NotNegative = Field(0, description="stop after so many evaluations without a better loss; 0 is off")
    min_delta: NotNegativeNumber = Field(
        0.0, description="a loss is better when it is lower by more than this", json_schema_extra={"unit": "nats"}
    )
    overfit_ratio: NotNegativeNumber = Field(
        0.0, description="stop when the held-out loss is so many times the train loss; 0 is off, else above 1"
    )
    overfit_patience: Positive = Field(3, description="evaluations in a row that overfit_ratio must hold")
    on_divergence: bool = Field(False, description="stop when the verdict on the curve is diverging")
    on_stuck: bool = Field(False, description="stop when the verdict on the curve is stuck")

    @model_validator(mode="after")
    def _overfit_ratio_is_above_one(self) -> Self:
        if 0 < self.overfit_ratio <= 1:
            raise ValueError(f"overfit_ratio={self.overfit_ratio} must be above 1, or 0 for off")
        return self

    @property
    def is_on(self) -> bool:
        """Whether any rule can stop a run."""
        return bool(self.patience or self.overfit_ratio or self.on_divergence or self.on_stuck)


class PromotionConfig(Section):
    """The alias that the best checkpoint of a finished run is offered to, and the gates before it."""

    alias: Name = Field("champion", description="alias that the best checkpoint is offered to")
    min_improvement: NotNegativeNumber = Field(
        0.0,
        description="how much lower than the present one its held-out loss must be",
        json_schema_extra={"unit": "nats"},
    )
    refuse_verdicts: tuple[Verdict, ...] = Field(
        ("diverging", "stuck"), description="verdicts on the loss curve that refuse promotion"
    )
    require_approval: bool = Field(False, description="a person must approve, in Prefect or with `cairn promote`")
    approval_timeout_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        86_400.0, description="how long Prefect waits for the approval; `cairn promote` works afterwards too"
    )
