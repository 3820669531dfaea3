"""The campaign, short: runs that are killed at chosen moments and judged. `make chaos` is the long one."""

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.plan import Fault, Kind, Moment, RunPlan
from tests.chaos.summary import as_text, one_line, summarize

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(600)]

LOCAL = (
    Fault(kind=Kind.KILL_TRAINER, moment=Moment.COMMIT, step=8),
    Fault(kind=Kind.KILL_EVALUATOR, moment=Moment.EVALUATION, step=20),
    Fault(kind=Kind.KILL_BOTH, moment=Moment.SWEEP, step=30),
    Fault(kind=Kind.KILL_FLOW, moment=Moment.PROMOTION, step=80),
)
WATCHED = (
    Fault(kind=Kind.KILL_BOTH, moment=Moment.STEP, step=12),
    Fault(kind=Kind.KILL_WATCHER, moment=Moment.RESUME, step=12),
    Fault(kind=Kind.KILL_TRAINER, moment=Moment.STEP, step=50),
)
REMOTE = (
    Fault(kind=Kind.STORE_LOSES_ANSWERS, moment=Moment.STEP, step=5),
    Fault(kind=Kind.KILL_TRAINER, moment=Moment.STEP, step=40),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A server and an undisturbed run for all of them."""
    campaign = Campaign(tmp_path_factory.mktemp("campaign") / "runs")
    yield campaign
    campaign.close()


@pytest.mark.parametrize(
    "plan",
    [
        RunPlan(seed=1, store="local", driver="command", faults=LOCAL),
        pytest.param(RunPlan(seed=2, store="local", driver="watch", faults=WATCHED), marks=pytest.mark.slow),
        pytest.param(RunPlan(seed=3, store="s3", driver="command", faults=REMOTE), marks=pytest.mark.slow),
    ],
    ids=["by-hand", "watched", "s3"],
)
def test_a_run_that_is_killed_at_chosen_moments_holds_everything_it_promises(
    campaign: Campaign, plan: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = campaign.run(plan)
    with capsys.disabled():
        print(f"\n{one_line(outcome)}")
    assert outcome.violations == (), as_text(summarize([outcome], outcome.seconds))
    assert len(outcome.struck) + outcome.missed == len(plan.faults)
    assert len(outcome.struck) >= len(plan.faults) - 1, "most faults must have struck, else nothing was tested"
