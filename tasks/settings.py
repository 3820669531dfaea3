"""What a user may say about checkpoints, evaluation, promotion, budgets and ownership. Validated before any work.

Owns sections that never change which run it is. Refuses to know the whole run configuration: `flows` composes it.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class CheckpointConfig(BaseModel):
    """How often the run commits, how long a preempted attempt may take to do so once more, and what is kept.

    Kept are the newest `keep_last`, the `keep_best` by held-out loss and, unless 0, every `keep_every`-th step; what
    an alias, an evaluation or an attempt needs is kept whatever stands here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_steps: Annotated[int, Field(gt=0)] = 200
    grace_seconds: Seconds = 30.0
    keep_last: Annotated[int, Field(ge=1)] = 3
    keep_best: Count = 1
    keep_every: Count = 0


class EvaluationConfig(BaseModel):
    """The suite every committed checkpoint is measured with, in a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_commits: Annotated[int, Field(gt=0)] = 1
    batches: Annotated[int, Field(gt=0)] = 20
    batch_size: Annotated[int, Field(gt=0)] = 16
    prompts: tuple[str, ...] = ("The ",)
    sample_tokens: Annotated[int, Field(ge=0)] = 120
    timeout_seconds: Seconds = 600.0


class PromotionConfig(BaseModel):
    """Which alias the best checkpoint of a finished run is offered to, and by how much it must be better."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "champion"
    min_improvement: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


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
    """What retries of one termination reason may spend since the last progress, and in total (None: no limit)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    retries: Count
    total: Count | None = None
    backoff_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class BudgetsConfig(BaseModel):
    """One budget for each termination reason that may be retried."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    preempted: BudgetConfig = BudgetConfig(retries=1000)
    lost: BudgetConfig = BudgetConfig(retries=20)
    oom: BudgetConfig = BudgetConfig(retries=6)
    bad_data: BudgetConfig = Field(default=BudgetConfig(retries=0), alias="bad-data")
    diverged: BudgetConfig = BudgetConfig(retries=0)
    storage: BudgetConfig = BudgetConfig(retries=8, backoff_seconds=5.0)
    hung: BudgetConfig = BudgetConfig(retries=3)
