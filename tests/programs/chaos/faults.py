"""How each fault is injected: real signals, a really full disk, really flipped bytes, a really wrong clock.

Each names the termination reasons it may explain. A fault that this machine cannot do is skipped with its reason.
"""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cairn.storage.logs.run_state import RunState
from tests.crash.victims import send
from tests.processes.waiting import patience_seconds
from tests.programs.chaos.environment import Environment, Kill, fill
from tests.programs.chaos.flips import flip_checkpoint, flip_data
from tests.programs.chaos.kinds import LIES_IN_WAIT, Kind
from tests.programs.chaos.observer import RUN
from tests.programs.chaos.plan import COMMAND, Fault, Skipped
from tests.programs.chaos.processes import WORKERS, Role
from tests.programs.chaos.sweep_fault import kill_sweep
from tests.s3.fault_proxy import NetworkFault

AWAY_SECONDS = 4.0
FULL_SECONDS = 4.0
REFUSED_SECONDS = 4.0
_OOM_AFTER_STEPS = 3
_EVALUATOR_SECONDS = 10.0
_SUCCESSION_SECONDS = 120.0
_ON_ITS_WAY_SECONDS = 20.0
_CLOCK, _FSYNC = (Path(__file__).with_name(name) for name in ("wrong_clock.c", "failing_fsync.c"))


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A fault that was done (or skipped, and why), to which attempts, and how many processes were killed by it.

    `others_wait` says that another flow than the owner's was there, or that somebody starts one whom nobody answers;
    `killed` are those of the run's processes among the killed.
    """

    fault: Fault
    first_attempt: int
    last_attempt: int
    kills: int
    skipped: str = ""
    others_wait: bool = False
    killed: tuple[Kill, ...] = ()


def inject(environment: Environment, fault: Fault) -> InjectedFault:
    """Do it now; returns what was done."""
    before = max(environment.observer.state().latest_attempt, 1)
    environment.suffer(fault.kind)
    known = len(environment.kills)
    try:
        kills = _DEEDS[fault.kind](environment)
    except Skipped as skipped:
        return InjectedFault(fault=fault, first_attempt=before, last_attempt=before, kills=0, skipped=str(skipped))
    after = environment.observer.state().latest_attempt
    after += fault.kind in LIES_IN_WAIT
    others = environment.driver != COMMAND or len(environment.processes.of(Role.FLOW)) > 1
    return InjectedFault(
        fault=fault,
        first_attempt=before,
        last_attempt=max(before, after),
        kills=kills,
        others_wait=others,
        killed=tuple(environment.kills[known:]),
    )


def _kill(*roles: Role) -> Callable[[Environment], int]:
    return lambda environment: environment.kill(*roles)


def _kill_evaluator(environment: Environment) -> int:
    """Kill it as soon as it is there: after the last step it comes a moment later."""
    deadline = time.monotonic() + _EVALUATOR_SECONDS
    while (
        not environment.processes.of(Role.EVALUATOR)
        and environment.processes.of(Role.FLOW)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return _kill(Role.EVALUATOR)(environment)


def _kill_server(environment: Environment) -> int:
    server = environment.server
    if not server.is_alive:
        raise Skipped("the server is being started already")
    server.kill()

    def restart() -> None:
        time.sleep(2.0)  # away for a moment
        server.start()

    threading.Thread(target=restart, daemon=True).start()
    return 1


def _notice(environment: Environment) -> int:
    struck = environment.processes.send_signal(signal.SIGTERM, Role.FLOW)
    if not struck:
        raise Skipped("no flow is left")
    if environment.processes.wait_gone(struck, seconds=patience_seconds()):
        raise AssertionError("a flow that was told to go is still there")
    return 0


def _notice_without_grace(environment: Environment) -> int:
    if not environment.processes.send_signal(signal.SIGTERM, Role.FLOW):
        raise Skipped("no flow is left")
    time.sleep(0.1)  # all the grace there is
    with suppress(Skipped):  # it was enough
        return environment.kill(*WORKERS)
    return 0


def _group_of(pid: int) -> int:
    """The process group, which a launcher leads and its ranks belong to; 0 for a process that is gone."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def _zombie(environment: Environment) -> int:
    asleep = environment.processes.send_signal(signal.SIGSTOP, *WORKERS)
    if not asleep:
        raise Skipped("nobody is left to fall asleep")
    before = environment.observer.state()
    environment.train()
    deadline = time.monotonic() + _SUCCESSION_SECONDS
    while not _has_succeeded(environment, before) and time.monotonic() < deadline:
        if environment.started[-1].process.poll() not in (None, 0):
            environment.train()  # the notice of a zombie's live process, a lost race: again, as a person would
        time.sleep(0.05)
    groups = {_group_of(pid) for pid in asleep}  # a rank that started just before is a zombie's too
    successors = [actor for actor in environment.processes.of(Role.TRAINER) if _group_of(actor.pid) not in groups]
    for actor in successors:  # it is so quick that it would be at the end before the next fault
        actor.signal(signal.SIGSTOP)
    for pid in asleep:
        send(pid, signal.SIGCONT)
    left = environment.processes.wait_gone(asleep, seconds=patience_seconds())
    for actor in successors:
        actor.signal(signal.SIGCONT)
    if left:
        raise AssertionError(f"a zombie that was fenced is still there: {left}")
    return 0


def _has_succeeded(environment: Environment, before: RunState) -> bool:
    """Whether a successor has committed or, where all was committed before, has left with everything done."""
    if before.finished is not None or environment.started[-1].process.poll() == 0:
        return environment.started[-1].process.poll() == 0
    newest = environment.observer.state().newest_committed
    return newest is not None and newest.committed.attempt > before.latest_attempt


def _full_disk(environment: Environment) -> int:
    if not environment.has_small_disk:
        raise Skipped("needs root and tmpfs")
    ballast = environment.folder / "store" / ".ballast"
    fill(ballast)
    time.sleep(FULL_SECONDS)
    ballast.unlink()
    return 0


def _break_store(fault: NetworkFault, pattern: str, times: int, seconds: float) -> Callable[[Environment], int]:
    def send(environment: Environment) -> int:
        assert environment.proxy is not None
        environment.proxy.aim(fault, pattern, times=times)
        time.sleep(seconds)
        environment.proxy.aims.clear()
        return 0

    return send


def _late_request(environment: Environment) -> int:
    """Kill the sender of an upload or of a log entry on its way, which arrives when a successor is at work."""
    assert environment.proxy is not None
    aim = environment.proxy.aim(NetworkFault.LATE, f"{_LOG}|PUT .*checkpoints/")
    deadline = time.monotonic() + _ON_ITS_WAY_SECONDS
    while not aim.fired and environment.processes.of(Role.FLOW) and time.monotonic() < deadline:
        time.sleep(0.02)
    environment.proxy.aims.clear()
    before = environment.observer.state().latest_attempt
    threading.Thread(target=_deliver, args=(environment, before), daemon=True).start()
    return _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)


def _deliver(environment: Environment, attempt: int) -> None:
    deadline = time.monotonic() + _SUCCESSION_SECONDS
    while environment.observer.state().latest_attempt <= attempt and time.monotonic() < deadline:
        time.sleep(0.1)
    if environment.proxy is not None:
        environment.proxy.deliver()


def _misread(environment: Environment) -> int:
    """Have one read of a checkpoint arrive with a bit flipped, once, at the next resume."""
    assert environment.proxy is not None
    struck = _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)
    environment.proxy.aim(NetworkFault.FLIPPED, r"GET .*checkpoints/.*(safetensors|trainer\.json)")
    return struck


def _failing_fsync(environment: Environment) -> int:
    """Have one fsync of the next attempt fail with EIO, some commits on."""
    library = _preloaded(environment.folder, _FSYNC)
    struck = _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)
    environment.next_variables = {
        "LD_PRELOAD": str(library),
        "CHAOS_FSYNC_FAILS_AT": str(random.Random(environment.tag).randrange(4, 40)),
        "CHAOS_FSYNC_FAILED": str(environment.folder / "fsync-failed"),
    }
    return struck


def _wrong_clock(shift_seconds: int) -> Callable[[Environment], int]:
    def set_clock(environment: Environment) -> int:
        library = _preloaded(environment.folder, _CLOCK)
        struck = _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)
        environment.next_variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_SHIFT_SECONDS": str(shift_seconds)}
        return struck

    return set_clock


def _preloaded(folder: Path, source: Path) -> Path:
    compiler, library = shutil.which("cc"), folder / f"{source.stem}.so"
    if compiler is None:
        raise Skipped("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O", "-o", str(library), str(source)], check=True, timeout=60)
    return library


def _two_flows(environment: Environment) -> int:
    struck = _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)
    for _ in range(2):
        environment.train().suffered.add(Kind.TWO_FLOWS)
    return struck


def _wrong_dead(environment: Environment) -> int:
    """Start the command in another pid namespace: the owner's process is not to be seen there, only its heartbeat."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise Skipped("needs the right to make a pid namespace")
    environment.train_in_other_namespace()
    return 0


def _version_skew(environment: Environment) -> int:
    """Let a newer program append one entry to a copy of the store: this one must not add a word there."""
    environment.processes.send_signal(signal.SIGSTOP, *WORKERS)
    try:
        environment.try_to_train_after_newer_program()
    finally:
        environment.processes.send_signal(signal.SIGCONT, *WORKERS)
    return 0


def _out_of_memory(environment: Environment) -> int:
    """Have the next attempt meet a real refusal of the allocator, some steps on."""
    step = environment.observer.trained_step(environment.observer.state())
    struck = _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER)(environment)
    environment.next_variables = {"CAIRN_FAULTS": f"oom@{step + _OOM_AFTER_STEPS}"}
    return struck


_LOG = rf"PUT .*runs/{RUN}/log/"
_DEEDS: dict[Kind, Callable[[Environment], int]] = {
    Kind.KILL_TRAINER: _kill(Role.TRAINER),
    Kind.KILL_FLOW: _kill(Role.FLOW),
    Kind.KILL_BOTH: _kill(Role.FLOW, Role.LAUNCHER, Role.TRAINER),
    Kind.KILL_LAUNCHER: _kill(Role.LAUNCHER),
    Kind.KILL_EVALUATOR: _kill_evaluator,
    Kind.KILL_SERVER: _kill_server,
    Kind.KILL_OWN_SERVER: _kill(Role.SERVER),
    Kind.KILL_WATCHER: _kill(Role.WATCHER),
    Kind.KILL_WORKER: _kill(Role.WORKER),
    Kind.KILL_SWEEP: kill_sweep,
    Kind.NOTICE: _notice,
    Kind.NOTICE_WITHOUT_GRACE: _notice_without_grace,
    Kind.ZOMBIE: _zombie,
    Kind.FULL_DISK: _full_disk,
    Kind.STORE_AWAY: _break_store(NetworkFault.SLOW_DOWN, ".", 1_000_000, AWAY_SECONDS),
    Kind.STORE_THROTTLED: _break_store(NetworkFault.SLOW_DOWN, "PUT ", 8, 3.0),
    Kind.STORE_LOSES_ANSWERS: _break_store(NetworkFault.RESPONSE_LOST, f"{_LOG}|PUT .*checkpoints/", 3, 3.0),
    Kind.STORE_REFUSES: _break_store(NetworkFault.REFUSED, "PUT ", 1_000_000, REFUSED_SECONDS),
    Kind.STORE_IS_LATE: _late_request,
    Kind.STORE_MISREADS: _misread,
    Kind.FSYNC_FAILS: _failing_fsync,
    Kind.FLIP_CHECKPOINT: flip_checkpoint,
    Kind.FLIP_DATA: flip_data,
    Kind.CLOCK_BACK: _wrong_clock(-5400),
    Kind.CLOCK_FORWARD: _wrong_clock(5400),
    Kind.TWO_FLOWS: _two_flows,
    Kind.WRONG_DEAD: _wrong_dead,
    Kind.VERSION_SKEW: _version_skew,
    Kind.OUT_OF_MEMORY: _out_of_memory,
}
