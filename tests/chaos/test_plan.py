"""What is done to a run is known from its seed alone, and means something for that run."""

import pytest

from tests.chaos.cast import Role, role_of
from tests.chaos.plan import ENDING, MOMENTS, STEPS, Kind, Moment, plan_run, possible_kinds
from tests.chaos.strikes import REASONS, Strike, flipped
from tests.chaos.summary import Outcome, as_json, as_text, summarize

PLANS = [plan_run(seed, store=store) for seed in range(200) for store in ("local", "s3")]


def test_one_seed_is_one_plan_and_another_seed_another() -> None:
    assert plan_run(7, store="local") == plan_run(7, store="local")
    assert len({plan_run(seed, store="local") for seed in range(50)}) == 50


def test_every_kind_and_every_moment_is_drawn_sooner_or_later() -> None:
    drawn = {(fault.kind, fault.moment) for plan in PLANS for fault in plan.faults}
    assert {kind for kind, _ in drawn} == set(Kind)
    assert {(kind, moment) for kind, moments in MOMENTS.items() for moment in moments} <= drawn


def test_faults_come_in_the_order_of_their_steps_within_the_run() -> None:
    for plan in PLANS:
        steps = [fault.step for fault in plan.faults]
        assert steps == sorted(steps) and steps[0] >= 1 and steps[-1] <= STEPS


def test_a_resume_is_struck_only_after_something_that_makes_the_run_resume() -> None:
    for plan in PLANS:
        for before, fault in zip((None, *plan.faults), plan.faults, strict=False):
            assert fault.moment is not Moment.RESUME or (before is not None and before.kind in ENDING)


@pytest.mark.parametrize("store", ["local", "s3"])
def test_only_what_means_something_for_the_store_is_drawn(store: str) -> None:
    drawn = {fault.kind for plan in PLANS if plan.store == store for fault in plan.faults}
    assert drawn == set(possible_kinds(store, "watch"))


def test_faults_that_must_cost_nothing_explain_no_end() -> None:
    assert set(Kind) - REASONS.keys() == {Kind.KILL_EVALUATOR, Kind.KILL_SERVER, Kind.KILL_WATCHER}


def test_one_bit_is_flipped() -> None:
    before = bytes(1000)
    assert sum(byte.bit_count() for byte in flipped(before, "x")) == 1


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["python", "-m", "flows.command", "train", "run.toml"], Role.FLOW),
        (["python", "-m", "flows.command", "watch", "--once"], Role.WATCHER),
        (["python", "-m", "tasks.trainer"], Role.TRAINER),
        (["python", "-m", "tasks.evaluator"], Role.EVALUATOR),
        (["sh", "-c", "true"], Role.OTHER),
    ],
)
def test_a_process_is_known_by_its_command_line(words: list[str], role: Role) -> None:
    assert role_of(words) is role


def test_the_summary_names_kills_goodput_and_the_seed_of_each_violation() -> None:
    plan = plan_run(7, store="local")
    strikes = tuple(Strike(fault=fault, first_attempt=1, last_attempt=1, kills=2) for fault in plan.faults)
    done = Outcome(
        plan=plan,
        strikes=strikes,
        missed=0,
        seconds=9.0,
        gpu_seconds=10.0,
        useful_gpu_seconds=8.0,
        violations=("other bits: a is not b",),
    )
    summary = summarize([done], 60.0)
    assert (summary.kills, summary.faults, summary.goodput) == (2 * len(strikes), len(strikes), 0.8)
    assert sum(cell.count for cell in summary.table) == len(strikes)
    assert "seed 7 (local" in as_text(summary) and "other bits" in as_text(summary)
    assert b'"violations":1' in as_json(summary).replace(b" ", b"")
