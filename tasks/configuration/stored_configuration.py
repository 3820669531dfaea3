"""The configuration in a run log: validated again, without the machine's keys, and compared with a command's."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.codec import flatten, stored_section
from cairn.tasks.configuration import key_reference, run_configuration
from cairn.tasks.errors import ConfigDrift


def parse_stored_configuration(document: Mapping[str, Any]) -> run_configuration.RunConfig:
    """Return it validated, without `MACHINE_KEYS`, evaluators marked as logged; `IntegrityError` names a bad key."""
    said = dict(document)
    for name, given in document.items():
        if isinstance(given, Mapping):
            taken = {key: item for key, item in given.items() if f"{name}.{key}" not in run_configuration.MACHINE_KEYS}
            said[name] = taken
    try:
        config = run_configuration.RunConfig.model_validate(said)
    except ValidationError as error:
        first = next(key_reference.broken_rules(error, said))
        cause = "a newer cairn wrote the log, or it was changed" if first.unknown else "the log was changed"
        raise IntegrityError(f"the configuration in the run's log is invalid: {first.text}; {cause}") from error
    if config.model.module and not config.model.files:  # a file of this machine is none that a log may name
        raise IntegrityError("the configuration in the run's log names no files of model.module; the log was changed")
    evaluators = tuple(item.model_copy(update={"logged": True}) for item in config.evaluation.evaluators)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"evaluators": evaluators})})


def left_out(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that the log sets and that are not taken from it."""
    named = ((key, *key.partition(".")) for key in run_configuration.MACHINE_KEYS)
    return tuple(key for key, section, _, name in named if stored_section(document, section).get(name))


def keep_numerics(config: run_configuration.RunConfig, opened: Mapping[str, Any]) -> run_configuration.RunConfig:
    """Return the configuration with precision, kernels and family of the opened run where it names none itself.

    So it is with the keys of the network of given weights, whose `config.json` is read only once.
    """
    stored = parse_stored_configuration(opened)
    named = config.model_copy(update={"model_family": config.model_family or stored.model_family})
    if config.training.init_from is not None:
        given = {name: getattr(config.model, name) for name in config.model.model_fields_set}
        named = named.model_copy(update={"model": stored.model.model_copy(update=given)})
    return named.with_mode(precision=stored.training.precision, kernels=stored.training.kernels)


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that two documents do not agree on, in order, with both values; one that lacks it is absent."""
    first, second = flatten(before), flatten(now)
    differing = (key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key))
    return {key: (first.get(key, "(absent)"), second.get(key, "(absent)")) for key in differing}


def check_drift(opened: Mapping[str, Any], config: run_configuration.RunConfig, *, run_id: str) -> None:
    """Raise `ConfigDrift` with the difference when `config` would be another run than the opened one."""
    differing = differing_keys(opened, config.frozen()).items()
    lines = [f"  {key}: run has {before!r}, this command has {now!r}" for key, (before, now) in differing]
    if lines:
        fork = f"go on from this one's newest checkpoint: cairn fork {run_id} NEW-RUN --set …"
        hint = f"these are frozen at run-opened; undo the change, start another run with --run-id, or {fork}"
        raise ConfigDrift("\n".join([f"run {run_id} exists with another configuration ({hint}):", *lines]))
