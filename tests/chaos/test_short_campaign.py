"""The campaign, short: runs that are struck at chosen moments and judged. `make chaos` is the long one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.programs.chaos.campaign import Campaign
from tests.programs.chaos.kinds import Kind, Moment
from tests.programs.chaos.plan import COMMAND, WATCH, WORKER, Fault, RunPlan
from tests.programs.chaos.summary import Outcome, Summary
from tests.programs.chaos.summary_text import as_markdown, one_line

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chaos"), pytest.mark.timeout(900)]
# Quick witnesses: tests/crash/test_kill_anywhere.py, test_injected_faults.py and test_ephemeral_server.py.
MAY_MISS = frozenset({Moment.SWEEP, Kind.KILL_SWEEP, Kind.KILL_SERVER, Kind.KILL_OWN_SERVER})
"""A sweep is over in milliseconds, between two slices of the flow; a server that was killed may just be starting."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A server and an undisturbed run for all of them."""
    campaign = Campaign(tmp_path_factory.mktemp("campaign") / "runs", forked=True)
    yield campaign
    campaign.close()


def struck(*planned: tuple[Kind, Moment, int] | Fault, **of_run: Any) -> RunPlan:
    """Return the plan of a run of the command on files, unless `of_run` says otherwise."""
    faults = [one if isinstance(one, Fault) else Fault(kind=one[0], moment=one[1], step=one[2]) for one in planned]
    return RunPlan(**{"seed": 0, "store": "local", "driver": COMMAND, "faults": tuple(faults), **of_run})


def struck_at_every_moment(kind: Kind) -> RunPlan:
    """Return the plan of a run that meets one kind of fault at each of its moments, a resume included."""
    running = ((kind, Moment.COMMIT, 20), (kind, Moment.EVALUATION, 35), (kind, Moment.SWEEP, 50))
    resumed = ((Kind.KILL_BOTH, Moment.STEP, 66), (kind, Moment.RESUME, 66))
    return struck((kind, Moment.START, 0), *running, *resumed, (kind, Moment.PROMOTION, 80))


RUNS = {
    "killed during start, commit, evaluation, sweep and promotion": struck(
        (Kind.KILL_FLOW, Moment.START, 0),
        (Kind.KILL_TRAINER, Moment.COMMIT, 8),
        (Kind.KILL_EVALUATOR, Moment.EVALUATION, 20),
        (Kind.KILL_BOTH, Moment.SWEEP, 30),
        (Kind.KILL_FLOW, Moment.PROMOTION, 80),
    ),
    "of two processes, whose launcher, evaluator and three starts are killed": struck(
        (Kind.KILL_LAUNCHER, Moment.STEP, 8),
        (Kind.KILL_EVALUATOR, Moment.EVALUATION, 20),
        (Kind.KILL_BOTH, Moment.COMMIT, 30),
        *(Fault(kind=Kind.KILL_BOTH, moment=Moment.EARLY, step=30, age_seconds=age) for age in (0.0, 0.2, 0.6)),
        (Kind.KILL_LAUNCHER, Moment.RESUME, 30),
        (Kind.KILL_LAUNCHER, Moment.COMMIT, 50),
        processes=2,
    ),
    "watched, when run and watcher are killed": struck(
        (Kind.KILL_BOTH, Moment.STEP, 12),
        (Kind.KILL_WATCHER, Moment.RESUME, 12),
        (Kind.KILL_TRAINER, Moment.STEP, 50),
        driver=WATCH,
    ),
    "deployed, whose worker is killed during start, steps, resume, evaluation and promotion": struck(
        (Kind.KILL_WORKER, Moment.START, 0),
        (Kind.KILL_WORKER, Moment.STEP, 6),
        (Kind.KILL_FLOW, Moment.STEP, 15),
        (Kind.KILL_WORKER, Moment.RESUME, 15),
        (Kind.KILL_WORKER, Moment.EVALUATION, 40),
        (Kind.KILL_WORKER, Moment.PROMOTION, 80),
        driver=WORKER,
    ),
    "whose Prefect server is killed at every moment": struck_at_every_moment(Kind.KILL_SERVER),
    "whose own Prefect server is killed at every moment": struck_at_every_moment(Kind.KILL_OWN_SERVER),
    "whose machine sleeps through commit, evaluation, resume and promotion, and wakes": struck(
        (Kind.ZOMBIE, Moment.COMMIT, 8),
        (Kind.ZOMBIE, Moment.RESUME, 8),
        (Kind.ZOMBIE, Moment.EVALUATION, 40),
        (Kind.ZOMBIE, Moment.PROMOTION, 80),
    ),
    "whose disk is full at every moment": struck_at_every_moment(Kind.FULL_DISK),
    "on S3, whose store is away, throttled and loses answers": struck(
        (Kind.STORE_AWAY, Moment.START, 0),
        (Kind.STORE_LOSES_ANSWERS, Moment.STEP, 5),
        (Kind.STORE_AWAY, Moment.EVALUATION, 20),
        (Kind.KILL_TRAINER, Moment.STEP, 30),
        (Kind.STORE_AWAY, Moment.RESUME, 30),
        (Kind.STORE_THROTTLED, Moment.STEP, 50),
        (Kind.FLIP_DATA, Moment.STEP, 60),
        (Kind.STORE_AWAY, Moment.PROMOTION, 80),
        store="s3",
    ),
    "on S3, when requests come late, reads come wrong and writes are refused": struck(
        (Kind.STORE_IS_LATE, Moment.COMMIT, 8),
        (Kind.STORE_MISREADS, Moment.STEP, 25),
        (Kind.STORE_IS_LATE, Moment.STEP, 40),
        (Kind.STORE_MISREADS, Moment.STEP, 60),
        (Kind.STORE_REFUSES, Moment.STEP, 70),
        store="s3",
    ),
    "of which an fsync fails": struck((Kind.FSYNC_FAILS, Moment.STEP, 10), (Kind.FSYNC_FAILS, Moment.STEP, 40)),
    "beside which sweeps are killed": struck(*((Kind.KILL_SWEEP, Moment.STEP, step) for step in (20, 35, 50))),
}


def judged(campaign: Campaign, plan: RunPlan) -> Outcome:
    """Have the plan done to a run; everything must hold."""
    outcome = campaign.run(plan)
    print(f"\n{one_line(outcome)}")
    assert outcome.violations == (), as_markdown(Summary(outcomes=(outcome,), seconds=outcome.seconds))
    return outcome


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_holds_and_every_fault_strikes_that_a_moment_is_caused_for(campaign: Campaign, kind: str) -> None:
    outcome = judged(campaign, replace(RUNS[kind], seed=list(RUNS).index(kind)))
    missed = [fault for fault in outcome.missed if not {fault.moment, fault.kind} & MAY_MISS]
    skipped = [item for item in outcome.injected if item.skipped and item.fault.kind not in MAY_MISS]
    assert missed == []
    assert [item.skipped for item in skipped if "needs" not in item.skipped] == []
    assert outcome.struck, "nothing was tested"


def test_a_run_that_lost_a_sample_and_computes_activations_again_equals_one_that_began_so(campaign: Campaign) -> None:
    plan = struck((Kind.OUT_OF_MEMORY, Moment.STEP, 12), (Kind.KILL_BOTH, Moment.STEP, 60), seed=99, spoiled_step=35)
    outcome = judged(campaign, plan)
    assert outcome.reference_run == "a reference run with its quarantine and its sizes"
    assert {"oom", "bad-data", "completed"} <= set(outcome.reasons)
