"""The campaign: run after run, each disturbed as its seed says, each judged; `make chaos ARGS=--help`.

A run that does not hold keeps its folder, and the one command that does the same to it again is printed.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.storage.errors import StorageError
from tests.crash.prefect_server import Server, wait_until_healthy
from tests.environment_allow_list import restrict_this_process
from tests.programs.chaos.disturbed_run import Course, disturb, finish
from tests.programs.chaos.environment import Environment
from tests.programs.chaos.judge import Reference, judge, reference_of
from tests.programs.chaos.kinds import Kind
from tests.programs.chaos.observer import RUN
from tests.programs.chaos.plan import FAULTS_PER_RUN, STORES, RunPlan, plan_run
from tests.programs.chaos.reference_run import train_reference_of
from tests.programs.chaos.replayed import Replayed, replay_segments
from tests.programs.chaos.summary import Outcome, Summary, added
from tests.programs.chaos.summary_text import as_json, as_markdown, from_json, one_line
from tests.session_folder import close_session, open_session

_SERVER_SECONDS = 120.0
WHOLE = (0, 1)
"""The share of one who does all runs: from the first on, every one."""


class Campaign:
    """One Prefect server, one undisturbed run, and as many disturbed ones as are asked for."""

    def __init__(self, folder: Path, *, forked: bool = False, replays: bool = False) -> None:
        """Start a server in the folder; the undisturbed run is trained when the first one needs it.

        `forked` saves the processes their imports, and the campaign a part of what it may strike and of its doubts.
        With `replays`, `cairn replay` computes every committed segment of each run again.
        """
        self._folder, self._forked, self._replays = folder, forked, replays
        self._home = folder / "prefect"
        self._home.mkdir(parents=True)
        self._server = Server(self._home)
        self._reference: Reference | None = None

    def run(self, plan: RunPlan) -> Outcome:
        """Do to one run what its plan says, and judge it; its folder stays where something does not hold."""
        reference = self._undisturbed()
        folder = self._folder / f"seed-{plan.seed}-{plan.store}"
        self._wait_for_server()
        began = time.monotonic()
        small_disk = any(fault.kind is Kind.FULL_DISK for fault in plan.faults)
        environment = Environment(
            folder,
            self._server,
            store=plan.store,
            driver=plan.driver,
            small_disk=small_disk,
            own_server=plan.has_own_server,
            processes=plan.processes,
            forked=self._forked,
        )
        keep = True
        try:
            outcome = _outcome(environment, plan, reference, began, replays=self._replays)
            keep = bool(outcome.violations)
        finally:
            environment.close()
            environment.unmount(keep)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def close(self) -> None:
        """End the server, also one that is just being started again."""
        self._wait_for_server()
        with suppress(ProcessLookupError):
            self._server.kill()

    def _wait_for_server(self) -> None:
        """Wait until the server answers again: the run before may have killed it."""
        deadline = time.monotonic() + _SERVER_SECONDS
        while not self._server.is_alive and time.monotonic() < deadline:
            time.sleep(0.2)
        wait_until_healthy(f"{self._server.url}/health", self._home / "server.txt")

    def _undisturbed(self) -> Reference:
        if self._reference is None:
            folder = self._folder / "undisturbed"
            environment = Environment(folder, self._server, store="local", driver="command", forked=self._forked)
            began = time.monotonic()
            environment.command.train()
            seconds = time.monotonic() - began
            self._reference = replace(reference_of(environment.observer.store), seconds=seconds)
            if not self._forked:
                _check_twin(environment, self._reference)
            environment.close()
            shutil.rmtree(folder, ignore_errors=True)
        return self._reference


def _check_twin(environment: Environment, reference: Reference) -> None:
    """Two roads to the same bits, else neither may judge: the command's run, and its steps by the library alone."""
    cache = environment.folder / "reference-run"
    reference_run = train_reference_of(environment.observer.store, RUN, cache_dir=cache)
    assert reference_run.state_sha256 == reference.state_sha256, "the reference run is not the run nobody touched"
    assert reference_run.curve == reference.curve, "the reference run's curve is not that of the run nobody touched"


def _outcome(environment: Environment, plan: RunPlan, reference: Reference, began: float, *, replays: bool) -> Outcome:
    course = Course(injected=(), missed=())
    try:
        course = disturb(environment, plan)
        finish(environment)
        told = judge(environment, plan, course.injected, reference)
        replayed = replay_segments(environment) if replays else Replayed()
    except (AssertionError, StorageError) as error:  # what a reader cannot read does not hold either
        said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        return Outcome(plan=plan, injected=course.injected, missed=course.missed, seconds=seconds, violations=(said,))
    attempts = environment.observer.state().attempts
    receipts = [attempt.ended for attempt in attempts if attempt.ended is not None]
    return Outcome(
        plan=plan,
        injected=course.injected,
        missed=course.missed,
        seconds=time.monotonic() - began,
        attempts=len(attempts),
        reasons=dict(sorted(Counter(ended.reason for ended in receipts).items())),
        reference_run=told.reference_run,
        gpu_seconds=sum(ended.gpu_seconds for ended in receipts),
        useful_gpu_seconds=sum(ended.useful_gpu_seconds for ended in receipts),
        segments=replayed.outcomes,
        violations=told.violations + replayed.violations,
        ends=tuple(one.end for one in environment.exits() if one.end is not None),
    )


def plans(options: argparse.Namespace) -> list[RunPlan]:
    """Return the plans asked for: the one that is done again, or one for each run of the campaign's seed."""
    given = {"store": options.store, "faults": options.faults, "driver": options.driver}
    if options.replay is not None:
        return [plan_run(options.replay, **given)]
    first, step = options.share
    return [plan_run(options.seed * 1000 + number, **given) for number in range(first, options.runs, step)]


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.chaos.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=STORES, default="local", help="s3, gs, az: emulators; ceph: real")
    parser.add_argument("--driver", choices=("command", "watch", "worker"), default="", help="else as the seed says")
    parser.add_argument("--minutes", type=float, default=30.0, help="no further run is begun after these")
    parser.add_argument("--faults", type=int, default=FAULTS_PER_RUN, help="faults of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each with a server of its own")
    parser.add_argument("--share", type=int, nargs=2, default=WHOLE, help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=int, help="the seed of one run, to do the same to it again")
    parser.add_argument(
        "--forked", action="store_true", help="fork commands instead of starting them: more in the time"
    )
    parser.add_argument("--segments", action="store_true", help="compute every committed segment again: cairn replay")
    parser.add_argument("--out", type=Path, help="folder for the summary and the runs that do not hold")
    parser.add_argument(
        "--add", type=Path, nargs="+", metavar="DIR", help="add up these campaigns, and do nothing else"
    )
    parser.add_argument("--plan", action="store_true", help="show what would be done, and do nothing")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the campaign; returns 1 where something does not hold."""
    options = _options(words)
    if options.plan:
        _show(plans(options))
        return 0
    folder = options.out or Path(tempfile.mkdtemp(prefix="cairn-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is taken down again
    if options.add:
        summary = added([_read(place) for place in options.add])
    elif options.jobs > 1:
        began = time.monotonic()
        given = sys.argv[1:] if words is None else words
        apart = run_side_by_side(given, folder, options.jobs)
        summary = added(apart, seconds=time.monotonic() - began)
    else:
        summary = _campaign(options, folder)
    _write(folder, summary)
    if options.share == WHOLE:
        print(as_markdown(summary), f"written to {folder}", sep="\n")
    return int(summary.violations > 0)


def run_side_by_side(words: Sequence[str], folder: Path, jobs: int) -> list[Summary]:
    """Run a campaign for each job, a process with a server, ports, a folder and a share of the runs of its own.

    Raises `RuntimeError` where one ended without a summary: what it would have found is not known.
    """
    places = [folder / f"job-{number}" for number in range(jobs)]
    own = [("--jobs", "1", "--share", str(number), str(jobs), "--out", str(places[number])) for number in range(jobs)]
    command = [sys.executable, "-m", "tests.programs.chaos.campaign", *words]
    started = [subprocess.Popen([*command, *more]) for more in own]  # of an option that is given twice the last counts
    try:
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.terminate()
            process.wait()
    silent = [place for place in places if not (place / "summary.json").exists()]
    if silent:
        raise RuntimeError(f"no summary in {', '.join(map(str, silent))}; the job's words are above")
    return [_read(place) for place in places]


def _campaign(options: argparse.Namespace, folder: Path) -> Summary:
    began, outcomes = time.monotonic(), list[Outcome]()
    place = Path(tempfile.mkdtemp(prefix="campaign-", dir=folder))
    campaign = Campaign(place, forked=options.forked, replays=options.segments)
    try:
        for plan in plans(options):
            if outcomes and time.monotonic() - began > options.minutes * 60:
                break
            outcomes.append(campaign.run(plan))
            print(one_line(outcomes[-1]), flush=True)
            _tell_violations(outcomes[-1], options)
            _write(folder, Summary(outcomes=tuple(outcomes), seconds=time.monotonic() - began))
    except pytest.skip.Exception as absent:
        sys.exit(f"{absent}")
    finally:
        campaign.close()
    return Summary(outcomes=tuple(outcomes), seconds=time.monotonic() - began)


def _show(planned: list[RunPlan]) -> None:
    for plan in planned:
        shown = [f"{fault.kind}@{fault.step}/{fault.moment}" for fault in plan.faults]
        print(
            json.dumps({"seed": plan.seed, "driver": plan.driver, "spoiled_step": plan.spoiled_step, "faults": shown})
        )


def _read(folder: Path) -> Summary:
    return from_json((folder / "summary.json").read_bytes(), where=str(folder))


def _write(folder: Path, summary: Summary) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_bytes(as_json(summary))
    (folder / "summary.md").write_text(as_markdown(summary))


def _tell_violations(outcome: Outcome, options: argparse.Namespace) -> None:
    for said in outcome.violations:
        print(f"  {said}", flush=True)
    if outcome.violations:
        plan = outcome.plan
        driver = f" --driver {options.driver}" if options.driver else ""
        forked = " --forked" if options.forked else ""
        again = f"--replay {plan.seed} --store {plan.store} --faults {options.faults}{driver}{forked}"
        print(f'  the same again: make chaos ARGS="{again}"', flush=True)


if __name__ == "__main__":
    restrict_this_process()
    owns_session = open_session()
    try:
        sys.exit(main())
    finally:
        if owns_session:
            close_session()
