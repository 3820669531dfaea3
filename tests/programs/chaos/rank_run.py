"""A run of several ranks without a flow: the real launcher and ranks, and this process in the place of the parent."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_members import MembersChanged
from cairn.storage.stores.child_process import DEVNULL, child_command, end_child, start_child
from cairn.tasks.attempt.watchdog import HangDetector, HeartbeatGap, detecting_hangs
from cairn.tasks.configuration.settings import WatchdogConfig
from cairn.tasks.trainer import trainer_protocol
from cairn.tasks.trainer.trainer_group import RENDEZVOUS_SECRET, TrainerGroup
from cairn.tasks.trainer.trainer_process import TrainerChild, TrainerProcess
from tests.processes.fork_server import fork_server
from tests.programs.chaos.rank_victim import KILLS, MACHINE, MOMENTS, STEP_SECONDS, SUSPENDED
from tests.tasks.trainer_in_process import TrainingWorld

STEPS, EVERY = 12, 3
"""Steps of a run, and of each segment."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a run came to: digests by step, dropped checkpoints, changes of members, and gaps after each death."""

    digests: Mapping[int, str]
    dropped: tuple[int, ...]
    changes: tuple[MembersChanged, ...]
    steps: tuple[int, ...]
    gaps: tuple[float, ...]
    deaths: tuple[str, ...]
    survivors_kept: bool
    exit_code: int
    problem: str = ""
    seconds: float = 0.0


@dataclass
class Seen:
    """What the parent sees while it listens."""

    steps: list[tuple[int, float]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


class RankRun:
    """One world, and runs of it on ranks that die."""

    def __init__(self, folder: Path, **training: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.world, self.training = TrainingWorld(folder), {"steps": STEPS, "parallel": "ddp", **training}
        self.count = 0

    def run(
        self,
        processes: int,
        kills: str = "",
        *,
        machines: int = 1,
        limit_seconds: float = 60.0,
        step_seconds: float = 0.0,
    ) -> Ended:
        """Train to the end on so many ranks in all, of which some die, as a flow would command it.

        A step takes so long at least. In the place of a machine that is lost another one joins.
        """
        self.count += 1
        moments = self.world.folder / f"moments-{self.count}"
        moments.mkdir()
        spec = self.world.spec(self.count, training=self.training, micro_batch=1)
        spec = spec.model_copy(update={"work_dir": self.world.folder / f"work-{self.count}"})
        group = TrainerGroup(
            processes=processes // machines, nodes=machines, rendezvous="127.0.0.1:0" if machines > 1 else ""
        )
        told = {KILLS: kills, MOMENTS: str(moments), STEP_SECONDS: str(step_seconds), RENDEZVOUS_SECRET: "s" * 16}
        others = list["subprocess.Popen[bytes]"]()

        def start_machine(node_rank: int) -> None:
            at = replace(group, node_rank=node_rank, rendezvous=address, joins=node_rank >= machines)
            log = (spec.work_dir / f"machine-{node_rank}.stderr").open("wb")
            with log, fork_server().forking(), _environment(told):
                others.append(start_child(_command(at), stdin=DEVNULL, stdout=DEVNULL, stderr=log))

        with fork_server().forking(), _environment(told):
            child = TrainerChild(spec.work_dir, group.command() if processes == 1 else _command(group))
        seen, began = Seen(), time.monotonic()
        soon = WatchdogConfig(floor_seconds=2.0, factor=2.0, startup_seconds=20.0)
        detector = HangDetector(soon if SUSPENDED in kills else WatchdogConfig())
        process = TrainerProcess(
            spec,
            child,
            on_step=lambda record: seen.steps.append((record.step, time.monotonic())),
            on_waiting=lambda waiting: None,
            on_outlived=lambda outlived: start_machine(len(others) + 1) if outlived.machine is not None else None,
            detector=detector,
        )
        address = f"127.0.0.1:{process.wait_listening()}" if machines > 1 else ""
        for number in range(1, machines):
            start_machine(number)

        def end_hung(gap: HeartbeatGap) -> bool:
            if not process.end_hung_ranks():
                process.kill()
                return False
            return True

        add = process.received.add

        def keep(event: Any) -> None:
            seen.events.append(event)
            add(event)

        process.received.add = keep  # type: ignore[method-assign]
        problem = ""
        timer = threading.Timer(limit_seconds, process.kill)
        timer.start()
        family, ranks = dict[int, psutil.Process](), dict[int, list[psutil.Process]]()
        stack = ExitStack()
        try:
            process.wait_ready()
            stack.enter_context(detecting_hangs(detector, end_hung, poll_seconds=0.2))
            launchers = (process.pid, *(other.pid for other in others))
            ranks = {pid: psutil.Process(pid).children(recursive=True) for pid in launchers}
            family = {one.pid: one for each in ranks.values() for one in each}
            step = 0
            while step < self.training["steps"]:
                step = process.train(min(step + EVERY, self.training["steps"])).step
            while not self._settle(seen, process, step):
                process.train(step)
            alive = {pid for pid, one in family.items() if _is_alive(one)}
            process.finish(20.0)
        except Exception as error:
            alive = set()
            problem = f"{type(error).__name__}: {error}"
        timer.cancel()
        stack.close()
        code = process.kill()
        if code and not problem:
            problem = f"exit {code}"
        if problem:
            logs = [child.stderr_path, *spec.work_dir.glob("*.stderr")]
            problem += "\n".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists())
        for other in others:
            if not problem and _is_alive(psutil.Process(other.pid)):
                with suppress(subprocess.TimeoutExpired):
                    other.wait(10.0)
            end_child(other)
        _, left = psutil.wait_procs(list(family.values()), timeout=10.0)
        orphans = [one.pid for one in left]
        problem += f" orphans {orphans}" if orphans else ""
        child.discard()
        killed = [path.read_text().split() for path in moments.iterdir()]
        struck = {int(path.name.split("-")[1]): path.read_text().split()[1] for path in moments.iterdir()}
        for each in ranks.values():
            pids = {one.pid for one in each}
            struck |= dict.fromkeys(pids, "") if any(struck.get(pid, "").startswith(MACHINE) for pid in pids) else {}
        times = [at for _, at in seen.steps]
        gaps = tuple(
            min((at - float(moment) for at in times if at > float(moment)), default=0.0) for moment, _ in killed
        )
        return Ended(
            digests={one.step: one.state_sha256 for one in seen.events if isinstance(one, StagedCheckpoint)},
            dropped=tuple(one.step for one in seen.events if isinstance(one, trainer_protocol.CheckpointDropped)),
            changes=tuple(one for one in seen.events if isinstance(one, MembersChanged)),
            steps=tuple(step for step, _ in seen.steps),
            gaps=gaps,
            deaths=tuple(name for _, name in killed),
            survivors_kept=alive >= family.keys() - struck.keys(),
            exit_code=code,
            problem=problem,
            seconds=time.monotonic() - began,
        )

    def _settle(self, seen: Seen, process: TrainerProcess, step: int) -> bool:
        """Wait until the checkpoint of the step is staged or dropped; return whether it is staged."""
        ended = sum(isinstance(one, trainer_protocol.SegmentDone) and one.step == step for one in seen.events)
        while True:
            if any(isinstance(one, StagedCheckpoint) and one.step == step for one in seen.events):
                return True
            dropped = sum(
                isinstance(one, trainer_protocol.CheckpointDropped) and one.step == step for one in seen.events
            )
            if dropped >= ended:
                return False
            if not process.is_alive:
                raise RuntimeError("the trainer ended before its last checkpoint was staged")
            time.sleep(0.01)


def _command(group: TrainerGroup) -> tuple[str, ...]:
    return child_command("tests.programs.chaos.rank_launcher", msgspec.json.encode(group).decode())


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
