"""What must be true of a run after all faults, asked of raw entries and bytes where possible.

The rules for single entries are those of `tests.protocol.raw_history`.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cairn.storage.errors import StorageError
from cairn.storage.logs.run_log import RunLog, fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import read_step_records, splice
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.store_probe import probe_store
from tests.log_judge import judge_store
from tests.processes.waiting import patience_seconds, prompt_seconds
from tests.programs.chaos.environment import Environment, Started
from tests.programs.chaos.faults import InjectedFault
from tests.programs.chaos.kinds import FACTS, LIES_IN_WAIT, SILENCES, Kind
from tests.programs.chaos.observer import RUN
from tests.programs.chaos.plan import RunPlan
from tests.programs.chaos.reference_run import train_reference_of
from tests.protocol.raw_history import (
    BROKEN,
    READABLE,
    RawRun,
    Violation,
    find_damage,
    mirrored,
    read_raw,
    tell_aliases,
    tell_run,
)

PREFIX = f"runs/{RUN}"
COMPLETED, BAD_DATA = "completed", "bad-data"
UNTOUCHED = "the run nobody touched"
_FINE_CODES = frozenset({0, 7, 75, -9})
_TOLD_TO_GO = -15
_REFUSED, _DAMAGED = 2, 5
_CLOCKS = frozenset({Kind.CLOCK_BACK, Kind.CLOCK_FORWARD})
"""An S3 server refuses whose clock is far from its own."""
_GONE = frozenset({"lost", "preempted"})
_OVER = _GONE | {COMPLETED}
_STORE_FAULTS = {kind for kind in Kind if kind.startswith("store-")} | {Kind.FULL_DISK, Kind.FSYNC_FAILS}
_OLD_SECONDS = 2 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The run nobody touched: its last digest, its curve, its held-out losses, and how long its command took."""

    state_sha256: str
    curve: tuple[tuple[int, float], ...]
    losses: frozenset[tuple[int, float]]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What does not hold; `reference_run` says which undisturbed run it was held against."""

    violations: tuple[str, ...]
    reference_run: str


def reference_of(store: ObjectStore) -> Reference:
    """Return what another run of this configuration must equal; raises `Violation` where this one is not finished."""
    state = RunLog(store, RUN).refresh()
    if state.finished is None:
        raise Violation("the run nobody touched did not finish")
    return Reference(state_sha256=state.finished.state_sha256, curve=_curve(store, state), losses=_losses(state))


def judge(
    environment: Environment, plan: RunPlan, injected: tuple[InjectedFault, ...], reference: Reference
) -> Judgement:
    """Ask everything; a question that cannot be asked is a violation itself."""
    store = environment.observer.store
    state = RunLog(store, RUN).refresh()
    reference_run = _which_reference(plan, state)
    questions: list[Callable[[], Iterator[str]]] = [
        *_of_any_run(
            environment,
            state,
            lambda: reference if reference_run == UNTOUCHED else _reference_of_run(environment),
        ),
        lambda: _receipts(state, injected, plan),
        lambda: _quarantines(environment, plan, state),
        lambda: _condemned(injected, store),
        lambda: _commands(environment.exits(), injected),
        lambda: _ends(environment.exits(), state, reference.seconds),
        lambda: _too_old(environment),
    ]
    violations = tuple(said for question in questions for said in _asked(question))
    return Judgement(violations=violations, reference_run=reference_run)


def violations_of(environment: Environment, reference: Reference) -> list[str]:
    """Ask what must hold of a run whatever was done to it: the bits, the log, what lies in the store, who is left."""
    state = RunLog(environment.observer.store, RUN).refresh()
    return [said for question in _of_any_run(environment, state, lambda: reference) for said in _asked(question)]


def _of_any_run(
    environment: Environment, state: RunState, find_reference: Callable[[], Reference]
) -> list[Callable[[], Iterator[str]]]:
    store = environment.observer.store
    return [
        lambda: _orphans(environment),
        lambda: _same_run(store, state, find_reference()),
        lambda: _log(store, environment.observer.seen),
        lambda: _swept(environment),
        lambda: _verified(environment),
    ]


def _which_reference(plan: RunPlan, state: RunState) -> str:
    """The run nobody touched, or one that began with this run's quarantine and was trained with its sizes."""
    differs = {
        "its quarantine": bool(state.quarantines) or plan.spoiled_step is not None,
        "its sizes": len({(a.started.micro_batch, a.started.activation_checkpointing) for a in state.attempts}) > 1,
    }
    named = " and ".join(what for what, is_so in differs.items() if is_so)
    return f"a reference run with {named}" if named else UNTOUCHED


def _reference_of_run(environment: Environment) -> Reference:
    """Train the reference run; what was measured of it is nothing: it has no evaluators."""
    cache = environment.folder / "reference-run"
    reference_run = train_reference_of(environment.observer.store, RUN, cache_dir=cache)
    return Reference(state_sha256=reference_run.state_sha256, curve=reference_run.curve, losses=frozenset())


def _asked(question: Callable[[], Iterator[str]]) -> list[str]:
    try:
        return list(question())
    except (Violation, StorageError, KeyError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]


def _orphans(environment: Environment) -> Iterator[str]:
    for actor in environment.processes.wait_gone(seconds=prompt_seconds()):
        yield f"orphan: {actor.role} {actor.pid} outlives the run: {actor.words}"


def _same_run(store: ObjectStore, state: RunState, reference: Reference) -> Iterator[str]:
    if state.finished is None or state.finished.state_sha256 != reference.state_sha256:
        yield f"other bits: {state.finished} is not {reference.state_sha256}"
    curve = _curve(store, state)
    steps = [step for step, _ in curve]
    if steps != [step for step, _ in reference.curve]:
        yield f"curve: dropped {sorted({step for step, _ in reference.curve} - set(steps))}, {len(steps)} points"
    elif curve != reference.curve:
        other = next(mine for mine, theirs in zip(curve, reference.curve, strict=True) if mine != theirs)
        yield f"curve: another loss at step {other[0]}"
    known = dict(reference.losses)
    for step, loss in _losses(state):
        if step in known and known[step] != loss:
            yield f"evaluation: val_loss {loss} at step {step} is not {known[step]}"


def _log(store: ObjectStore, seen: dict[int, str]) -> Iterator[str]:
    left = mirrored(store)
    judge_store(left)
    told = tell_run(left, PREFIX)
    raw = read_raw(left, f"{PREFIX}/log")
    for seq, write_id in seen.items():
        if seq >= len(raw) or raw[seq]["write_id"] != write_id:
            yield f"nothing acknowledged is lost: seq {seq} was seen and is another now"
    log = RunLog(left, RUN)
    entries = log.read_entries()
    state = fold(entries)
    if state != log.refresh():
        yield "the cache does not agree with the entries"
    if state.refused:
        yield f"refused entries: {state.refused}"
    if not told.finished or told.owner is not None:
        yield f"the run is not at its end: owner {told.owner}"
    for prefix, status in told.status.items():
        if status == READABLE:
            yield from _broken_objects(left, told.commits[prefix])
    aliases = tell_aliases(left)
    if not any(aliases.values()):
        yield "nothing was promoted"
    for alias, stack in aliases.items():
        promoted = [body["manifest_sha256"] for body in stack]
        if len(set(promoted)) < len(promoted):
            yield f"promoted twice: {alias} has {promoted}"


def _broken_objects(store: ObjectStore, body: dict[str, str]) -> Iterator[str]:
    """Hash a committed checkpoint with nothing of the product's."""
    if damage := find_damage(store, body):
        yield f"committed verifies: {damage}"


def _receipts(state: RunState, injected: tuple[InjectedFault, ...], plan: RunPlan) -> Iterator[str]:
    always = {COMPLETED} if plan.spoiled_step is None else {COMPLETED, BAD_DATA}
    for attempt in state.attempts:
        number, ended = attempt.started.attempt, attempt.ended
        if ended is None:
            yield f"receipt: attempt {number} has no end"
            continue
        met = [s for s in injected if not s.skipped and s.first_attempt <= number <= _met_until(s, state)]
        explained = frozenset(always).union(*map(_explained_by, met))
        if ended.reason not in explained:
            done = ", ".join(s.fault.kind for s in met) or "nothing"
            yield f"receipt: attempt {number} ended as {ended.reason} ({ended.detail}), but {done} was done to it"


def _explained_by(met: InjectedFault) -> frozenset[str]:
    lost = {"lost"} if met.fault.kind in SILENCES and met.others_wait else set()
    return FACTS[met.fault.kind].reasons | lost


def _met_until(fault: InjectedFault, state: RunState) -> int:
    """The last attempt that may have met it: of what lies in wait, the first that lives and does not leave it.

    An attempt that stops for want of a remedy (the watcher does not know the text's source) leaves it to the next one.
    """
    if fault.fault.kind not in LIES_IN_WAIT:
        return fault.last_attempt
    later = [attempt for attempt in state.attempts if attempt.started.attempt >= fault.last_attempt]
    ends = (attempt.ended for attempt in later if attempt.ended)
    lived = (ended.attempt for ended in ends if ended.reason not in _GONE and ended.decision.action != "stop")
    return next(lived, fault.last_attempt)


def _quarantines(environment: Environment, plan: RunPlan, state: RunState) -> Iterator[str]:
    """What was bad is left out, all of it and nothing else."""
    spoiled = {environment.spoiled.window} if environment.spoiled is not None else set()
    if state.quarantined_windows != spoiled:
        yield f"quarantine: windows {sorted(state.quarantined_windows)} are left out, bad are {sorted(spoiled)}"


def _condemned(injected: tuple[InjectedFault, ...], store: ObjectStore) -> Iterator[str]:
    """No checkpoint is quarantined but one whose bytes were flipped in the store."""
    flips = sum(item.fault.kind is Kind.FLIP_CHECKPOINT and not item.skipped for item in injected)
    raw = read_raw(mirrored(store), f"{PREFIX}/log")
    said = {entry["body"]["prefix"] for entry in raw if entry["kind"] == "checkpoint-quarantined"}
    if len(said) > flips:
        yield f"no quarantine on one read: {sorted(said)} are quarantined, {flips} were damaged"


def _commands(ended: list[Started], injected: tuple[InjectedFault, ...]) -> Iterator[str]:
    has_wrong_clock = any(item.fault.kind in _CLOCKS and not item.skipped for item in injected)
    for one in ended:
        words = one.output.read_text(errors="replace").strip().splitlines()[-3:]
        is_excused = one.code == 1 and one.suffered & _STORE_FAULTS
        is_skewed = one.code == _REFUSED and has_wrong_clock and any("RequestTimeTooSkewed" in line for line in words)
        has_not_begun = one.code == _TOLD_TO_GO and not words  # the interpreter itself was still starting
        if one.code not in _FINE_CODES and not (is_excused or is_skewed or has_not_begun):
            yield f"exit: command {one.number} left with {one.code} after {sorted(one.suffered)}: {' / '.join(words)}"


def _too_old(environment: Environment) -> Iterator[str]:
    """A command that met a newer program's entry has left, and has written nothing."""
    for one in environment.too_old:
        code = one.process.wait(timeout=patience_seconds())
        more = set(one.command.store.keys("runs")) - one.there
        if code != _REFUSED or more:
            yield f"version: too old a program left with {code} and wrote {sorted(more)}: {one.command.output()[-300:]}"


def _ends(ended: list[Started], state: RunState, undisturbed_seconds: float) -> Iterator[str]:
    """Left alone, a command ends in the time of an undisturbed one for each attempt that it may have had to make."""
    failed = sum(attempt.ended is not None and attempt.ended.reason not in _OVER for attempt in state.attempts)
    bound = (undisturbed_seconds + prompt_seconds()) * (1 + failed)
    for one in ended:
        if one.end is not None and one.end.seconds > bound:
            yield f"end: command {one.number} left {one.end.seconds:.0f} s after {one.end.after}, {bound:.0f} allowed"


def _swept(environment: Environment) -> Iterator[str]:
    """What remains after a sweep is something the log names; what is old and unfinished goes too."""
    local = environment.observer.store.local_path("runs")
    if local is not None:
        _age_unfinished(local.parent)
        probe_store(environment.observer.store)
    code, words = environment.verb("sweep", RUN)
    if code != 0:
        yield f"sweep: exit {code}: {words[-300:]}"
    store = environment.observer.store
    told = tell_run(mirrored(store), PREFIX)
    for room in ("runs", "data", "models", "probe", "initial"):
        for key in store.keys(room):
            if not _is_referred_to(key, told, store):
                yield f"nobody refers to {key}"
    if local is not None:
        for path in local.parent.rglob(".*"):
            yield f"an unfinished write is left: {path.relative_to(local.parent)}"


def _is_referred_to(key: str, told: RawRun, store: ObjectStore) -> bool:
    if re.fullmatch(rf"{PREFIX}/log/\d{{10}}\.json|{PREFIX}/fold\.json|models/[\w.-]+/(log/\d{{10}}|fold)\.json", key):
        return True
    if re.fullmatch(rf"({PREFIX}|models/[\w.-]+)/fold/[0-9a-f]{{64}}\.json", key):  # a part of a cached fold
        return True
    if found := re.fullmatch(rf"{PREFIX}/(steps|heartbeats)/attempt-(\d+)(-\w+)?(/\d{{16}})?\.jsonl?", key):
        return 1 <= int(found[2]) <= told.claims
    if re.fullmatch(r"probe/[0-9a-f]{32}/[\w-]+", key):  # a bucket's objects cannot be aged for the next probe
        return store.local_path(key) is None
    if re.fullmatch(rf"{PREFIX}/faults/oom-\d+\.json", key):  # that a injected fault has struck
        return True
    if found := re.fullmatch(rf"{PREFIX}/window-losses/([0-9a-f]{{64}})\.json", key):
        return any(found[1].encode() in store.read(entry) for entry in store.keys(f"{PREFIX}/log"))
    if key.startswith(f"{PREFIX}/checkpoints/"):
        prefix, name = key.rsplit("/", 1)
        return told.status.get(prefix) in (READABLE, BROKEN) and name in _names(store, prefix)
    room, snapshot, name = key.split("/", 2)
    if snapshot == "recipes":  # what a snapshot was made from, so that it is found again
        return json.loads(store.read(key))["snapshot_id"] in {folder.split("/")[1] for folder in store.folders(room)}
    return room == "data" and name in _data_names(store, snapshot)


def _names(store: ObjectStore, prefix: str) -> set[str]:
    manifest = json.loads(store.read(f"{prefix}/manifest.json"))
    return {"manifest.json", *(item["name"] for item in (manifest["trainer"], *manifest["shards"]))}


def _data_names(store: ObjectStore, snapshot: str) -> set[str]:
    manifest = json.loads(store.read(f"data/{snapshot}/snapshot.json"))
    return {"snapshot.json", *(item["key"] for item in manifest["objects"])}


def _age_unfinished(root: Path) -> None:
    """Let everything unfinished, and what probes left, be two days old: by then nobody may be at it any more."""
    then = time.time() - _OLD_SECONDS
    for path in (*root.rglob(".*"), *root.glob("probe/*/*")):
        os.utime(path, (then, then))


def _verified(environment: Environment) -> Iterator[str]:
    code, words = environment.verb("verify", RUN)
    if code == _DAMAGED and any(key in words for key in environment.rotten):
        # Every attempt has read its own copy, so nobody made the shard anew; all else must be whole.
        for key, data in environment.rotten.items():
            environment.observer.store.write(key, data)
        code, words = environment.verb("verify", RUN)
    if code != 0:
        yield f"verify: exit {code}: {words[-600:]}"


def _curve(store: ObjectStore, state: RunState) -> tuple[tuple[int, float], ...]:
    points = splice(read_step_records(store, PREFIX, state.attempts), state.attempts)
    return tuple((point.record.step, point.record.train_loss) for point in points)


def _losses(state: RunState) -> frozenset[tuple[int, float]]:
    return frozenset((item.step, item.metrics["val_loss"]) for item in state.evaluations)
