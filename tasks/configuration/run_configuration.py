"""The run configuration: sections from their owners, one TOML file, overrides on top.

Owns composition, precedence (file, then `CAIRN_SECTION__KEY`, then `--set`), and which part is frozen at run-opened.
Refuses to know torch, stores and the orchestrator.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.configuration.data import DataConfig
from model.configuration.network import ModelConfig
from model.configuration.training import UNFROZEN_TRAINING, TrainingConfig
from storage.errors import IntegrityError
from storage.stores.document import encode, sha256
from tasks.configuration.evaluation_settings import SUITE_KEYS, EarlyStopConfig, EvaluationConfig, PromotionConfig
from tasks.configuration.flat_document import flatten
from tasks.configuration.settings import (
    BudgetsConfig,
    CheckpointConfig,
    CostConfig,
    DivergenceConfig,
    LeaseConfig,
    MirrorsConfig,
    PreemptionConfig,
    WatchdogConfig,
)
from tasks.configuration.suite_file import resolve_evaluation
from tasks.errors import ConfigDrift, InvalidConfiguration, TaskError

_SHOWN_CHARACTERS = 60

FROZEN_SECTIONS = ("model_family", "data", "model", "training")


class RunConfig(BaseModel):
    """Everything a user says about a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_family: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "gpt2-tiny"
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    promotion: PromotionConfig = PromotionConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    lease: LeaseConfig = LeaseConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    cost: CostConfig = CostConfig()
    mirrors: MirrorsConfig = MirrorsConfig()
    # Where the log lies is no part of what it says: a store can be moved.
    store: str = Field(default="", exclude=True)

    def document(self) -> dict[str, Any]:
        """Return the configuration as plain JSON."""
        return self.model_dump(mode="json")

    def frozen(self) -> dict[str, Any]:
        """Return only what decides which run it is."""
        document = self.document()
        training = {key: value for key, value in document["training"].items() if key not in UNFROZEN_TRAINING}
        return {**{name: document[name] for name in FROZEN_SECTIONS}, "training": training}

    def with_mode(self, *, precision: str, kernels: str) -> Self:
        """Return the configuration with these where it leaves them to Cairn with `auto`."""
        mode = {"precision": precision, "kernels": kernels}
        chosen = {key: value for key, value in mode.items() if getattr(self.training, key) == "auto"}
        return self.model_copy(update={"training": self.training.model_copy(update=chosen)})

    def as_opened(self, opened: Mapping[str, Any]) -> Self:
        """Return the configuration with the mode that the run of this frozen document was opened with."""
        training = parse_stored_configuration(opened).training
        return self.with_mode(precision=training.precision, kernels=training.kernels)

    def frozen_sha256(self) -> str:
        """Return the identity of the frozen part."""
        return sha256(encode(self.frozen()))


def load_configuration(path: Path | None, *, overrides: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """Read, overlay and validate; raises `InvalidConfiguration` with one line for each broken rule."""
    document = _read(path) if path else {}
    return parse_configuration(
        document,
        overrides=overrides,
        environment=environment,
        name=str(path or "(no file)"),
        folder=path.absolute().parent if path else None,
    )


def parse_configuration(
    document: Mapping[str, Any],
    *,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    name: str,
    folder: Path | None = None,
) -> RunConfig:
    """Overlay environment and `--set` on a document, validate the whole, and read the suite it names.

    Relative paths of suites, evaluators and mirrors start at `folder`, without one at the working directory.
    """
    layered = _copied(document)
    origins: dict[str, str] = {}
    for variable, value in sorted(environment.items()):
        if variable.startswith("CAIRN_") and "__" in variable:
            _put(layered, variable[len("CAIRN_") :].lower().split("__"), value, origin=variable, origins=origins)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise InvalidConfiguration(f"--set {override!r}: must be section.key=value")
        _put(layered, key.split("."), value, origin=f"--set {override}", origins=origins)
    if "evaluation.suite" in origins:  # it replaces what the layers below measure
        for key in (*SUITE_KEYS, "command"):
            if f"evaluation.{key}" not in origins:
                layered["evaluation"].pop(key, None)
    try:
        config = RunConfig.model_validate(layered)
        evaluation = resolve_evaluation(config.evaluation, folder or Path.cwd())
    except ValidationError as error:
        raise InvalidConfiguration(_explained(error, name, origins)) from error
    except TaskError as error:
        raise InvalidConfiguration(f"{name}: evaluation: {error}") from error
    mirrors = config.mirrors.based_at(folder or Path.cwd())
    return config.model_copy(update={"evaluation": evaluation, "mirrors": mirrors})


def check_drift(opened: Mapping[str, Any], config: RunConfig, *, run_id: str) -> None:
    """Raise `ConfigDrift` printing the difference when `config` would not be the run that was opened."""
    before, now = flatten(opened), flatten(config.frozen())
    lines = [
        f"  {key}: run has {before.get(key, '(absent)')!r}, this command has {now.get(key, '(absent)')!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if lines:
        hint = "these are frozen at run-opened; undo the change or start another run with --run-id"
        raise ConfigDrift("\n".join([f"run {run_id} exists with another configuration ({hint}):", *lines]))


def parse_stored_configuration(document: Mapping[str, Any]) -> RunConfig:
    """Validate the configuration of a run log; raises `IntegrityError` naming the first field that breaks a rule."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:_SHOWN_CHARACTERS] or "the whole of it"
        if first["type"] == "extra_forbidden":
            problem = "is a key this cairn does not know; update cairn, or the log was changed"
        else:
            problem = f"{first['msg']}, it is {repr(first['input'])[:_SHOWN_CHARACTERS]}; the log was changed"
        raise IntegrityError(f"the configuration in the run's log cannot be believed: {field}: {problem}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidConfiguration(f"{path}: no such configuration file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfiguration(f"{path}: not readable as TOML: {error}") from error


def _copied(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in document.items()}


def _put(document: dict[str, Any], keys: Sequence[str], text: str, *, origin: str, origins: dict[str, str]) -> None:
    section = document
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise InvalidConfiguration(f"{origin}: {key} is a value, not a section")
    section[keys[-1]] = _value(text)
    origins[".".join(keys)] = origin


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explained(error: ValidationError, name: str, origins: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        given = "" if item["type"] == "missing" or isinstance(item["input"], dict) else f" = {item['input']!r}"
        rule = "unknown key; README lists the keys there are" if item["type"] == "extra_forbidden" else item["msg"]
        lines.append(f"{origins.get(field, name)}: {field}{given}: {rule}")
    return "\n".join(lines)
