"""The sections about checkpoints, evaluation, failures, liveness, cost and exporters: none changes which run it is."""

import shlex
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from cairn.model.configuration.network import NotNegative, NotNegativeNumber, Positive, PositiveNumber, Section
from cairn.storage.stores import codec, redaction

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NAME_RULE = "a name of letters, digits, '_', '.' and '-' that begins with none of the last two"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", json_schema_extra={"rule": _NAME_RULE})]
METRIC = "val_loss"
"""The held-out loss in an evaluation's metrics, by which checkpoints are ranked, promoted and stopped."""
SUITE_KEYS = ("name", "batches", "batch_size", "prompts", "sample_tokens", "sample_seed", "evaluators")
"""The keys of a suite: those that a suite file may hold."""
_SPLIT = BeforeValidator(lambda command: tuple(shlex.split(command)) if isinstance(command, str) else command)
_COMMAND_RULE = "a command line, or a list of its words"
Command = Annotated[tuple[str, ...], _SPLIT, Field(json_schema_extra={"rule": _COMMAND_RULE})]
Verdict = Literal["diverging", "stuck", "spiking", "overfitting", "clipping", "repeating", "plateau", "too-early"]


class CheckpointConfig(Section, use_attribute_docstrings=True):
    """When a run commits and which checkpoints are kept. Those of an alias, evaluation or attempt are always kept."""

    every_steps: Positive = 200
    """interval of commits; evaluations are due at its multiples"""
    every_seconds: Seconds | None = None
    """commit also before so much training time can be lost; not set: only by steps"""
    grace_seconds: Seconds = 30.0
    """time that a preempted attempt has to commit once more"""
    patience_seconds: Seconds = 600.0
    """how long an unreachable store is retried"""
    stall_seconds: Seconds = 10.0
    """how long training waits for the checkpoint before; then it goes on without this one"""
    keep_last: Annotated[int, Field(ge=1)] = 3
    """keep so many of the newest checkpoints"""
    keep_best: NotNegative = 1
    """keep so many with the lowest held-out loss"""
    keep_every: NotNegative = Field(0, json_schema_extra={"unit": "steps"})
    """keep those at multiples of this step; 0 is off"""


class EvaluatorConfig(Section, use_attribute_docstrings=True):
    """A command that is given a model directory and prints numbers as JSON."""

    name: Name
    """name of its suite in the log"""
    command: Annotated[Command, Field(min_length=1)]
    """command that measures; {model} in it, or a further last word, is the model directory"""
    timeout_seconds: Seconds = 600.0
    """time limit, writing the model directory included"""
    required: bool = False
    """promotion waits for it; otherwise its failure is only recorded"""
    folder: str = Field("", json_schema_extra={"internal": True})
    """working directory of the command"""
    files: dict[str, str] | None = Field(None, json_schema_extra={"internal": True})
    """sha256 of every file that the command names"""
    logged: bool = Field(False, json_schema_extra={"internal": True})
    """only a run's log names the command"""
    evaluator_version: ClassVar[str] = "1"
    """version of how commands are run, a part of their suite's identity that evaluations record"""

    @model_validator(mode="after")
    def _files_come_with_their_folder(self) -> Self:
        if (self.files is None) != (not self.folder):
            raise ValueError(f"folder={self.folder!r}: folder and files are filled in on reading; leave both out")
        return self

    @property
    def sha256(self) -> str:
        """The identity of its suite: the contents of its files count, their paths and the timeout do not."""
        files, command = self.files or {}, []
        for argument in self.command:
            option, equals, value = ("", "", argument) if argument in files else argument.partition("=")
            command.append(f"{option}{equals}sha256:{files[value]}" if value in files else argument)
        measured = {"kind": "command", "name": self.name, "command": command}
        return codec.sha256(codec.encode(measured | {"evaluator_version": self.evaluator_version}))


class EvaluationConfig(Section, use_attribute_docstrings=True):
    """The suites that measure committed checkpoints, each in a process of its own."""

    every_commits: Positive = 1
    """multiples of checkpoint.every_steps between evaluations"""
    timeout_seconds: Seconds = 600.0
    """time limit of one suite"""
    suite: str = ""
    """TOML file of the suite, instead of the keys below"""
    name: Name = "held-out"
    """name of the built-in suite in the log"""
    batches: Positive = 20
    """held-out batches that the loss is measured on; text of up to four times as many windows is measured whole"""
    batch_size: Positive = Field(16, json_schema_extra={"unit": "windows"})
    """windows in a held-out batch"""
    prompts: tuple[str, ...] = ("The ",)
    """texts that samples begin with"""
    sample_tokens: NotNegative = 120
    """length of each sample; 0 draws none"""
    sample_seed: NotNegative = 0
    """seed of the samples"""
    command: Command = ()
    """short for one required evaluator called `command`"""
    evaluators: tuple[EvaluatorConfig, ...] = ()
    """further evaluators, each with the keys of evaluation.evaluators"""

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


class EarlyStopConfig(Section, use_attribute_docstrings=True):
    """When a run ends before its last step; off by default. Held-out losses decide, in the order of steps."""

    patience: NotNegative = 0
    """stop after so many evaluations without a better loss; 0 is off"""
    min_delta: NotNegativeNumber = Field(0.0, json_schema_extra={"unit": "nats"})
    """a loss is better when it is lower by more than this"""
    overfit_ratio: NotNegativeNumber = 0.0
    """stop when the held-out loss is so many times the train loss; 0 is off, else above 1"""
    overfit_patience: Positive = 3
    """evaluations in a row that overfit_ratio must hold"""
    on_divergence: bool = False
    """stop when the verdict on the curve is diverging"""
    on_stuck: bool = False
    """stop when the verdict on the curve is stuck"""

    @model_validator(mode="after")
    def _overfit_ratio_is_above_one(self) -> Self:
        if 0 < self.overfit_ratio <= 1:
            raise ValueError(f"overfit_ratio={self.overfit_ratio} must be above 1, or 0 for off")
        return self

    @property
    def is_on(self) -> bool:
        """Whether any rule can stop a run."""
        return bool(self.patience or self.overfit_ratio or self.on_divergence or self.on_stuck)


class MetricGate(Section, use_attribute_docstrings=True):
    """A comparison with the champion by one metric, which counts where it is larger than its noise."""

    metric: Annotated[str, Field(min_length=1)] = METRIC
    """metric of the suite, as `cairn evaluations` names it"""
    suite: str = ""
    """the built-in suite, or a required evaluator, by name; empty: the suite by which losses are compared"""
    direction: Literal["lower", "higher"] = "lower"
    """which values of the metric are better"""
    margin: NotNegativeNumber = 0.0
    """better by at least so much, or with no_regression worse by at most so much, in the metric's unit"""
    no_regression: bool = False
    """refuse only what is worse by more than margin and noise, instead of asking for an improvement"""

    @field_validator("metric")
    @classmethod
    def _metric_has_an_error(cls, given: str) -> str:
        if given in ("perplexity", "bits_per_byte"):
            raise ValueError(f"{given} is {METRIC} in another unit, and has no error of its own: name {METRIC}")
        return given


class PromotionConfig(Section, use_attribute_docstrings=True):
    """The alias that the best checkpoint of a finished run is offered to, and the gates before it."""

    alias: Name = "champion"
    """alias that the best checkpoint is offered to"""
    min_improvement: NotNegativeNumber = Field(0.025, json_schema_extra={"unit": "nats"})
    """how much lower the held-out loss must be, on top of the windows' noise; small runs differ by so much by seed"""
    gates: tuple[MetricGate, ...] = ()
    """further comparisons, each with the keys of promotion.gates"""
    refuse_verdicts: tuple[Verdict, ...] = ("diverging", "stuck")
    """verdicts on the loss curve that refuse promotion"""
    require_approval: bool = False
    """a person must approve, in Prefect or with `cairn promote`"""
    approval_timeout_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 86_400.0
    """how long Prefect waits for the approval; `cairn promote` works afterwards too"""


class LeaseConfig(Section, use_attribute_docstrings=True):
    """How a live attempt is recognized."""

    seconds: Seconds = Field(30.0, json_schema_extra={"unit": "seconds"})
    """an attempt without a heartbeat for this time counts as lost; at least 3 heartbeats"""
    heartbeat_seconds: Seconds = 3.0
    """time between heartbeats"""

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> Self:
        if self.seconds < 3 * self.heartbeat_seconds:
            least = f"three times heartbeat_seconds={self.heartbeat_seconds}"
            raise ValueError(f"seconds={self.seconds} must be at least {least}")
        return self


class BudgetConfig(Section, use_attribute_docstrings=True):
    """The budget for retries of one termination reason."""

    retries: NotNegative
    """retries since the last progress"""
    total: NotNegative | None = None
    """retries over the whole run; not set: no limit"""
    wasted_gpu_seconds: NotNegativeNumber | None = None
    """device time lost to this reason over the whole run; not set: no limit"""
    backoff_seconds: NotNegativeNumber = 0.0
    """wait before the first retry; it doubles with each further one"""
    samples: NotNegative | None = None
    """samples that may be quarantined over the whole run"""


class BudgetsConfig(Section, use_attribute_docstrings=True):
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


class WatchdogConfig(Section, use_attribute_docstrings=True):
    """After how much silence a trainer counts as hung."""

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """a trainer hangs when it is silent this many times as long as its slowest recent step"""
    floor_seconds: Seconds = 60.0
    """shortest silence after which a trainer counts as hung"""
    startup_seconds: Seconds = 900.0
    """silence that is allowed before the first steps"""


class MachinesConfig(Section, use_attribute_docstrings=True):
    """How a run on several machines waits for them; how many there are is the environment's CAIRN_NODES."""

    check: str = ""
    """command without which no machine joins an attempt: its exit code must be 0"""
    at_least: NotNegative = 0
    """train with so many machines if no more come, or others are lost; 0: begin only with all"""
    spares: NotNegative = 0
    """machines of CAIRN_NODES that wait to take the place of one that is lost"""
    wait_seconds: Seconds = 30.0
    """how long an attempt waits for machines, and they for the first, before they leave with 75"""


class DivergenceConfig(Section, use_attribute_docstrings=True):
    """When the train loss counts as exploded."""

    patience_steps: Positive = 16
    """steps in a row whose loss is too high"""
    rise_nats: PositiveNumber = 1.5
    """a loss is too high this far above the median of the losses before"""


class PreemptionConfig(Section, use_attribute_docstrings=True):
    """Notices, besides SIGTERM, that this machine will be taken away; file and cloud are never taken from a log."""

    notice_file: str = ""
    """a file whose existence is the notice"""
    metadata: Literal["", "aws", "azure", "gcp"] = ""
    """cloud whose metadata service is asked"""
    signal: Literal["", "SIGUSR1", "SIGUSR2"] = ""
    """signal that the scheduler sends ahead, such as Slurm's --signal=USR1@60"""
    poll_seconds: Seconds = 5.0
    """time between polls of the file and the metadata service"""


class CostConfig(Section, use_attribute_docstrings=True):
    """Price of the devices, for estimates in reports, and the most that a run may cost."""

    gpu_hour_price: NotNegativeNumber | None = None
    """price of one device for an hour; not set: no costs are shown"""
    currency: str = Field(
        "USD", pattern=r"^[^\W\d_]{1,8}$|^[$€£¥]$", json_schema_extra={"rule": "up to 8 letters, or one of $ € £ ¥"}
    )
    """currency of the price"""
    limit: PositiveNumber | None = None
    """device hours, or money where there is a price, above which no further segment is trained"""


class NotifyConfig(Section, use_attribute_docstrings=True):
    """Where notices of a run's decisions are sent, by this machine alone: none of this section is written into a log.

    Notices: finished, budget-exhausted, stopped, integrity, approval-wanted, and silent, which `cairn watch` sends.
    """

    command: str = ""
    """command of this machine that reads each notice as JSON from standard input"""
    webhook: SecretStr = SecretStr("")
    """address that each notice is posted to as JSON"""
    block: str = Field(
        "", pattern=r"^([a-z0-9-]+/[a-z0-9-]+)?$", json_schema_extra={"rule": "type/name, as Prefect lists blocks"}
    )
    """notification block of the Prefect server, such as slack-webhook/team"""
    timeout_seconds: Seconds = 10.0
    """how long the command or the webhook may take for one notice"""

    @field_validator("command")
    @classmethod
    def _command_can_be_split(cls, given: str) -> str:
        shlex.split(given)
        return given

    @field_validator("webhook")
    @classmethod
    def _webhook_is_an_address(cls, given: SecretStr) -> SecretStr:
        address = given.get_secret_value()
        if address and (problem := redaction.find_http_problem(address, instead="its path")):
            raise ValueError(f"the address {problem}; it may be a secret, so it is not shown")
        return given
