"""What follows a failure: a table of decisions, and what must hold for every history."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.logs.run_entries import DataQuarantined, Decision, EvaluationFailed
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_state import Charges, RunState
from cairn.tasks.configuration.settings import BudgetConfig, BudgetsConfig
from cairn.tasks.policy.attempt_sizes import AttemptSizes, lighter_sizes
from cairn.tasks.policy.budgets import FailureImpact, decide, evaluator_budget
from cairn.tasks.policy.failures import Evidence, Failure, classify
from cairn.tasks.policy.termination import TerminationReason
from tests.entries import NOON, ended, started
from tests.storage.builders import committed, entry, opened

DEFAULT = BudgetsConfig()
LIGHTEST = AttemptSizes(micro_batch=1, activation_checkpointing=True)
RETRIED = ("preempted", "lost", "oom", "bad-data", "diverged", "storage", "hung", "too-few-machines")
STOPPED_BY_THE_SAME = ("oom", "bad-data", "diverged", "hung")
AGAIN_AND_AGAIN = ("preempted", "lost", "storage")


class History:
    """A run's log as it grows: attempts that commit and fail, each decided as the flow would decide it."""

    def __init__(self, **budgets: BudgetConfig) -> None:
        self.budgets = BudgetsConfig(**budgets)
        self.state: RunState = fold([entry(opened())])

    def begin(self, **changes: object) -> None:
        number = self.state.latest_attempt + 1
        self._append(replace(started(number), **changes))

    def commit(self, step: int) -> None:
        self._append(committed(step, self.state.latest_attempt))

    def quarantine(self, windows: range, reason: str = "bad-data") -> None:
        number = self.state.latest_attempt
        self._append(DataQuarantined(attempt=number, reason=reason, windows=tuple(windows), detail=""))

    def decide(self, reason: str, step: int = 0, *, cause: str = "", jitter: float = 0.0, **impact: object) -> Decision:
        """Say what would follow now, without writing it."""
        known = FailureImpact(**{"last_step": step, "sizes": LIGHTEST, **impact})
        return decide(self.budgets, self.state, failure(reason, cause), known, jitter=jitter)

    def fail(self, reason: str, step: int = 0, *, cause: str = "", **impact: object) -> Decision:
        """End the open attempt (one begins if none is open) and return what was decided."""
        if self.state.open_attempt is None:
            self.begin()
        decision = self.decide(reason, step, cause=cause, **impact)
        receipt = replace(
            ended(self.state.latest_attempt, reason),
            fingerprint=failure(reason, cause).fingerprint,
            last_step=step,
            wasted_gpu_seconds=float(impact.get("wasted_gpu_seconds", 0.0)),
            decision=decision,
        )
        self._append(receipt)
        return decision

    def _append(self, body: object) -> None:
        number = self.state.latest_attempt or None
        new = replace(entry(body, attempt=number), at=NOON + timedelta(seconds=len(self.state.attempts)))
        before = len(self.state.refused)
        self.state = fold([new], self.state)
        assert len(self.state.refused) == before, self.state.refused


def failure(reason: str, cause: str = "") -> Failure:
    return Failure(reason=TerminationReason(reason), detail=f"it was {reason}", fingerprint=f"{reason} {cause}")


def remedy(reason: str) -> dict[str, object]:
    """What lets a reason be retried that is never retried unchanged."""
    return {"quarantined_samples": 1} if reason in ("bad-data", "diverged") else {}


UNPAID = [("completed", "finish"), *((reason, "stop") for reason in ("fenced", "cancelled", "paused", "error"))]


@pytest.mark.parametrize(("reason", "action"), UNPAID)
def test_an_end_that_no_retry_follows_charges_nothing(reason: str, action: str) -> None:
    assert History().fail(reason) == Decision(action=action, reason=f"it was {reason}")


@pytest.mark.parametrize("reason", RETRIED)
def test_a_first_failure_is_retried_and_charged_to_its_own_budget(reason: str) -> None:
    history = History()
    history.begin()
    history.commit(50)
    decision = history.fail(reason, 60, **remedy(reason))
    assert (decision.action, decision.charged) == ("resume", reason)


def test_every_reason_that_is_retried_has_a_budget_and_no_other_has() -> None:
    budgeted = {name.replace("_", "-") for name in BudgetsConfig.model_fields} - {"evaluator-failed"}
    assert budgeted == set(RETRIED) == set(TerminationReason) - {reason for reason, _ in UNPAID}


def test_an_error_is_never_retried_whatever_is_left() -> None:
    assert all(History().fail("error", cause=cause).action == "stop" for cause in "abc")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_as_many_retries_as_the_budget_says_and_not_one_more(retries: int) -> None:
    history = History(lost=BudgetConfig(retries=retries))
    decisions = [history.fail("lost", step) for step in range(retries + 1)]
    assert [decision.action for decision in decisions] == ["resume"] * retries + ["stop"]
    assert [decision.left["retries"] for decision in decisions] == [*reversed(range(retries)), 0]


def test_a_commit_beyond_the_old_high_water_mark_refills() -> None:
    history = History(lost=BudgetConfig(retries=1))
    history.fail("lost")
    history.begin()
    history.commit(10)
    assert history.fail("lost", 12).action == "resume"
    assert history.fail("lost", 12).action == "stop"


def test_a_commit_that_only_repeats_old_steps_refills_nothing() -> None:
    history = History(lost=BudgetConfig(retries=1))
    history.begin()
    history.commit(20)
    assert history.fail("lost", 25).action == "resume"
    history.begin()
    history.commit(15)
    assert history.fail("lost", 25).action == "stop"


def test_seven_real_failures_are_not_hidden_under_1785_preemptions() -> None:
    history = History(lost=BudgetConfig(retries=6), preempted=BudgetConfig(retries=1000))
    decisions = []
    for number in range(1785):
        history.begin()
        if number % 500 == 499:
            history.commit(number)
        assert history.fail("preempted", number).action == "resume"
        if number >= 1778:
            decisions.append(history.fail("lost", number).action)
    assert decisions == ["resume"] * 6 + ["stop"]
    assert history.state.charges["preempted"].total == 1785
    assert history.state.charges["lost"].total == 7


@given(others=st.lists(st.sampled_from(AGAIN_AND_AGAIN), max_size=30), own=st.sampled_from(RETRIED))
def test_no_reason_eats_the_budget_of_another(others: list[str], own: str) -> None:
    history, alone = History(), History()
    for other in others:
        if other != own:
            history.fail(other, 5)
    for step in (3, 4):
        assert history.fail(own, step, **remedy(own)).left == alone.fail(own, step, **remedy(own)).left


@pytest.mark.parametrize(
    ("limit", "resumed"),
    [
        pytest.param({"total": 3}, 3, id="the total is never refilled"),
        pytest.param({"wasted_gpu_seconds": 100.0}, 2, id="wasted device time"),
    ],
)
def test_a_limit_over_the_whole_run_is_not_refilled_by_commits(limit: dict[str, Any], resumed: int) -> None:
    history, actions = History(lost=BudgetConfig(retries=99, **limit)), []
    for step in (10, 20, 30, 40):
        history.begin()
        history.commit(step)
        actions.append(history.fail("lost", step, wasted_gpu_seconds=33.5).action)
    assert actions == ["resume"] * resumed + ["stop"] * (4 - resumed)


def test_a_part_of_a_second_too_much_is_too_much() -> None:
    history = History(lost=BudgetConfig(retries=9, wasted_gpu_seconds=10.0))
    assert history.fail("lost", wasted_gpu_seconds=10.5).action == "stop"


def test_device_time_wasted_for_another_reason_is_not_counted() -> None:
    history = History(lost=BudgetConfig(retries=9, wasted_gpu_seconds=10.0))
    history.fail("preempted", wasted_gpu_seconds=1000.0)
    assert history.fail("lost", wasted_gpu_seconds=9.0).left["wasted_gpu_seconds"] == 1


def test_quarantined_samples_are_capped_for_each_reason_over_the_whole_run() -> None:
    history = History(bad_data=BudgetConfig(retries=9, samples=10))
    history.begin()
    history.quarantine(range(6))
    history.quarantine(range(100, 200), reason="diverged")
    assert history.decide("bad-data", quarantined_samples=4).left["samples"] == 0
    assert history.decide("bad-data", quarantined_samples=4).action == "resume"
    refused = history.decide("bad-data", quarantined_samples=5)
    assert refused.action == "stop"
    assert refused.reason.startswith("budget bad-data is spent (samples)")


@pytest.mark.parametrize(("failed", "seconds"), [(0, 5.0), (1, 10.0), (2, 20.0), (6, 320.0), (9, 320.0)])
def test_the_wait_doubles_with_every_retry_up_to_a_bound(failed: int, seconds: float) -> None:
    history = History(storage=BudgetConfig(retries=99, backoff_seconds=5.0))
    for _ in range(failed):
        history.fail("storage")
    history.begin()
    assert history.decide("storage").delay_seconds == seconds


def test_progress_makes_the_wait_short_again() -> None:
    history = History(storage=BudgetConfig(retries=99, backoff_seconds=5.0))
    for _ in range(4):
        history.fail("storage")
    history.begin()
    history.commit(10)
    assert history.decide("storage").delay_seconds == 5.0


@given(jitter=st.floats(min_value=0, max_value=1, exclude_max=True), failed=st.integers(0, 8))
def test_jitter_takes_off_up_to_half_of_the_wait_and_adds_nothing(jitter: float, failed: int) -> None:
    history = History(storage=BudgetConfig(retries=99, backoff_seconds=5.0))
    for _ in range(failed):
        history.fail("storage")
    history.begin()
    whole = history.decide("storage").delay_seconds
    assert whole / 2 < history.decide("storage", jitter=jitter).delay_seconds <= whole


@pytest.mark.parametrize("reason", STOPPED_BY_THE_SAME)
def test_the_same_failure_at_the_same_step_with_nothing_changed_is_not_tried_again(reason: str) -> None:
    history = History()
    history.fail(reason, 40, **remedy(reason))
    assert history.fail(reason, 40).action == "stop"


@pytest.mark.parametrize("reason", AGAIN_AND_AGAIN)
def test_what_comes_from_outside_may_come_twice_at_one_step(reason: str) -> None:
    history = History()
    assert [history.fail(reason, 40).action for _ in range(3)] == ["resume"] * 3


@pytest.mark.parametrize(
    ("between", "step", "cause", "action"),
    [
        pytest.param([("preempted", 30), ("lost", 40)], 40, "", "stop", id="interruptions in between are none"),
        pytest.param([("preempted", 50)], 40, "", "resume", id="having got further in between"),
        pytest.param([], 41, "", "resume", id="another step"),
        pytest.param([], 40, "another", "resume", id="another cause"),
    ],
)
def test_a_failure_is_tried_again_if_there_is_news(
    between: list[tuple[str, int]], step: int, cause: str, action: str
) -> None:
    history = History()
    for reason, at in [("hung", 40), *between]:
        history.fail(reason, at)
    assert history.fail("hung", step, cause=cause).action == action


@pytest.mark.parametrize("reason", ["bad-data", "diverged"])
def test_damaged_data_is_not_tried_again_as_it_is(reason: str) -> None:
    decision = History().fail(reason, 40)
    assert decision.reason == f"{reason}: no remedy is known, so a retry would fail the same way"
    assert (decision.action, decision.charged) == ("stop", None)


@pytest.mark.parametrize(
    ("impact", "changed"),
    [
        ({"quarantined_samples": 3}, "3 sample(s) quarantined"),
        ({"repaired_objects": ("train-00002.arrow",)}, "damaged train-00002.arrow rebuilt from source"),
    ],
)
def test_damaged_data_that_is_avoided_or_repaired_is_tried_again(impact: dict[str, object], changed: str) -> None:
    decision = History().fail("bad-data", 40, **impact)
    assert (decision.action, decision.changed) == ("resume", changed)


RECOMPUTED = "activations are computed again, bits stay equal"
HALVED = [f"micro-batch {size} to {size // 2}, bits differ from here" for size in (8, 4, 2)]


@pytest.mark.parametrize(
    ("halves_first", "changed"), [(False, [RECOMPUTED, *HALVED, ""]), (True, [*HALVED, RECOMPUTED, ""])]
)
def test_out_of_memory_first_keeps_the_bits_unless_speed_is_preferred_and_then_stops(
    halves_first: bool, changed: list[str]
) -> None:
    history, decisions = History(oom=BudgetConfig(retries=99)), []
    now: AttemptSizes | None = AttemptSizes(micro_batch=8, activation_checkpointing=False)
    while now is not None:
        lighter = next(iter(lighter_sizes(now, global_batch=8, halves_first=halves_first)), None)
        decisions.append(history.fail("oom", 40, sizes=now, lighter=lighter))
        now = lighter
    assert [decision.changed for decision in decisions] == changed
    assert [decision.action for decision in decisions] == ["resume"] * 4 + ["stop"]


def test_a_decision_that_recomputes_and_takes_a_smaller_micro_batch_says_both() -> None:
    now = AttemptSizes(micro_batch=8, activation_checkpointing=False)
    decision = History().fail("oom", 40, sizes=now, lighter=replace(LIGHTEST, micro_batch=2))
    assert decision.changed == "activations are computed again, micro-batch 8 to 2, bits differ from here"
    assert (decision.micro_batch, decision.activation_checkpointing) == (2, True)


def test_out_of_memory_with_every_remedy_used_is_bounded_by_its_budget() -> None:
    history = History(oom=BudgetConfig(retries=2))
    assert [history.fail("oom", step).action for step in (10, 20, 30)] == ["resume", "resume", "stop"]


def test_a_shells_137_is_paid_by_the_budget_of_lost_and_keeps_the_micro_batch() -> None:
    seen = classify(Evidence(exit_code=137))
    history = History()
    history.begin()
    decision = decide(DEFAULT, history.state, seen, FailureImpact(last_step=3, sizes=replace(LIGHTEST, micro_batch=8)))
    assert (decision.charged, decision.micro_batch) == ("lost", None)


def test_an_exhausted_budget_says_what_it_was_spent_on_and_what_would_unblock_it() -> None:
    history = History(hung=BudgetConfig(retries=2))
    history.begin()
    history.commit(200)
    history.fail("preempted", 210)
    for step in (220, 230):
        history.fail("hung", step, wasted_gpu_seconds=50.0)
    decision = history.fail("hung", 240, wasted_gpu_seconds=25.0)
    assert (decision.action, decision.charged, decision.left["retries"]) == ("stop", "hung", 0)
    assert decision.reason == (
        "budget hung is spent (retries): 2 retries since the last new commit by attempts 2, 3, 2 in total, "
        "125 device seconds lost to it; a commit beyond step 200 refills it, or raise budgets.hung.retries"
    )


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (BudgetConfig(retries=9, total=0), "total"),
        (BudgetConfig(retries=9, wasted_gpu_seconds=1.0), "wasted_gpu_seconds"),
        (BudgetConfig(retries=0), "retries"),
    ],
)
def test_the_limit_that_is_reached_is_named(budget: BudgetConfig, limit: str) -> None:
    decision = History(lost=budget).fail("lost", wasted_gpu_seconds=2.0)
    assert f"budget lost is spent ({limit})" in decision.reason
    assert decision.reason.endswith(f"raise budgets.lost.{limit}")


def test_raising_an_exhausted_budget_lets_the_run_go_on() -> None:
    history = History(lost=BudgetConfig(retries=1))
    history.fail("lost")
    assert history.fail("lost").action == "stop"
    history.budgets = BudgetsConfig(lost=BudgetConfig(retries=5))
    assert history.fail("lost").action == "resume"


events = st.lists(
    st.tuples(st.sampled_from(RETRIED), st.integers(0, 60), st.none() | st.integers(1, 60), st.integers(0, 9)),
    max_size=25,
)


@given(events=events)
def test_no_history_spends_more_than_its_budgets(events: list[tuple[str, int, int | None, int]]) -> None:
    limits = BudgetConfig(retries=2, total=5, wasted_gpu_seconds=20.0)
    history = History(**{name: limits for name in BudgetsConfig.model_fields})
    for reason, step, committed_step, wasted in events:
        history.begin()
        if committed_step is not None:
            history.commit(committed_step)
        decision = history.fail(reason, step, wasted_gpu_seconds=float(wasted), **remedy(reason))
        spent = history.state.charges.get(reason, Charges())
        assert decision.action in ("resume", "stop")
        if decision.action == "resume":
            assert len(spent.since_progress) <= 2
            assert spent.total <= 5
            assert spent.wasted_gpu_seconds <= 20.0
            assert decision.left["retries"] == 2 - len(spent.since_progress)
        assert all(value is None or value >= 0 for value in decision.left.values())


@given(events=events)
def test_the_same_log_gives_the_same_decision(events: list[tuple[str, int, int | None, int]]) -> None:
    first, second = History(), History()
    for reason, step, _, _ in events:
        assert first.fail(reason, step, **remedy(reason)) == second.fail(reason, step, **remedy(reason))


@pytest.mark.parametrize(
    ("limits", "left"),
    [({"total": 2}, 2), ({"total": 1}, 0), ({"wasted_gpu_seconds": 3.0}, 2), ({"wasted_gpu_seconds": 2.9}, 0)],
)
def test_evaluators_of_a_run_have_no_retry_once_they_have_spent_its_limits(limits: dict[str, float], left: int) -> None:
    failed = [evaluation_failed("m"), evaluation_failed("m"), evaluation_failed("n")]  # one retry, three seconds
    budget = evaluator_budget(BudgetConfig.model_validate({"retries": 2, **limits}), failed)
    assert budget.retries == left


def evaluation_failed(manifest_sha256: str) -> EvaluationFailed:
    return EvaluationFailed(
        step=1,
        manifest_sha256=manifest_sha256,
        suite="held-out",
        suite_sha256="s",
        data_snapshot="d",
        detail="it printed nonsense",
        started_at=NOON,
        seconds=1.0,
    )
