"""What retention keeps and why: a table of cases, and what holds of every run there can be."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cairn.storage.checkpoints.resume_point import Finding
from cairn.storage.checkpoints.sweep import SweepPlan
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.registry import RegistryState
from cairn.storage.logs.run_entries import (
    CheckpointCommitted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointSuperseded,
    CheckpointUnpinned,
)
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_state import RunState
from cairn.tasks.checkpoints.retention import RetentionTerms, plan_retention
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.entries import ended, evaluated, started
from tests.storage.builders import committed, entry, opened

SUITE = "s"
FOLDER = "runs/r1/checkpoints"


def terms(
    *,
    keep_last: int = 1,
    keep_best: int = 0,
    keep_every: int = 0,
    champion: RegistryState | None = None,
    dead: Iterable[str] = (),
) -> RetentionTerms:
    policy = CheckpointConfig(keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
    aliases = {"champion": champion} if champion else {}
    return RetentionTerms(policy=policy, suite_sha256=SUITE, aliases=aliases, dead_pins=frozenset(dead))


def run_of(*steps: int, more: Iterable[object] = ()) -> RunState:
    """Attempt 1 commits at the steps; then come more entries."""
    state = fold([entry(opened()), entry(started(1))])
    state = fold([entry(committed(step, 1), attempt=1) for step in steps], state)
    return fold([entry(body) for body in more], state)


def quarantine(step: int) -> CheckpointQuarantined:
    return CheckpointQuarantined(**identity(committed(step, 1)), detail="flipped")


def identity(body: CheckpointCommitted) -> dict[str, object]:
    return {name: getattr(body, name) for name in ("step", "attempt", "prefix", "manifest_sha256")}


def new_pin(step: int, pin_id: str = "h", *, alias: str | None = None, suite: str | None = None) -> CheckpointPinned:
    placement = started(1).placement
    return CheckpointPinned(
        **identity(committed(step, 1)), pin_id=pin_id, pinned_by=placement, alias=alias, suite_sha256=suite
    )


def manifest(step: int) -> str:
    return committed(step, 1).manifest_sha256


def over(plan: SweepPlan) -> list[int]:
    """Steps of the checkpoints that go."""
    return [int(finding.key.split("-")[1]) for finding in plan.checkpoints if finding.is_over]


def finding_on(state: RunState, step: int, by: RetentionTerms) -> Finding:
    prefix = committed(step, 1).prefix
    return next(finding for finding in plan_retention(by, state, ()).checkpoints if finding.key == prefix)


def test_the_newest_are_kept_and_the_others_go() -> None:
    assert over(plan_retention(terms(keep_last=2), run_of(1, 2, 3, 4), ())) == [1, 2]


ANOTHER_SUITE = replace(evaluated(1, 0.1), suite_sha256="other")
BEST = terms(keep_best=1)
GOES: dict[str, tuple[RetentionTerms, range, list[object], list[int]]] = {
    "with fewer than keep_last none goes": (terms(keep_last=3), range(1, 4), [], []),
    "the best is kept by its loss": (
        BEST, range(1, 5), [evaluated(1, 3.0), evaluated(2, 2.0), evaluated(3, 2.5)], [1, 3]
    ),
    "of equal losses the earlier is the best": (BEST, range(1, 4), [evaluated(2, 2.0), evaluated(1, 2.0)], [2]),
    "another suite makes nothing the best": (BEST, range(1, 4), [ANOTHER_SUITE, evaluated(2, 2.0)], [1]),
    "a loss that is no number is never the best": (
        BEST, range(1, 4), [evaluated(1, float("nan")), evaluated(2, 2.0)], [1]
    ),
    "a quarantined one is neither the best nor among the newest": (
        terms(keep_last=2, keep_best=1), range(1, 5), [evaluated(2, 2.0), evaluated(3, 1.0), quarantine(3)], [1]
    ),
    "every so many steps one is kept": (terms(keep_every=20), range(10, 51, 10), [], [10, 30]),
    "a quarantined one with nothing newer stays for a person to look at": (terms(), range(1, 3), [quarantine(2)], []),
}  # fmt: skip


@pytest.mark.parametrize("case", GOES)
def test_a_checkpoint_goes_unless_a_rule_keeps_it(case: str) -> None:
    by, steps, more, gone = GOES[case]
    assert over(plan_retention(by, run_of(*steps, more=more), ())) == gone


def test_what_an_alias_reaches_is_kept() -> None:
    reach = RegistryState(reached=(manifest(1),))
    state = run_of(1, 2, 3)
    assert finding_on(state, 1, terms(champion=reach)).why == "alias champion"
    assert over(plan_retention(terms(champion=reach), state, ())) == [2]


def test_what_is_held_is_kept_even_where_its_hold_is_over() -> None:
    state = run_of(1, 2, more=[new_pin(1, suite=SUITE)])
    found = finding_on(state, 1, terms(dead=["h"]))
    assert (found.is_over, found.why) == (False, "pinned by an evaluation on host here (pid 11)")


def test_what_the_open_attempt_resumed_from_is_kept() -> None:
    second = replace(started(2), resumed_from=committed(1, 1).reference)
    state = run_of(1, more=[ended(1), second])
    state = fold([entry(committed(step, 2), attempt=2) for step in (2, 3)], state)
    assert finding_on(state, 1, terms()).why == "attempt 2 resumed from it"


def test_what_an_ended_attempt_resumed_from_is_kept_no_longer() -> None:
    second = replace(started(2), resumed_from=committed(1, 1).reference)
    state = run_of(1, more=[ended(1), second])
    state = fold([entry(committed(step, 2), attempt=2) for step in (2, 3)], state)
    assert 1 in over(plan_retention(terms(), fold([entry(ended(2))], state), ()))


def test_a_quarantined_checkpoint_goes_once_enough_newer_ones_can_be_read() -> None:
    state = run_of(1, 2, 3, more=[quarantine(1)])
    assert finding_on(state, 1, terms(keep_last=2)).why == "quarantined (flipped), and 2 newer ones can be read"
    assert finding_on(state, 1, terms(keep_last=3)).why == "quarantined, and fewer than 3 newer ones can be read"


def test_why_a_checkpoint_goes_names_every_rule_that_did_not_keep_it() -> None:
    state = run_of(1, 2, 3, more=[evaluated(1, 2.5), evaluated(2, 1.5)])
    why = finding_on(state, 1, terms(keep_last=1, keep_best=1, keep_every=2)).why
    assert why == "older than the newest 1, val_loss 2.5 is not the best 1, not at a multiple of 2 steps"


def test_why_a_checkpoint_stays_names_every_rule_that_keeps_it() -> None:
    state = run_of(1, 2, more=[evaluated(2, 1.5)])
    why = finding_on(state, 2, terms(keep_last=1, keep_best=1, keep_every=2)).why
    assert why == "newest 1; best 1 (val_loss 1.5); every 2 steps; nothing newer to resume from"


REACHES = RegistryState(reached=(manifest(1),), decided_pins=("h",))
LEFT = RegistryState(decided_pins=("h",))
UNDECIDED = RegistryState()


@pytest.mark.parametrize(
    ("pin", "champion", "dead", "is_over"),
    [
        pytest.param(new_pin(1, suite=SUITE), None, [], False, id="evaluation, its process perhaps alive"),
        pytest.param(new_pin(1, suite=SUITE), None, ["h"], True, id="evaluation, its process dead"),
        pytest.param(new_pin(1, alias="champion"), REACHES, ["h"], False, id="alias points at it, its process dead"),
        pytest.param(new_pin(1, alias="champion"), LEFT, [], True, id="alias decided and left it"),
        pytest.param(
            new_pin(1, alias="champion"), UNDECIDED, [], False, id="alias undecided, its process perhaps alive"
        ),
        pytest.param(new_pin(1, alias="champion"), UNDECIDED, ["h"], True, id="alias undecided, its process dead"),
        pytest.param(new_pin(1, alias="champion"), None, ["h"], False, id="alias nobody read"),
    ],
)
def test_a_hold_is_over_only_on_proof(
    pin: CheckpointPinned, champion: RegistryState | None, dead: list[str], is_over: bool
) -> None:
    (found,) = plan_retention(terms(champion=champion, dead=dead), run_of(1, 2, more=[pin]), ()).pins
    assert found.is_over is is_over, found.why


@pytest.mark.parametrize(
    ("more", "name", "is_orphan"),
    [
        pytest.param([ended(1)], "step-00000002-attempt-0001", [True], id="of an ended attempt"),
        pytest.param([], "step-00000002-attempt-0001", [False], id="of the open attempt"),
        pytest.param([ended(1)], "step-00000002-attempt-0002", [False], id="of an attempt that the log does not know"),
        pytest.param([ended(1)], "notes", [False], id="of another name"),
        pytest.param([ended(1)], "step-00000001-attempt-0001", [], id="a committed checkpoint, which is none"),
    ],
)
def test_a_staged_folder_is_an_orphan_once_its_attempt_has_ended(
    more: list[object], name: str, is_orphan: list[bool]
) -> None:
    plan = plan_retention(terms(), run_of(1, more=more), [f"{FOLDER}/{name}"])
    assert [finding.is_over for finding in plan.staged] == is_orphan


@pytest.mark.parametrize(("field", "value"), [("keep_last", 0), ("keep_best", -1), ("keep_every", -1)])
def test_a_policy_that_cannot_be_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValidationError, match=field):
        CheckpointConfig(**{field: value})


def test_the_defaults_keep_three_and_the_best() -> None:
    policy = CheckpointConfig()
    assert (policy.keep_last, policy.keep_best, policy.keep_every) == (3, 1, 0)


@st.composite
def runs(draw: st.DrawFn) -> RunState:
    """Attempts that resume anywhere, commit at any step, are quarantined, evaluated and pinned."""
    state = fold([entry(opened())])
    for _ in range(draw(st.integers(1, 3))):
        number = state.latest_attempt + 1
        resumed = draw(st.sampled_from([None, *(record.committed.reference for record in state.readable)]))
        state = fold([entry(replace(started(number), resumed_from=resumed))], state)
        for step in draw(st.lists(st.integers(1, 9), max_size=5, unique=True)):
            body = replace(committed(step, number), manifest_sha256=f"{number}-{step}")
            state = fold([entry(body, attempt=number)], state)
        for record in draw(st.lists(st.sampled_from(state.checkpoints), max_size=3)) if state.checkpoints else []:
            state = fold([entry(draw(st.sampled_from(said_of(record.committed, draw(st.floats(0, 3))))))], state)
        if draw(st.booleans()):
            state = fold([entry(ended(number))], state)
        else:
            break
    return state


def said_of(body: CheckpointCommitted, loss: float) -> list[object]:
    placement, named = started(1).placement, identity(body)
    return [
        CheckpointQuarantined(**named, detail="flipped"),
        replace(evaluated(body.step, loss), manifest_sha256=body.manifest_sha256),
        CheckpointPinned(**named, pin_id=f"{body.prefix}-e", pinned_by=placement, suite_sha256=SUITE),
        CheckpointPinned(**named, pin_id=f"{body.prefix}-a", pinned_by=placement, alias="champion"),
    ]


@st.composite
def terms_of_any_kind(draw: st.DrawFn) -> RetentionTerms:
    reached = draw(st.frozensets(st.builds("{}-{}".format, st.integers(1, 3), st.integers(1, 9)), max_size=4))
    reach = RegistryState(reached=tuple(sorted(reached)))
    counts = [draw(st.integers(low, 3)) for low in (1, 0, 0)]
    return terms(keep_last=counts[0], keep_best=counts[1], keep_every=counts[2], champion=reach)


def applied(state: RunState, plan: SweepPlan) -> RunState:
    """The state after the plan's supersedings, each of them accepted by the fold."""
    for finding in plan.checkpoints:
        record = state.find(finding.key)
        if finding.is_over and record is not None:
            state = fold([entry(CheckpointSuperseded(**identity(record.committed), why=finding.why))], state)
    return state


@given(runs(), terms_of_any_kind())
def test_the_fold_refuses_nothing_that_retention_gives_up(state: RunState, by: RetentionTerms) -> None:
    assert applied(state, plan_retention(by, state, ())).refused == state.refused


@given(runs(), terms_of_any_kind())
def test_the_checkpoint_a_resume_takes_is_the_same_before_and_after(state: RunState, by: RetentionTerms) -> None:
    assert applied(state, plan_retention(by, state, ())).newest_committed == state.newest_committed


@given(runs(), terms_of_any_kind())
def test_nothing_held_reached_or_resumed_from_is_given_up(state: RunState, by: RetentionTerms) -> None:
    after = applied(state, plan_retention(by, state, ()))
    gone = {record.committed.reference for record in state.checkpoints} - references(after)
    needed: set[CheckpointReference | None] = {
        record.committed.reference
        for record in state.checkpoints
        if record.committed.manifest_sha256 in by.aliases["champion"].reached
        or any(pin.prefix == record.committed.prefix for pin in state.pins)
    }
    needed |= {state.open_attempt.started.resumed_from} if state.open_attempt else set()
    assert gone & needed == set()


def references(state: RunState) -> set[CheckpointReference]:
    return {record.committed.reference for record in state.checkpoints if record.is_kept}


@given(runs(), terms_of_any_kind())
def test_a_second_plan_right_after_the_first_gives_up_nothing(state: RunState, by: RetentionTerms) -> None:
    after = applied(state, plan_retention(by, state, ()))
    assert over(plan_retention(by, after, ())) == []


@given(runs(), terms_of_any_kind())
def test_the_newest_that_can_be_read_are_all_kept(state: RunState, by: RetentionTerms) -> None:
    after = applied(state, plan_retention(by, state, ()))
    assert after.readable[: by.policy.keep_last] == state.readable[: by.policy.keep_last]


@given(runs(), terms_of_any_kind())
def test_ending_a_hold_never_saves_a_checkpoint(state: RunState, by: RetentionTerms) -> None:
    unpinned = [CheckpointUnpinned(pin_id=pin.pin_id, prefix=pin.prefix, why="") for pin in state.pins]
    freed = fold([entry(body) for body in unpinned], state)
    assert set(over(plan_retention(by, state, ()))) <= set(over(plan_retention(by, freed, ())))
