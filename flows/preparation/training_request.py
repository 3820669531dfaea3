"""A request for training by a person or a deployment, resolved once: run, store and configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.logs import run_log, run_state
from cairn.storage.stores.open_store import open_store
from cairn.tasks.configuration import addresses, configuration_source, network_module, stored_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.run_set import NO_LIMIT, RunLimit
from cairn.tasks.trainer.initial_weights import InitialDirectory, adopt_network


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """The arguments of `cairn train` or a flow run of `train-gpt`; an empty string means the default."""

    config: str = ""
    run_id: str = ""
    overrides: tuple[str, ...] = ()
    store: str = ""
    start_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRequest:
    """A request whose configuration (None without a file) was read; its relative paths start at `base_dir`.

    `limit` is how far a set of runs lets this one be trained now.
    """

    request: TrainingRequest
    run_id: str
    store_url: str
    base_dir: Path
    configuration: RunConfig | None
    limit: RunLimit = NO_LIMIT

    def open_log(self) -> run_log.RunLog:
        """Return the run's log, not read yet."""
        return run_log.RunLog(open_store(self.store_url), self.run_id)


def with_settings(overrides: tuple[str, ...], *, steps: int, learning_rate: float, micro_batch: int) -> tuple[str, ...]:
    """Return overrides for the form's own fields, 0 for none; `InvalidConfiguration` for a key set in both."""
    fields = {"training.steps": steps, "training.lr": learning_rate, "training.micro_batch": micro_batch}
    given = {key: value for key, value in fields.items() if value}
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in given:
            raise InvalidConfiguration(f"{key}: set in a field of its own ({given[key]:g}) and by {override}; keep one")
    return (*(f"{key}={value}" for key, value in given.items()), *overrides)


def resolve_request(request: TrainingRequest, environment: Mapping[str, str]) -> ResolvedRequest:
    """Read the configuration and choose run and store; raises `InvalidConfiguration`."""
    run_id, base_dir = choose_run_id(request), configuration_source.configuration_folder(request.config)
    config, configured_store, overrides = None, "", request.overrides
    if request.config:
        config = configuration_source.read_configuration(request.config, overrides=overrides, environment=environment)
        configured_store = config.store or ""
        if configured_store and "://" not in configured_store:  # a folder starts at `base_dir`, as other paths do
            configured_store = str(base_dir / addresses.expand_home("store", configured_store))
    elif any(override.startswith("store=") for override in overrides):
        raise InvalidConfiguration("--set store=…: without a configuration file the store is named with --store")
    store_url = addresses.choose_store(request.store, environment, configured_store)
    return ResolvedRequest(request=request, run_id=run_id, store_url=store_url, base_dir=base_dir, configuration=config)


def choose_run_id(request: TrainingRequest) -> str:
    """Return the given run id, else the configuration file's name."""
    if request.run_id:
        return request.run_id
    if not request.config:
        raise InvalidConfiguration("neither a configuration file nor --run-id: say which run to train or continue")
    return configuration_source.configuration_name(request.config)


def configure_run(resolved: ResolvedRequest, state: run_state.RunState, environment: Mapping[str, str]) -> RunConfig:
    """Return the file's configuration, else the newest attempt's in the log, with overrides; `auto` as frozen.

    The network of a run that is not opened yet is that of the weights it begins with.
    """
    config, overrides = resolved.configuration, resolved.request.overrides
    if state.opened is not None:
        if config is None:
            document, name = configuration_of(state).document(), f"run {state.opened.run_id}"
            config = configuration_source.parse_configuration(
                document, overrides=overrides, environment=environment, name=name
            )
        network_module.require_allowed(config.model, config.code.allow)
        return stored_configuration.keep_numerics(config, state.opened.config)
    try:
        config = config or configuration_source.read_configuration("", overrides=overrides, environment=environment)
        if config.training.init_from is None:
            return config
        directory = InitialDirectory(config.training.init_from, resolved.base_dir)
        return config.model_copy(update={"model": adopt_network(directory, config.model)})
    except InvalidConfiguration as error:
        missing = f"run {resolved.request.run_id!r} is not in this store ({resolved.store_url})"
        missing += ", and no configuration file says what to train"
        # Without overrides, the likely mistake is the store or the name, not a missing key.
        problem = str(error) if overrides else "`cairn runs` lists those there are; --store names another"
        raise InvalidConfiguration(f"{missing}: {problem}") from error
