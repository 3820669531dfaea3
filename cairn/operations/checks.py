"""Checks that change nothing: is this machine fit to train, and is all there that a run's log promises?"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import starmap
from pathlib import Path

from cairn.flows.orchestrator import prefect_settings, session_server
from cairn.reports.queries import run_lookup
from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.logs import log_entry, registry, run_entries, run_log, run_state, window_losses
from cairn.storage.snapshots import data_snapshot
from cairn.storage.stores import codec, open_store, store_probe
from cairn.storage.stores.object_store import ObjectStore, check_object
from cairn.tasks.configuration.addresses import as_path
from cairn.tasks.machine.placement import CAIRN_VERSION, is_known_dead, shares_pids, usable_cores, work_folder
from cairn.tasks.text.format import format_quantity

_PACKAGES = ("torch", "prefect", "fastapi", "fsspec", "pydantic", "pyarrow", "tokenizers", "safetensors")
PROBE_CREATORS, PROBE_ROUNDS = 32, 20
ENOUGH_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check: its name, whether the machine is good enough, and the details."""

    name: str
    ok: bool
    detail: str


def check_machine(store_url: str) -> tuple[Check, ...]:
    """Return every finding; the store is checked by a real race of creators, whose objects are deleted again."""
    python = f"{platform.python_version()} on {platform.platform(terse=True)}, {usable_cores()} cores"
    questions: dict[str, Callable[[], str]] = {"packages": _packages, "device": _device, "mode": _numerics}
    questions["arithmetic"] = _arithmetic
    questions |= {"store": partial(_store, store_url), "prefect": _prefect, "disk": partial(_disk, store_url)}
    return (Check(name="python", ok=True, detail=python), *starmap(_check, questions.items()))


def _check(name: str, question: Callable[[], str]) -> Check:
    try:
        return Check(name=name, ok=True, detail=question())
    except Exception as error:  # every kind of error is a finding
        return Check(name=name, ok=False, detail=f"{error}" or type(error).__name__)


def _packages() -> str:
    try:
        return ", ".join([f"cairn {CAIRN_VERSION}", *(f"{name} {version(name)}" for name in _PACKAGES)])
    except PackageNotFoundError as missing:
        cure = "`pip install .` in Cairn's folder installs it"
        raise RuntimeError(f"{missing.name} is not installed; {cure}") from missing


def _device() -> str:
    import torch

    from cairn.model.estimates.utilization import peak_flops_of_device
    from cairn.model.kernels.head_loss import can_compile
    from cairn.model.training.determinism import require_right_products

    require_right_products()
    if not torch.cuda.is_available():
        return f"cpu ({torch.get_num_threads()} threads, whose products are right); no CUDA device"
    devices = []
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        flops = peak_flops_of_device(name, "bf16")
        rate = f"{format_quantity(flops, 'FLOP/s')} by its data sheet" if flops else "not in the table of data sheets"
        if not can_compile(torch.device("cuda", number)):
            rate += "; slower than it could be: Triton or a C compiler is missing"
        devices.append(f"{name} ({rate})")
    return f"cuda: {', '.join(devices)}"


def _numerics() -> str:
    from cairn.model.estimates.numerics import describe_machine
    from cairn.tasks.machine.machine_speed import machine_speed

    return describe_machine(machine_speed(work_folder(os.environ)))


def _arithmetic() -> str:
    from cairn.tasks.machine.arithmetic import arithmetic_here

    if (found := arithmetic_here("auto", "native")) is None:
        raise RuntimeError("a child that asks torch for it failed; rule: torch can be imported")
    return f"{found.digest}: {found}"


def _store(url: str) -> str:
    store = open_store.open_store(url)
    if refused := store_probe.probe_store(store, creators=PROBE_CREATORS, rounds=PROBE_ROUNDS):
        raise RuntimeError(f"{refused}: objects are written there and never deleted; rule: retention may delete them")
    race = f"{PROBE_ROUNDS} races of {PROBE_CREATORS} creators, one winner each"
    return f"{store.url}: writable, create-if-absent is atomic ({race})"


def _prefect() -> str:
    environment, notes = dict(os.environ), list[str]()
    session_server.settle_client(environment, say=notes.append)
    if not (url := prefect_settings.server_address(environment)):
        none = "PREFECT_API_URL is not set: `cairn train` starts a temporary Prefect server while it runs"
        return "; ".join([none, *notes])
    version = prefect_settings.ask_server(environment, timeout_seconds=3.0)
    return f"{url} answers{version and f': Prefect {version}'}"


def _disk(store_url: str) -> str:
    found, local_path = [], as_path(store_url)
    for folder in (*([] if "://" in local_path else [Path(local_path)]), work_folder(os.environ)):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(there).free
        found.append(f"{folder}: {format_quantity(free)} free")
        if free < ENOUGH_BYTES:
            raise RuntimeError(f"{found[-1]}, at least {format_quantity(ENOUGH_BYTES)} are needed")
    return "; ".join(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The number of things checked, and one line for each problem."""

    run_id: str
    entries: int
    checkpoints: int
    checkpoint_bytes: int
    data_snapshot: str | None
    problems: tuple[str, ...]


def verify_run(store: ObjectStore, run_id: str) -> Verification:
    """Re-hash everything the run has committed; raises `RunNotFound`."""
    log = log_entry.EntryLog(store=store, prefix=f"{run_log.run_prefix(run_id)}/log", kinds=run_entries.RUN_KINDS)
    listed = store.keys(log.prefix)
    if not listed:
        if needing := ", ".join(aliases_that_need(store, run_id)):
            raise IntegrityError(f"{log.prefix}: is gone, and alias {needing} points at the run; restore its entries")
        run_lookup.find_run(store, run_id)
    problems, entries, state = list[str](), list[log_entry.Entry](), run_state.RunState()
    try:
        for read in log.read_after(None):
            entries.append(read.entry)
    except IntegrityError as error:
        problems.append(str(error))
    problems += sequence_problems(listed)
    for entry in entries:
        state = run_log.fold([entry], state)
        if entry.resume != state.resume:
            problems.append(f"seq {entry.seq}: its resume list is not what the entries up to it lead to")
    if not problems:
        problems += _cache_problems(store, run_id, state, len(entries))
    why = "its writer was fenced, or it contradicts what precedes it"
    problems += [f"seq {entry.seq}: a {entry.kind} without effect: {why}" for entry in state.refused]
    problems += registry_problems(store, run_id, state)
    problems += _data_problems(store, state)
    named = [] if state.deleted else [it.window_losses_sha256 for it in state.evaluations if it.window_losses_sha256]
    for digest in dict.fromkeys(named):
        try:
            window_losses.read_losses(store, run_log.run_prefix(run_id), digest)
        except IntegrityError as damage:
            problems.append(f"{damage}; `cairn evaluate {run_id}@STEP --again` measures it anew")
    for record in state.readable:
        problems += map(str, verify_checkpoint(store, record.committed))
    return Verification(
        run_id=run_id,
        entries=len(entries),
        checkpoints=len(state.readable),
        checkpoint_bytes=sum(record.committed.bytes for record in state.readable),
        data_snapshot=state.opened.data_snapshot if state.opened else None,
        problems=tuple(problems),
    )


def _cache_problems(store: ObjectStore, run_id: str, state: run_state.RunState, folded: int) -> Iterator[str]:
    log = run_log.RunLog(store, run_id)
    try:
        cached = log.refresh()
        if log.seq >= folded:  # the run is at work
            state = run_log.fold(log.read_entries()[folded : log.seq + 1], state)
    except IntegrityError as error:
        yield str(error)
        return
    if cached != state:
        yield f"{log.fold_key}: leads to another state than the entries do; delete it, it is only a cache"


def _data_problems(store: ObjectStore, state: run_state.RunState) -> Iterator[str]:
    """Yield the problems of the data snapshot, of the initial weights and of a module's files."""
    if state.opened is None:
        return
    try:
        yield from (str(damage) for _, damage in data_snapshot.find_damage(store, state.opened.data_snapshot))
    except (ObjectMissing, IntegrityError) as error:
        yield str(error)
    opened = state.opened
    begun = {"weights.safetensors": opened.initial_weights_sha256, "source.json": opened.initial_source_sha256}
    for name, sha256 in begun.items():
        if sha256 is not None:
            from cairn.tasks.trainer.initial_weights import promised_object  # few runs have any

            try:
                check_object(store, promised_object(store, sha256, name))
            except IntegrityError as error:
                yield str(error)
    if codec.stored_value(state.opened.config, "model", "module", str):
        from cairn.tasks.configuration.network_module import promised_file

        try:
            for name, sha256 in (run_lookup.configuration_of(state).model.files or {}).items():
                check_object(store, promised_file(store, name, sha256))
        except IntegrityError as error:
            yield str(error)


def registry_problems(store: ObjectStore, run_id: str, state: run_state.RunState) -> Iterator[str]:
    """Yield the problems of the aliases, and the entries missing by the run's pins."""
    aliases = registry.list_aliases(store)
    known = {record.committed.manifest_sha256: record.state for record in state.checkpoints}
    for alias in aliases:
        log = log_entry.EntryLog(store=store, prefix=f"models/{alias}/log", kinds=registry.MODEL_KINDS)
        yield from sequence_problems(store.keys(log.prefix))
        try:
            decided = registry.fold_decisions([read.entry for read in log.read_after(None)])
            cached = registry.Registry(store, alias).refresh()
        except IntegrityError as error:
            yield str(error)
            continue
        if cached != decided:
            yield f"models/{alias}/fold.json: leads to another state than the entries do; delete it, it is only a cache"
        for promoted in (promoted for _, promoted in decided.champions if promoted.run_id == run_id):
            now = known.get(promoted.manifest_sha256)
            named = f"{log.prefix}: points at step {promoted.step} of run {run_id}, or could be rolled back to it"
            if now is None:
                gone = "its end is gone or was replaced; restore its entries"
                yield f"{named}, but the run's log has no such commit: {gone}"
            elif now in (run_state.CheckpointState.SUPERSEDED, run_state.CheckpointState.DELETED):
                yield f"{named}, but that checkpoint is {now}; promote another one"
    for pin in state.pins:
        may_still_decide = shares_pids(pin.pinned_by) and not is_known_dead(pin.pinned_by)
        if pin.alias and pin.alias not in aliases and not may_still_decide:
            yield (
                f"models/{pin.alias}/log: is gone, or another host is just promoting: step {pin.step} of run {run_id} "
                "is pinned for this alias, and nothing is on record for it; restore it, or promote again"
            )


def sequence_problems(listed: list[str]) -> Iterator[str]:
    """Yield the names that are no entries', then the entries that are missing: a reader stops at the first of them."""
    folder, following = "", 0
    for key in reversed(listed):  # from the oldest
        folder, _, name = key.rpartition("/")
        try:
            seq = log_entry.seq_of(name)
        except IntegrityError as error:
            yield str(error)
            continue
        if following < seq:
            names = dict.fromkeys(map(log_entry.entry_name, (following, seq - 1)))
            which = f"seq {following} is" if seq == following + 1 else f"seq {following} to {seq - 1} are"
            advice = "put back as they were, by the copy or restore under way or from a backup, they mend the log"
            yield f"{folder}/{' to '.join(names)}: {which} missing before seq {seq}, so readers end there; {advice}"
        following = seq + 1


def aliases_that_need(store: ObjectStore, run_id: str) -> list[str]:
    """Return the aliases that point at the run or could be rolled back to it, without those that cannot be read."""
    needing = []
    for alias in registry.list_aliases(store):
        with suppress(IntegrityError):
            if any(promoted.run_id == run_id for _, promoted in registry.Registry(store, alias).refresh().champions):
                needing.append(alias)
    return needing
