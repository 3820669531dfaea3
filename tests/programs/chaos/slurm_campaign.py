"""Runs on two machines of a real Slurm, each disturbed as its seed says, with a watcher beside: `make chaos-slurm`.

Each must end with the bits of the run nobody touched, and neither machine may be idle for long. Runs that do not hold
keep their folder. With `--losses` only the second node's ranks and command are killed, so often in each run, and no
attempt may end by it.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cairn.storage.logs.run_entries import AttemptStarted
from cairn.storage.stores.codec import encode
from tests.crash import slurm_job
from tests.crash.prefect_server import Server
from tests.crash.slurm_job import NEEDED, Job, Slurm, has_slurm
from tests.crash.training_command import RUN, configuration
from tests.environment_allow_list import restrict_this_process
from tests.processes.waiting import patience_seconds, wait_until
from tests.programs.chaos.environment import Environment
from tests.programs.chaos.judge import Reference, reference_of, violations_of
from tests.programs.chaos.plan import COMMAND
from tests.programs.chaos.processes import TAG
from tests.programs.chaos.slurm_times import Idle, JobStates, idle_times
from tests.session_folder import close_session, open_session

STEPS, LAST_STRUCK_STEP = 80, 74
STEPS_OF_A_LOSS = 600
"""Steps in which another rank can join before the next one is lost."""
_LOSSES = ("kill_other", "kill_other_ranks")
TWO_DISTURBANCES_SHARE = 0.25
REASONS: dict[str, frozenset[str]] = {
    "kill_first": frozenset({"lost"}),
    "kill_other": frozenset({"lost"}),
    "kill_first_ranks": frozenset({"lost"}),
    "kill_other_ranks": frozenset({"lost"}),
    "preempt": frozenset({"preempted"}),
    "requeue": frozenset({"preempted"}),
    "drain_node": frozenset({"preempted"}),
    "notify_other": frozenset({"preempted"}),
    "lose_node": frozenset({"preempted", "lost"}),
    "cancel": frozenset({"cancelled"}),
}
"""What may be done to a run, by the name of its function, and why an attempt may end then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What is done to a run, and not before which step."""

    name: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one run; `gathering_seconds` is the longest wait for the other machine."""

    seed: int
    disturbances: tuple[Disturbance, ...]
    missed: int
    reasons: tuple[str, ...]
    seconds: float
    idle: tuple[Idle, ...]
    gathering_seconds: float
    violations: tuple[str, ...]


def plan_run(seed: int) -> tuple[Disturbance, ...]:
    """Return what is done to a run: a pure function of its seed."""
    chance = random.Random(f"slurm {seed}")
    count = 2 if chance.random() < TWO_DISTURBANCES_SHARE else 1
    drawn = [
        Disturbance(name=chance.choice(sorted(REASONS)), step=chance.randrange(1, LAST_STRUCK_STEP))
        for _ in range(count)
    ]
    return tuple(sorted(drawn, key=lambda disturbance: disturbance.step))


def plan_losses(seed: int, count: int) -> tuple[Disturbance, ...]:
    """Return so many kills on the second node, each some steps after the other: a pure function of the seed."""
    chance = random.Random(f"slurm losses {seed}")
    steps = [number * STEPS_OF_A_LOSS + chance.randrange(1, STEPS_OF_A_LOSS // 4) for number in range(count)]
    return tuple(Disturbance(name=chance.choice(_LOSSES), step=step) for step in steps)


class DisturbedJob:
    """One run on the cluster, with a watcher beside it."""

    def __init__(self, environment: Environment, slurm: Slurm) -> None:
        self._environment, self._slurm = environment, slurm
        self.job = Job(slurm, environment.command, {TAG: environment.tag})
        self.states = JobStates(lambda: slurm.state(self.job.id))
        self._watcher = environment.command.start_verb("watch", "--every", "0.5")

    def disturb(self, disturbance: Disturbance) -> bool:
        """Wait for the step, do it, and wait until the run has noticed; False where the run was over before."""
        if not self._comes(lambda: self._environment.observer.has_trained(disturbance.step)):
            return False
        before = self._changes()
        if disturbance.name == "cancel":
            self.job.cancel()
            self._wait(self.job.is_over)
            self.job.submit()
        else:
            deed: Callable[[Job], None] = getattr(slurm_job, disturbance.name)
            deed(self.job)
        self._comes(lambda: self._changes() > before)
        return True

    def _changes(self) -> tuple[int, int]:
        """How many attempts there were, and how often ranks were lost in them."""
        state = self._environment.observer.state()
        return state.latest_attempt, sum(bool(change.lost) for change in state.member_changes)

    def finish(self) -> str:
        """Wait for the end of the job, and end the watcher; returns the job's last state."""
        state = self.job.wait_for_end()
        self._end_watcher()
        self.states.stop()
        return state

    def close(self) -> None:
        """End whatever is left."""
        self.job.cancel()
        self._end_watcher()
        self.states.stop()

    def _comes(self, is_there: Callable[[], bool]) -> bool:
        self._wait(lambda: is_there() or self._environment.observer.state().finished is not None or self.job.is_over())
        return is_there()

    def _wait(self, is_there: Callable[[], bool]) -> None:
        wait_until(is_there, "what the disturbed run comes to", self.job.output)

    def _end_watcher(self) -> None:
        self._watcher.kill()
        self._watcher.wait()


class SlurmCampaign:
    """One cluster, one Prefect server, one undisturbed run, and as many disturbed ones as there are seeds."""

    def __init__(self, folder: Path, slurm: Slurm, losses: int = 0) -> None:
        self._folder, self._slurm, self._losses = folder, slurm, losses
        (folder / "prefect").mkdir(parents=True)
        self._server = Server(folder / "prefect")
        self._reference = self._undisturbed()

    def run(self, seed: int) -> Outcome:
        """Do to one run what its seed says, and judge it."""
        folder, began = self._folder / f"seed-{seed}", time.monotonic()
        environment = self._environment(folder)
        disturbed = DisturbedJob(environment, self._slurm)
        planned, missed, said = self._plan(seed), 0, list[str]()
        try:
            for disturbance in planned:
                missed += not disturbed.disturb(disturbance)
            if (last := disturbed.finish()) != "COMPLETED":
                said.append(f"the job ended as {last}: {disturbed.job.output()[-300:]}")
        except AssertionError as error:
            said.append(f"{error}"[-1500:])
        finally:
            disturbed.close()
        outcome = self._judge(environment, disturbed, seed, missed, said, time.monotonic() - began)
        environment.close()
        if not outcome.violations:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def close(self) -> None:
        """End the server."""
        self._server.kill()

    def _plan(self, seed: int) -> tuple[Disturbance, ...]:
        return plan_losses(seed, self._losses) if self._losses else plan_run(seed)

    def _environment(self, folder: Path) -> Environment:
        environment = Environment(folder, self._server, store="local", driver=COMMAND, forked=True)
        steps, every_commits = (self._losses * STEPS_OF_A_LOSS, 120) if self._losses else (STEPS, 16)
        (folder / "run.toml").write_text(configuration(steps=steps, every_commits=every_commits))
        return environment

    def _undisturbed(self) -> Reference:
        environment = self._environment(self._folder / "undisturbed")
        environment.command.train()
        reference = reference_of(environment.observer.store)
        environment.close()
        return reference

    def _judge(
        self, environment: Environment, disturbed: DisturbedJob, seed: int, missed: int, said: list[str], seconds: float
    ) -> Outcome:
        state, planned = environment.observer.state(), self._plan(seed)
        reasons = tuple(attempt.ended.reason for attempt in state.attempts if attempt.ended is not None)
        explained = frozenset({"completed"}).union(*(REASONS[disturbance.name] for disturbance in planned))
        idle = idle_times(environment.observer.store, RUN, state, disturbed.states)
        violations = [
            *said,
            *(f"an attempt ended as {reason}" for reason in reasons if reason not in explained),
            *(["a loss ended the attempt"] if self._losses and len(reasons) > 1 else []),
            *(why for attempt in state.attempts for why in _placed_elsewhere(attempt.started)),
            *(f"idle: {one.seconds:.0f} s {one.where}, {one.allowed:.0f} allowed" for one in idle if one.is_too_long),
            *violations_of(environment, self._reference),
        ]
        return Outcome(
            seed=seed,
            disturbances=planned,
            missed=missed,
            reasons=reasons,
            seconds=round(seconds, 1),
            idle=idle,
            gathering_seconds=max((attempt.started.gathering_seconds for attempt in state.attempts), default=0.0),
            violations=tuple(violations),
        )


def _placed_elsewhere(started: AttemptStarted) -> list[str]:
    """What a watcher or another command would have done: train elsewhere, or on one machine."""
    place = started.placement
    if place.nodes == 2 and place.continued_by.startswith("slurm job"):
        return []
    return [f"attempt {started.attempt} ran on {place.nodes} machine(s), continued by {place.continued_by}"]


def as_text(outcomes: list[Outcome]) -> str:
    """Return what BENCHMARKS.md says of the campaign."""
    done = Counter(disturbance.name for outcome in outcomes for disturbance in outcome.disturbances)
    idle = [one.seconds for outcome in outcomes for one in outcome.idle if one.is_between]
    own = [one.seconds - one.start_seconds for outcome in outcomes for one in outcome.idle if one.is_between]
    ends = [one.seconds for outcome in outcomes for one in outcome.idle if not one.is_between]
    lines = [
        f"{len(outcomes)} runs, {sum(done.values()) - sum(outcome.missed for outcome in outcomes)} disturbances, "
        f"{sum(len(outcome.violations) for outcome in outcomes)} violations, "
        f"{sum(outcome.seconds for outcome in outcomes) / 60:.0f} minutes",
        ", ".join(f"{name} {count}" for name, count in sorted(done.items())),
    ]
    if idle and ends:
        lines += [
            f"from an attempt's last step to the next one's first, without Slurm's own delay: "
            f"median {median(idle):.0f} s, most {max(idle):.0f} s; less what the run's first start took: "
            f"median {median(own):.0f} s, most {max(own):.0f} s",
            f"waits of one machine for the other: most {max(one.gathering_seconds for one in outcomes):.0f} s; "
            f"from run-finished to the end of the job: most {max(ends):.0f} s",
        ]
    return "\n".join(lines) + "\n"


def _one_line(outcome: Outcome) -> str:
    done = ", ".join(f"{disturbance.name}@{disturbance.step}" for disturbance in outcome.disturbances)
    idle = ", ".join(f"{one.seconds:.0f}/{one.allowed:.0f}" for one in outcome.idle)
    verdict = "; ".join(outcome.violations) or "ok"
    return f"seed {outcome.seed}: {done}: {', '.join(outcome.reasons)}; idle {idle}; {outcome.seconds:.0f} s: {verdict}"


def main(words: list[str] | None = None) -> int:
    """Run the campaign; returns 1 where something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.chaos.slurm_campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=int, default=0, help="kill the second node's ranks or command so often")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further run is begun after these")
    parser.add_argument("--out", type=Path, help="folder for the summary and the runs that do not hold")
    options = parser.parse_args(words)
    if not has_slurm():
        sys.exit(NEEDED)
    folder = (options.out or Path(tempfile.mkdtemp(prefix="cairn-slurm-"))).resolve()
    (folder / "cluster").mkdir(parents=True)
    deadline, outcomes = time.monotonic() + 60 * options.minutes, list[Outcome]()
    with Slurm(folder / "cluster").running() as slurm:
        campaign = SlurmCampaign(folder / "runs", slurm, options.losses)
        try:
            for seed in range(options.seed * 1000, options.seed * 1000 + options.runs):
                if time.monotonic() > deadline:
                    break
                outcomes.append(campaign.run(seed))
                print(_one_line(outcomes[-1]), flush=True)
                (folder / "summary.json").write_bytes(encode(outcomes))
        finally:
            campaign.close()
    print(as_text(outcomes), f"written to {folder}", sep="\n")
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    restrict_this_process()
    owns_session = open_session()
    try:
        patience_seconds()
        sys.exit(main())
    finally:
        if owns_session:
            close_session()
