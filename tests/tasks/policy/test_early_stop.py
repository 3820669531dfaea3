"""The policy in step order, and its reading of the log: whoever asks, whenever, gets one answer."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.run_entries import (
    CheckpointQuarantined,
    CheckpointSuperseded,
    CurveVerdict,
    EvaluationFailed,
    EvaluationRecorded,
)
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_state import RunState
from cairn.tasks.checkpoints.retention import RetentionTerms, plan_retention
from cairn.tasks.configuration.settings import CheckpointConfig, EarlyStopConfig
from cairn.tasks.policy.early_stop import Stop, StopTerms, decide, find_stop, outstanding
from tests.entries import CONFIG, NOON, evaluated, started
from tests.storage.builders import committed, entry, opened

SUITE = "s"
FAILED: dict[str, Any] = {
    "step": 10,
    "manifest_sha256": committed(10, 1).manifest_sha256,
    "suite": "held-out",
    "suite_sha256": SUITE,
    "data_snapshot": "d",
    "detail": "it fell over",
    "seconds": 1.0,
}


def configured(**early_stop: Any) -> dict[str, Any]:
    """A stored configuration with a commit every 10 steps."""
    return CONFIG | {
        "checkpoint": CONFIG["checkpoint"] | {"every_steps": 10},
        "early_stop": CONFIG["early_stop"] | early_stop,
    }


PATIENT = configured(patience=2)


def steps(*losses: float, train: float | None = None, verdict: str = "") -> list[EvaluationRecorded]:
    numbers = {} if train is None else {"train_loss": train}
    judged = CurveVerdict(kind=verdict, why="so", numbers=numbers)
    return [replace(evaluated(10 * number, loss), verdict=judged) for number, loss in enumerate(losses, start=1)]


def stop_of(policy: EarlyStopConfig, evaluations: list[EvaluationRecorded]) -> tuple[int, str] | None:
    stop = decide(policy, evaluations)
    return (stop.step, stop.rule) if stop else None


def test_by_default_nothing_stops_a_run() -> None:
    worst = steps(3.0, 4.0, 5.0, 6.0, 7.0, train=0.1, verdict="diverging")
    assert not EarlyStopConfig().is_on and decide(EarlyStopConfig(), worst) is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3.0, 2.0, 2.1, 2.2), (40, "patience")),
        ((3.0, 2.0, 2.1, 1.9, 2.0), None),
        ((3.0, 2.0, 2.0, 2.0), (40, "patience")),
        ((3.0, 2.0, 2.1, 2.2, 1.0), (40, "patience")),
        ((), None),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    losses: tuple[float, ...], expected: tuple[int, str] | None
) -> None:
    assert stop_of(EarlyStopConfig(patience=2), steps(*losses)) == expected


def test_an_improvement_below_min_delta_is_none() -> None:
    policy = EarlyStopConfig(patience=2, min_delta=0.5)
    assert stop_of(policy, steps(3.0, 2.9, 2.8)) == (30, "patience")


def test_a_loss_that_is_not_a_number_improves_on_nothing() -> None:
    assert stop_of(EarlyStopConfig(patience=1), steps(3.0, float("nan"))) == (20, "patience")


def test_overfitting_must_last_for_its_patience_in_a_row() -> None:
    policy = EarlyStopConfig(overfit_ratio=1.5, overfit_patience=2)
    assert stop_of(policy, steps(3.1, 2.9, 3.1, 3.2, train=2.0)) == (40, "overfit_ratio")


@pytest.mark.parametrize(("loss", "expected"), [(3.0, (10, "overfit_ratio")), (2.9999, None)])
def test_a_held_out_loss_of_exactly_the_ratio_overfits(loss: float, expected: tuple[int, str] | None) -> None:
    assert stop_of(EarlyStopConfig(overfit_ratio=1.5, overfit_patience=1), steps(loss, train=2.0)) == expected


def test_without_a_train_loss_there_is_no_overfitting() -> None:
    assert stop_of(EarlyStopConfig(overfit_ratio=1.5, overfit_patience=1), steps(9.0)) is None


@pytest.mark.parametrize(("rule", "verdict"), [("on_divergence", "diverging"), ("on_stuck", "stuck")])
def test_a_verdict_stops_where_the_policy_says_so(rule: str, verdict: str) -> None:
    assert stop_of(EarlyStopConfig(**{rule: True}), steps(3.0, verdict=verdict)) == (10, rule)
    assert stop_of(EarlyStopConfig(**{rule: True}), steps(3.0, verdict="healthy")) is None


def test_more_evaluations_never_move_a_stop() -> None:
    policy, losses = EarlyStopConfig(patience=2), (3.0, 2.0, 2.1, 2.2, 1.0, 0.5)
    assert {stop_of(policy, steps(*losses[:count])) for count in range(4, 7)} == {(40, "patience")}


def test_a_ratio_that_every_run_has_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"overfit_ratio=0.9 must be above 1"):
        EarlyStopConfig(overfit_ratio=0.9)


def history(*bodies: object, config: dict[str, Any] | None = None) -> RunState:
    """Fold an opened, started run and these bodies, whose writer is their attempt."""
    begun = started(1, config=config or PATIENT)
    entries = [entry(opened()), entry(begun, attempt=1), *(entry(body, attempt=_writer(body)) for body in bodies)]
    return fold(entries)


def _writer(body: object) -> int | None:
    return getattr(body, "attempt", None) if type(body).__name__ == "CheckpointCommitted" else None


def measured(*losses: float) -> list[object]:
    bodies: list[object] = []
    for number, loss in enumerate(losses, start=1):
        bodies += [committed(10 * number, 1), evaluated(10 * number, loss)]
    return bodies


def test_the_log_alone_says_where_a_run_stops() -> None:
    state = history(*measured(3.0, 2.0, 2.1, 2.2, 1.0))
    assert find_stop(state, SUITE) == Stop(
        step=40, rule="patience", why="val loss 2.2000: 2 evaluations without improving on 2.0000 at step 20"
    )


def test_evaluations_of_another_suite_say_nothing() -> None:
    assert find_stop(history(*measured(3.0, 2.0, 2.1, 2.2)), "another") is None


def test_an_outstanding_evaluation_is_waited_for_whatever_later_ones_say() -> None:
    bodies = measured(3.0, 2.0, 2.1, 2.2)
    del bodies[3]
    state = history(*bodies)
    assert find_stop(state, SUITE) is None
    assert [r.committed.step for r in outstanding(state, StopTerms(PATIENT, SUITE))] == [20]


@pytest.mark.parametrize(("tries", "awaited"), [(0, [10]), (1, [10]), (2, [10]), (3, [])])
def test_an_evaluation_that_failed_is_waited_for_as_long_as_its_evaluator_has_retries(
    tries: int, awaited: list[int]
) -> None:
    config = PATIENT | {"budgets": CONFIG["budgets"] | {"evaluator_failed": {"retries": 2}}}
    another = EvaluationFailed(**FAILED | {"suite_sha256": "another"}, started_at=NOON)
    failed = [EvaluationFailed(**FAILED, started_at=NOON + timedelta(seconds=number)) for number in range(tries)]
    state = history(committed(10, 1), another, *failed, config=config)
    assert [record.committed.step for record in outstanding(state, StopTerms(config, SUITE))] == awaited


def test_an_evaluation_is_not_waited_for_once_the_run_has_spent_its_retries() -> None:
    config = PATIENT | {"budgets": CONFIG["budgets"] | {"evaluator_failed": {"retries": 5, "total": 1}}}
    failed = [EvaluationFailed(**FAILED, started_at=NOON + timedelta(seconds=number)) for number in range(2)]
    for tries, awaited in ((1, [10]), (2, [])):
        state = history(committed(10, 1), *failed[:tries], config=config)
        assert [record.committed.step for record in outstanding(state, StopTerms(config, SUITE))] == awaited


def test_the_terms_of_a_log_without_the_keys_of_a_configuration_are_refused_by_name() -> None:
    with pytest.raises(IntegrityError, match="the configuration in the run's log is invalid: data"):
        StopTerms({"training": {"steps": 1}}, SUITE)


def test_an_evaluation_whose_checkpoint_aged_out_unmeasured_is_passed_over() -> None:
    bodies = measured(3.0, 2.0, 2.1, 2.2)
    old = committed(20, 1)
    del bodies[3]
    gone = CheckpointSuperseded(step=20, attempt=1, prefix=old.prefix, manifest_sha256=old.manifest_sha256, why="old")
    assert find_stop(history(*bodies, gone), SUITE) is None
    assert find_stop(history(*bodies, gone, committed(50, 1), evaluated(50, 3.1)), SUITE) is not None


def test_a_commit_beside_the_rhythm_decides_nothing() -> None:
    beside = [committed(37, 1), evaluated(37, 9.0)]
    assert find_stop(history(*measured(3.0, 2.0, 2.1), *beside), SUITE) is None


def test_a_run_that_trained_its_last_step_no_longer_stops_early() -> None:
    assert find_stop(history(*measured(3.0, 2.0, 2.1, 2.2), committed(100, 1)), SUITE) is None


def test_quarantined_checkpoints_are_not_of_the_surviving_line() -> None:
    spoiled = committed(40, 1)
    away = CheckpointQuarantined(
        step=40, attempt=1, prefix=spoiled.prefix, manifest_sha256=spoiled.manifest_sha256, detail="torn"
    )
    assert find_stop(history(*measured(3.0, 2.0, 2.1, 2.2), away), SUITE) is None


def verdicts(state: RunState, **policy: int) -> dict[int, str]:
    """What retention keeps, by step, and why."""
    terms = RetentionTerms(policy=CheckpointConfig(**policy), suite_sha256=SUITE)
    by_prefix = {record.committed.prefix: record.committed.step for record in state.checkpoints}
    found = plan_retention(terms, state, ()).checkpoints
    return {by_prefix[verdict.key]: verdict.why for verdict in found if not verdict.is_over}


def test_retention_keeps_the_step_a_run_stops_at_and_the_best_before_it() -> None:
    state = history(*measured(3.0, 2.0, 2.1, 2.2, 1.0, 0.5))
    kept = verdicts(state, keep_last=1, keep_best=1)
    assert set(kept) == {20, 40, 60} and "stops early here" in kept[40] and "best 1" in kept[20]


def test_retention_keeps_what_an_early_stop_still_waits_for() -> None:
    bodies = measured(3.0, 2.9, 2.8, 2.7)
    del bodies[1]
    assert "outstanding" in verdicts(history(*bodies), keep_last=1, keep_best=0)[10]
    off = history(*bodies, config=configured())
    assert 10 not in verdicts(off, keep_last=1, keep_best=0)


def test_a_verdict_on_record_says_the_train_loss() -> None:
    config = configured(overfit_ratio=1.5, overfit_patience=1)
    item = evaluated(10, 3.0)
    seen = CurveVerdict(kind="healthy", why="so", numbers={"train_loss": 1.0})
    judged = replace(item, verdict=seen)
    stop = find_stop(history(committed(10, 1), judged, config=config), SUITE)
    assert stop is not None and stop.rule == "overfit_ratio"
