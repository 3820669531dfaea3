"""Finds a run by its id, a checkpoint by REF (an alias, `RUN` or `RUN@STEP`; an alias first), or all of a run.

Where a store has no run, the stores near this folder are named: the command may be meant for one of them.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from difflib import get_close_matches
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.reports.errors import RunNotFound
from cairn.storage.checkpoints.sweep import parse_checkpoint_folder
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import log_entry, registry, run_entries, run_index, run_log, run_state, step_log
from cairn.storage.stores import codec, object_store
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.text.format import format_count

if TYPE_CHECKING:
    from cairn.model.configuration.data import MixtureStage
    from cairn.tasks.configuration.run_configuration import RunConfig

_SHOWN, _NEARBY, _MOST_ENTRIES = 20, 5, 200
"""Names in a list, stores nearby, and entries of one folder that are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint and the log of its run."""

    log: run_log.RunLog
    reference: log_entry.CheckpointReference

    @property
    def opened(self) -> run_entries.RunOpened:
        """The run's opening entry."""
        assert self.log.state.opened is not None
        return self.log.state.opened


def find_run(store: object_store.ObjectStore, run_id: str) -> run_log.RunLog:
    """Return the run's log, read to its end; raises `RunNotFound`, which lists the runs of the store."""
    log = run_log.RunLog(store, run_id)
    if log.refresh().opened is None:
        runs = run_index.list_run_ids(store)
        why = f" in {store.url}; {_listed('runs', runs, run_id)}" if runs else f": {describe_no_runs(store)}"
        raise RunNotFound(f"no run {run_id!r}{why}")
    return log


def find_checkpoint(store: object_store.ObjectStore, reference: str) -> FoundCheckpoint:
    """Resolve alias, `RUN` (its newest) or `RUN@STEP`; `RunNotFound`, or `IntegrityError` if it is quarantined."""
    champion = None if "@" in reference else registry.Registry(store, reference).refresh().champion
    if champion is not None:
        log = find_run(store, champion.run_id)
        found = [r for r in log.state.checkpoints if r.committed.manifest_sha256 == champion.manifest_sha256]
        if not found:
            raise IntegrityError(f"alias {reference}: run {champion.run_id} has no such checkpoint: {champion.prefix}")
        return FoundCheckpoint(log=log, reference=found[-1].committed.reference)
    run_id, at, step = reference.partition("@")
    if at and not (step.isascii() and step.isdigit()):
        raise InvalidConfiguration(f"{reference}: must be RUN@STEP with a whole number as STEP")
    try:
        log = find_run(store, run_id)
    except RunNotFound as missing:
        raise RunNotFound(f"{missing}; {_listed('aliases', registry.list_aliases(store), reference)}") from missing
    return FoundCheckpoint(log=log, reference=_at_step(log.state, run_id, step))


def find_in_run(log: run_log.RunLog, step: int | None = None) -> log_entry.CheckpointReference:
    """Return the run's newest committed checkpoint, or that of a step; raises as `find_checkpoint` does."""
    return _at_step(log.refresh(), log.run_id, "" if step is None else str(step))


def read_beat(log: run_log.RunLog) -> step_log.Heartbeat | None:
    """Return the heartbeat of a run's open attempt as it is now; None where there is none."""
    if (owner := log.state.open_attempt) is None:
        return None
    return step_log.read_heartbeat(log.store, log.prefix, owner.started.attempt, owner.started.claim_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """A checkpoint in one of its states and why; one that is still *writing* has no digests and no commit time."""

    run_id: str
    attempt: int
    step: int
    state: str
    prefix: str
    manifest_sha256: str | None = None
    state_sha256: str | None = None
    bytes: int
    committed_at: datetime | None = None
    detail: str = ""


def read_checkpoints(log: run_log.RunLog) -> tuple[CheckpointSummary, ...]:
    """Return every checkpoint in commit order, then the staged ones; the log is read again after the listing."""
    staged = Counter[str]()
    for key, size in log.store.sizes(f"{log.prefix}/checkpoints").items():
        staged[key.rpartition("/")[0]] += size
    known = [summarize_checkpoint(log.run_id, record) for record in log.refresh().checkpoints]
    for prefix in sorted(staged.keys() - {summary.prefix for summary in known}):
        if folder := parse_checkpoint_folder(prefix):
            names: dict[str, Any] = {"run_id": log.run_id, "prefix": prefix, "state": "writing"}
            known.append(CheckpointSummary(**names, step=folder[0], attempt=folder[1], bytes=staged[prefix]))
    return tuple(known)


def summarize_checkpoint(run_id: str, record: run_state.CheckpointRecord) -> CheckpointSummary:
    """Return the summary of a checkpoint that the log names."""
    committed = record.committed
    return CheckpointSummary(
        **asdict(committed.reference),
        run_id=run_id,
        state=record.state,
        state_sha256=committed.state_sha256,
        bytes=committed.bytes,
        committed_at=record.committed_at,
        detail=record.detail,
    )


def configuration_of(state: run_state.RunState) -> "RunConfig":
    """Return the newest attempt's configuration, else a fork's own or the frozen part; raises `IntegrityError`."""
    from cairn.tasks.configuration.stored_configuration import parse_stored_configuration

    return parse_stored_configuration(configuration_document(state))


def configuration_document(state: run_state.RunState) -> Mapping[str, Any]:
    """Return what `configuration_of` validates, as it stands in the log."""
    if state.attempts:
        return state.attempts[-1].started.config
    if state.origin is not None:
        return state.origin.config
    return state.opened.config if state.opened else {}


def mixture_of(state: run_state.RunState) -> "tuple[MixtureStage, ...]":
    """Return what the run draws from step 0 and from each stage's step on, as far as its log can be read."""
    if not codec.stored_section(configuration_document(state), "data").get("weights"):
        return ()
    try:
        return configuration_of(state).data.mixture
    except IntegrityError:
        return ()


def tokens_per_step(state: run_state.RunState) -> int:
    """Return the tokens of one step; 0 where the configuration is of another version."""
    config = configuration_document(state)
    windows = codec.stored_value(config, "training", "global_batch", int) or 0
    return windows * (codec.stored_value(config, "model", "block_size", int) or 0)


def tokens_at(state: run_state.RunState, step: int) -> int:
    """Return the tokens trained on up to a step, by the runs that this one was forked from too; 0 as above."""
    each, origin = tokens_per_step(state), state.origin
    if origin is None or origin.tokens is None or not each:
        return step * each
    return origin.tokens + (step - origin.checkpoint.step) * each


def _at_step(state: run_state.RunState, run_id: str, step: str) -> log_entry.CheckpointReference:
    if deleted := state.closed_to_training():
        raise RunNotFound(deleted)
    if not step:
        if state.newest_committed is None:
            raise RunNotFound(f"run {run_id} has no committed checkpoint yet; `cairn train` makes the first one")
        return state.newest_committed.committed.reference
    of_step = [record for record in reversed(state.checkpoints) if record.committed.step == int(step)]
    for record in of_step:
        if record.state == "committed":
            return record.committed.reference
    steps = _listed("steps", [str(record.committed.step) for record in reversed(state.readable)], step)
    if not of_step:
        raise RunNotFound(f"run {run_id} has no checkpoint at step {step}; {steps}")
    newest = of_step[0]
    if newest.state == run_state.CheckpointState.QUARANTINED:
        raise IntegrityError(f"{newest.committed.prefix} is quarantined: {newest.detail}; {steps}")
    why = f" ({newest.detail})" if newest.detail else ""
    raise RunNotFound(f"the checkpoint of step {step} of run {run_id} is {newest.state}{why}; {steps}")


def _listed(what: str, names: list[str], wanted: str) -> str:
    if not names:
        return f"there are no {what} here"
    meant = "".join(f"did you mean {name}? " for name in get_close_matches(wanted, names, n=1, cutoff=0.7))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{meant}{what} here: {', '.join(names[-_SHOWN:])}{more}"


def describe_no_runs(store: object_store.ObjectStore) -> str:
    """Return the place of a store without runs, whether its folder exists, and the stores nearby."""
    if (runs := store.local_path("runs")) is None:
        return f"there are no runs in {store.url}"
    chosen, here = runs.parent, Path.cwd()
    gone = "" if chosen.exists() else ", a folder that does not exist"
    bases = [(here, 2), *((folder, 1) for folder in (*here.parents[:2], chosen.parent))]
    folders = dict.fromkeys(path for base, levels in bases for path in _list_folders(base, levels) if path != chosen)
    counts = {folder: len(glob(f"{escape(str(folder))}/runs/*/log")) for folder in folders}
    named = ((shlex.quote(os.path.relpath(folder)), count) for folder, count in counts.items() if count)
    found = [f"--store {name} ({format_count(count, 'run')})" for name, count in named]
    nearby = f"stores nearby: {', '.join(found[:_NEARBY])}" if found else "`cairn train quickstart` makes the first"
    return f"there are no runs in {chosen}{gone}; {nearby}"


def _list_folders(base: Path, levels: int) -> Iterator[Path]:
    yield base
    with suppress(OSError), os.scandir(base) as entries:
        for entry in islice(entries, _MOST_ENTRIES if levels else 0):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _list_folders(Path(entry.path), levels - 1)
