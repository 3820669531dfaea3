"""Why an attempt ended, in sentences, by evidence as receipts store it: an older or newer one may lack any key."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.reports.queries.evaluations import EvaluationSummary
from cairn.reports.queries.post_mortem import AttemptFacts
from cairn.reports.queries.receipts import Receipt
from cairn.storage.logs.run_entries import AttemptEnded
from cairn.tasks.policy.termination import TERMINATIONS, DecisionAction, ExitCode, TerminationReason
from cairn.tasks.text.format import format_count, format_duration, format_list, format_value, one_line

_MOST_WINDOWS = 8
DETAIL_CHARACTERS = 280
_LIMITS = {
    "retries": "retries",
    "total": "retries in all",
    "wasted_gpu_seconds": "seconds of lost device time",
    "samples": "samples that may be quarantined",
}


def evidence_sentences(evidence: Mapping[str, Any], receipt: Receipt) -> list[str]:
    """Return the evidence, one sentence each, and why it leads to the receipt's reason."""
    reason = receipt.termination_reason or ""
    found = [*_notices(evidence), *_exit(evidence, reason), *_memory(evidence), *_words(evidence, receipt.detail or "")]
    if not found and reason not in (TerminationReason.COMPLETED, TerminationReason.FENCED):
        found = ["no exit code, no signal and no last words are on record"]
    known = TERMINATIONS.get(reason)
    return [*found, f"That makes it {reason}: {known.because}"] if known and known.because else found


def end_writer_sentence(attempt: AttemptFacts) -> str:
    """Return which process recorded the end and how it knew, empty where the attempt's own parent did."""
    writer, where = attempt.ended_by, attempt.receipt.placement
    if writer is None:
        return ""
    lease = f"the lease of {format_duration(attempt.lease_seconds)}" if attempt.lease_seconds else "the lease"
    known = f"which watched its heartbeat stay the same for {lease}"
    if writer.host == where.host:
        known = f"on the same host, where process {where.pid} was no longer there or had been silent for {lease}"
    return f"It left no last words: its end was put on record by process {writer.pid} on {writer.host}, {known}"


def _notices(evidence: Mapping[str, Any]) -> Iterator[str]:
    if evidence.get("stop_signal"):
        by = f": {one_line(str(evidence['notice']), 160)}" if evidence.get("notice") else ""
        yield f"notice to leave by {evidence['stop_signal']}{by}"
    if evidence.get("grace_ended"):
        yield "it was killed because its grace period was over before it could commit"
    if evidence.get("cancelling"):
        yield f"a person cancelled it in {evidence.get('cancelled_in', 'Prefect')}"
    if evidence.get("fenced"):
        yield one_line(str(evidence["fenced"]), 200)
    if evidence.get("silent_seconds") is not None:
        allowed = evidence.get("allowed_seconds")
        limit = f"; its own steps allowed {format_duration(float(allowed))}" if allowed is not None else ""
        step = evidence.get("heartbeat_step")
        after = f" after step {step:,}" if step is not None else " before its first step"
        silent = format_duration(float(evidence["silent_seconds"]))
        yield f"the trainer was silent for {silent}{after}{limit}, then it was killed"
    if evidence.get("too_few_machines"):
        yield str(evidence["too_few_machines"])
    if evidence.get("store_error"):
        yield f"the store's error: {one_line(str(evidence['store_error']), 200)}"
    if evidence.get("kubernetes_reason"):
        yield f"Kubernetes gives the reason {evidence['kubernetes_reason']}"


def _exit(evidence: Mapping[str, Any], reason: str) -> Iterator[str]:
    code = evidence.get("exit_code")
    if code is None or (code == 0 and reason == TerminationReason.COMPLETED):
        return
    if code == 0:
        yield "the trainer process left in order (exit code 0)"
    elif code < 0:
        yield f"the trainer process was ended by signal {-code}{_signal_name(-code)}"
    elif code == ExitCode.PREEMPTED:
        yield "the trainer process left in order, with the exit code for a preemption (75)"
    elif code > 128 and _signal_name(code - 128):
        yield f"the trainer process ended with exit code {code}: signal {code - 128}{_signal_name(code - 128)}"
    else:
        yield f"the trainer process ended with exit code {code}"


def _signal_name(number: int) -> str:
    names = {int(item): item.name for item in signal.Signals}
    return f" ({names[number]})" if number in names else ""


def _memory(evidence: Mapping[str, Any]) -> Iterator[str]:
    kills, used, limit = (evidence.get(name) for name in ("oom_kills", "rss_bytes", "memory_limit_bytes"))
    if kills:
        yield f"the kernel counted {format_count(kills, 'kill')} for memory (oom_kill) in its control group"
    elif evidence.get("exit_code") == -signal.SIGKILL:
        yield "the kernel counted no kill for memory (oom_kill)"
    if used:
        sizes = [f"{it / 1e9:.2f} GB" if it >= 1e9 else f"{it / 1e6:,.0f} MB" for it in (used, limit) if it]
        yield f"it used up to {' of '.join(sizes)}{' allowed' if limit else ''}"


def _words(evidence: Mapping[str, Any], detail: str) -> Iterator[str]:
    last_words = evidence.get("last_words")
    if not isinstance(last_words, Mapping):
        return
    step = last_words.get("step")
    at = f" at step {step:,}" if step is not None else ""
    message = str(last_words.get("message", ""))
    if message and message in detail:
        yield f"that error was its last words{at}"
    else:
        yield f"its last words{at}: {last_words.get('exception')}: {one_line(message, 200)}"
    frames = [str(line).strip() for line in last_words.get("traceback", ()) if str(line).lstrip().startswith("File ")]
    if frames:
        head = frames[-1].partition("\n")[0]
        file, *rest = head.split('"', 2)[1:] or [head]  # `File "trainer/loop.py", line 12, in step`
        yield f"raised in {'/'.join(file.replace(chr(92), '/').rsplit('/', 2)[-2:])}{rest[0] if rest else ''}"
    windows = last_words.get("windows") or ()
    if windows:
        noun = "sample of the data (window" if len(windows) == 1 else "samples of the data (windows"
        yield f"guilty: {len(windows)} {noun} {format_list(list(windows), _MOST_WINDOWS)})"
    if last_words.get("spike_step") is not None:
        yield f"the loss began to rise at step {last_words['spike_step']:,}"


def budget_sentences(receipt: Receipt) -> Iterator[str]:
    """Yield what the end was charged to, and what is left of it."""
    decision = receipt.decision
    assert decision is not None
    if decision.charged is None:
        yield f"nothing was charged: {receipt.termination_reason} costs no retry"
        return
    if decision.action == DecisionAction.STOP:
        yield f"{decision.charged} had to pay for this end and could not: it is spent"
        return
    yield f"{decision.charged} paid for this end; left of it then: {describe_left(decision.left)}"
    yield "A commit of new steps fills the retries up again"


def describe_left(left: Mapping[str, int | None]) -> str:
    """Return what is left of a budget, limit by limit."""
    limits = (f"{format_value(value)} {_LIMITS.get(name, name)}" for name, value in left.items() if value is not None)
    return ", ".join(limits) or "no limit is set"


def describe_end(ended: AttemptEnded) -> str:
    """Return the detail of an end and the reason of its decision, once where both are the same."""
    return "; ".join(dict.fromkeys((ended.detail, ended.decision.reason)))


def decision_sentences(receipt: Receipt) -> list[str]:
    """Return what was decided at the end and why, nothing while the attempt is open."""
    decision = receipt.decision
    if decision is None:
        return []
    wait = f", after waiting {format_duration(decision.delay_seconds)}" if decision.delay_seconds else ""
    what = "try again" if decision.action == DecisionAction.RESUME else decision.action
    why = one_line(decision.reason, DETAIL_CHARACTERS)
    return [f"{what}{wait}"] if why == one_line(receipt.detail or "", DETAIL_CHARACTERS) else [f"{what}{wait}: {why}"]


def evaluation_sentences(evaluations: Sequence[EvaluationSummary], run_id: str) -> Iterator[str]:
    """Yield what the newest evaluations of an attempt's checkpoints measured."""
    if not evaluations:
        yield "none of its checkpoints was evaluated"
        return
    for item in evaluations[-3:]:
        if item.status == "failed":
            yield f"step {item.step:,} {item.suite}: failed ({one_line(item.detail or '', 100)})"
            continue
        named = sorted(item.metrics.items(), key=lambda item: (item[0] != "val_loss", item[0]))
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in named if name != "samples")
        yield f"step {item.step:,} {item.suite}: {one_line(numbers, 160)}"
    if len(evaluations) > 3:
        yield f"And {len(evaluations) - 3} before: cairn evaluations {run_id}"
