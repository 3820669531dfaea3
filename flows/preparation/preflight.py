"""Refuses before anything starts what cannot work: configuration, drift, store, text, tokenizer, sizes, memory.

The server takes seconds to start, so mistakes are found before that. Tokenizing checks sizes again, exactly.
"""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

from flows.preparation.memory_check import available_memory, require_memory
from flows.preparation.planned_data import wanted_vocab_size
from flows.preparation.text_check import check_text
from flows.preparation.training_request import ResolvedRequest, configure_run
from reports.exporters.exporters import check_exporters
from storage.errors import StoreRefused, StoreUnavailable
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import read_manifest
from storage.stores.object_store import ObjectStore
from storage.stores.store_probe import probe_store
from tasks.configuration.run_configuration import RunConfig
from tasks.configuration.stored_configuration import check_drift
from tasks.data.snapshot_build import check_block_size
from tasks.data.snapshot_lookup import find_by_id
from tasks.errors import InvalidConfiguration, TaskError
from tasks.machine.machine_speed import trains_on_cuda
from tasks.policy.attempt_sizes import next_sizes
from tasks.trainer.initial_weights import check_directory, find_directory
from tasks.trainer.trainer_group import trainer_group

_NEVER_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors that no retry cures; a full disk is not among them."""


def check_before_start(
    resolved: ResolvedRequest,
    log: RunLog,
    environment: Mapping[str, str],
    *,
    writable: bool = True,
    before_text: Callable[[], None] = lambda: None,
) -> RunConfig:
    """Read the log and return the run's configuration; raises what makes the command exit at once.

    A new run's store is probed by writing, unless `writable` is false. `before_text` is called before the slow checks
    of a new run: its text and sizes.
    """
    try:
        opened = log.refresh().opened
    except StoreUnavailable as error:
        problem = f"store {log.store.url}: cannot be read: {error}; name another with --store"
        raise InvalidConfiguration(problem) from error
    wanted = configure_run(resolved, log.state, environment)
    if opened is not None:
        check_drift(opened.config, wanted, run_id=log.run_id)
    _check_processes(wanted, environment)
    check_exporters(wanted.mirrors)
    if opened is not None:
        if writable and log.state.finished is None and log.state.open_attempt is None:  # otherwise its owner may live
            _check_memory(wanted, log.state, read_manifest(log.store, opened.data_snapshot).vocab_size, environment)
        return wanted
    if writable:
        _check_store(log.store)
    before_text()
    vocab_size = _check_data(log.store, wanted, resolved.base_dir)
    if writable:
        _check_memory(wanted, log.state, vocab_size, environment)
    return wanted


def _check_data(store: ObjectStore, config: RunConfig, base_dir: Path) -> int:
    """Check a new run's data and initial weights; returns the vocabulary size."""
    if config.data.snapshot:
        manifest = find_by_id(store, config.data.snapshot).manifest
        check_block_size(manifest, config.model.block_size, config.data)
        vocab_size = manifest.vocab_size
    else:
        check_text(config, base_dir)
        vocab_size = wanted_vocab_size(config.data, base_dir)
    if config.training.init_from is not None:
        check_directory(find_directory(config.training.init_from, base_dir), config.model, vocab_size)
    return vocab_size


def _check_store(store: ObjectStore) -> None:
    try:
        probe_store(store)
    except StoreUnavailable as error:
        if not _needs_another_store(error):  # unavailable or full for now: the same command may work in a minute
            raise
        raise InvalidConfiguration(
            f"store {store.url}: cannot be written: {error}; rule: a folder or bucket this user may write to, "
            "chosen with --store or CAIRN_STORE"
        ) from error


def _needs_another_store(error: StoreUnavailable) -> bool:
    if isinstance(error, StoreRefused):
        return True
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NEVER_WRITABLE


def _check_processes(config: RunConfig, environment: Mapping[str, str]) -> None:
    try:
        trainer_group(config.training, environment)
    except TaskError as error:
        raise InvalidConfiguration(str(error)) from error


def _check_memory(config: RunConfig, state: RunState, vocab_size: int, environment: Mapping[str, str]) -> None:
    # Asking a device takes a process with torch; a run that has attempts has trained on its device before.
    is_known_to_fit = bool(state.attempts) and trains_on_cuda(config.training.device)
    if config.training.memory_check and not is_known_to_fit:
        memory = available_memory(config.training, trainer_group(config.training, environment))
        require_memory(config, vocab_size, next_sizes(state, config.training, chosen=1), memory)
