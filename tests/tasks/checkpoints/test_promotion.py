"""The gates, in their order: each says no for its own reason, and tells what to do."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.registry import DatedDecision, Promoted, Refused, RegistryState, RolledBack, SuiteReference
from cairn.storage.logs.run_entries import CurveVerdict, EvaluationRecorded
from cairn.tasks.checkpoints.promotion import (
    Approval,
    Candidate,
    PromotionRules,
    decide_promotion,
    decision_on_record,
    refuse_unreadable,
)
from tests.entries import NOON
from tests.tasks.checkpoints.promotion_records import PRIMARY, candidate, evaluation, gate, holding, promoted

RULES = PromotionRules(required=(PRIMARY,), refuse_verdicts=("diverging", "stuck"))


def decide(
    offered: Candidate, *earlier: EvaluationRecorded, state: RegistryState | None = None, rules: PromotionRules = RULES
) -> Promoted | Refused | None:
    return decide_promotion(
        state or holding(promoted()),
        offered,
        rules,
        alias="champion",
        read_evaluations=lambda _: earlier,
        read_losses=lambda _, item: None,
    )


DIVERGING = CurveVerdict(kind="diverging", why="because")
NO_NUMBER = {"val_loss": math.nan}


@pytest.mark.parametrize(
    ("evaluations", "first"),
    [
        ([], "evaluated"),
        ([evaluation(metrics=NO_NUMBER, verdict=DIVERGING, data_snapshot="e")], "finite"),
        ([evaluation(val_loss=4.0, verdict=DIVERGING, data_snapshot="e")], "verdict"),
        ([evaluation(val_loss=4.0, data_snapshot="e")], "comparable"),
        ([evaluation(val_loss=4.0)], "better"),
        ([evaluation()], "approved"),
    ],
)
def test_the_gates_are_asked_in_one_order(evaluations: list[EvaluationRecorded], first: str) -> None:
    assert gate(decide(candidate(*evaluations), rules=replace(RULES, needs_approval=True))) == first


def test_weights_without_an_evaluation_are_refused_with_the_command_that_makes_one() -> None:
    decision = decide(candidate())
    assert gate(decision) == "evaluated"
    assert isinstance(decision, Refused) and "`cairn evaluate r1@20`" in decision.detail


def test_every_missing_required_evaluation_is_named() -> None:
    others = (SuiteReference(name="trivia", sha256="t"), SuiteReference(name="spelling", sha256="u"))
    decision = decide(
        candidate(evaluation(), evaluation(suite_sha256="t")), rules=replace(RULES, required=(PRIMARY, *others))
    )
    assert isinstance(decision, Refused)
    assert (decision.gate, "spelling" in decision.detail, "trivia" in decision.detail) == ("evaluated", True, False)


def test_with_all_required_evaluations_the_promotion_names_them() -> None:
    required = (PRIMARY, SuiteReference(name="trivia", sha256="t"))
    trivia = evaluation(suite_sha256="t", metrics={"accuracy": 0.5})
    decision = decide(candidate(trivia, evaluation()), rules=replace(RULES, required=required))
    assert isinstance(decision, Promoted)
    assert (decision.required, decision.metrics) == (required, evaluation().metrics)


@pytest.mark.parametrize("metrics", [{"val_loss": math.nan}, {"val_loss": math.inf}, {"perplexity": 1.0}])
def test_a_loss_that_is_no_number_is_refused(metrics: Mapping[str, float]) -> None:
    assert gate(decide(candidate(evaluation(metrics=metrics)))) == "finite"


def test_a_required_metric_that_is_no_number_is_refused_by_name() -> None:
    trivia = evaluation(suite="trivia", suite_sha256="t", metrics={"accuracy": math.nan})
    rules = replace(RULES, required=(PRIMARY, SuiteReference(name="trivia", sha256="t")))
    decision = decide(candidate(evaluation(), trivia), rules=rules)
    assert isinstance(decision, Refused) and (decision.gate, "accuracy (trivia) is nan" in decision.detail) == (
        "finite",
        True,
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("diverging", "verdict"), ("stuck", "verdict"), ("overfitting", "Promoted"), ("healthy", "Promoted")],
)
def test_only_the_verdicts_the_policy_names_are_refused(kind: str, expected: str) -> None:
    verdict = CurveVerdict(kind=kind, why="because")
    assert gate(decide(candidate(evaluation(verdict=verdict)))) == expected


@pytest.mark.parametrize(("champion_loss", "expected"), [(2.5, "Promoted"), (1.5, "better")])
def test_the_champions_later_evaluation_under_the_candidates_suite_decides(champion_loss: float, expected: str) -> None:
    decision = decide(
        candidate(evaluation()),
        evaluation(10, champion_loss),
        state=holding(promoted(suite_sha256="other", val_loss=9.0)),
    )
    assert gate(decision) == expected


def test_the_candidates_evaluation_under_the_champions_suite_is_compared_where_there_is_one() -> None:
    under_other = evaluation(suite_sha256="other", metrics={"val_loss": 7.0})
    decision = decide(candidate(evaluation(), under_other), state=holding(promoted(suite_sha256="other", val_loss=9.0)))
    assert isinstance(decision, Promoted) and (decision.suite_sha256, decision.metrics["val_loss"]) == ("other", 7.0)


@pytest.mark.parametrize(
    ("val_loss", "least", "expected"),
    [
        (3.0, 0.0, "better"),
        (3.1, 0.0, "better"),
        (2.9, 0.2, "better"),
        (2.75, 0.25, "Promoted"),
        (2.9, 0.0, "Promoted"),
    ],
)
def test_the_loss_must_be_below_the_champions_by_the_improvement_asked_for(
    val_loss: float, least: float, expected: str
) -> None:
    rules = replace(RULES, min_improvement=least)
    assert gate(decide(candidate(evaluation(val_loss=val_loss)), rules=rules)) == expected


@pytest.mark.parametrize("measured", [{"val_loss": 1.0}, {"data_snapshot": "e"}, {"suite_sha256": "o"}])
def test_a_refusal_that_another_alias_would_not_get_names_the_command_for_one(measured: dict[str, Any]) -> None:
    decision = decide(candidate(evaluation()), state=holding(promoted(**measured)))
    assert isinstance(decision, Refused) and "`cairn promote r1@20 --alias NAME`" in decision.detail


def test_the_first_promotion_has_nothing_to_be_better_than() -> None:
    decision = decide(candidate(evaluation()), state=RegistryState())
    assert isinstance(decision, Promoted) and (decision.previous, decision.why) == (
        None,
        "val_loss 2.0000, the first one",
    )


def test_weights_the_alias_points_at_are_not_promoted_again() -> None:
    assert decide(candidate(evaluation()), state=holding(promoted(20))) is None


def test_a_no_is_on_record_with_who_said_it_and_why() -> None:
    answer = Approval(is_given=False, by="ann", why="it insults people")
    decision = decide(candidate(evaluation(), approval=answer), rules=replace(RULES, needs_approval=True))
    assert isinstance(decision, Refused)
    assert (decision.gate, decision.by, "it insults people" in decision.detail) == ("approved", "ann", True)


def test_a_yes_promotes_in_the_name_and_the_words_of_who_said_it() -> None:
    answer = Approval(is_given=True, by="ann", why="it rhymes")
    decision = decide(candidate(evaluation(), approval=answer), rules=replace(RULES, needs_approval=True))
    assert isinstance(decision, Promoted)
    assert decision.by == "ann"
    assert decision.why == "val_loss 2.0000, before 3.0000: better by 1.0000, no error is known: it rhymes"


def test_a_yes_does_not_overrule_a_gate_before_it() -> None:
    answer = Approval(is_given=True, by="ann")
    assert gate(decide(candidate(evaluation(val_loss=4.0), approval=answer))) == "better"


def test_a_refusal_keeps_what_the_gate_looked_at_and_the_words_of_who_offered() -> None:
    decision = decide(candidate(evaluation(val_loss=4.0), why="a try"))
    assert isinstance(decision, Refused)
    assert (decision.suite_sha256, decision.metrics, decision.why) == ("s", evaluation(val_loss=4.0).metrics, "a try")


def test_a_checkpoint_that_is_gone_is_refused_with_the_command_that_lists_the_others() -> None:
    refused = refuse_unreadable(candidate(), "champion")
    assert (refused.gate, "`cairn checkpoints r1`" in refused.detail) == ("readable", True)


def test_what_was_decided_of_weights_is_found_though_it_was_rolled_back_since() -> None:
    back = RolledBack(alias="champion", manifest_sha256=None, by="ann", why="")
    state = RegistryState(
        history=History([DatedDecision(at=NOON, promoted=promoted(20)), DatedDecision(at=NOON, rolled_back=back)])
    )
    assert decision_on_record(state, f"{20:064x}") == promoted(20)


def test_an_offer_abandoned_before_the_gates_decided_is_no_decision() -> None:
    refused = replace(refuse_unreadable(candidate(), "champion"), gate="abandoned")
    assert (
        decision_on_record(RegistryState(history=History([DatedDecision(at=NOON, refused=refused)])), f"{20:064x}")
        is None
    )
