"""The whole configuration of a run, and which part of it is frozen when the run is opened."""

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from cairn.model.configuration.data import SNAPSHOT_SOURCE, DataConfig
from cairn.model.configuration.network import Digest, ModelConfig, Positive, Section
from cairn.model.configuration.training import UNFROZEN_TRAINING, TrainingConfig
from cairn.storage.stores import codec, redaction
from cairn.tasks.configuration import addresses, settings

FROZEN_SECTIONS = ("model_family", "data", "model", "training")
"""The sections that decide which run it is; `UNFROZEN_TRAINING` is excepted."""
MACHINE_KEYS = (
    *("exporters.tensorboard", "exporters.wandb", "exporters.mlflow", "preemption.notice_file", "preemption.metadata"),
    *("notify.command", "notify.webhook", "notify.block"),
    *("evaluation.suite", "evaluation.command", "machines.check", "code.allow", "code.files"),
)
"""Folders, endpoints, files and commands, which only the machine that acts may name: none is taken from a log.

`evaluation.evaluators` of a log stay suites, because promotion may need them, and are marked as logged.
"""
_SPLIT = BeforeValidator(lambda given: given.replace(",", " ").split() if isinstance(given, str) else given)


class ExportersConfig(Section, use_attribute_docstrings=True):
    """Exporters: where the curve of a run is copied, beside the store. Never read, waited for or taken from a log."""

    tensorboard: str = ""
    """folder of this machine that TensorBoard reads"""
    wandb: str = ""
    """folder of this machine for Weights & Biases, offline; `wandb sync` sends it"""
    mlflow: str = ""
    """address of an MLflow tracking server; credentials stay in MLFLOW_TRACKING_*"""

    @model_validator(mode="after")
    def _addresses_can_be_used(self) -> Self:
        for name in ("tensorboard", "wandb"):
            if "://" in getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a folder of this machine")
        variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        if self.mlflow and (problem := redaction.find_http_problem(self.mlflow, instead=variables)):
            raise ValueError(f"mlflow: the address {problem}; `mlflow server` starts one")
        return self

    def based_at(self, folder: Path) -> "ExportersConfig":
        """Return the same with absolute folders; a relative one starts at `folder`."""
        named = {name: given for name in ("tensorboard", "wandb") if (given := getattr(self, name))}
        paths = {name: str(folder / addresses.expand_home(f"exporters.{name}", given)) for name, given in named.items()}
        return self.model_copy(update=paths)


class CodeConfig(Section, use_attribute_docstrings=True):
    """The networks of one's own (model.module) that this machine runs from a store: none is taken from a log."""

    allow: Annotated[tuple[Digest, ...], _SPLIT] = ()
    """sha256 of each file that it may run, beside those that this command was given as files"""
    files: dict[str, bytes] = Field(default_factory=dict, json_schema_extra={"internal": True})
    """those that this command was given, by name"""

    def with_files(self, files: Mapping[str, bytes]) -> "CodeConfig":
        """Return the same, with these files allowed too."""
        return CodeConfig(allow=(*self.allow, *map(codec.sha256, files.values())), files=dict(files))


class SetConfig(Section, use_attribute_docstrings=True):
    """A set of runs, which `cairn train --set key=value,value` trains one after the other; one run alone has none."""

    halving: Annotated[int, Field(ge=2)] | None = None
    """at each rung one in so many runs goes on, those with the lowest held-out losses; not set: all do"""
    steps: Positive | None = None
    """steps that all runs of the set may be trained for together; not set: no limit"""
    device_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """device time that all runs of the set may use together, up to their next commit; not set: no limit"""

    @property
    def is_on(self) -> bool:
        """Whether a set is more than its runs one after the other."""
        return bool(self.halving or self.steps or self.device_hours)


class RunConfig(Section, use_attribute_docstrings=True):
    """All sections of a configuration."""

    model_family: settings.Name | None = Field(default=None, json_schema_extra={"default_rule": "the run's name"})
    """label of the run in queries and reports"""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    checkpoint: settings.CheckpointConfig = settings.CheckpointConfig()
    evaluation: settings.EvaluationConfig = settings.EvaluationConfig()
    early_stop: settings.EarlyStopConfig = settings.EarlyStopConfig()
    promotion: settings.PromotionConfig = settings.PromotionConfig()
    budgets: settings.BudgetsConfig = settings.BudgetsConfig()
    lease: settings.LeaseConfig = settings.LeaseConfig()
    watchdog: settings.WatchdogConfig = settings.WatchdogConfig()
    divergence: settings.DivergenceConfig = settings.DivergenceConfig()
    preemption: settings.PreemptionConfig = settings.PreemptionConfig()
    machines: settings.MachinesConfig = settings.MachinesConfig()
    set: SetConfig = SetConfig()
    cost: settings.CostConfig = settings.CostConfig()
    exporters: ExportersConfig = ExportersConfig()
    notify: settings.NotifyConfig = Field(default=settings.NotifyConfig(), exclude=True)
    code: CodeConfig = Field(default=CodeConfig(), exclude=True)
    # A store can be moved, so its place is no part of the log.
    store: str = Field("", exclude=True)
    """folder or URL of the store, where neither --store nor CAIRN_STORE names one"""

    @model_validator(mode="before")
    @classmethod
    def _weights_bring_their_tokenizer(cls, document: Any) -> Any:
        match document:
            case {"training": {"init_from": str(folder)}, "data": {"sources": [source, *_], **data}}:
                if "tokenizer" not in data and not str(source).startswith(SNAPSHOT_SOURCE):
                    named = {**document["data"], "tokenizer": f"{folder.rstrip('/')}/tokenizer.json"}
                    return {**document, "data": named}
        return document

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        for stage in self.data.stages[-1:]:
            if stage.step >= self.training.steps:
                problem = f"step {stage.step} is never reached, training.steps = {self.training.steps}"
                raise ValueError(f"data.stages: {problem}; lower the step, or leave the stage out")
        # A network of one's own is trained as it is.
        of_ours = {"training.kernels": "fused", "training.parallel": "fsdp", "training.optimizer": "muon"}
        others = [f"training.{name}" for name in ("init_from", "compile", "lora", "mask_documents", "z_loss")]
        for key in ("data.loss_on", *others, *of_ours) if self.model.module else ():
            value = attrgetter(key)(self)
            if value and value == of_ours.get(key, value):
                raise ValueError(f"{key} = {value!r} is only for the networks that Cairn has; leave it out")
        known = ["", self.evaluation.name, *(item.name for item in self.evaluation.evaluators if item.required)]
        for suite in (gate.suite for gate in self.promotion.gates if gate.suite not in known):
            remedy = f"name one of {', '.join(known[1:])}, or require it"
            raise ValueError(f"promotion.gates: suite {suite!r} measures no candidate; {remedy}")
        return self

    def document(self) -> dict[str, Any]:
        """Return the configuration as plain JSON."""
        return self.model_dump(mode="json")

    def frozen(self) -> dict[str, Any]:
        """Return only the part that decides which run it is."""
        document = self.document()
        training = {key: value for key, value in document["training"].items() if key not in UNFROZEN_TRAINING}
        return {**{name: document[name] for name in FROZEN_SECTIONS}, "training": training}

    def frozen_sha256(self) -> str:
        """Return the identity of the frozen part."""
        return codec.sha256(codec.encode(self.frozen()))

    def with_mode(self, *, precision: str, kernels: str) -> Self:
        """Return the configuration with these values where its own are `auto`."""
        mode = {"precision": precision, "kernels": kernels}
        chosen = {key: value for key, value in mode.items() if getattr(self.training, key) == "auto"}
        return self.model_copy(update={"training": self.training.model_copy(update=chosen)})
