"""The fold is a pure function of the entries, and folding goes on where it stopped."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.logs.log_entry import Entry, Writer
from cairn.storage.logs.run_entries import CheckpointQuarantined, RunFinished
from cairn.storage.logs.run_log import fold
from tests.entries import ended, evaluated, noted, started
from tests.storage.builders import committed, entry, opened


def quarantined(step: int, attempt: int) -> CheckpointQuarantined:
    of = committed(step, attempt)
    return CheckpointQuarantined(
        step=step, attempt=attempt, prefix=of.prefix, manifest_sha256=of.manifest_sha256, detail="flipped"
    )


ATTEMPTS = st.integers(1, 4)
STEPS = st.integers(0, 5)
BODIES = st.one_of(
    st.just(opened()),
    st.builds(started, ATTEMPTS),
    st.builds(ended, ATTEMPTS),
    st.builds(committed, STEPS, ATTEMPTS),
    st.builds(quarantined, STEPS, ATTEMPTS),
    st.builds(evaluated, STEPS, st.floats(0, 9)),
    st.builds(lambda names: noted(tags=names, untagged=names[1:]), st.tuples(*[st.sampled_from("abc")] * 2)),
    st.builds(lambda step: RunFinished(attempt=1, step=step, manifest_sha256="", state_sha256=""), STEPS),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """A log in any order at all, honest or not."""
    bodies = draw(st.lists(st.tuples(BODIES, st.none() | ATTEMPTS), max_size=14))
    return [entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies)]


@given(logs(), st.integers(0, 14))
def test_folding_in_two_parts_equals_folding_at_once(entries: list[Entry], cut: int) -> None:
    assert fold(entries[cut:], fold(entries[:cut])) == fold(entries)


@given(logs())
def test_folding_twice_gives_the_same_state(entries: list[Entry]) -> None:
    assert fold(entries) == fold(list(entries))


@given(logs())
def test_folding_changes_no_earlier_state(entries: list[Entry]) -> None:
    half = fold(entries[: len(entries) // 2])
    before = repr(half)
    fold(entries, half)
    assert repr(half) == before


@given(logs())
def test_attempt_numbers_rise_by_one_whatever_is_in_the_log(entries: list[Entry]) -> None:
    numbers = [record.started.attempt for record in fold(entries).attempts]
    assert numbers == list(range(1, len(numbers) + 1))


@given(logs())
def test_only_the_latest_attempt_is_ever_open(entries: list[Entry]) -> None:
    assert all(record.ended is not None for record in fold(entries).attempts[:-1])


@given(logs())
def test_every_commit_was_written_by_the_owner_of_its_moment(entries: list[Entry]) -> None:
    for at, written in enumerate(entries):
        before, after = fold(entries[:at]), fold(entries[: at + 1])
        if len(after.checkpoints) > len(before.checkpoints):
            assert before.open_attempt is not None
            assert written.writer.attempt == before.open_attempt.started.attempt


@given(logs())
def test_a_checkpoint_is_never_forgotten(entries: list[Entry]) -> None:
    for at in range(len(entries)):
        before = [record.committed for record in fold(entries[:at]).checkpoints]
        assert [record.committed for record in fold(entries).checkpoints][: len(before)] == before


def test_a_quarantined_checkpoint_is_skipped_and_the_one_before_is_newest() -> None:
    bodies = [(opened(), None), (started(1), None), (committed(1, 1), 1), (committed(2, 1), 1), (quarantined(2, 1), 1)]
    state = fold(entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies))
    assert [reference.step for reference in state.resume] == [1]


def test_only_a_step_beyond_the_high_water_mark_is_progress() -> None:
    bodies = [
        (started(1), None),
        (committed(5, 1), 1),
        (ended(1), None),
        (started(2), None),
        (committed(5, 2), 2),
    ]
    state = fold(entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies))
    assert [record.made_progress for record in state.attempts] == [True, False]


@pytest.mark.parametrize(
    ("reason", "last_step", "is_doubted"), [("storage", 5, True), ("storage", 6, False), ("lost", 5, False)]
)
def test_only_an_attempt_that_ended_for_the_store_before_it_trained_a_step_casts_doubt_on_its_resume_point(
    reason: str, last_step: int, is_doubted: bool
) -> None:
    reference = committed(5, 1).reference
    bodies = [(started(1), None), (committed(5, 1), 1), (ended(1), None), (started(2, resumed_from=reference), None)]
    bodies += [(ended(2, reason, last_step=last_step), None)]
    state = fold(entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies))
    assert state.is_doubted(reference) is is_doubted


def test_a_flow_run_shows_the_open_attempt_and_no_other() -> None:
    claims = [entry(opened(), seq=0), entry(started(1), seq=1)]
    late = Writer(host="h", pid=1, attempt=1, flow_run_id="late")
    shown = fold([*claims, replace(entry(committed(5, 1), seq=2), writer=late)])
    assert shown.attempts[0].flow_run_id == "late" and not shown.refused
    over = [*claims, entry(ended(1), attempt=1, seq=2)]
    fenced = fold([*over, replace(entry(committed(5, 1), seq=3), writer=late)])
    assert fenced.attempts[0].flow_run_id is None and len(fenced.refused) == 1


def test_the_flow_run_that_claims_an_attempt_shows_it() -> None:
    claim = replace(entry(started(1), seq=1), writer=Writer(host="h", pid=1, flow_run_id="deployed"))
    assert fold([entry(opened(), seq=0), claim]).attempts[0].flow_run_id == "deployed"
