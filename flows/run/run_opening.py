"""A run is opened: its data stand in the store, what it begins from and its arithmetic are decided, all of it frozen.

Owns the first entry of a run's log. Of many that open one run at the same moment one is first, and all go on as it
said.
"""

import os
from functools import partial
from pathlib import Path

from flows.run.text_progress import TextProgress
from storage.logs.entry_log import this_writer
from storage.logs.run_entries import RunOpened
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import TOKENIZER, SnapshotFiles
from storage.stores.object_store import ObjectStore
from storage.stores.store_probe import probe_store
from tasks.configuration.run_configuration import RunConfig
from tasks.data.snapshot_build import check_block_size
from tasks.machine.code_version import code_version
from tasks.machine.machine_speed import numerics_beside
from tasks.machine.work_folder import work_folder
from tasks.tokenize_and_split import tokenize_and_split
from tasks.trainer.initial_weights import find_directory, keep_initial_weights


def open_run(log: RunLog, wanted: RunConfig, base_dir: Path) -> RunOpened:
    """Put the run on record, with data, initial weights and the mode this machine trains fastest in.

    Returns what stands in the log. Relative paths start at `base_dir`.
    """
    probe_store(log.store)
    folder = work_folder(os.environ)
    with numerics_beside(wanted.training, wanted.model, folder) as mode, TextProgress().shown() as shown:
        snapshot = tokenize_and_split(log.store.url, wanted.data, base_dir, cache_dir=folder, on_progress=shown)
    check_block_size(snapshot.manifest, wanted.model.block_size, wanted.data)
    initial = _keep_initial_weights(log.store, wanted, snapshot.snapshot_id, base_dir)
    chosen = wanted.with_mode(precision=mode().precision, kernels=mode().kernels)
    entry = partial(_opening_entry, chosen, log.run_id, snapshot.snapshot_id, initial)
    opened = log.append(entry, writer=this_writer()).opened
    assert opened is not None
    return opened


def _keep_initial_weights(store: ObjectStore, config: RunConfig, snapshot_id: str, base_dir: Path) -> str | None:
    if config.training.init_from is None:
        return None
    files = SnapshotFiles(store, snapshot_id, work_folder(os.environ) / "snapshots")
    return keep_initial_weights(
        store,
        find_directory(config.training.init_from, base_dir),
        config.model,
        tokenizer_json=files.path(TOKENIZER).read_text(encoding="utf-8"),
        vocab_size=files.manifest.vocab_size,
    )


def _opening_entry(
    config: RunConfig, run_id: str, snapshot_id: str, initial_sha256: str | None, state: RunState
) -> RunOpened | None:
    if state.opened is not None:
        return None
    return RunOpened(
        run_id=run_id,
        model_family=config.model_family,
        config=config.frozen(),
        config_sha256=config.frozen_sha256(),
        data_snapshot=snapshot_id,
        total_steps=config.training.steps,
        code_version=code_version(),
        initial_weights_sha256=initial_sha256,
    )
