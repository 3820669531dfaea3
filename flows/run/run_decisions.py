"""The decisions beside and after training: evaluations and early stop of an attempt, what follows it, a promotion.

Evaluations run one at a time beside training, at most one behind it if they may stop the run. At the end the best
checkpoint is offered to the alias once, with approval where required: a deployed flow run is suspended until the answer
starts it again from the top, any other waits in its process. Without a server that a person can open the question stays
open; that is no refusal.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any
from uuid import UUID

from prefect import State, get_client, runtime, settings, states, suspend_flow_run
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import SetStateStatus
from prefect.input.run_input import RunInput, keyset_from_paused_state
from prefect.utilities.urls import url_for
from pydantic import Field

from cairn.flows.operations import checkpoint_operations
from cairn.flows.orchestrator import flow_run, prefect_server
from cairn.flows.run.active_run import ActiveRun
from cairn.flows.run.steps import Steps
from cairn.reports.text.answer_text import describe_end, describe_kept, describe_left
from cairn.reports.text.display_tables import markdown_text
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.logs import log_entry, run_entries
from cairn.storage.logs.registry import Promoted, Registry
from cairn.storage.stores.codec import sha256
from cairn.tasks import errors, evaluate, promote
from cairn.tasks.checkpoints import promotion
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, Measurement
from cairn.tasks.policy.early_stop import Stop, StopTerms, find_stop, finish, outstanding
from cairn.tasks.policy.termination import DecisionAction, FlowEnd, FlowOutcome, TerminationReason, flow_outcome
from cairn.tasks.text.format import format_count


class AttemptEvaluations:
    """Starts the evaluations of an attempt, waits for those that a decision needs, and decides on an early stop."""

    def __init__(self, run: ActiveRun, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="evaluate")  # evaluators share it with training
        self._futures: list[Future[object]] = []
        self._earlier = 0  # how many were started before the newest commit
        self._stop: Stop | None = None
        self._is_attempt_over = False

    def start_missing(self, steps: Steps) -> None:
        """Start the evaluations that were due in earlier attempts and have no outcome."""
        for plan, reference in self.missing():
            committed = Future[log_entry.CheckpointReference]()
            committed.set_result(reference)
            self._start(plan, committed, steps)

    def missing(self) -> Iterator[tuple[EvaluationPlan, log_entry.CheckpointReference]]:
        """Yield the evaluations that are due and have no outcome, in step order."""
        state, plans = self._run.log.state, self._run.evaluation.all
        lost = [(record.committed, plan) for plan in plans for record in outstanding(state, self._terms(plan))]
        for committed, plan in sorted(lost, key=lambda item: (item[0].step, plans.index(item[1]))):
            yield plan, committed.reference

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        return step == self._run.config.training.steps or self._terms(self._run.evaluation).is_due(step)

    def plans_at(self, step: int) -> tuple[EvaluationPlan, ...]:
        """Return the plans by which the checkpoint of this step is evaluated."""
        return self._run.evaluation.all if self.is_due(step) else ()

    def follow(self, committed: Future[log_entry.CheckpointReference], step: int, steps: Steps) -> None:
        """Evaluate the checkpoint of `step` once it is committed, if that is due."""
        self._futures = [future for future in self._futures if not future.done()]
        self._earlier = len(self._futures)
        for plan in self.plans_at(step):
            self._start(plan, committed, steps)

    def stop_run(self, until: int | None = None) -> bool:
        """Wait and return whether the run stops early, before the segment that ends at `until`, or before any."""
        is_last = until is None or until == self._run.config.training.steps
        awaited = self._futures if is_last else self._futures[: self._earlier]  # those before the newest commit
        return self._run.retry.call(self.is_over, awaited)

    def is_over(self, awaited: Sequence[Future[object]]) -> bool:
        """Wait for these evaluations or a shutdown; return whether the run stops here, as a finished one does."""
        run, plan = self._run, self._run.evaluation
        if run.log.state.finished is not None:
            return True
        if self._stop is None and self._terms(plan).config.early_stop.is_on:
            done: SimpleQueue[object] = SimpleQueue()
            for future in awaited:
                future.add_done_callback(done.put)
            with run.host.shutdown.on_shutdown(lambda: done.put(None)):
                for _ in awaited:
                    if done.get() is None:
                        break
            self._stop = find_stop(run.log.refresh(), plan.suite.sha256)
            if self._stop is not None:
                run.say(f"  stops early at step {self._stop.step}: {self._stop.why} (early_stop.{self._stop.rule})")
        return self._stop is not None

    def finish(self) -> None:
        """Wait for every evaluation, and say how many; failures are in the log already.

        The receipt is written: from now on they are given up when a shutdown is requested, and are not waited for.
        """
        self._is_attempt_over = True
        if not self._run.is_shutting_down():
            if count := self._outstanding():
                self._run.say(f"  {format_count(count, 'evaluation')} outstanding")
            self._beside.shutdown()

    def _outstanding(self) -> int:
        return sum(not future.done() for future in self._futures)

    def _start(self, plan: EvaluationPlan, committed: Future[log_entry.CheckpointReference], steps: Steps) -> None:
        def measure() -> None:
            reader = self._run.curve_reader
            asked = Measurement(reference=committed.result(), plan=plan, during_attempt=self._attempt, reader=reader)
            with self._run.progress.doing(f"evaluating step {asked}") as note:
                ended = steps.evaluate(replace(asked, note=note), self._run.log, leaves)
            self._run.sweep.start()  # an evaluation's end is the end of its pin
            if (count := self._outstanding() - 1) and not isinstance(ended, evaluate.Interrupted):
                step, left = asked.reference.step, format_count(count, "evaluation")
                self._run.say(f"  evaluated step {step}, {left} outstanding")

        def leaves() -> bool:
            return self._is_attempt_over and self._run.is_shutting_down()

        self._futures.append(self._beside.submit(copy_context().run, measure))

    def _terms(self, plan: EvaluationPlan) -> StopTerms:
        return StopTerms(self._run.log.state.attempts[-1].started.config, plan.suite.sha256)


def finish_run(run: ActiveRun, attempt: int) -> None:
    """Append run-finished if the last step is committed or the run stops early; quarantine what an early stop voids."""
    log, writer, state = run.log, run.writer(attempt), run.log.refresh()
    stop, newest = find_stop(state, run.evaluation.suite.sha256), state.newest_committed
    if stop is not None:
        last = next(record.committed for record in state.surviving_checkpoints if record.committed.step == stop.step)
        why = f"trained beyond step {stop.step}, where the run stopped early: {stop.why}"
        for record in state.readable:
            if record.committed.step > stop.step:
                quarantine_checkpoint(log, record.committed, why, writer=writer)
    elif newest is not None and newest.committed.step >= run.config.training.steps:
        last = newest.committed
    else:
        return
    body = finish(last, attempt, stop)
    log.append(lambda state: body if state.finished is None else None, writer=writer)


def end_after(run: ActiveRun, ended: run_entries.AttemptEnded) -> FlowEnd | None:
    """Return the run's end if no other attempt follows in this process, None if it goes on or is finished."""
    decision = ended.decision
    if decision.action == DecisionAction.FINISH:
        return None
    if run.cancellation.is_cancelling():
        return FlowEnd(reason=run.cancellation.outcome, message=f"{ended.detail}; the same command continues")
    if ended.reason == TerminationReason.PAUSED and not run.limit.why:
        return None  # by cost.limit: no other attempt can be claimed
    outcome = flow_outcome(ended.reason, decision.action, decision.charged, is_spent=decision.is_spent)
    if outcome is None:
        run.say(f"  {decision.reason}; left: {describe_left(decision.left)}")
        return None
    if outcome in (FlowOutcome.PREEMPTED, FlowOutcome.INTERRUPTED):
        kept = describe_kept(ended, run.log.state.resume_step)
        return FlowEnd(reason=outcome, message=f"{kept}; the same command continues")
    return FlowEnd(reason=outcome, message=describe_end(ended))


_POLL_SECONDS, _ASKED_SECONDS = 2.0, 15.0
_SLACK_SECONDS = 3600.0
"""Prefect fails a flow run that resumes after Prefect's own deadline, so that is later than ours."""


class PromotionApproval(RunInput):
    """The form that a person fills in."""

    approve: bool = Field(description="yes: the alias points at this checkpoint from now on; no: it is refused")
    by: str = Field(min_length=1, description="who you are, for the record")
    why: str = Field(default="", description="your reason, for the record")


def offer_best(run: ActiveRun, steps: Steps) -> FlowEnd:
    """Evaluate the last and the best checkpoint, and offer the best one unless that was decided before."""
    rules = checkpoint_operations.promotion_rules(run.config)
    try:
        _evaluate_candidates(run, rules, steps)
    except errors.EvaluationInterrupted as interrupted:
        return run.interrupted_end(f"trained; {interrupted}; the same command continues")
    state = run.log.refresh()
    how = checkpoint_operations.describe_training(state)
    candidate = checkpoint_operations.best_candidate(run.log.run_id, state, rules)
    if candidate is None:
        return flow_run.completed(f"{how}; nothing to promote: no evaluation succeeded")
    registry = Registry(run.log.store, run.config.promotion.alias)
    foreseen = promotion.preview_offer(run.log, registry, candidate, replace(rules, needs_approval=False))
    if before := checkpoint_operations.describe_earlier_decision(registry, candidate, foreseen):
        return flow_run.completed(f"{how}; {before}")
    if rules.needs_approval and isinstance(foreseen, Promoted):
        answer = ask(run, registry, foreseen, run.config.promotion.approval_timeout_seconds)
        run.overview.question = ""
        if isinstance(answer, str):
            named = f"{candidate.run_id}@{candidate.reference.step}"
            left = checkpoint_operations.describe_earlier_decision(registry, candidate, None) or (
                f"{registry.alias} is not changed, {named} waits for approval ({answer}); "
                f"`cairn promote {named}`, typed by a person, approves it, the same command asks again"
            )
            message = f"{how}; {left}"
            return run.interrupted_end(message) if run.is_shutting_down() else flow_run.completed(message)
        candidate = replace(candidate, approval=answer)
    decision = steps.promote(promote.Offer(candidate=candidate, rules=rules, registry=registry), run.log)
    return flow_run.completed(f"{how}; {decision.message}")


def _evaluate_candidates(run: ActiveRun, rules: promotion.PromotionRules, steps: Steps) -> None:
    """Evaluate the last checkpoint under every suite, then the best one under the suites that promotion requires."""
    last = checkpoint_operations.last_checkpoint(run.log.refresh())
    if last is not None:
        _evaluate_missing(run, last.committed.reference, run.evaluation.all, steps)
    best = checkpoint_operations.best_candidate(run.log.run_id, run.log.refresh(), rules)
    if best is not None and (last is None or best.reference != last.committed.reference):
        required = {suite.sha256 for suite in rules.required}
        with suppress(errors.CheckpointGone):  # then another one is the best
            plans = [plan for plan in run.evaluation.all if plan.suite.sha256 in required]
            _evaluate_missing(run, best.reference, plans, steps)


def _evaluate_missing(
    run: ActiveRun, reference: log_entry.CheckpointReference, plans: Sequence[EvaluationPlan], steps: Steps
) -> None:
    suites = (plan.suite.sha256 for plan in plans)
    missing = checkpoint_operations.missing_suites(run.log.state, reference.manifest_sha256, suites)
    for plan in plans:
        if plan.suite.sha256 in missing:
            asked = Measurement(reference=reference, plan=plan, reader=run.curve_reader)
            with run.progress.doing(f"evaluating step {asked}") as note:
                ended = steps.evaluate(replace(asked, note=note), run.log, run.is_shutting_down)
            if isinstance(ended, evaluate.Interrupted):
                raise errors.EvaluationInterrupted(ended.why)


def ask(run: ActiveRun, registry: Registry, proposal: Promoted, timeout_seconds: float) -> promotion.Approval | str:
    """Return the answer, or why there is none; in a deployed flow run the first call ends the process."""
    is_named = bool(settings.PREFECT_API_URL.value()) and not prefect_server.is_ephemeral_server(os.environ)
    flow_run_id = run.host.flow_run.wait_id(_ASKED_SECONDS) if is_named else None
    if flow_run_id is None:
        return "no Prefect server is named (PREFECT_API_URL) where a person could be asked"
    form: Any = PromotionApproval.with_initial_data(description=describe(proposal, registry.state.champion))
    key = sha256(f"{proposal.alias} {proposal.manifest_sha256}".encode())[:32]
    try:
        with get_client(sync_client=True) as client:
            asked_before = client.read_flow_run(flow_run_id).empirical_policy.pause_keys or set()
            if not runtime.deployment.get_id():
                paused: State[Any] = states.Paused(timeout_seconds=int(timeout_seconds + _SLACK_SECONDS), pause_key=key)
                keyset = keyset_from_paused_state(paused)
                paused.state_details.run_input_keyset = {str(name): stored for name, stored in keyset.items()}
                answer = client.set_flow_run_state(flow_run_id, paused)
                if answer.status is not SetStateStatus.ACCEPT:
                    return f"Prefect did not pause the flow run: {answer.details}"
                form.save(keyset, flow_run_id)
                _announce(run, proposal, timeout_seconds)
                if why := _wait(client, run, registry, proposal, timeout_seconds):
                    return why
                given = form.load(keyset, flow_run_id)
            else:
                if key not in asked_before:  # else this process was started by the answer
                    _announce(run, proposal, timeout_seconds)
                given = suspend_flow_run(wait_for_input=form, timeout=int(timeout_seconds), key=key)
            return promotion.Approval(is_given=given.approve, by=given.by, why=given.why)
    except Exception as error:  # whatever the API does, the run is trained and nothing is decided
        return f"Prefect could not ask: {error}"


def describe(new: Promoted, old: Promoted | None) -> str:
    """Return the Markdown above the form: the promotion as it would be recorded, and what the alias points at now."""
    before = old.metrics if old else {}
    rows = [
        "| | offered | now |",
        "|---|---|---|",
        f"| checkpoint | {new.run_id}@{new.step} | {f'{old.run_id}@{old.step}' if old else '–'} |",
        f"| manifest | {new.manifest_sha256[:8]} | {old.manifest_sha256[:8] if old else '–'} |",
    ]
    for name, value in sorted(new.metrics.items()):
        now = f"{before[name]:.4f}" if name in before else "–"
        rows.append(f"| {markdown_text(name)} | {value:.4f} | {now} |")
    curve = f" The loss curve is {markdown_text(new.verdict)}." if new.verdict else ""
    named, table = f"{new.run_id}@{new.step}", "\n".join(rows)
    return (
        f"# May `{new.alias}` point at `{named}`?\n\nEvery other gate said yes: {markdown_text(new.why)}.{curve}\n\n"
        f"{table}\n\n`cairn sample {named}` lets it write. `cairn promote {named}` is a yes too."
    )


def _announce(run: ActiveRun, proposal: Promoted, timeout_seconds: float) -> None:
    """Say the question with its deadline and where it is answered, and show it on the run's page."""
    named, alias, flow_run_id = f"{proposal.run_id}@{proposal.step}", proposal.alias, run.host.flow_run.id
    until = f"{datetime.now(UTC) + timedelta(seconds=timeout_seconds):%Y-%m-%d %H:%M:%S} UTC"
    run.say(
        f"may {alias} point at {named}? It waits for approval until {until}: resume flow run {flow_run_id} in "
        f"Prefect, {url_for('flow-run', obj_id=flow_run_id)}, or `cairn promote {named}` in another terminal"
    )
    run.overview.question = (
        f"**May `{alias}` point at `{named}`? It waits for approval until {until}.** "
        f"[Open the flow run](../../runs/flow-run/{flow_run_id}) and choose Resume (in its menu): a form asks for the "
        f"answer. `cairn promote {named}`, typed by a person, is a yes too."
    )


def _wait(client: SyncPrefectClient, run: ActiveRun, registry: Registry, proposal: Promoted, seconds: float) -> str:
    """Wait for the answer in this process; return why there is none, or "" for one."""
    known = promotion.decision_on_record(registry.state, proposal.manifest_sha256)
    deadline, woken = time.monotonic() + seconds, threading.Event()
    with run.progress.doing("waiting for approval"), run.host.shutdown.on_shutdown(woken.set):
        while not woken.is_set():
            with suppress(Exception):  # an API that is away for a while may come back with the answer
                state = client.read_flow_run(UUID(run.host.flow_run.id)).state
                if state is not None and state.is_running():
                    return ""
            if promotion.decision_on_record(registry.refresh(), proposal.manifest_sha256) is not known:
                return "it was decided elsewhere meanwhile"
            if time.monotonic() >= deadline:
                return f"nobody answered in Prefect within {seconds:g} s"
            woken.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    return f"{run.host.shutdown.signal} came before an answer"
