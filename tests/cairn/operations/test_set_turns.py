"""Whose turn it is in a set of runs: decided by the logs alone, however often the command that decides is killed."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.flows.preparation import training_request
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest
from cairn.operations.prefect_session import plan_rungs, train_in_turn
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import SetConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.evaluator.evaluation_run import suite_of
from cairn.tasks.policy import run_set
from cairn.tasks.policy.run_set import Move, Rung, RunLimit, Trial, find_limit, next_move
from tests.entries import decided, ended, evaluated, opened, started, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import committed

STEPS, COUNT = 729, 81
DOCUMENT = {"data": {"sources": ["a.txt"]}, "training": {"steps": STEPS}, "checkpoint": {"every_steps": 1}}
WORST = math.inf


class Killed(BaseException):
    """The controller is gone."""


@dataclass(kw_only=True)
class Trials:
    """Runs whose losses are known beforehand, in a store each; the command is killed after so many entries."""

    seed: int
    count: int
    overrides: Sequence[str] = ()
    kill_after: float = math.inf
    steps: int = 0
    said: list[str] = field(default_factory=list)
    stores: dict[str, MemoryStore] = field(default_factory=dict)
    logs: dict[str, RunLog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = random.Random(self.seed)
        config = parse_configuration(DOCUMENT, overrides=self.overrides, environment={}, name="test")
        self.suite, self.document = suite_of(config.evaluation).sha256, config.document()
        self.bases = [round(made.uniform(2.0, 4.0), 2) for _ in range(self.count)]  # some of them are equal
        self.failing = {place for place in range(self.count) if made.random() < 0.1}
        self.members = [
            ResolvedRequest(
                request=TrainingRequest(),
                run_id=f"rates.seed={place}",
                store_url=f"memory://{place}",
                base_dir=Path(),
                configuration=config,
            )
            for place in range(self.count)
        ]

    def open_store(self, url: str) -> MemoryStore:
        return self.stores.setdefault(url, MemoryStore(url))

    def open_log(self, store: MemoryStore, run_id: str) -> RunLog:
        return self.logs.setdefault(run_id, RunLog(store, run_id))

    def append(self, log: RunLog, body: object, attempt: int | None = None) -> RunState:
        self.kill_after -= 1
        if self.kill_after < 0:
            raise Killed
        return log.append(lambda state: body, writer=writer(attempt))  # type: ignore[arg-type]

    def train(self, member: ResolvedRequest) -> None:
        """Write what a run's training to its limit leaves in its log."""
        place, log = self.members.index(replace(member, limit=run_set.NO_LIMIT)), member.open_log()
        state = log.refresh()
        if state.opened is None:
            state = self.append(log, opened(log.run_id, total_steps=STEPS))
        if state.open_attempt is not None:  # whose process was killed
            state = self.append(log, ended(state.latest_attempt, "lost"))
        number, resumed = state.latest_attempt + 1, state.resume_reference
        state = self.append(log, started(number, config=self.document, resumed_from=resumed))
        until = int(min(STEPS, member.limit.until_step))
        if place in self.failing and until >= 9:
            self.append(log, ended(number, "diverged", decision=decided(action="stop")), number)
            return
        if until > state.high_water_step:
            trained = until - state.high_water_step
            state = self.append(log, committed(until, number), number)
            self.steps += trained
        manifest = committed(until, number).manifest_sha256
        if not state.evaluations_of(manifest):
            loss = self.bases[place] - until / 10_000
            self.append(log, evaluated(until, loss, suite_sha256=self.suite))
        if until == STEPS:
            log.append(lambda _: run_set.early_stop.finish(committed(until, number), number, None), writer=writer())
        reason, action = ("completed", "finish") if until == STEPS else ("paused", "stop")
        self.append(log, ended(number, reason, decision=decided(action=action)), number)

    def play(self) -> None:
        """Do what the command does, until it is killed."""
        for member in train_in_turn(self.members, plan_rungs(self.members, {}), {}, self.said.append):
            self.train(member)

    def ends(self) -> dict[str, tuple[int, str]]:
        """Return how far each run came, and by which rule it was finished."""
        states = {member.run_id: member.open_log().refresh() for member in self.members}
        rules = {name: state.finished.rule if state.finished else "failed" for name, state in states.items()}
        return {name: (state.high_water_step, rules[name]) for name, state in states.items()}


def trials_of(patch: pytest.MonkeyPatch, count: int, *overrides: str) -> Trials:
    trials = Trials(seed=7, count=count, overrides=overrides)
    patch.setattr(training_request, "open_store", trials.open_store)
    patch.setattr(training_request, "run_log", SimpleNamespace(RunLog=trials.open_log))
    return trials


def test_a_command_that_is_killed_a_hundred_times_finds_the_same_winner_with_a_quarter_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = trials_of(monkeypatch, COUNT, "set.halving=3")
    once.play()
    expected, places, kills = once.ends(), random.Random(11), 0
    again = trials_of(monkeypatch, COUNT, "set.halving=3")
    while True:
        again.kill_after = places.randrange(1, 9) if kills < 100 else math.inf
        try:
            again.play()
            break
        except Killed:
            kills += 1
            if kills % 20 == 0:
                again.logs.clear()  # the others find what this process has read already
    winners = [name for name, (step, rule) in expected.items() if (step, rule) == (STEPS, "")]
    sound = [place for place in range(COUNT) if place not in once.failing]
    best = min(sound, key=lambda place: (once.bases[place], place))
    assert (kills, again.ends(), winners) == (100, expected, [once.members[best].run_id])
    assert again.steps == once.steps <= COUNT * STEPS / 4


def test_the_log_of_a_run_that_lost_names_the_evaluation_by_which_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(monkeypatch, 2, "set.halving=2", "checkpoint.every_steps=100")
    trials.failing = set()
    trials.play()
    loser = trials.members[trials.bases.index(max(trials.bases))].open_log().refresh().finished
    assert loser is not None and loser.stopped == (
        f"it lost at rung 1 of 1: held-out loss {max(trials.bases) - 0.04:.4f} "
        f"(held-out of step 400, manifest {loser.manifest_sha256[:12]}) is not among the best 1 of 2 runs, which go on"
    )


def test_a_budget_of_steps_ends_the_set_and_says_what_was_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(monkeypatch, 4, f"set.steps={2 * STEPS + 100}")
    trials.failing = set()
    trials.play()
    assert [step for step, _ in trials.ends().values()] == [STEPS, STEPS, 100, 0]
    assert trials.said == ["the budget of the set is spent; not trained to the end: rates.seed=2, rates.seed=3"]


def test_a_run_that_comes_no_further_ends_the_set_instead_of_being_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = trials_of(monkeypatch, 3, "set.halving=2")
    turns = train_in_turn(trials.members, plan_rungs(trials.members, {}), {}, trials.said.append)
    assert len(list(turns)) == 1 and "rates.seed=0, which comes no further" in trials.said[0]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("set.halving=2", "checkpoint.every_steps=729"), "no evaluation is due before step 729, the first is at 729"),
        (("set.halving=2", "evaluation.batches=7"), "runs with the same training.steps, checkpoint and evaluation"),
        (("set.halving=2", "training.steps=9"), "runs with the same training.steps, checkpoint and evaluation"),
    ],
)
def test_runs_that_no_rung_could_compare_are_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], problem: str
) -> None:
    trials = trials_of(monkeypatch, 3, *overrides)
    plain = parse_configuration(DOCUMENT, overrides=["set.halving=2"], environment={}, name="test")
    is_alike = "checkpoint" in overrides[1]
    members = [*trials.members[:2], replace(trials.members[2], configuration=None if is_alike else plain)]
    members = trials.members if is_alike else members
    with pytest.raises(InvalidConfiguration, match=rf"set\.halving = 2: .*{problem}"):
        plan_rungs(members, {})


@pytest.mark.parametrize("value", ["halving=1", "halving=two", "steps=0", "steps=-5", "device_hours=0", "hours=3"])
def test_a_malformed_rule_of_a_set_is_refused_by_its_key_and_value(value: str) -> None:
    key, _, text = value.partition("=")
    with pytest.raises(InvalidConfiguration, match=rf"set\.{key}.*{text}|set\.{key}: unknown"):
        parse_configuration(DOCUMENT, overrides=[f"set.{value}"], environment={}, name="test")


@pytest.mark.parametrize(
    ("runs", "factor", "interval", "expected"),
    [
        (4, 2, 15, [(15, 2), (30, 1)]),
        (9, 3, 1, [(7, 3), (20, 1)]),
        (5, 2, 5, [(10, 3), (15, 2), (30, 1)]),
        (256, 4, 20, [(20, 1)]),
        (1, 2, 1, []),
    ],
)
def test_each_rung_has_a_share_of_the_runs_and_lies_where_evaluations_are_due(
    runs: int, factor: int, interval: int, expected: list[tuple[int, int]]
) -> None:
    rungs = run_set.plan_rungs(runs, factor=factor, total_steps=60, interval=interval)
    assert [(rung.step, rung.kept) for rung in rungs] == expected


MEASURED = st.one_of(st.none(), st.floats(0.0, 9.0), st.just(WORST))


@given(st.lists(st.tuples(MEASURED, st.booleans()), min_size=1, max_size=12), st.integers(1, 6))
def test_the_next_move_trains_what_is_missing_and_else_drops_the_worst(
    runs: list[tuple[float | None, bool]], kept: int
) -> None:
    trials = [trial(loss, is_over=is_over) for loss, is_over in runs]
    move = next_move(trials, (Rung(step=10, kept=kept),), 20)
    losses = [WORST if loss is None and is_over else loss for loss, is_over in runs]
    if None in losses:
        assert move is not None and (move.place, move.until_step, move.stop) == (losses.index(None), 10, None)
        return
    ranked = sorted(range(len(runs)), key=lambda place: (losses[place], place))
    lost = [place for place in ranked[kept:] if not runs[place][1]]
    gone_on = [place for place in sorted(ranked[:kept]) if not runs[place][1]]
    assert (move.place if move else None) == next(iter([*lost, *gone_on]), None)
    assert move is None or (move.stop is not None) == bool(lost)


def trial(loss: float | None, *, is_over: bool = False) -> Trial:
    losses: Mapping[int, tuple[float, str]] = {} if loss is None else {10: (loss, "so")}
    return Trial(losses=losses, settled=WORST if is_over else 0.0 if loss is None else 10.0)


@pytest.mark.parametrize(
    ("rules", "spent", "expected"),
    [
        ({}, (5, 5.0), RunLimit(until_step=20, why="its rung")),
        ({"steps": 30}, (5, 5.0), RunLimit(until_step=20, why="its rung")),
        ({"steps": 12}, (5, 5.0), RunLimit(until_step=12, why="its set has spent set.steps = 12")),
        ({"steps": 5}, (5, 5.0), None),
        ({"device_hours": 0.5}, (5, 1800.0), None),
        (
            {"device_hours": 0.5},
            (5, 1799.0),
            RunLimit(until_step=20, device_seconds=1.0, why="its rung or its set has spent set.device_hours = 0.5"),
        ),
    ],
)
def test_a_run_goes_no_further_than_the_budget_of_its_set(
    rules: dict[str, float], spent: tuple[int, float], expected: RunLimit | None
) -> None:
    trials = [Trial(step=spent[0], device_seconds=spent[1]), Trial()]
    move = Move(place=1, until_step=20, why="its rung")
    expected = replace(expected, until_step=7) if expected and "12" in expected.why else expected
    assert find_limit(move, trials, SetConfig.model_validate(rules)) == expected
