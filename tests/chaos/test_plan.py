"""What is done to a run is known from its seed alone, and means something for that run."""

from pathlib import Path

import pytest

from tests.crash.prefect_api import SETTLED
from tests.programs.chaos.campaign import run_side_by_side
from tests.programs.chaos.environment import CommandEnd, Kill
from tests.programs.chaos.faults import InjectedFault
from tests.programs.chaos.flips import flipped
from tests.programs.chaos.kinds import ENDING, FACTS, KILLS, Kind, Moment
from tests.programs.chaos.plan import STARTING, STEPS, Fault, plan_run, possible_kinds
from tests.programs.chaos.processes import Role, role_of
from tests.programs.chaos.summary import Outcome, Summary, added
from tests.programs.chaos.summary_text import as_json, as_markdown, from_json

PLANS = [plan_run(seed, store=store) for seed in range(200) for store in ("local", "s3")]


def test_one_seed_is_one_plan_and_another_seed_another() -> None:
    assert plan_run(7, store="local") == plan_run(7, store="local")
    assert len({plan_run(seed, store="local") for seed in range(50)}) == 50


def test_every_kind_and_every_moment_is_drawn_sooner_or_later() -> None:
    drawn = {(fault.kind, fault.moment) for plan in PLANS for fault in plan.faults}
    assert {kind for kind, _ in drawn} == set(Kind)
    assert {(kind, moment) for kind, facts in FACTS.items() for moment in facts.moments} <= drawn


def test_faults_come_in_the_order_of_their_steps_within_the_run() -> None:
    for plan in PLANS:
        steps = [fault.step for fault in plan.faults]
        assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] <= STEPS


def test_a_resume_is_struck_only_after_something_that_makes_the_run_resume() -> None:
    for plan in PLANS:
        for before, fault in zip((None, *plan.faults), plan.faults, strict=False):
            assert fault.moment is not Moment.RESUME or (before is not None and before.kind in ENDING)


def test_an_early_fault_comes_first_or_after_something_that_has_a_command_started() -> None:
    for plan in PLANS:
        for before, fault in zip((None, *plan.faults), plan.faults, strict=False):
            assert fault.moment is not Moment.EARLY or before is None or before.kind in STARTING
            assert fault.moment is Moment.EARLY or not fault.age_seconds


@pytest.mark.parametrize("store", ["local", "s3"])
def test_by_default_a_third_of_the_kills_is_early_and_an_eighth_is_of_launchers_and_evaluators(store: str) -> None:
    faults = [fault for plan in PLANS if plan.store == store for fault in plan.faults]
    kills = [fault for fault in faults if fault.kind in KILLS]
    assert sum(fault.moment is Moment.EARLY for fault in kills) >= len(kills) / 3
    assert sum(fault.kind in (Kind.KILL_LAUNCHER, Kind.KILL_EVALUATOR) for fault in kills) >= len(kills) / 8


def test_only_several_processes_have_a_launcher_that_is_killed() -> None:
    assert {plan.processes for plan in PLANS} == {1, 2}
    assert all(fault.kind is not Kind.KILL_LAUNCHER for plan in PLANS if plan.processes == 1 for fault in plan.faults)


@pytest.mark.parametrize("store", ["local", "s3"])
def test_only_what_means_something_for_the_store_is_drawn(store: str) -> None:
    drawn = {fault.kind for plan in PLANS if plan.store == store for fault in plan.faults}
    assert drawn == {*possible_kinds(store, "worker"), Kind.KILL_OWN_SERVER}


def test_faults_that_must_cost_nothing_explain_no_end() -> None:
    assert {kind for kind, facts in FACTS.items() if not facts.reasons} == {
        Kind.KILL_EVALUATOR,
        Kind.KILL_SERVER,
        Kind.KILL_OWN_SERVER,
        Kind.KILL_WATCHER,
        Kind.KILL_WORKER,
        Kind.KILL_SWEEP,
        Kind.WRONG_DEAD,
        Kind.VERSION_SKEW,
    }


def test_one_bit_is_flipped() -> None:
    before = bytes(1000)
    assert sum(byte.bit_count() for byte in flipped(before, "x")) == 1


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["python", "-m", "cairn.cli.command", "train", "run.toml"], Role.FLOW),
        (["python", "-m", "cairn.cli.command", "watch", "--once"], Role.WATCHER),
        (["python", "-m", "cairn.cli.command", "sweep", "bard"], Role.SWEEPER),
        (["python", "-m", "tests.programs.chaos.waiting_sweep", "bard", "store"], Role.SWEEPER),
        ([*SETTLED, "prefect", "worker", "start", "--pool", "cairn"], Role.WORKER),
        ([*SETTLED, "prefect.engine"], Role.FLOW),
        (["python", "-m", "cairn.flows.orchestrator.prefect_server", "7"], Role.SERVER),
        (["python", "-m", "cairn.tasks.trainer.trainer"], Role.TRAINER),
        (["python", "-m", "cairn.tasks.trainer.trainer_group", "{}"], Role.LAUNCHER),
        (["python", "-m", "cairn.tasks.evaluator.evaluator"], Role.EVALUATOR),
        (["sh", "-c", "true"], Role.OTHER),
    ],
)
def test_a_process_is_known_by_its_command_line(words: list[str], role: Role) -> None:
    assert role_of(words) is role


def test_a_spoiled_snapshot_is_never_flipped_besides_as_nothing_of_it_can_be_made_anew() -> None:
    spoiled = [plan for plan in PLANS if plan.spoiled_step is not None]
    assert spoiled and all(fault.kind is not Kind.FLIP_DATA for plan in spoiled for fault in plan.faults)


def test_every_driver_continues_some_runs() -> None:
    assert {plan.driver for plan in PLANS} == {"command", "watch", "worker"}


KILLED = (Kill(role=Role.FLOW, is_early=True), Kill(role=Role.SERVER, is_early=False))


def outcome(seed: int, *violations: str) -> Outcome:
    plan = plan_run(seed, store="local")
    return Outcome(
        plan=plan,
        injected=tuple(
            InjectedFault(fault=fault, first_attempt=1, last_attempt=1, kills=2, killed=KILLED) for fault in plan.faults
        ),
        missed=(Fault(kind=Kind.NOTICE, moment=Moment.SWEEP, step=9),),
        seconds=9.0,
        gpu_seconds=10.0,
        useful_gpu_seconds=8.0,
        violations=violations,
        ends=(CommandEnd(after=Kind.KILL_FLOW, seconds=4.0), CommandEnd(after=Kind.KILL_FLOW, seconds=7.0)),
    )


def of_all(*outcomes: Outcome, seconds: float = 60.0) -> Summary:
    return Summary(outcomes=outcomes, seconds=seconds)


def test_only_a_command_has_a_server_of_its_own_and_no_other_is_killed_then() -> None:
    own = [plan for plan in PLANS if plan.has_own_server]
    assert {plan.driver for plan in own} == {"command"}
    assert all(fault.kind is not Kind.KILL_SERVER for plan in own for fault in plan.faults)


def test_the_summary_says_how_long_commands_took_from_the_last_fault_to_their_end() -> None:
    assert "(median, longest): kill-flow 2: 5.5, 7.0" in as_markdown(of_all(outcome(7)))


def test_the_summary_names_kills_goodput_and_the_seed_of_each_violation() -> None:
    done = outcome(7, "other bits: a is not b")
    summary = of_all(done)
    assert (summary.kills, len(summary.struck), summary.goodput) == (2 * len(done.injected), len(done.injected), 0.8)
    assert summary.counts().total() == len(done.injected)
    assert sum(summary.kills_of(*cell) for cell in summary.counts()) == summary.kills
    text = as_markdown(summary)
    assert f"{len(done.injected)} within three seconds of their command's start, 0 launchers" in text
    assert "seed 7 (local" in text and "other bits" in text


def test_campaigns_add_up_to_what_one_campaign_of_all_their_runs_would_say() -> None:
    apart = [of_all(outcome(seed), seconds=30.0) for seed in (8, 7)]
    assert added(apart) == of_all(outcome(7), outcome(8))


def test_a_written_summary_is_read_back_as_it_was() -> None:
    summary = of_all(outcome(7, "other bits"))
    assert from_json(as_json(summary), where="here") == summary


def test_the_markdown_has_every_kind_that_struck_and_the_seeds_as_ranges() -> None:
    text = as_markdown(of_all(*map(outcome, (7, 8, 9, 12))))
    assert "seeds: local 7-9, 12" in text
    for seed in (7, 8, 9, 12):
        assert all(f"| {fault.kind} |" in text for fault in plan_run(seed, store="local").faults)


@pytest.mark.slow
def test_jobs_side_by_side_each_leave_a_summary_and_one_that_cannot_is_an_error(tmp_path: Path) -> None:
    summary = of_all(outcome(7))
    (tmp_path / "summary.json").write_bytes(as_json(summary))
    given = ["--add", str(tmp_path), "--jobs", "2", "--out", str(tmp_path / "another")]
    assert run_side_by_side(given, tmp_path / "jobs", 2) == [summary, summary]
    assert not (tmp_path / "another").exists()
    with pytest.raises(RuntimeError, match="no summary"):
        run_side_by_side(["--add", str(tmp_path / "absent")], tmp_path / "others", 1)
