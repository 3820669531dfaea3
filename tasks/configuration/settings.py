"""The sections about checkpoints, evaluation, failures, liveness, cost and exporters: none changes which run it is."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from model.configuration.network import NotNegative, NotNegativeNumber, Positive, PositiveNumber, Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        json_schema_extra={"rule": "a name of letters, digits, '_', '.' and '-' that begins with none of the last two"},
    ),
]
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


class CheckpointConfig(Section):
    """When a run commits and which checkpoints are kept. What an alias, evaluation or attempt needs is always kept."""

    every_steps: Positive = Field(200, description="interval of commits; evaluations are due at its multiples")
    every_seconds: Seconds | None = Field(
        None, description="commit also before so much training time can be lost; not set: only by steps"
    )
    grace_seconds: Seconds = Field(30.0, description="time that a preempted attempt has to commit once more")
    patience_seconds: Seconds = Field(600.0, description="how long an unreachable store is retried")
    stall_seconds: Seconds = Field(
        10.0, description="how long training waits for the checkpoint before; then it goes on without this one"
    )
    keep_last: Annotated[int, Field(ge=1)] = Field(3, description="keep so many of the newest checkpoints")
    keep_best: NotNegative = Field(1, description="keep so many with the lowest held-out loss")
    keep_every: NotNegative = Field(
        0, description="keep those at multiples of this step; 0 is off", json_schema_extra={"unit": "steps"}
    )


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


class LeaseConfig(Section):
    """How a live attempt is recognized."""

    seconds: Seconds = Field(
        30.0,
        description="an attempt without a heartbeat for this time counts as lost; at least 3 heartbeats",
        json_schema_extra={"unit": "seconds"},
    )
    heartbeat_seconds: Seconds = Field(3.0, description="time between heartbeats")

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> Self:
        if self.seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"seconds={self.seconds} must be at least three times heartbeat_seconds={self.heartbeat_seconds}"
            )
        return self


class BudgetConfig(Section):
    """What retries of one termination reason may spend."""

    retries: NotNegative = Field(description="retries since the last progress")
    total: NotNegative | None = Field(None, description="retries over the whole run; not set: no limit")
    wasted_gpu_seconds: NotNegativeNumber | None = Field(
        None, description="device time lost to this reason over the whole run; not set: no limit"
    )
    backoff_seconds: NotNegativeNumber = Field(
        0.0, description="wait before the first retry; it doubles with each further one"
    )
    samples: NotNegative | None = Field(None, description="samples that may be quarantined over the whole run")


class BudgetsConfig(Section):
    """One budget for each termination reason that may be retried, and one for evaluators."""

    model_config = ConfigDict(populate_by_name=True)

    preempted: BudgetConfig = BudgetConfig(retries=1000)
    lost: BudgetConfig = BudgetConfig(retries=20)
    oom: BudgetConfig = BudgetConfig(retries=6)
    bad_data: BudgetConfig = Field(default=BudgetConfig(retries=5, samples=256), alias="bad-data")
    diverged: BudgetConfig = BudgetConfig(retries=2, samples=65536)
    storage: BudgetConfig = BudgetConfig(retries=8, backoff_seconds=5.0)
    hung: BudgetConfig = BudgetConfig(retries=3)
    too_few_machines: BudgetConfig = Field(default=BudgetConfig(retries=3000), alias="too-few-machines")
    evaluator_failed: BudgetConfig = Field(default=BudgetConfig(retries=1), alias="evaluator-failed")

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults_of_what_is_left_out(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        names = {field.alias or name: field.default for name, field in cls.model_fields.items()}
        return {
            name: {**names[name].model_dump(), **value} if name in names and isinstance(value, Mapping) else value
            for name, value in given.items()
        }

    @model_validator(mode="after")
    def _evaluators_quarantine_nothing(self) -> Self:
        if self.evaluator_failed.samples is not None:
            raise ValueError("evaluator-failed.samples must not be set: a failed evaluator quarantines no samples")
        return self


class WatchdogConfig(Section):
    """After how much silence a trainer counts as hung."""

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        10.0, description="a trainer hangs when it is silent this many times as long as its slowest recent step"
    )
    floor_seconds: Seconds = Field(60.0, description="shortest silence after which a trainer counts as hung")
    startup_seconds: Seconds = Field(900.0, description="silence that is allowed before the first steps")


class MachinesConfig(Section):
    """How a run on several machines waits for them; how many there are is the environment's CAIRN_NODES."""

    check: str = Field("", description="command without which no machine joins an attempt: its exit code must be 0")
    at_least: NotNegative = Field(0, description="train with so many machines if no more come; 0: only with all")
    wait_seconds: Seconds = Field(
        30.0, description="how long an attempt waits for machines, and they for the first, before they leave with 75"
    )


class DivergenceConfig(Section):
    """When the train loss counts as exploded."""

    patience_steps: Positive = Field(16, description="steps in a row whose loss is too high")
    rise_nats: PositiveNumber = Field(
        1.5, description="a loss is too high this far above the median of the losses before"
    )


class PreemptionConfig(Section):
    """What announces, besides SIGTERM, that this machine will be taken away; file and cloud are never a log's word."""

    notice_file: str = Field("", description="a file whose existence is the notice")
    metadata: Literal["", "aws", "gcp"] = Field("", description="cloud whose metadata service is asked")
    signal: Literal["", "SIGUSR1", "SIGUSR2"] = Field(
        "", description="signal that the scheduler sends ahead, such as Slurm's --signal=USR1@60"
    )
    poll_seconds: Seconds = Field(5.0, description="time between looks at the file and the metadata service")


class CostConfig(Section):
    """Price of the devices, for estimates in reports."""

    gpu_hour_price: NotNegativeNumber | None = Field(
        None, description="price of one device for an hour; not set: no costs are shown"
    )
    currency: Annotated[str, Field(pattern=r"^[^\W\d_]{1,8}$|^[$€£¥]$")] = Field(
        "USD", description="currency of the price", json_schema_extra={"rule": "up to 8 letters, or one of $ € £ ¥"}
    )


class NotifyConfig(Section):
    """Whom a run's decisions are told, by this machine alone: nothing of this section is written into a log.

    Its words: finished, budget-exhausted, stopped, integrity, approval-wanted, and silent, which `cairn watch` tells.
    """

    command: str = Field("", description="command of this machine that reads each notice as JSON from standard input")
    webhook: SecretStr = Field(SecretStr(""), description="address that each notice is posted to as JSON")
    block: Annotated[str, Field(pattern=r"^([a-z0-9-]+/[a-z0-9-]+)?$")] = Field(
        "",
        description="notification block of the Prefect server, such as slack-webhook/team",
        json_schema_extra={"rule": "type/name, as Prefect lists blocks"},
    )
    timeout_seconds: Seconds = Field(10.0, description="how long the command or the webhook may take for one notice")

    @field_validator("command")
    @classmethod
    def _command_can_be_split(cls, given: str) -> str:
        shlex.split(given)
        return given

    @field_validator("webhook")
    @classmethod
    def _webhook_is_an_address(cls, given: SecretStr) -> SecretStr:
        parts = urlsplit(given.get_secret_value())
        if given.get_secret_value() and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must be an http(s) address; it may be a secret, so it is not shown")
        return given


class MirrorsConfig(Section):
    """Exporters: where the curve of a run is copied, beside the store. Never read or waited for, never a log's word."""

    tensorboard: str = Field("", description="folder of this machine that TensorBoard reads")
    wandb: str = Field("", description="folder of this machine for Weights & Biases, offline; `wandb sync` sends it")
    mlflow: str = Field("", description="address of an MLflow tracking server; credentials stay in MLFLOW_TRACKING_*")

    @model_validator(mode="after")
    def _addresses_can_be_used(self) -> Self:
        for name in ("tensorboard", "wandb"):
            if "://" in getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a folder of this machine")
        if not self.mlflow:
            return self
        parts = urlsplit(self.mlflow)
        if parts.username or parts.password:
            raise ValueError(
                "mlflow: the address carries credentials; put them into MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"mlflow={self.mlflow!r} must be the http(s) address of a tracking server; `mlflow server` starts one"
            )
        return self

    def based_at(self, folder: Path) -> "MirrorsConfig":
        """Return the same with absolute folders; a relative one starts at `folder`."""
        named = {name: given for name in ("tensorboard", "wandb") if (given := getattr(self, name))}
        return self.model_copy(update={name: str(folder / Path(given).expanduser()) for name, given in named.items()})
