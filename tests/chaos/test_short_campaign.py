"""The campaign, short: runs that are struck at chosen moments and judged. `make chaos` is the long one."""

from collections.abc import Iterator

import pytest

from tests.crash.prefect_server import shared_server
from tests.programs.chaos.campaign import Campaign
from tests.programs.chaos.plan import Fault, Kind, Moment, RunPlan
from tests.programs.chaos.summary import summarize
from tests.programs.chaos.summary_text import as_text, one_line

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(900)]
RUNNING = (Moment.COMMIT, Moment.EVALUATION, Moment.SWEEP)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A server and an undisturbed run for all of them."""
    campaign = Campaign(tmp_path_factory.mktemp("campaign") / "runs", forked=True)
    yield campaign
    campaign.close()


@pytest.fixture(scope="module")
def campaign_beside_others(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """An undisturbed run, and the server that other tests of the session use as well: no fault strikes it."""
    return Campaign(tmp_path_factory.mktemp("campaign") / "runs", forked=True, api_url=shared_server())


def faults(*planned: tuple[Kind, Moment, int]) -> tuple[Fault, ...]:
    return tuple(Fault(kind=kind, moment=moment, step=step) for kind, moment, step in planned)


def hold(campaign: Campaign, plan: RunPlan) -> None:
    """Have the plan done to a run; everything must hold, and every fault must have struck that a moment was caused for.

    A sweep is over in milliseconds, between two slices of the flow: it may be missed. So may a kill of the server while
    it is started again.
    """
    outcome = campaign.run(plan)
    print(f"\n{one_line(outcome)}")
    assert outcome.violations == (), as_text(summarize([outcome], outcome.seconds))
    may_miss = {Moment.SWEEP, Kind.KILL_SWEEP, Kind.KILL_SERVER, Kind.KILL_OWN_SERVER}
    missed = [fault for fault in outcome.missed if not {fault.moment, fault.kind} & may_miss]
    skipped = [item for item in outcome.injected if item.skipped and item.fault.kind not in may_miss]
    assert missed == []
    assert [item.skipped for item in skipped if "needs" not in item.skipped] == []
    assert outcome.struck, "nothing was tested"


@pytest.mark.slow  # quick witnesses: tests/crash/test_kill_anywhere.py, tests/crash/test_injected_faults.py
def test_a_run_killed_during_start_commit_evaluation_sweep_and_promotion_holds(
    campaign_beside_others: Campaign,
) -> None:
    planned = faults(
        (Kind.KILL_FLOW, Moment.START, 0),
        (Kind.KILL_TRAINER, Moment.COMMIT, 8),
        (Kind.KILL_EVALUATOR, Moment.EVALUATION, 20),
        (Kind.KILL_BOTH, Moment.SWEEP, 30),
        (Kind.KILL_FLOW, Moment.PROMOTION, 80),
    )
    hold(campaign_beside_others, RunPlan(seed=1, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_of_two_processes_holds_when_its_launcher_its_evaluator_and_three_starts_are_killed(
    campaign: Campaign,
) -> None:
    starts = tuple(Fault(kind=Kind.KILL_BOTH, moment=Moment.EARLY, step=30, age_seconds=age) for age in (0.0, 0.2, 0.6))
    before = faults(
        (Kind.KILL_LAUNCHER, Moment.STEP, 8),
        (Kind.KILL_EVALUATOR, Moment.EVALUATION, 20),
        (Kind.KILL_BOTH, Moment.COMMIT, 30),
    )
    after = faults((Kind.KILL_LAUNCHER, Moment.RESUME, 30), (Kind.KILL_LAUNCHER, Moment.COMMIT, 50))
    planned = (*before, *starts, *after)
    hold(campaign, RunPlan(seed=12, store="local", driver="command", faults=planned, processes=2))


@pytest.mark.slow
def test_a_run_that_is_watched_holds_when_run_and_watcher_are_killed(campaign: Campaign) -> None:
    planned = faults(
        (Kind.KILL_BOTH, Moment.STEP, 12), (Kind.KILL_WATCHER, Moment.RESUME, 12), (Kind.KILL_TRAINER, Moment.STEP, 50)
    )
    hold(campaign, RunPlan(seed=2, store="local", driver="watch", faults=planned))


@pytest.mark.slow
def test_a_deployed_run_holds_when_its_worker_is_killed_during_start_steps_resume_evaluation_and_promotion(
    campaign: Campaign,
) -> None:
    planned = faults(
        (Kind.KILL_WORKER, Moment.START, 0),
        (Kind.KILL_WORKER, Moment.STEP, 6),
        (Kind.KILL_FLOW, Moment.STEP, 15),
        (Kind.KILL_WORKER, Moment.RESUME, 15),
        (Kind.KILL_WORKER, Moment.EVALUATION, 40),
        (Kind.KILL_WORKER, Moment.PROMOTION, 80),
    )
    hold(campaign, RunPlan(seed=3, store="local", driver="worker", faults=planned))


@pytest.mark.slow
def test_a_run_holds_when_the_prefect_server_is_killed_during_start_commit_resume_evaluation_sweep_and_promotion(
    campaign: Campaign,
) -> None:
    struck = [(Kind.KILL_SERVER, moment, 20 + 15 * place) for place, moment in enumerate(RUNNING)]
    resumed = [(Kind.KILL_BOTH, Moment.STEP, 66), (Kind.KILL_SERVER, Moment.RESUME, 66)]
    first, last = (Kind.KILL_SERVER, Moment.START, 0), (Kind.KILL_SERVER, Moment.PROMOTION, 80)
    planned = faults(first, *struck, *resumed, last)
    hold(campaign, RunPlan(seed=4, store="local", driver="command", faults=planned))


@pytest.mark.slow  # quick witness: tests/crash/test_ephemeral_server.py
def test_a_run_holds_when_its_own_prefect_server_is_killed_during_start_commit_resume_evaluation_sweep_and_promotion(
    campaign: Campaign,
) -> None:
    struck = [(Kind.KILL_OWN_SERVER, moment, 20 + 15 * place) for place, moment in enumerate(RUNNING)]
    resumed = [(Kind.KILL_BOTH, Moment.STEP, 66), (Kind.KILL_OWN_SERVER, Moment.RESUME, 66)]
    first, last = (Kind.KILL_OWN_SERVER, Moment.START, 0), (Kind.KILL_OWN_SERVER, Moment.PROMOTION, 80)
    planned = faults(first, *struck, *resumed, last)
    hold(campaign, RunPlan(seed=10, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_holds_when_its_machine_sleeps_through_commit_evaluation_resume_and_promotion_and_wakes(
    campaign: Campaign,
) -> None:
    planned = faults(
        (Kind.ZOMBIE, Moment.COMMIT, 8),
        (Kind.ZOMBIE, Moment.RESUME, 8),
        (Kind.ZOMBIE, Moment.EVALUATION, 40),
        (Kind.ZOMBIE, Moment.PROMOTION, 80),
    )
    hold(campaign, RunPlan(seed=5, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_holds_when_its_disk_is_full_during_start_commit_evaluation_sweep_resume_and_promotion(
    campaign: Campaign,
) -> None:
    struck = [(Kind.FULL_DISK, moment, 20 + 15 * place) for place, moment in enumerate(RUNNING)]
    resumed = [(Kind.KILL_BOTH, Moment.STEP, 66), (Kind.FULL_DISK, Moment.RESUME, 66)]
    first, last = (Kind.FULL_DISK, Moment.START, 0), (Kind.FULL_DISK, Moment.PROMOTION, 80)
    planned = faults(first, *struck, *resumed, last)
    hold(campaign, RunPlan(seed=6, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_on_s3_holds_when_its_store_is_away_throttled_and_loses_answers(campaign: Campaign) -> None:
    planned = faults(
        (Kind.STORE_AWAY, Moment.START, 0),
        (Kind.STORE_LOSES_ANSWERS, Moment.STEP, 5),
        (Kind.STORE_AWAY, Moment.EVALUATION, 20),
        (Kind.KILL_TRAINER, Moment.STEP, 30),
        (Kind.STORE_AWAY, Moment.RESUME, 30),
        (Kind.STORE_THROTTLED, Moment.STEP, 50),
        (Kind.FLIP_DATA, Moment.STEP, 60),
        (Kind.STORE_AWAY, Moment.PROMOTION, 80),
    )
    hold(campaign, RunPlan(seed=7, store="s3", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_on_s3_holds_when_requests_come_late_reads_come_wrong_and_writes_are_refused(
    campaign: Campaign,
) -> None:
    planned = faults(
        (Kind.STORE_IS_LATE, Moment.COMMIT, 8),
        (Kind.STORE_MISREADS, Moment.STEP, 25),
        (Kind.STORE_IS_LATE, Moment.STEP, 40),
        (Kind.STORE_MISREADS, Moment.STEP, 60),
        (Kind.STORE_REFUSES, Moment.STEP, 70),
    )
    hold(campaign, RunPlan(seed=10, store="s3", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_holds_when_an_fsync_fails(campaign: Campaign) -> None:
    planned = faults((Kind.FSYNC_FAILS, Moment.STEP, 10), (Kind.FSYNC_FAILS, Moment.STEP, 40))
    hold(campaign, RunPlan(seed=11, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_sweeps_beside_a_run_that_are_killed_delete_nothing_needed_and_leave_nothing_behind(campaign: Campaign) -> None:
    planned = faults(*((Kind.KILL_SWEEP, Moment.STEP, step) for step in (20, 35, 50)))
    hold(campaign, RunPlan(seed=8, store="local", driver="command", faults=planned))


@pytest.mark.slow
def test_a_run_that_lost_a_sample_and_computes_activations_again_equals_one_that_began_so(campaign: Campaign) -> None:
    planned = faults((Kind.OUT_OF_MEMORY, Moment.STEP, 12), (Kind.KILL_BOTH, Moment.STEP, 60))
    plan = RunPlan(seed=9, store="local", driver="command", faults=planned, spoiled_step=35)
    outcome = campaign.run(plan)
    assert outcome.violations == (), as_text(summarize([outcome], outcome.seconds))
    assert outcome.reference_run == "a reference run with its quarantine and its sizes"
    assert outcome.reasons is not None and {"oom", "bad-data", "completed"} <= set(outcome.reasons)
