"""The configuration in a run log: validated again, continued, and compared with what a command asks for."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from storage.errors import IntegrityError
from tasks.configuration.broken_rules import broken_rules
from tasks.configuration.flat_document import flatten
from tasks.configuration.run_configuration import RunConfig
from tasks.errors import ConfigDrift


def parse_stored_configuration(document: Mapping[str, Any]) -> RunConfig:
    """Return the validated configuration; raises `IntegrityError` naming the first key that breaks a rule."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        first = next(broken_rules(error, document))
        cause = "a newer cairn wrote the log, or it was changed" if first.unknown else "the log was changed"
        raise IntegrityError(f"the configuration in the run's log is invalid: {first.text}; {cause}") from error


def keep_numerics(config: RunConfig, opened: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with precision, kernels and threads of the opened run where its own are `auto`."""
    training = parse_stored_configuration(opened).training
    return config.with_mode(precision=training.precision, kernels=training.kernels, threads=training.threads)


def check_drift(opened: Mapping[str, Any], config: RunConfig, *, run_id: str) -> None:
    """Raise `ConfigDrift` with the difference when `config` would be another run than the opened one."""
    before, now = flatten(opened), flatten(config.frozen())
    lines = [
        f"  {key}: run has {before.get(key, '(absent)')!r}, this command has {now.get(key, '(absent)')!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if lines:
        hint = "these are frozen at run-opened; undo the change or start another run with --run-id"
        raise ConfigDrift("\n".join([f"run {run_id} exists with another configuration ({hint}):", *lines]))
