"""Which store training means: `--store`, else `CAIRN_STORE`, else the configuration's `store`, else the default.

Owns that the configuration has a say. Only training has a configuration file before it has a store: to the other verbs
a store is named, and that a run's receipts name none lets a store be moved.
"""

from collections.abc import Mapping
from pathlib import Path

from flows.preparation.preflight import TrainingRequest
from tasks.configuration.configuration_source import configuration_folder, read_configuration
from tasks.configuration.store_choice import DEFAULT_STORE, choose_store
from tasks.errors import InvalidConfiguration


def training_store(given: str, request: TrainingRequest, environment: Mapping[str, str]) -> str:
    """Return the store's folder or URL; raises `InvalidConfiguration` where the configuration cannot be read."""
    return choose_store(given, environment, _configured_store(request, environment))


def store_option(chosen: str, environment: Mapping[str, str]) -> str:
    """Return what `--store` must say for other verbs to find `chosen`; empty where they find it without."""
    return "" if chosen in (DEFAULT_STORE, environment.get("CAIRN_STORE", "")) else chosen


def _configured_store(request: TrainingRequest, environment: Mapping[str, str]) -> str:
    """Return what the configuration says; a relative folder starts where the configuration's other paths do."""
    if not request.config:
        if any(override.startswith("store=") for override in request.overrides):
            raise InvalidConfiguration("--set store=…: without a configuration file the store is named with --store")
        return ""
    named = read_configuration(request.config, overrides=request.overrides, environment=environment).store
    if not named or "://" in named:
        return named
    return str(configuration_folder(request.config) / Path(named).expanduser())
