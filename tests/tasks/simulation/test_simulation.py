import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, repeat
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.logs.run_entries import Decision
from cairn.storage.logs.run_state import RunState
from cairn.tasks.configuration.settings import BudgetConfig, BudgetsConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.budgets import FailureImpact, decide
from cairn.tasks.policy.failures import Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason
from cairn.tasks.simulation.failure_trace import (
    Aftershocks,
    FailureTrace,
    TraceFailure,
    parse_trace,
    published_trace,
    recorded_trace,
)
from cairn.tasks.simulation.simulated_run import (
    SimulatedRun,
    SimulationPlan,
    budget_policy,
    compare_intervals,
    daly_seconds,
    plain_retries,
    simulate,
    train_until,
    young_seconds,
)
from tests.call_count import count_calls
from tests.fabricated_run import fabricate
from tests.memory_store import MemoryStore


def never_give_up(state: RunState, failure: Failure, impact: FailureImpact) -> Decision:
    return Decision(action=DecisionAction.RESUME, reason="always")


R = TerminationReason
SMALL = SimulationPlan(
    total_steps=100,
    devices=4,
    step_seconds=2.0,
    every_steps=10,
    checkpoint_seconds=3.0,
    restart_seconds=7.0,
    grace_seconds=0.0,
    micro_batch=8,
    global_batch=8,
)
LLAMA = SimulationPlan(
    total_steps=54 * 86_400 // 6,
    devices=16_384,
    step_seconds=6.0,
    every_steps=200,
    checkpoint_seconds=10.0,
    restart_seconds=300.0,
    grace_seconds=30.0,
    micro_batch=2048,
    global_batch=2048,
)


def after(seconds: float, reason: TerminationReason = R.LOST) -> TraceFailure:
    """A failure this many wall seconds after the beginning of an attempt on the four devices of SMALL."""
    return TraceFailure(reason=reason, after_device_seconds=4 * seconds)


def constant(seconds_between: float, reason: TerminationReason = R.LOST, *, devices: int = 1) -> FailureTrace:
    return FailureTrace(source="a test", per_device_day={reason: 86_400 / seconds_between / devices})


def reasons(run: SimulatedRun) -> list[str]:
    return [attempt.ended.reason for attempt in run.state.attempts if attempt.ended]


def test_equal_seeds_give_equal_runs_and_other_seeds_others() -> None:
    plan = replace(LLAMA, total_steps=LLAMA.total_steps // 9)
    first, again, other = (
        simulate(plan, published_trace().failures(random.Random(seed)), never_give_up) for seed in (7, 7, 8)
    )
    assert first == again != other


@pytest.mark.parametrize("steps, commits", [(100, 10), (101, 11), (9, 1)])
def test_without_failures_only_commits_cost_goodput(steps: int, commits: int) -> None:
    run = simulate(replace(SMALL, total_steps=steps), (), plain_retries(0))
    assert (run.stopped_by, run.goodput) == (None, steps * 2.0 / (steps * 2.0 + commits * 3.0))


def test_wasted_is_what_lies_between_the_last_commit_and_the_failure() -> None:
    # Two segments of 10 steps and a commit take 46 s; 11 s later five steps are done that no commit holds.
    run = simulate(SMALL, [after(57.0)], never_give_up)
    receipt = run.state.attempts[0].ended
    assert receipt is not None
    assert (run.seconds.lost, receipt.wasted_gpu_seconds, receipt.last_step) == (11.0, 44.0, 25)


def test_the_next_attempt_goes_on_from_the_newest_commit() -> None:
    run = simulate(SMALL, [after(57.0)], never_give_up)
    resumed = run.state.attempts[1].started.resumed_from
    assert resumed is not None and resumed.step == 20
    assert sum(run.seconds) == 100 * 2.0 + 10 * 3.0 + 11.0 + 7.0


def test_a_failure_during_a_commit_loses_its_whole_segment() -> None:
    assert simulate(SMALL, [after(22.0)], never_give_up).seconds.lost == 22.0


def test_a_failure_during_a_restart_loses_only_time() -> None:
    run = simulate(SMALL, [after(23.0), after(5.0)], never_give_up)
    assert (run.seconds.lost, run.seconds.restarts) == (0.0, 5.0 + 7.0)


def test_an_announced_end_with_enough_grace_commits_at_the_very_step() -> None:
    run = simulate(replace(SMALL, grace_seconds=5.0), [after(28.5, R.PREEMPTED)], never_give_up)
    resumed = run.state.attempts[1].started.resumed_from
    assert resumed is not None and (resumed.step, run.seconds.lost, run.seconds.commits) == (13, 0.0, 33.0)


def test_an_announced_end_with_too_little_grace_loses_the_segment_and_the_grace() -> None:
    run = simulate(replace(SMALL, grace_seconds=3.0), [after(28.5, R.PREEMPTED)], never_give_up)
    assert run.seconds.lost == 5.5 + 3.0


def test_an_end_announced_during_the_last_commit_finds_the_run_finished() -> None:
    run = simulate(replace(SMALL, grace_seconds=5.0), [after(229.0, R.PREEMPTED)], plain_retries(0))
    assert (run.stopped_by, len(run.state.attempts)) == (None, 1)


@given(
    first=st.integers(0, 99),
    every=st.integers(1, 120),
    failure=st.floats(0, 400),
    restart=st.floats(0, 20),
    grace=st.floats(0, 30),
    announced=st.booleans(),
)
def test_an_attempts_time_is_accounted_for(
    first: int, every: int, failure: float, restart: float, grace: float, announced: bool
) -> None:
    plan = replace(SMALL, every_steps=every, grace_seconds=grace)
    event = after(failure, R.PREEMPTED if announced else R.LOST)
    span = train_until(plan, event, first_step=first, restart_seconds=restart)
    spent = sum(span.seconds)
    assert first <= span.committed_step <= span.last_step <= 100
    assert spent <= failure + (grace if announced else 0.0) + 1e-6
    assert span.seconds.useful == (span.committed_step - first) * 2.0
    assert span.committed_step == 100 or spent >= failure - 1e-6


def closed_form_and_step_by_step(plan: SimulationPlan, failure: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """Committed step and commits of an attempt from step 7, calculated and walked."""
    span = train_until(plan, after(failure), first_step=7, restart_seconds=0.0)
    committed, commits, now = 7, 0, 0.0
    for step in range(8, plan.total_steps + 1):
        now += plan.step_seconds
        if step % plan.every_steps == 0 or step == plan.total_steps:
            now += plan.checkpoint_seconds
            if now > failure:
                break
            committed, commits = step, commits + 1
    return (span.committed_step, span.seconds.commits / 3), (committed, commits)


@given(every=st.integers(1, 120), failure=st.integers(0, 500))
def test_the_calculation_agrees_with_walking_step_by_step(every: int, failure: int) -> None:
    calculated, walked = closed_form_and_step_by_step(replace(SMALL, every_steps=every), float(failure))
    assert calculated == walked


def preemptions_with_real_failures() -> Iterator[TraceFailure]:
    """1,785 preemptions and, evenly among them, 7 losses: each after a commit's worth of new work."""
    for number in range(1_785):
        yield after(45.0, R.PREEMPTED)
        if number % 255 == 100:
            yield after(45.0)


def test_a_budget_that_refills_outlives_1785_preemptions_and_7_real_failures() -> None:
    plan = replace(SMALL, total_steps=100_000)
    run = simulate(plan, preemptions_with_real_failures(), budget_policy(BudgetsConfig()))
    assert run.stopped_by is None and run.retries == {"preempted": 1_785, "lost": 7}


def test_a_plain_count_of_10_dies_of_the_same_failures() -> None:
    plan = replace(SMALL, total_steps=100_000)
    run = simulate(plan, preemptions_with_real_failures(), plain_retries(10))
    assert (run.step < 100_000, len(run.state.attempts), run.retries) == (True, 11, {"preempted": 10})


def test_failures_without_progress_empty_a_budget_and_the_end_says_which() -> None:
    budgets = BudgetsConfig(lost=BudgetConfig(retries=2))
    run = simulate(SMALL, repeat(after(5.0)), budget_policy(budgets))
    assert len(run.state.attempts) == 3
    assert run.stopped_by is not None and "budget lost is spent (retries)" in run.stopped_by


def test_a_bug_stops_the_run_at_once() -> None:
    run = simulate(SMALL, repeat(after(50.0, R.ERROR)), budget_policy(BudgetsConfig()))
    assert (run.stopped_by is None, len(run.state.attempts)) == (False, 1)


def test_a_remedy_lasts_through_later_attempts() -> None:
    run = simulate(SMALL, [after(30.0, R.OOM), after(30.0)], budget_policy(BudgetsConfig()))
    assert [attempt.started.activation_checkpointing for attempt in run.state.attempts] == [False, True, True]


def test_quarantined_samples_are_counted_against_their_budget() -> None:
    budgets = BudgetsConfig(diverged=BudgetConfig(retries=9, samples=20))
    run = simulate(SMALL, repeat(after(30.0, R.DIVERGED)), budget_policy(budgets))
    assert len(run.state.attempts) == 3  # 8 samples of one step each time
    assert run.stopped_by is not None and "(samples)" in run.stopped_by


def test_waiting_is_part_of_the_wall_time_and_not_of_the_goodput() -> None:
    budgets = BudgetsConfig(storage=BudgetConfig(retries=5, backoff_seconds=40.0))
    run = simulate(SMALL, [after(23.0, R.STORAGE)], budget_policy(budgets))
    assert run.seconds.waiting == 30.0  # the mean of a wait between half and whole
    assert sum(run.seconds) == 200.0 + 30.0 + 7.0 + 30.0


def test_every_decision_is_the_one_decide_gives_for_the_receipts_before_it() -> None:
    budgets, failures = BudgetsConfig(), published_trace().failures(random.Random(3))
    seen: list[tuple[RunState, Failure, FailureImpact]] = []
    policy = budget_policy(budgets)

    def watched(state: RunState, failure: Failure, impact: FailureImpact):  # type: ignore[no-untyped-def]
        seen.append((state, failure, impact))
        return policy(state, failure, impact)

    run = simulate(LLAMA, failures, watched)
    receipts = [attempt.ended for attempt in run.state.attempts[: len(seen)]]
    assert len(seen) > 300
    assert [decide(budgets, *case, jitter=0.5) for case in seen] == [item.decision for item in receipts if item]


def test_the_state_a_policy_sees_has_the_failed_attempt_open_and_all_others_ended() -> None:
    seen: list[tuple[bool, int]] = []

    def policy(state: RunState, failure: Failure, impact: FailureImpact):  # type: ignore[no-untyped-def]
        ended = sum(attempt.ended is not None for attempt in state.attempts)
        seen.append((state.open_attempt is state.attempts[-1], len(state.attempts) - ended))
        return never_give_up(state, failure, impact)

    simulate(SMALL, [after(30.0), after(3.0), after(50.0)], policy)
    assert seen == [(True, 1)] * 3


def test_a_run_that_cannot_get_anywhere_is_cut_off() -> None:
    run = simulate(SMALL, repeat(after(8.0)), never_give_up, most_attempts=100)
    assert (len(run.state.attempts), run.stopped_by) == (100, "cut off after 100 attempts")


def test_54_days_on_16384_devices_are_finished_and_compared_in_a_million_calls() -> None:
    def simulate_all() -> None:
        assert (
            simulate(LLAMA, published_trace().failures(random.Random(0)), budget_policy(BudgetsConfig())).stopped_by
            is None
        )
        compare_intervals(LLAMA, published_trace(), range(2))

    assert count_calls(simulate_all) < 1_000_000


def test_a_thousand_attempts_are_decided_on_in_a_thousand_calls_each() -> None:
    def simulate_all() -> None:
        plan = replace(SMALL, total_steps=1_000_000)
        run = simulate(plan, repeat(after(60.0), 1_000), budget_policy(BudgetsConfig()))
        assert run.retries == {"lost": 1_000}

    assert count_calls(simulate_all) < 1_000_000


def test_the_published_trace_adds_up_to_419_interruptions() -> None:
    per_day = sum(published_trace().per_device_day.values())
    assert per_day * 16_384 * 54 == pytest.approx(419)


def test_drawn_failures_come_as_often_and_for_the_reasons_the_rates_say() -> None:
    trace = FailureTrace(source="a test", per_device_day={R.LOST: 3.0, R.HUNG: 1.0})
    drawn = [failure for failure, _ in zip(trace.drawn(random.Random(0)), range(20_000), strict=False)]
    mean = sum(failure.after_device_seconds for failure in drawn) / len(drawn)
    assert mean == pytest.approx(86_400 / 4, rel=0.03)
    assert Counter(failure.reason for failure in drawn)[R.HUNG] == pytest.approx(5_000, rel=0.05)


CLUSTER = FailureTrace(
    source="",
    per_device_day={R.LOST: 1.0},
    replacement_seconds=600.0,
    aftershocks=Aftershocks(share=0.4, rate_factor=20.0),
)


def draw(trace: FailureTrace, count: int) -> list[TraceFailure]:
    return list(islice(trace.drawn(random.Random(1)), count))


def test_aftershocks_bunch_failures_and_leave_their_rate_alone() -> None:
    after = [failure.after_device_seconds for failure in draw(CLUSTER, 20_000)]
    alone = [failure.after_device_seconds for failure in draw(replace(CLUSTER, aftershocks=Aftershocks()), 20_000)]
    assert mean(after) == pytest.approx(86_400, rel=0.05) and mean(alone) == pytest.approx(86_400, rel=0.05)
    soon = [sum(seconds < 4_320 for seconds in drawn) / 20_000 for drawn in (after, alone)]
    assert soon[0] > 4 * soon[1]


def test_an_aftershock_has_the_reason_of_the_failure_before_it() -> None:
    rates = {R.LOST: 1.0, R.HUNG: 1.0}
    mixed = draw(
        FailureTrace(source="", per_device_day=rates, aftershocks=Aftershocks(share=0.9, rate_factor=10.0)), 5_000
    )
    same = sum(one.reason is other.reason for one, other in pairwise(mixed)) / 5_000
    assert same == pytest.approx(0.95, abs=0.02)


def test_only_a_machine_that_was_taken_is_waited_for() -> None:
    waits = {
        reason: draw(replace(CLUSTER, per_device_day={reason: 1.0}), 2_000) for reason in (R.LOST, R.PREEMPTED, R.HUNG)
    }
    means = {reason: mean(failure.replacement_seconds for failure in drawn) for reason, drawn in waits.items()}
    assert means == {R.LOST: pytest.approx(600, rel=0.1), R.PREEMPTED: pytest.approx(600, rel=0.1), R.HUNG: 0.0}


def test_waiting_for_a_machine_and_backing_off_are_one_wait() -> None:
    failure = TraceFailure(reason=R.LOST, after_device_seconds=100.0, replacement_seconds=40.0)

    def delayed(state: RunState, failure: Failure, impact: FailureImpact) -> Decision:
        return Decision(action=DecisionAction.RESUME, reason="", delay_seconds=30.0)

    assert simulate(SMALL, [failure], delayed).seconds.waiting == 40.0


@pytest.mark.parametrize(
    ("between", "checkpoint"),
    [
        (1_000.0, 30.0),
        (80_000.0, 2.0),
        *(  # quick witness: the two before, which lie farthest apart
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((1_000.0, 2.0), (11_135.0, 2.0), (11_135.0, 30.0), (80_000.0, 30.0))
        ),
    ],
)
def test_the_simulated_optimum_is_near_the_formulas(between: float, checkpoint: float) -> None:
    plan = replace(
        SMALL,
        total_steps=int(400 * between),
        devices=1,
        step_seconds=1.0,
        checkpoint_seconds=checkpoint,
        restart_seconds=0.1 * between,
    )
    found = compare_intervals(plan, constant(between), range(6))
    assert "simulated" in found
    assert found["simulated"].seconds == pytest.approx(daly_seconds(checkpoint, between), rel=0.2)
    assert found["simulated"].seconds == pytest.approx(young_seconds(checkpoint, between), rel=0.2)


@pytest.mark.parametrize("hours, minutes", [(24.0, 117), (6.0, 57), (0.25, 9.1)])
def test_dalys_formula_gives_what_his_paper_prints(hours: float, minutes: float) -> None:
    assert daly_seconds(5 * 60, hours * 3600) / 60 == pytest.approx(minutes, rel=0.01)


def test_preemptions_that_lose_nothing_do_not_shorten_the_interval() -> None:
    lost, preempted = constant(5_000.0).per_device_day, constant(100.0, R.PREEMPTED).per_device_day
    plan = replace(SMALL, devices=1, total_steps=2_000, grace_seconds=60.0)
    with_both = compare_intervals(plan, FailureTrace(source="", per_device_day={**lost, **preempted}), range(1))
    assert with_both["young"].seconds == pytest.approx(young_seconds(3.0, 5_000.0), rel=0.02)


def test_a_short_run_that_sees_no_failure_is_advised_as_a_long_one_would_be() -> None:
    plan = replace(SMALL, devices=1, total_steps=20_000, restart_seconds=100.0)
    found = compare_intervals(plan, constant(1_000_000.0), range(4))
    assert "simulated" in found
    assert found["simulated"].seconds == pytest.approx(daly_seconds(3.0, 1_000_000.0), rel=0.2)


def test_where_nothing_fails_no_interval_is_better() -> None:
    found = compare_intervals(SMALL, FailureTrace(source="", per_device_day={}), range(2))
    assert (found.keys(), found["present"].lost_share) == ({"present"}, 1 - 200 / 230)


def test_the_sweep_measures_what_a_whole_simulation_measures() -> None:
    trace = published_trace()
    run = simulate(LLAMA, trace.drawn(random.Random(5)), never_give_up)
    assert compare_intervals(LLAMA, trace, [5])["present"].lost_share == pytest.approx(1 - run.goodput)


def test_a_stored_log_replays_its_own_reasons_after_its_own_times() -> None:
    stored = fabricate(MemoryStore(), "stored")
    for reason, action in (("preempted", "resume"), ("oom", "resume"), ("cancelled", "stop"), ("lost", "resume")):
        stored.start()
        stored.end(reason, action=action)
    trace = recorded_trace(stored.log.state, restart_device_seconds=7.0)
    told = [(failure.reason, failure.after_device_seconds) for failure in trace.recorded]
    assert told == [("preempted", 2.0), ("oom", 9.0), ("lost", 9.0)]
    plan = replace(SMALL, devices=1, step_seconds=0.1, checkpoint_seconds=0.0, every_steps=1)
    run = simulate(plan, trace.recorded, budget_policy(BudgetsConfig()))
    assert reasons(run) == ["preempted", "oom", "lost"]


def test_a_stored_logs_rates_count_its_failures_in_its_own_device_time() -> None:
    stored = fabricate(MemoryStore(), "stored")
    for reason in ("lost", "lost", "cancelled"):
        stored.start()
        stored.end(reason, action="resume")
    trace = recorded_trace(stored.log.state, restart_device_seconds=7.0)
    assert list(trace.per_device_day.items()) == [("lost", pytest.approx(2 / 20 * 86_400))]


RATES = {"source": "ours", "per_device_day": {"lost": 0.5, "bad-data": 0.25}}
TOML = 'source = "ours"\n[per_device_day]\nlost = 0.5\n"bad-data" = 0.25\n'


@pytest.mark.parametrize("text", [json.dumps(RATES), TOML], ids=["json", "toml"])
def test_rates_are_read_from_either_format(text: str) -> None:
    trace = parse_trace(text, name="rates")
    assert trace.source == "ours"
    assert list(trace.per_device_day.items()) == [("lost", 0.5), ("bad-data", 0.25)]


@pytest.mark.parametrize(
    "text, told",
    [
        ("[per_device_day]\nlost = -1", "per_device_day.lost"),
        ("[per_device_day]\nlsot = 1", "per_device_day.lsot"),
        ("[per_device_day]\ncancelled = 1", "cancelled"),
        ("per_device_day = 3", "per_device_day"),
        ("devices = 3\n[per_device_day]", "devices = 3: unknown key"),
        ("replacement_seconds = -1\n[per_device_day]", "replacement_seconds = -1: must be a number of at least 0"),
        ("[aftershocks]\nshare = 1.0\n[per_device_day]", "aftershocks.share = 1.0: must be a number below 1"),
        ("[aftershocks]\nrate_factor = 0.5\n[per_device_day]", "aftershocks.rate_factor = 0.5: must be a number of at"),
        ("{not json", "neither TOML nor JSON"),
        ("also = not = toml", "neither TOML nor JSON"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_refused_with_its_name(text: str, told: str) -> None:
    with pytest.raises(InvalidConfiguration, match=told):
        parse_trace(text, name="rates")


@pytest.mark.parametrize("field", ["devices", "step_seconds", "every_steps", "total_steps"])
def test_a_plan_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: 0})
