"""Evaluations of one committed checkpoint on its own, and its offers to an alias; imports no orchestrator."""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from cairn.reports.queries import evaluations, run_lookup
from cairn.storage.logs import run_log, run_state
from cairn.storage.logs.registry import Promoted, Refused, Registry, RegistryState, SuiteReference
from cairn.tasks.checkpoints import promotion
from cairn.tasks.checkpoints.promotion import Approval, Candidate, Gate, PromotionRules
from cairn.tasks.configuration import addresses, configuration_source, network_module, run_configuration, settings
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.evaluator import evaluation_run
from cairn.tasks.machine.placement import this_person, work_folder


def plan_checkpoint(found: run_lookup.FoundCheckpoint, suite: str) -> evaluation_run.EvaluationPlan:
    """Return the plan: the run's suites, or those of a file; raises `InvalidConfiguration` for an invalid file."""
    config = run_lookup.configuration_of(found.log.state)
    allowed = configuration_source.allowed_code(os.environ)
    network_module.require_allowed(config.model, allowed)
    config = config.model_copy(update={"code": run_configuration.CodeConfig(allow=allowed)})
    if suite:
        try:
            path = addresses.find_file(suite, addresses.SUITES, folder=Path())
            evaluation = configuration_source.read_suite(path, config.evaluation)
        except TaskError as error:
            raise InvalidConfiguration(str(error)) from error
        config = config.model_copy(update={"evaluation": evaluation})
    return plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ))


def measure(found: run_lookup.FoundCheckpoint, *, suite: str, again: bool) -> tuple[evaluations.Outcome, ...]:
    """Evaluate under the run's suites, or those of a suite file, in turn; an evaluation on record only if `again`."""
    asked = partial(evaluation_run.Measurement, reference=found.reference, again=again, on_request=True)
    plans = plan_checkpoint(found, suite).all
    return tuple(evaluation_run.record_evaluation(found.log, asked(plan=plan)) for plan in plans)


def plan_evaluation(
    config: run_configuration.RunConfig, snapshot_id: str, work_dir: Path, *, faults: str = ""
) -> evaluation_run.EvaluationPlan:
    """Return the plan of the held-out suite, followed by those of the user's evaluators; files go to `work_dir`."""
    plan = evaluation_run.EvaluationPlan(
        suite=evaluation_run.suite_of(config.evaluation),
        model=config.model,
        snapshot_id=snapshot_id,
        cache_dir=work_dir / "snapshots",
        device=config.training.device,
        threads=config.training.threads,
        timeout_seconds=config.evaluation.timeout_seconds,
        budget=config.budgets.evaluator_failed,
        faults=faults,
        mask_documents=config.training.mask_documents,
        arithmetic=config.training.arithmetic,
        allowed_code=config.code.allow,
    )
    others = config.evaluation.evaluators
    return replace(plan, following=tuple(replace(plan, suite=s, timeout_seconds=s.timeout_seconds) for s in others))


def promotion_rules(config: run_configuration.RunConfig) -> PromotionRules:
    """Return the gates that the configuration asks for."""
    required = evaluation_run.required_suites_of(config.evaluation)
    return PromotionRules(
        required=tuple(SuiteReference(name=suite.name, sha256=suite.sha256) for suite in required),
        min_improvement=config.promotion.min_improvement,
        gates=config.promotion.gates,
        refuse_verdicts=config.promotion.refuse_verdicts,
        needs_approval=config.promotion.require_approval,
    )


def offer_as_person(found: run_lookup.FoundCheckpoint, alias: str, *, why: str = "") -> RegistryState:
    """Record the gates' decision with this person's name, approval and reason; raises `GateRefused`."""
    log, reference, by = found.log, found.reference, this_person()
    measured = promotion.evaluations_of(log.state, reference.manifest_sha256)
    yes = Approval(is_given=True, by=by, why=why)
    candidate = Candidate(run_id=log.run_id, reference=reference, evaluations=measured, by=by, why=why, approval=yes)
    rules = promotion_rules(run_lookup.configuration_of(log.state))
    return promotion.offer(log, Registry(log.store, alias), candidate, rules)


def end_on_record(log: run_log.RunLog, config: run_configuration.RunConfig) -> str:
    """Return how a finished run ended whose evaluations and decision are on record, or "": there is something to do."""
    state, rules = log.state, promotion_rules(config)
    last, candidate = last_checkpoint(state), best_candidate(log.run_id, state, rules)
    if state.finished is None or state.open_attempt is not None or last is None or candidate is None:
        return ""
    suites = (
        evaluation_run.suite_of(config.evaluation).sha256,
        *(suite.sha256 for suite in config.evaluation.evaluators),
    )
    required = (suite.sha256 for suite in rules.required)
    missing = missing_suites(state, last.committed.manifest_sha256, suites)
    if missing | missing_suites(state, candidate.reference.manifest_sha256, required):
        return ""
    registry = Registry(log.store, config.promotion.alias)
    foreseen = promotion.preview_offer(log, registry, candidate, replace(rules, needs_approval=False))
    before = describe_earlier_decision(registry, candidate, foreseen)
    return f"{describe_training(state)}; {before}" if before else ""


def describe_training(state: run_state.RunState) -> str:
    """Return how the training of a finished run ended."""
    return f"stopped early: {state.finished.stopped}" if state.finished and state.finished.stopped else "trained"


def last_checkpoint(state: run_state.RunState) -> run_state.CheckpointRecord | None:
    """Return the checkpoint that the run finished with, else the newest one that can be read, or None."""
    finished = state.finished.manifest_sha256 if state.finished else None
    return next((r for r in state.readable if r.committed.manifest_sha256 == finished), state.newest_committed)


def missing_suites(state: run_state.RunState, manifest_sha256: str, suites: Iterable[str]) -> set[str]:
    """Return those of the suites, by hash, under which no evaluation of these weights is on record."""
    return set(suites) - {item.suite_sha256 for item in promotion.evaluations_of(state, manifest_sha256)}


def best_candidate(run_id: str, state: run_state.RunState, rules: PromotionRules) -> Candidate | None:
    """Return the readable checkpoint with the lowest finite loss under the primary suite, or None without one."""
    known = [(record, item) for record in state.readable for item in reversed(record.evaluations)]
    fitting = [(record, item) for record, item in known if item.suite_sha256 == rules.required[0].sha256]
    finite = [(record, item) for record, item in fitting if math.isfinite(item.metrics.get(settings.METRIC, math.nan))]
    if not finite:
        return None
    record, best = min(finite, key=lambda pair: pair[1].metrics[settings.METRIC])
    measured = promotion.evaluations_of(state, best.manifest_sha256)
    return Candidate(run_id=run_id, reference=record.committed.reference, evaluations=measured, by=f"run {run_id}")


def describe_earlier_decision(registry: Registry, candidate: Candidate, foreseen: Promoted | Refused | None) -> str:
    """Return the recorded decision on these weights in words; empty if they are to be offered."""
    before = promotion.decision_on_record(registry.state, candidate.reference.manifest_sha256)
    champion, step = registry.state.champion, candidate.reference.step
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return promotion.describe_champion(champion)
    again = f"`cairn promote {candidate.run_id}@{step}` offers it again"
    if isinstance(before, Promoted):
        return f"step {step} has been {registry.alias} before and is not now; {again}"
    if before is None:
        return ""
    is_same = isinstance(foreseen, Refused) and (foreseen.gate, foreseen.detail) == (before.gate, before.detail)
    if before.gate == Gate.EVALUATED and not is_same:  # any other decision is final until a person overrules it
        return ""
    return f"not promoted: gate {before.gate!r} refused step {step} before: {before.detail}; {again}"
