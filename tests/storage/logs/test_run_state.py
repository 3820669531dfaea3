"""The fold is a pure function of the entries, and folding goes on where it stopped."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

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


class Log(RuleBasedStateMachine):
    """A log in any order at all, honest or not, whose entries are folded one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.before, self.after = list[Entry](), fold([]), fold([])

    @rule(body=BODIES, attempt=st.none() | ATTEMPTS)
    def append(self, body: object, attempt: int | None) -> None:
        self.entries.append(entry(body, attempt=attempt, seq=len(self.entries)))
        self.before, unfolded = self.after, repr(self.after)
        self.after = fold(self.entries[-1:], self.before)
        assert repr(self.before) == unfolded, "folding changes no earlier state"

    @invariant()
    def folding_goes_on_where_it_stopped(self) -> None:
        assert self.after == fold(self.entries)

    @invariant()
    def attempt_numbers_rise_by_one(self) -> None:
        numbers = [record.started.attempt for record in self.after.attempts]
        assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def only_the_latest_attempt_is_open(self) -> None:
        assert all(record.ended is not None for record in self.after.attempts[:-1])

    @invariant()
    def every_commit_was_written_by_the_owner_of_its_moment(self) -> None:
        if len(self.after.checkpoints) > len(self.before.checkpoints):
            assert self.before.open_attempt is not None
            assert self.entries[-1].writer.attempt == self.before.open_attempt.started.attempt

    @invariant()
    def no_checkpoint_is_forgotten(self) -> None:
        known, found = ([record.committed for record in state.checkpoints] for state in (self.before, self.after))
        assert found[: len(known)] == known


def test_no_log_breaks_what_the_fold_promises() -> None:
    run_state_machine_as_test(Log, settings=settings(max_examples=50, stateful_step_count=15))  # type: ignore[no-untyped-call]


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
