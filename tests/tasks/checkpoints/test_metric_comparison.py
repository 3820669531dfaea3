"""Comparisons with the champion: a difference's error, what may be compared, and what each kind of gate refuses."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.registry import Promoted, Refused, SuiteReference
from cairn.storage.logs.run_entries import EvaluationRecorded
from cairn.storage.logs.window_losses import WindowLosses
from cairn.tasks.checkpoints.metric_comparison import BLOCKS, paired_error
from cairn.tasks.checkpoints.promotion import PromotionRules, decide_promotion
from cairn.tasks.configuration.settings import MetricGate
from tests.tasks.checkpoints.promotion_records import PRIMARY, candidate, evaluation, gate, holding, promoted

TRIVIA = SuiteReference(name="trivia", sha256="t")
RULES = PromotionRules(required=(PRIMARY, TRIVIA))
NOISE = np.random.default_rng(3).normal(0, 0.1, 320)


def windows(mean: float, *, spread: float = 1.0, count: int = 320, tokens: int = 128, **other: float) -> WindowLosses:
    """Losses with this mean; two of another spread differ by noise."""
    noise = NOISE[:count] - NOISE[:count].mean()
    of = {"val_loss": mean, **other}
    return WindowLosses(
        window_tokens=tokens, losses={name: tuple((at + spread * noise).tolist()) for name, at in of.items()}
    )


def trivia(accuracy: float, **more: float) -> EvaluationRecorded:
    return evaluation(suite="trivia", suite_sha256="t", metrics={"accuracy": accuracy, **more})


def decide(
    ours: tuple[EvaluationRecorded, ...],
    theirs: tuple[EvaluationRecorded, ...],
    *gates: MetricGate,
    losses: Mapping[str, Any] | None = None,
    champion: Mapping[str, Any] | None = None,
) -> Promoted | Refused:
    """Offer a checkpoint where `losses` of r1, and of the champion r0, are those by window, or why there are none."""

    def read(run_id: str, item: EvaluationRecorded) -> WindowLosses | None:
        found = (losses or {}).get(run_id) if "val_loss" in item.metrics else None
        if isinstance(found, Exception):
            raise found
        return found

    decision = decide_promotion(
        holding(replace(promoted(**(champion or {})), metrics=theirs[0].metrics if theirs else {"val_loss": 3.0})),
        candidate(*ours),
        replace(RULES, gates=gates, min_improvement=0.0, required=(PRIMARY, TRIVIA) if len(ours) > 1 else (PRIMARY,)),
        alias="champion",
        read_evaluations=lambda _: theirs,
        read_losses=read,
    )
    assert decision is not None
    return decision


def test_the_error_is_that_of_the_mean_difference_over_blocks_of_windows() -> None:
    losses, others = [float(index % 2) for index in range(BLOCKS)], [0.5] * BLOCKS
    assert paired_error(losses, others) == pytest.approx((0.25 * BLOCKS / (BLOCKS - 1) / BLOCKS) ** 0.5)


def test_neighbouring_windows_that_are_alike_count_as_few() -> None:
    document = np.repeat(np.random.default_rng(1).normal(size=BLOCKS), 10)
    shuffled = np.random.default_rng(2).permutation(document)
    alike, apart = (paired_error(losses.tolist(), [0.0] * 320) for losses in (document, shuffled))
    assert alike is not None and apart is not None and alike > 2.5 * apart


def test_what_both_runs_find_hard_is_no_error_of_their_difference() -> None:
    hard = np.random.default_rng(1).normal(3, 1, 320)
    assert paired_error(hard.tolist(), (hard - 0.25).tolist()) == pytest.approx(0.0, abs=1e-12)


def test_of_fewer_than_eight_windows_no_error_is_known() -> None:
    assert paired_error([1.0] * 7, [2.0] * 7) is None


@pytest.mark.parametrize(("mean", "expected"), [(2.995, "better"), (2.98, "Promoted"), (3.01, "better")])
def test_an_improvement_within_the_noise_of_the_windows_is_refused(mean: float, expected: str) -> None:
    losses = {"r1": windows(mean, spread=2.0), "r0": windows(3.0)}
    assert gate(decide((evaluation(val_loss=mean),), (evaluation(10, 3.0),), losses=losses)) == expected


def test_a_promotion_keeps_the_difference_and_its_error_and_says_both() -> None:
    losses = {"r1": windows(2.5, spread=2.0), "r0": windows(3.0)}
    decision = decide((evaluation(val_loss=2.5),), (evaluation(10, 3.0),), losses=losses)
    assert isinstance(decision, Promoted)
    (found,) = decision.differences
    assert (found.metric, found.value, found.before, found.better_by) == ("val_loss", 2.5, 3.0, 0.5)
    assert found.error == pytest.approx(0.1 / 320**0.5, rel=0.4)
    assert decision.why == f"val_loss 2.5000, before 3.0000: better by 0.5000 ± {found.error:.4f}"


def test_a_refusal_keeps_them_too_and_names_the_noise() -> None:
    losses = {"r1": windows(2.995, spread=2.0), "r0": windows(3.0)}
    decision = decide((evaluation(val_loss=2.995),), (evaluation(10, 3.0),), losses=losses)
    assert isinstance(decision, Refused) and decision.differences[0].better_by == pytest.approx(0.005)
    assert "better by 0.0050 ± " in decision.detail and "(noise of the sample)" in decision.detail


@pytest.mark.parametrize("missing", ["r0", "r1"])
def test_evaluations_of_before_losses_by_window_were_kept_are_compared_and_no_error_is_known(missing: str) -> None:
    losses = {"r1": windows(2.9, spread=2.0), "r0": windows(3.0)} | {missing: None}
    decision = decide((evaluation(val_loss=2.9),), (evaluation(10, 3.0),), losses=losses)
    assert isinstance(decision, Promoted) and decision.differences[0].error is None
    assert decision.why.endswith("better by 0.1000, no error is known")


@pytest.mark.parametrize(
    ("theirs", "losses", "words"),
    [
        ({"suite_sha256": "other"}, {}, "was measured under another suite.*`cairn evaluate r0@10 --suite FILE`"),
        ({"data_snapshot": "e"}, {}, "was measured on other data"),
        ({}, {"r0": windows(3.0, count=160)}, "160 windows of 128 tokens, here 320 of 128"),
        ({}, {"r0": windows(3.0, tokens=64)}, "320 windows of 64 tokens, here 320 of 128"),
        ({}, {"r0": IntegrityError("x.json: is missing")}, "losses by window cannot be read: x.json: is missing"),
    ],
    ids=["suite", "data", "number of windows", "length of windows", "damaged losses"],
)
def test_two_samples_of_different_text_are_never_compared(
    theirs: dict[str, Any], losses: dict[str, Any], words: str
) -> None:
    found = {"r1": windows(1.0), "r0": windows(3.0), **losses}
    decision = decide((evaluation(val_loss=1.0),), (evaluation(10, 3.0, **theirs),), losses=found, champion=theirs)
    assert isinstance(decision, Refused) and (decision.gate, decision.differences) == ("comparable", ())
    assert re.search(words, decision.detail) and "--alias NAME" in decision.detail


HIGHER = {"metric": "accuracy", "suite": "trivia", "direction": "higher"}


@pytest.mark.parametrize(
    ("accuracy", "settings", "expected"),
    [
        (0.6, {}, "Promoted"),
        (0.5, {}, "better"),
        (0.6, {"margin": 0.2}, "better"),
        (0.4, {"direction": "lower"}, "Promoted"),
        (0.5, {"no_regression": True}, "Promoted"),
        (0.4, {"no_regression": True}, "better"),
        (0.45, {"no_regression": True, "margin": 0.1}, "Promoted"),
        (0.6, {"no_regression": True, "direction": "lower"}, "better"),
    ],
)
def test_a_gate_on_another_suites_metric_asks_for_its_direction_and_margin(
    accuracy: float, settings: dict[str, Any], expected: str
) -> None:
    asked = MetricGate(**HIGHER | settings)
    ours, theirs = (evaluation(val_loss=2.0), trivia(accuracy)), (evaluation(10, 3.0), trivia(0.5))
    assert gate(decide(ours, theirs, asked)) == expected


@pytest.mark.parametrize(
    ("accuracy", "no_regression", "expected"),
    [(0.54, False, "better"), (0.58, False, "Promoted"), (0.46, True, "Promoted"), (0.42, True, "better")],
)
def test_an_error_that_an_evaluator_prints_beside_its_metric_is_its_noise(
    accuracy: float, no_regression: bool, expected: str
) -> None:
    printed = {"accuracy_stderr": 0.03}
    ours, theirs = (
        (evaluation(val_loss=2.0), trivia(accuracy, **printed)),
        (evaluation(10, 3.0), trivia(0.5, **printed)),
    )
    assert gate(decide(ours, theirs, MetricGate(**HIGHER, no_regression=no_regression))) == expected


def test_the_error_of_a_metric_of_the_lm_evaluation_harness_is_found_by_its_name() -> None:
    printed = {"acc,none": 0.9, "acc_stderr,none": 0.3, "accuracy": 1.0}
    ours, theirs = (
        (evaluation(val_loss=2.0), trivia(**{**printed})),
        (evaluation(10, 3.0), trivia(**printed | {"acc,none": 0.5})),
    )
    decision = decide(ours, theirs, MetricGate(**HIGHER | {"metric": "acc,none", "no_regression": True}))
    assert isinstance(decision, Promoted) and decision.differences[1].error == pytest.approx(0.3 * 2**0.5)


def test_the_loss_of_one_source_may_not_become_worse_than_its_windows_noise() -> None:
    asked = MetricGate(metric="val_loss/wiki", no_regression=True)
    losses = {"r1": windows(2.0, spread=2.0, **{"val_loss/wiki": 3.1}), "r0": windows(3.0, **{"val_loss/wiki": 3.0})}
    both = [
        evaluation(step, loss, metrics={"val_loss": loss, "val_loss/wiki": wiki})
        for step, loss, wiki in ((20, 2.0, 3.1), (10, 3.0, 3.0))
    ]
    decision = decide((both[0],), (both[1],), asked, losses=losses)
    assert (
        isinstance(decision, Refused)
        and "val_loss/wiki 3.1000 must not be above the champion's 3.0000" in decision.detail
    )


def test_a_metric_that_the_champion_lacks_cannot_be_compared() -> None:
    decision = decide((evaluation(val_loss=2.0), trivia(0.9)), (evaluation(10, 3.0),), MetricGate(**HIGHER))
    assert isinstance(decision, Refused) and (decision.gate, "`cairn evaluate r0@10" in decision.detail) == (
        "comparable",
        True,
    )


@pytest.mark.parametrize("metric", ["perplexity", "bits_per_byte"])
def test_a_gate_on_the_loss_in_another_unit_is_refused_because_it_has_no_error(metric: str) -> None:
    with pytest.raises(ValueError, match="name val_loss"):
        MetricGate(metric=metric)
