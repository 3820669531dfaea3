"""Decisions of a person, recorded in their name: fork a run, delete one, roll an alias back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import SNAPSHOT_SOURCE
from cairn.reports.errors import RunNotFound
from cairn.reports.queries import alias_history
from cairn.reports.queries.run_lookup import FoundCheckpoint, configuration_of, read_checkpoints
from cairn.storage.checkpoints import checkpoint, resume_point
from cairn.storage.checkpoints.sweep import SweepAction, SweepKind
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import log_entry, registry, run_entries, run_log, run_state, step_log
from cairn.storage.stores import child_process, object_store
from cairn.tasks.attempt.attempt_entries import Claimant, refuse_deleted, refuse_live_owner
from cairn.tasks.checkpoints.retention import check_deletion, delete_run
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import differing_keys, keep_numerics
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import code_version, this_person, this_placement
from cairn.tasks.text.format import format_count
from cairn.tasks.trainer.trainer_protocol import trained_before

_SHAPE_OF_STATE = "training.precision", "data.tokenizer"
"""Keys that, with the network's own, decide the tensors of the state; another value could not be loaded."""
_SAME_TOKENS = frozenset({"data.weights", "data.stages"})
"""Keys of the data that change no token where they were set before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The opening entry of a fork, and the keys that differ from its parent's frozen configuration."""

    opened: run_entries.RunOpened
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
        if key in _SHAPE_OF_STATE or (key.startswith(("model.", "training.lora")) and key != "model.dropout"):
            raise InvalidConfiguration(
                f"{key} = {changed[key]!r}: the checkpoint's state has another shape; rule: a fork keeps its network, "
                "adapters, precision and tokenizer. Leave it out, or start a run of its own"
            )
    if config.training.steps <= record.committed.step:
        raise InvalidConfiguration(
            f"training.steps = {config.training.steps}: the checkpoint is of step {record.committed.step} already; "
            f"rule: more steps than that. Add --set training.steps={2 * record.committed.step}"
        )
    snapshot_id = _choose_data(found, config, changed, base_dir)
    body = _opening(found, run_id, before, config, snapshot_id)
    pin = resume_point.new_pin(found.reference, this_placement(device="cpu", threads=1), fork=run_id)
    state = resume_point.open_fork(parent, body, pin, writer=log_entry.this_writer())
    if state.opened is None:
        raise InvalidConfiguration(f"run {run_id}: a sweep took this process for dead: run the same command again")
    if state.opened != body:
        raise InvalidConfiguration(f"run {run_id} was opened by another process meanwhile: name another")
    return Fork(opened=body, changed=changed)


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
    from cairn.storage.snapshots.data_snapshot import TOKENIZER, read_manifest  # pyarrow: other decisions need none
    from cairn.tasks.data import snapshot_build, snapshot_lookup

    store, opened = found.log.store, found.opened
    others = {key for key in changed if key.startswith("data.")}
    if not others or (others <= _SAME_TOKENS and opened.config["data"]["weights"] and config.data.weights):
        return opened.data_snapshot
    if "data.sources" not in others:
        raise InvalidConfiguration(
            f"{min(others)}: other tokens need the text, and what only a run's log names is not opened; "
            "rule: name it too. Add --set data.sources=…"
        )
    with child_process.temporary_folder("cairn-fork-") as folder:
        tokenizer = folder / TOKENIZER
        tokenizer.write_bytes(store.read(f"data/{opened.data_snapshot}/{TOKENIZER}"))
        given = {} if config.data.snapshot else {"tokenizer": str(tokenizer)}
        built = snapshot_build.build_snapshot(store, config.data.model_copy(update=given), base_dir)
    if built.manifest.tokenizer_sha256 != read_manifest(store, opened.data_snapshot).tokenizer_sha256:
        raise InvalidConfiguration(
            "data.sources: that snapshot was made with another tokenizer than the network's; rule: the same tokens. "
            "Name text instead, which is tokenized with the network's own"
        )
    snapshot_lookup.check_block_size(built.manifest, config.model, config.data, config.training)
    return built.snapshot_id


def _opening(
    found: FoundCheckpoint, run_id: str, before: RunConfig, config: RunConfig, snapshot_id: str
) -> run_entries.RunOpened:
    """Return a fork's opening entry: what its parent trained; of data that is new to the fork, nothing was drawn."""
    from cairn.storage.snapshots.data_snapshot import read_manifest  # as above
    from cairn.tasks.data.snapshot_lookup import order_samples, weighted_components

    log, opened, number, step = found.log, found.opened, found.reference.attempt, found.reference.step
    past, block = trained_before(opened.forked_from), before.model.block_size
    manifest, is_same = read_manifest(log.store, opened.data_snapshot), snapshot_id == opened.data_snapshot
    order = order_samples(manifest, before.data, before.training, block, before=past)
    draws = (step - past.step) * before.training.global_batch
    drawn = order.component_draws_before(step)
    own = weighted_components(manifest if is_same else read_manifest(log.store, snapshot_id), config.data, block)
    if not is_same or len(own or drawn[:1]) != len(drawn):
        drawn = (0,) * (len(own) or 1)
    windows = log.state.windows_quarantined_before(number) if is_same else ()
    record, attempt = log.state.find_live(found.reference.prefix), log.state.attempt(number)
    assert record is not None
    beat = attempt.ended or step_log.read_heartbeat(log.store, log.prefix, number, attempt.started.claim_id)
    return run_entries.RunOpened(
        run_id=run_id,
        model_family=config.model_family or run_id,
        config=config.frozen(),
        config_sha256=config.frozen_sha256(),
        data_snapshot=snapshot_id,
        total_steps=config.training.steps,
        code_version=code_version(),
        # Adapters go on beside the same weights.
        initial_weights_sha256=opened.initial_weights_sha256 if config.training.lora else None,
        initial_source_sha256=opened.initial_source_sha256,
        forked_from=log_entry.ForkOrigin(
            run_id=log.run_id,
            checkpoint=found.reference,
            state_sha256=record.committed.state_sha256,
            quarantined_windows=tuple(sorted(windows)),
            config=config.document(),
            draws=past.draws + draws,
            tokens=past.tokens + draws * block,
            component_draws=drawn,
            arithmetic=beat.arithmetic if beat else None,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDeletion:
    """The checkpoints that deleting a run removes; `freed_bytes` is None as long as nothing is deleted.

    `checkpoints` and `bytes` count staged ones too. Rollbacks of the aliases `withdrawn_from` went to it until now.
    """

    run_id: str
    checkpoints: int
    bytes: int
    withdrawn_from: tuple[str, ...]
    data_snapshot: str
    freed_bytes: int | None = None


def preview_deletion(log: run_log.RunLog) -> RunDeletion:
    """Return the deletion without doing it; `GateRefused` if an alias or a fork needs it, `LiveOwner` if one lives."""
    aliases = check_deletion(log)
    refuse_live_owner(log, configuration_of(log.state).lease)
    there = [item for item in read_checkpoints(log) if item.state != run_state.CheckpointState.DELETED]
    return RunDeletion(
        run_id=log.run_id,
        checkpoints=len(there),
        bytes=sum(item.bytes for item in there),
        withdrawn_from=aliases,
        data_snapshot=log.state.opened.data_snapshot if log.state.opened else "",
    )


def delete_as_person(log: run_log.RunLog, view: RunDeletion, why: str) -> RunDeletion:
    """Delete the run and return the deletion; raises as `delete_run` does."""
    config = configuration_of(log.state)
    claimant = Claimant(lease=config.lease, budgets=config.budgets, writer=log_entry.this_writer())
    report = delete_run(log, run_entries.RunDeleted(by=this_person(), why=why), claimant)
    gone = [item for item in report.items if item.action == SweepAction.DELETE and item.kind != SweepKind.UNFINISHED]
    return replace(view, checkpoints=len(gone), bytes=sum(item.bytes for item in gone), freed_bytes=report.freed_bytes)


def describe_deletion(deletion: RunDeletion) -> list[str]:
    """Return lines about the deleted checkpoints and about the kept log and data."""
    freed = deletion.freed_bytes
    verb, size = ("would delete", deletion.bytes) if freed is None else ("deleted", freed)
    lines = [f"run {deletion.run_id}: {verb} {format_count(deletion.checkpoints, 'checkpoint')} ({size:,} bytes)"]
    lines += [f"`cairn rollback --alias {alias}` skips them from then on" for alias in deletion.withdrawn_from]
    kept = f"its data snapshot {deletion.data_snapshot[:8]}"
    return [*lines, f"its log, receipts and curve stay (`cairn runs --archived`), and {kept}"]


def roll_back(store: object_store.ObjectStore, alias: str, *, by: str, why: str = "") -> alias_history.AliasDecision:
    """Point the alias at the last readable promotion before and return it; raises `RunNotFound` or `IntegrityError`."""

    def decide(state: registry.RegistryState) -> registry.RolledBack:
        if len(state.champions) < 2:
            has = "one promotion and nothing before it" if state.champions else "no promotion"
            what_next = "`cairn models` shows the history, `cairn promote` adds to it"
            raise RunNotFound(f"alias {alias!r} has {has}; {what_next}")
        problems, leaving = [], state.champions[-1][1]
        for _, before in reversed(state.champions[:-1]):
            if not (problem := _find_problem(store, before)):
                facts = f"from {leaving.run_id}@{leaving.step} back to {before.run_id}@{before.step}"
                facts += f": {why}" if why else ""
                new, old = before.manifest_sha256, leaving.manifest_sha256
                return registry.RolledBack(alias=alias, manifest_sha256=new, by=by, why=facts, left_manifest_sha256=old)
            problems.append(f"{before.run_id}@{before.step} {problem}")
        raise IntegrityError(
            f"alias {alias!r} stays where it is, nothing before it can be read: {'; '.join(problems)}; "
            "`cairn promote RUN@STEP --alias NAME` points another alias at what is left"
        )

    return alias_history.list_alias_promotions(alias, registry.Registry(store, alias).append(decide))[0]


def _find_problem(store: object_store.ObjectStore, promoted: registry.Promoted) -> str:
    """Return why these weights cannot be used; empty where they are committed and all their bytes are there."""
    record = run_log.RunLog(store, promoted.run_id).refresh().find(promoted.prefix)
    if record is None or not record.is_committed:
        return "is not in its run's log" if record is None else f"is {record.state}: {record.detail}"
    try:
        manifest = checkpoint.read_manifest(store, replace(record.committed, manifest_sha256=promoted.manifest_sha256))
    except IntegrityError as error:
        return f"has no manifest: {error}"
    short = [damage.key.rsplit("/", 1)[1] for damage in checkpoint.find_wrong_sizes(store, promoted.prefix, manifest)]
    return f"has lost bytes: {', '.join(short)}" if short else ""
