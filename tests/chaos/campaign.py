"""The campaign: run after run, each disturbed as its seed says, each judged; `python -m tests.chaos.campaign --help`.

A run that does not hold keeps its folder, and the one command that does the same to it again is printed.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from storage.errors import StorageError
from tests.chaos.disturbed_run import Course, disturb, finish
from tests.chaos.judge import Reference, judge, reference_of
from tests.chaos.plan import FAULTS_PER_RUN, Kind, RunPlan, plan_run
from tests.chaos.scene import Scene
from tests.chaos.summary import Outcome, as_json, as_text, one_line, summarize
from tests.crash.test_prefect_away import Server


class Campaign:
    """One Prefect server, one undisturbed run, and as many disturbed ones as are asked for."""

    def __init__(self, folder: Path) -> None:
        """Start the server in the folder; the undisturbed run is trained when the first one needs it."""
        self._folder = folder
        home = folder / "prefect"
        home.mkdir(parents=True)
        self._server = Server(home)
        self._reference: Reference | None = None

    def run(self, plan: RunPlan) -> Outcome:
        """Do to one run what its plan says, and judge it; its folder stays where something does not hold."""
        reference = self._undisturbed()
        folder = self._folder / f"seed-{plan.seed}-{plan.store}"
        began = time.monotonic()
        small_disk = any(fault.kind is Kind.FULL_DISK for fault in plan.faults)
        scene = Scene(folder, self._server, store=plan.store, driver=plan.driver, small_disk=small_disk)
        keep = True
        try:
            outcome = _outcome(scene, plan, reference, began)
            keep = bool(outcome.violations)
        finally:
            scene.close()
            scene.unmount(keep)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def close(self) -> None:
        """End the server."""
        for _ in range(100):  # it may just be started again
            if self._server.is_alive:
                break
            time.sleep(0.2)
        with suppress(ProcessLookupError):
            self._server.kill()

    def _undisturbed(self) -> Reference:
        if self._reference is None:
            folder = self._folder / "undisturbed"
            scene = Scene(folder, self._server, store="local", driver="command")
            scene.command.train()
            self._reference = reference_of(scene.observer.store)
            scene.close()
            shutil.rmtree(folder, ignore_errors=True)
        return self._reference


def _outcome(scene: Scene, plan: RunPlan, reference: Reference, began: float) -> Outcome:
    course = Course(strikes=(), missed=())
    try:
        course = disturb(scene, plan)
        finish(scene)
        told = judge(scene, course.strikes, reference)
    except (AssertionError, StorageError) as error:  # what a reader cannot read does not hold either
        said = f"{type(error).__name__}: {error}"
        return Outcome(
            plan=plan, strikes=course.strikes, missed=0, seconds=time.monotonic() - began, violations=(said,)
        )
    return Outcome(
        plan=plan,
        strikes=course.strikes,
        missed=len(course.missed),
        seconds=time.monotonic() - began,
        attempts=told.attempts,
        reasons=told.reasons,
        is_comparable=told.is_comparable,
        gpu_seconds=told.gpu_seconds,
        useful_gpu_seconds=told.useful_gpu_seconds,
        violations=told.violations,
    )


def plans(options: argparse.Namespace) -> list[RunPlan]:
    """Return the plans asked for: the one that is done again, or one for each run of the campaign's seed."""
    if options.replay is not None:
        return [plan_run(options.replay, store=options.store, faults=options.faults)]
    seeds = [options.seed * 1000 + number for number in range(options.runs)]
    return [plan_run(seed, store=options.store, faults=options.faults) for seed in seeds]


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--minutes", type=float, default=30.0, help="no further run is begun after these")
    parser.add_argument("--faults", type=int, default=FAULTS_PER_RUN, help="faults of each run")
    parser.add_argument("--replay", type=int, help="the seed of one run, to do the same to it again")
    parser.add_argument("--out", type=Path, help="folder for the summary and the runs that do not hold")
    parser.add_argument("--plan", action="store_true", help="show what would be done, and do nothing")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the campaign; returns 1 where something does not hold."""
    options = _options(words)
    if options.plan:
        for plan in plans(options):
            shown = [f"{fault.kind}@{fault.step}/{fault.moment}" for fault in plan.faults]
            print(json.dumps({"seed": plan.seed, "driver": plan.driver, "faults": shown}))
        return 0
    folder = options.out or Path(tempfile.mkdtemp(prefix="cairn-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), list[Outcome]()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is taken down again
    campaign = Campaign(Path(tempfile.mkdtemp(prefix="campaign-", dir=folder)))
    try:
        for plan in plans(options):
            if outcomes and time.monotonic() - began > options.minutes * 60:
                break
            outcomes.append(campaign.run(plan))
            print(one_line(outcomes[-1]), flush=True)
            _tell_violations(outcomes[-1], options.faults)
            summary = summarize(outcomes, time.monotonic() - began)
            (folder / "summary.json").write_bytes(as_json(summary))
            (folder / "summary.txt").write_text(as_text(summary))
    finally:
        campaign.close()
    print(as_text(summarize(outcomes, time.monotonic() - began)), f"written to {folder}", sep="\n")
    return int(any(outcome.violations for outcome in outcomes))


def _tell_violations(outcome: Outcome, faults: int) -> None:
    for said in outcome.violations:
        print(f"  {said}", flush=True)
    if outcome.violations:
        plan = outcome.plan
        again = f"--replay {plan.seed} --store {plan.store} --faults {faults}"
        print(f'  the same again: make chaos ARGS="{again}"', flush=True)


if __name__ == "__main__":
    sys.exit(main())
