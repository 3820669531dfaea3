"""What a user may say about checkpoints, evaluation, promotion, budgets and ownership. Validated before any work.

Owns sections that never change which run it is. Refuses to know the whole run configuration: `flows` composes it.
"""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class CheckpointConfig(BaseModel):
    """How often the run commits, how long a preempted attempt may take to do so once more, and what is kept.

    Every `every_steps` steps, where evaluations are due; and, where `every_seconds` is given, before that many seconds
    of training are at stake, as far as the last step's time tells.
    Kept are the newest `keep_last`, the `keep_best` by held-out loss and, unless 0, every `keep_every`-th step; what
    an alias, an evaluation or an attempt needs is kept whatever stands here. A store that is away is waited for
    `patience_seconds`, while training goes on as far as it can.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_steps: Annotated[int, Field(gt=0)] = 200
    every_seconds: Seconds | None = None
    grace_seconds: Seconds = 30.0
    patience_seconds: Seconds = 600.0
    keep_last: Annotated[int, Field(ge=1)] = 3
    keep_best: Count = 1
    keep_every: Count = 0


def _split_command(command: object) -> object:
    return tuple(shlex.split(command)) if isinstance(command, str) else command


SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Command = Annotated[tuple[str, ...], BeforeValidator(_split_command)]


class EvaluatorConfig(BaseModel):
    """An evaluator of somebody's own: a command that is given a model directory and prints numbers as JSON.

    `timeout_seconds` is for all of it, writing the directory included. Without `required` its failure is on record and
    nothing waits for it. `folder` and `files` are filled in when the configuration is read: where the command runs, and
    the sha256 of every file it names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: SuiteName
    command: Annotated[Command, Field(min_length=1)]
    timeout_seconds: Seconds = 600.0
    required: bool = False
    folder: str = ""
    files: dict[str, str] | None = None

    @model_validator(mode="after")
    def _files_come_with_their_folder(self) -> Self:
        if (self.files is None) != (not self.folder):
            raise ValueError(f"folder={self.folder!r}: folder and files are filled in on reading; leave both out")
        return self


class EvaluationConfig(BaseModel):
    """The suites every committed checkpoint is measured with, each in a process of its own.

    `suite` names a file that says what is measured, instead of the keys here; `command` is short for one required
    evaluator called "command".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_commits: Annotated[int, Field(gt=0)] = 1
    timeout_seconds: Seconds = 600.0
    suite: str = ""
    name: SuiteName = "held-out"
    batches: Annotated[int, Field(gt=0)] = 20
    batch_size: Annotated[int, Field(gt=0)] = 16
    prompts: tuple[str, ...] = ("The ",)
    sample_tokens: Annotated[int, Field(ge=0)] = 120
    sample_seed: Annotated[int, Field(ge=0)] = 0
    command: Command = ()
    evaluators: tuple[EvaluatorConfig, ...] = ()

    @model_validator(mode="after")
    def _suite_stands_alone(self) -> Self:
        both = sorted(self.model_fields_set & {*SUITE_KEYS, "command"})
        if self.suite and both:
            raise ValueError(f"suite={self.suite!r} says what is measured; remove {', '.join(both)} or suite")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.name, *(evaluator.name for evaluator in self.evaluators)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"evaluators: {', '.join(twice)}: every suite needs a name of its own")
        return self


SUITE_KEYS = ("name", "batches", "batch_size", "prompts", "sample_tokens", "sample_seed", "evaluators")
"""The keys that say what is measured: those a suite file may hold."""


class PromotionConfig(BaseModel):
    """Which alias the best checkpoint of a finished run is offered to, and what the gates ask of it.

    It must be better by `min_improvement`, its loss curve may not be one of `refuse_verdicts`, and with
    `require_approval` a person has the last word: asked in Prefect for `approval_timeout_seconds`, afterwards by
    `cairn promote`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "champion"
    min_improvement: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    refuse_verdicts: tuple[Literal["diverging", "stuck", "spiking", "overfitting", "plateau", "too-early"], ...] = (
        "diverging",
        "stuck",
    )
    require_approval: bool = False
    approval_timeout_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 86_400.0


class LeaseConfig(BaseModel):
    """Liveness of an attempt: how often it says it is here, and how long silence must last before it counts as lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Seconds = 30.0
    heartbeat_seconds: Seconds = 3.0

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> Self:
        if self.seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"seconds={self.seconds} must be at least three times heartbeat_seconds={self.heartbeat_seconds}"
            )
        return self


class BudgetConfig(BaseModel):
    """What retries of one termination reason may spend (None: no limit).

    `retries` count since the last progress; `total` and `wasted_gpu_seconds` over the whole run; `samples` is how much
    data may be quarantined in all. The wait before a retry doubles from `backoff_seconds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    retries: Count
    total: Count | None = None
    wasted_gpu_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    backoff_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    samples: Count | None = None


class BudgetsConfig(BaseModel):
    """One budget for each termination reason that may be retried, and one for evaluators."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    preempted: BudgetConfig = BudgetConfig(retries=1000)
    lost: BudgetConfig = BudgetConfig(retries=20)
    oom: BudgetConfig = BudgetConfig(retries=6)
    bad_data: BudgetConfig = Field(default=BudgetConfig(retries=5, samples=256), alias="bad-data")
    diverged: BudgetConfig = Field(default=BudgetConfig(retries=2, samples=65536))
    storage: BudgetConfig = BudgetConfig(retries=8, backoff_seconds=5.0)
    hung: BudgetConfig = BudgetConfig(retries=3)
    evaluator_failed: BudgetConfig = Field(default=BudgetConfig(retries=1), alias="evaluator-failed")


class WatchdogConfig(BaseModel):
    """When silence means that the trainer hangs: `factor` times the slowest of its own recent steps.

    Never less than `floor_seconds`; before it has a history, `startup_seconds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    floor_seconds: Seconds = 60.0
    startup_seconds: Seconds = 900.0


class DivergenceConfig(BaseModel):
    """When the loss counts as exploded: `patience_steps` in a row lie `rise_nats` above the median before them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    patience_steps: Annotated[int, Field(gt=0)] = 16
    rise_nats: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5


class PreemptionConfig(BaseModel):
    """Who besides SIGTERM announces that this machine will be taken away; each leads to the same orderly end.

    `notice_file` counts as soon as it exists. `metadata` asks the cloud's metadata service (aws or gcp). `signal` is a
    further signal a scheduler sends ahead, such as Slurm's `--signal=USR1@60`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    notice_file: str = ""
    metadata: Literal["", "aws", "gcp"] = ""
    signal: Literal["", "SIGUSR1", "SIGUSR2"] = ""
    poll_seconds: Seconds = 5.0


class EarlyStopConfig(BaseModel):
    """When a run ends before its last step; off by default. Held-out losses decide, in step order.

    `patience` evaluations in a row do not improve on the best by more than `min_delta` nats (0: off); the held-out loss
    is at least `overfit_ratio` times the train loss (0: off) for `overfit_patience` evaluations in a row; the verdict
    on the curve is diverging, or stuck.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    patience: Count = 0
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    overfit_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    overfit_patience: Annotated[int, Field(ge=1)] = 3
    on_divergence: bool = False
    on_stuck: bool = False

    @model_validator(mode="after")
    def _ratio_can_be_one_of_overfitting(self) -> Self:
        if 0 < self.overfit_ratio <= 1:
            raise ValueError(f"overfit_ratio={self.overfit_ratio} must be above 1, or 0 for off")
        return self

    @property
    def is_on(self) -> bool:
        """Whether any rule can stop a run."""
        return bool(self.patience or self.overfit_ratio or self.on_divergence or self.on_stuck)


class CostConfig(BaseModel):
    """What an hour of one device costs, for estimates in reports; without a price there is no money in them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    currency: Annotated[str, Field(pattern=r"^[^\W\d_]{1,8}$|^[$€£¥]$")] = "USD"


class MirrorsConfig(BaseModel):
    """Where else a run's curve is shown, beside the store: it is only ever copied there, never read or waited for.

    `tensorboard` is a folder of this machine that TensorBoard watches, `mlflow` the address of an MLflow tracking
    server; its credentials stay in MLflow's own environment variables.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorboard: str = ""
    mlflow: str = ""

    @model_validator(mode="after")
    def _each_is_where_it_can_be(self) -> Self:
        if "://" in self.tensorboard:
            raise ValueError(f"tensorboard={self.tensorboard!r} must be a folder of this machine")
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
        """Return the same with an absolute folder; a relative one starts at `folder`."""
        if not self.tensorboard:
            return self
        return self.model_copy(update={"tensorboard": str(folder / Path(self.tensorboard).expanduser())})
