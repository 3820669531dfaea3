"""Forks a run: opens one that begins with a committed checkpoint's train state, pinned until the fork has its own."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import SNAPSHOT_SOURCE
from cairn.reports.queries.run_lookup import FoundCheckpoint, configuration_of
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import log_entry, run_entries, run_log
from cairn.storage.snapshots.data_snapshot import TOKENIZER, read_manifest
from cairn.tasks.attempt.attempt_claim import refuse_deleted
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import differing_keys, keep_numerics
from cairn.tasks.data.snapshot_build import build_snapshot, check_block_size
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import code_version, this_placement

_SHAPE_OF_STATE = "training.precision", "data.tokenizer"
"""Keys that decide what the state holds, with the network's own; another value could not be loaded."""
_SAME_TOKENS = frozenset({"data.weights"})  # keys of the data that change no token where they were set before


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A run that was opened: what it begins with, and what differs from its parent's frozen configuration."""

    run_id: str
    parent: str
    step: int
    manifest_sha256: str
    data_snapshot: str
    total_steps: int
    changed: Mapping[str, Any]


def fork_run(
    found: FoundCheckpoint, run_id: str, overrides: Sequence[str], environment: Mapping[str, str], base_dir: Path
) -> Fork:
    """Open `run_id` at the checkpoint, with overrides; `InvalidConfiguration` or `IntegrityError` if it cannot be."""
    log, parent = run_log.RunLog(found.log.store, run_id), found.log
    refuse_deleted(log.refresh())
    if log.state.opened is not None:
        raise InvalidConfiguration(f"run {run_id} exists in {log.store.url}: name another, or train it")
    record = parent.state.find_live(found.reference.prefix)
    if record is None:
        raise IntegrityError(f"{found.reference.prefix} is no longer there; fork another step")
    before, config = _configure(found, overrides, environment)
    changed = {key: now for key, (_, now) in differing_keys(before.frozen(), config.frozen()).items()}
    given = {"data.tokenizer"} if config.data.snapshot is not None else set()  # a named snapshot decides it
    for key in (key for key in changed if key not in given):
        if key in _SHAPE_OF_STATE or (key.startswith("model.") and key != "model.dropout"):
            raise InvalidConfiguration(
                f"{key} = {changed[key]!r}: the checkpoint's state has another shape; rule: a fork keeps its network, "
                "precision and tokenizer. Leave it out, or start a run of its own"
            )
    if config.training.steps <= record.committed.step:
        raise InvalidConfiguration(
            f"training.steps = {config.training.steps}: the checkpoint is of step {record.committed.step} already; "
            f"rule: more steps than that. Add --set training.steps={2 * record.committed.step}"
        )
    body = _opening(found, run_id, config, record.committed, _choose_data(found, config, changed, base_dir))
    pin = new_pin(found.reference, this_placement(device="cpu", threads=1), fork=run_id)
    if not pin_checkpoint(parent, pin, writer=log_entry.this_writer()):
        raise IntegrityError(f"{found.reference.prefix} was given up meanwhile; fork another step")
    opened = log.append(lambda state: body if state.opened is None else None, writer=log_entry.this_writer()).opened
    if opened != body:
        unpin_checkpoint(parent, pin, "another process opened the run first", writer=log_entry.this_writer())
        raise InvalidConfiguration(f"run {run_id} was opened by another process meanwhile: name another")
    return Fork(
        run_id=run_id,
        parent=parent.run_id,
        step=record.committed.step,
        manifest_sha256=found.reference.manifest_sha256,
        data_snapshot=body.data_snapshot,
        total_steps=body.total_steps,
        changed=changed,
    )


def _configure(
    found: FoundCheckpoint, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[RunConfig, RunConfig]:
    """Return the parent's configuration, with the sizes that trained the checkpoint, and the fork's."""
    state = found.log.state
    before = keep_numerics(configuration_of(state), found.opened.config)
    sizes = {"init_from": None, "micro_batch": state.attempt(found.reference.attempt).started.micro_batch}
    before = before.model_copy(update={"training": before.training.model_copy(update=sizes)})
    document, name = before.document(), f"run {found.log.run_id}"
    if any(override.startswith("data.sources=") and SNAPSHOT_SOURCE in override for override in overrides):
        document["data"] = {}  # a snapshot was made with its own
    wanted = parse_configuration(document, overrides=overrides, environment=environment, name=name)
    return before, keep_numerics(wanted, found.opened.config)


def _choose_data(found: FoundCheckpoint, config: RunConfig, changed: Mapping[str, Any], base_dir: Path) -> str:
    """Return the parent's snapshot, or for other data the one that is built with the parent's tokenizer."""
    store, opened = found.log.store, found.opened
    others = {key for key in changed if key.startswith("data.")}
    if not others or (others <= _SAME_TOKENS and opened.config["data"]["weights"] and config.data.weights):
        return opened.data_snapshot
    if "data.sources" not in others:
        raise InvalidConfiguration(
            f"{min(others)}: other tokens need the text, and what only a run's log names is not opened; "
            "rule: name it too. Add --set data.sources=…"
        )
    with tempfile.TemporaryDirectory(prefix="cairn-fork-") as folder:
        tokenizer = Path(folder) / TOKENIZER
        tokenizer.write_bytes(store.read(f"data/{opened.data_snapshot}/{TOKENIZER}"))
        given = {} if config.data.snapshot else {"tokenizer": str(tokenizer)}
        built = build_snapshot(store, config.data.model_copy(update=given), base_dir)
    if built.manifest.tokenizer_sha256 != read_manifest(store, opened.data_snapshot).tokenizer_sha256:
        raise InvalidConfiguration(
            "data.sources: that snapshot was made with another tokenizer than the network's; rule: the same tokens. "
            "Name text instead, which is tokenized with the network's own"
        )
    check_block_size(built.manifest, config.model.block_size, config.data)
    return built.snapshot_id


def _opening(
    found: FoundCheckpoint, run_id: str, config: RunConfig, committed: run_entries.CheckpointCommitted, snapshot_id: str
) -> run_entries.RunOpened:
    opened, state = found.opened, found.log.state
    windows = state.windows_quarantined_before(committed.attempt) if snapshot_id == opened.data_snapshot else ()
    return run_entries.RunOpened(
        run_id=run_id,
        model_family=config.model_family,
        config=config.frozen(),
        config_sha256=config.frozen_sha256(),
        data_snapshot=snapshot_id,
        total_steps=config.training.steps,
        code_version=code_version(),
        threads_why=f"those of run {found.log.run_id}",
        forked_from=log_entry.ForkOrigin(
            run_id=found.log.run_id,
            checkpoint=committed.reference,
            state_sha256=committed.state_sha256,
            quarantined_windows=tuple(sorted(windows)),
            config=config.document(),
        ),
    )
