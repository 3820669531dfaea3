"""Polls all runs of a store and continues those that need it; a run's error becomes its row and ends no poll."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NoReturn, Protocol

import psutil

from cairn.flows.orchestrator import prefect_settings, run_notices
from cairn.reports.notices import notice
from cairn.reports.text.progress import RunProgress, read_progress
from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.logs import registry, run_index, run_log, step_log
from cairn.storage.stores import codec, object_store, open_store
from cairn.tasks.checkpoints.promotion import pending_offer
from cairn.tasks.configuration import addresses, configuration_source
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import boot_id, is_known_dead, replace_file, shares_pids, work_folder
from cairn.tasks.policy.run_watch import Life, Observed, WatchAction, decide_watch, is_over, lease_seconds
from cairn.tasks.text.output import say

CAIRN = (sys.executable, "-P", "-m", "cairn.cli.command")
_READERS = 8
_SHORTEST_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRow:
    """The action of one poll on one run, and why; `seconds` is how long a waiting run still waits."""

    run_id: str
    action: WatchAction
    why: str
    how: str = ""
    seconds: float | None = None


class WatcherMemory:
    """The observations of one store's runs, in a file of this machine's work folder."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Read the file; one of another boot, or a damaged one, is ignored."""
        self._path, self.monotonic = path, monotonic
        self._runs: dict[str, Observed] = {}
        with suppress(OSError, IntegrityError):
            remembered = codec.decode(path.read_bytes(), dict[str, dict[str, Observed]], where=str(path))
            self._runs = remembered.get(boot_id(), {})

    def observe(self, log: run_log.RunLog) -> Observed:
        """Return the observation of a run whose log was just read."""
        state, owner = log.state, log.state.open_attempt
        mark = f"ended {state.latest_attempt}" if state.attempts else "opened"
        if owner is not None:  # what changes whenever the run moves: a commit is a sign of life like a heartbeat
            started = owner.started
            heartbeat = step_log.read_heartbeat(log.store, log.prefix, started.attempt, started.claim_id)
            mark = f"open {started.attempt} committed {owner.last_committed_step} {heartbeat}"
        mark = f"{mark}, a run of {state.opening}"
        life, attempt, before = _life(log), state.latest_attempt, self._runs.get(log.run_id)
        if before is not None and before.mark == mark:
            seen = replace(before, owner=life, shows_life=False)
        else:
            moved = before is not None and before.attempt == attempt and owner is not None
            now = self.monotonic()
            seen = Observed(owner=life, unchanged_since=now, shows_life=moved, attempt=attempt, mark=mark)
        self._runs[log.run_id] = seen
        return seen

    def note_continued(self, run_id: str) -> None:
        """Remember that a continuation of the run was begun."""
        seen = self._runs[run_id]
        self._runs[run_id] = replace(seen, futile=seen.futile + 1, tried_at=self.monotonic())

    def save(self) -> None:
        """Replace the file; a folder that cannot be written costs only the memory."""
        replace_file(self._path, codec.encode({boot_id(): self._runs}))


def _life(log: run_log.RunLog) -> Life:
    """Judge by the newest attempt, else by the opening entry; a process that began later only has the same pid."""
    if log.state.attempts:
        placement = log.state.attempts[-1].started.placement
        if not shares_pids(placement):
            return Life.UNKNOWN
        return Life.GONE if is_known_dead(placement) else Life.HERE
    opening = log.read_entries()[0]
    if opening.writer.host != socket.gethostname():
        return Life.UNKNOWN
    try:
        began = psutil.Process(opening.writer.pid).create_time()
    except psutil.NoSuchProcess:
        return Life.GONE
    except psutil.AccessDenied:
        return Life.UNKNOWN
    return Life.GONE if began > opening.at.timestamp() else Life.HERE


class Continuation(Protocol):
    """A way to continue a run."""

    def begin(self, log: run_log.RunLog, *, silent_seconds: float) -> tuple[WatchAction, str]:
        """Continue a run unchanged for so long; return how, or that it waits or is left alone, and why."""

    def where(self, run_id: str) -> str:
        """Return where a person finds the output of the run's continuations."""


class ContinuationHere:
    """Continues runs by `cairn train` on this machine, at most `at_most` at a time, in sessions that outlive this one.

    Each child holds a file lock on its run and on one of the machine's places; the kernel releases both at its end.
    """

    def __init__(self, folder: Path, store: str, *, at_most: int, program: Sequence[str] = CAIRN) -> None:
        """Keep locks and outputs in `folder`; the children open `store`."""
        self._folder, self._store, self._at_most, self._program = folder, store, at_most, program
        self._children: list[Popen[bytes]] = []

    def begin(self, log: run_log.RunLog, *, silent_seconds: float) -> tuple[WatchAction, str]:
        """Start `cairn train` on the run, unless an earlier child still runs or all places are taken."""
        self._children = [child for child in self._children if child.poll() is None]  # also reaps those that ended
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked([self._folder / f"{log.run_id}.lock"]) as run:
            if run is None:
                return WatchAction.WAITS, "a process of an earlier poll is continuing it"
            with _locked([self._folder / f"place-{number}.lock" for number in range(self._at_most)]) as place:
                if place is None:
                    many = f"{self._at_most} runs are being continued here already; --at-most allows more"
                    return WatchAction.WAITS, many
                command = [*self._program, "train", "--run-id", log.run_id, "--store", self._store]
                with (self._folder / f"{log.run_id}.txt").open("ab") as sink:
                    child = Popen(
                        command, stdin=DEVNULL, stdout=sink, stderr=sink, start_new_session=True, pass_fds=(run, place)
                    )
        self._children.append(child)
        return WatchAction.CONTINUED, f"process {child.pid}, {self.where(log.run_id)}"

    def where(self, run_id: str) -> str:
        """Return the output file of the run's continuations."""
        return f"output in {self._folder / run_id}.txt"


@contextmanager
def _locked(paths: list[Path]) -> Iterator[int | None]:
    """Yield the descriptor of the first of `paths` that could be locked, or None; a child that inherits it keeps it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    yield None


class RunWatcher:
    """Polls the runs of one store."""

    def __init__(
        self,
        store: object_store.ObjectStore,
        continuation: Continuation,
        memory: WatcherMemory,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._continuation, self._memory = store, continuation, memory
        self._monotonic, self._sleep = memory.monotonic, sleep
        self._index = run_index.RunIndex(store)
        self._logs: dict[str, run_log.RunLog] = {}
        self._offered = set[tuple[str, str]]()
        self._silent: dict[str, notice.Notice] = {}

    def poll(self) -> tuple[WatchRow, ...]:
        """Poll every run once; raises `StorageError` if the store cannot list them."""
        run_ids = self._index.refresh()
        self._logs = {}
        rows = self._poll(run_ids)
        self._index.save()
        return rows

    def poll_patiently(self) -> tuple[WatchRow, ...]:
        """Poll once, then again the runs whose wait ends within their lease: no observation precedes the first poll."""
        rows = {row.run_id: row for row in self.poll()}
        polled_at = self._monotonic()

        def is_near(row: WatchRow) -> bool:
            if row.seconds is None:  # of what is over the index has no configuration
                return False
            lease_end = polled_at + lease_seconds(self._logs[row.run_id].state)
            return self._monotonic() + row.seconds <= lease_end

        while near := [run_id for run_id, row in rows.items() if is_near(row)]:
            self._sleep(_SHORTEST_PAUSE_SECONDS)
            rows.update((row.run_id, row) for row in self._poll(near))
        return tuple(rows.values())

    def delivering_notices(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Send the notices of this block's polls to the receivers that the environment of this machine names."""
        receivers = run_notices.all_receivers(configuration_source.read_notify(os.environ))
        return notice.delivering_notices(self._store, receivers, self.notices, say)

    def progress(self) -> tuple[RunProgress, ...]:
        """Return the progress of the runs that trained at the last poll."""
        with ThreadPoolExecutor(_READERS) as readers:
            return tuple(filter(None, readers.map(read_progress, self._logs.values())))

    def notices(self) -> Iterator[notice.Notice]:
        """Yield the decisions that the last poll saw, and the attempts that were silent for two leases; any thread."""
        for log in tuple(self._logs.values()):
            yield from run_notices.notices_of(log)
        yield from tuple(self._silent.values())

    def watch(
        self, *, every_seconds: float, report: Callable[[tuple[WatchRow, ...]], None], say: Callable[[str], None]
    ) -> NoReturn:
        """Poll every `every_seconds`, or sooner where a wait ends; after each, `report` gets the new rows, if any."""
        reported: dict[str, tuple[str, str]] = {}
        while True:
            pause = every_seconds
            try:
                rows = self.poll()
            except StorageError as error:
                say(f"the store does not answer, the next poll asks again: {error}")
            else:
                report(tuple(row for row in rows if reported.get(row.run_id) != (row.action, row.why)))
                reported = {row.run_id: (row.action, row.why) for row in rows}
                pause = min([every_seconds, *(row.seconds for row in rows if row.seconds is not None)])
            self._sleep(max(pause, _SHORTEST_PAUSE_SECONDS))

    def _poll(self, run_ids: list[str]) -> tuple[WatchRow, ...]:
        self._read_registry = cache(lambda alias: registry.Registry(self._store, alias).refresh())  # once a poll
        with ThreadPoolExecutor(_READERS) as readers:
            reads = {run_id: readers.submit(self._index.read, run_id) for run_id in run_ids}
        rows = []
        for run_id, read in reads.items():
            try:
                if not run_index.is_empty(log := read.result()):
                    self._logs[run_id] = log
                    rows.append(self._decide(run_id, log))
            except Exception as error:  # whatever is wrong with one run, the others are polled
                rows.append(WatchRow(run_id=run_id, action=WatchAction.FAILED, why=f"{error}" or type(error).__name__))
        self._memory.save()
        return tuple(rows)

    def _decide(self, run_id: str, log: run_log.RunLog) -> WatchRow:
        observed, now = self._observe(log), self._monotonic()
        decision = decide_watch(log.state, observed, now)
        if decision.action is WatchAction.CONTINUED:  # nothing is begun on what the index says, or on a log with a hole
            is_sketch = log.head is None
            log.refresh_whole()
            if is_sketch:
                observed = self._observe(self._index.fold(log))
                decision = decide_watch(log.state, observed, now)
        self._index.note(log, is_over=is_over(log.state, observed))
        row, owner, seconds = partial(WatchRow, run_id=run_id), log.state.open_attempt, now - observed.unchanged_since
        if owner is None or seconds < 2 * lease_seconds(log.state):
            self._silent.pop(run_id, None)
        else:
            opening, number, step = log.state.opening, owner.started.attempt, owner.last_known_step
            self._silent[run_id] = notice.silent_notice(run_id, opening, number, step, seconds)
        why = decision.why
        if decision.action is WatchAction.LEFT:
            return row(action=decision.action, why=addresses.name_store(why, self._store.url, os.environ))
        if decision.action is WatchAction.WAITS:
            how = self._continuation.where(run_id) if observed.futile else ""
            return row(action=decision.action, why=why, how=how, seconds=max(decision.until - now, 0.0))
        action, how = self._continuation.begin(log, silent_seconds=seconds)
        if action is not WatchAction.CONTINUED:
            return row(action=action, why=f"{why}; {how}")
        self._memory.note_continued(run_id)
        return row(action=action, why=why, how=how)

    def _observe(self, log: run_log.RunLog) -> Observed:
        observed = self._memory.observe(log)
        offer = log.run_id, log.state.opening
        if log.state.finished is None or offer in self._offered or self._index.is_over(log):
            return observed
        alias = pending_offer(log.state, self._read_registry)
        if not alias:  # a decision on record stays on record
            self._offered.add(offer)
        return replace(observed, unoffered_to=alias)


def open_watcher(url: str, deployment: str = "", *, at_most: int = 1) -> RunWatcher:
    """Return the watcher of a store; runs are continued by the deployment, or without one on this machine."""
    store = open_store.open_store(url)
    folder = work_folder(os.environ) / "watch" / codec.sha256(store.url.encode())[:12]
    continuation: Continuation = ContinuationHere(folder, store.url, at_most=at_most)
    if deployment:
        if len(list(filter(None, deployment.split("/")))) != 2:
            raise InvalidConfiguration(f"--deployment {deployment}: must be flow/deployment, as Prefect names it")
        prefect_settings.import_prefect(say=say)
        from cairn.flows.watching.deployed_continuation import ContinuationByDeployment

        continuation = ContinuationByDeployment(deployment, store.url)
    return RunWatcher(store, continuation, WatcherMemory(folder / "observations.json"))
