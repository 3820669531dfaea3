"""Why an attempt ended and what was decided, as text: first the answer, then the facts behind it, on one screen.

Evidence is read as receipts store it: an older, newer or foreign one may lack any key, or have another kind of value.
"""

import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cairn.reports.queries import post_mortem, receipts
from cairn.reports.text import answer_text, display_tables
from cairn.storage.stores.codec import stored_list
from cairn.tasks.policy.termination import DecisionAction, ExitCode, TerminationReason, read_terminations
from cairn.tasks.text import format

_MOST_CHANGES, _MOST_WINDOWS, _MOST_ITEMS, _MOST_LINES = 6, 8, 3, 5
_DETAIL_CHARACTERS, _STDERR_CHARACTERS, _LARGEST = 280, 108, 2**63
_EVIDENCE = {
    "stop_signal": "notice to leave by {}",
    "grace_ended": "it was killed because its grace period was over before it could commit",
    "store_error": "the store's error: {}",
    "kubernetes_reason": "Kubernetes gives the reason {}",
}
"""The sentence of each key of the evidence that is not empty; {} stands for its value."""


def post_mortem_blocks(facts: post_mortem.PostMortem) -> Iterator[answer_text.Block]:
    """Yield the answer, the sections behind it, and the last lines on the attempt's stderr."""
    yield f"{post_mortem_answer(facts)}\n"
    if facts.attempt is None:
        return
    yield dict(post_mortem_sections(facts))
    if facts.attempt.passed_over:
        yield "\ncheckpoints that it could not start from:"
        yield display_tables.checkpoints_table(facts.attempt.passed_over[-_MOST_ITEMS:])
    if facts.attempt.quarantines:
        yield f"\nthe newest data that was quarantined at its start; all: cairn log {facts.status.run_id}"
        yield display_tables.quarantines_table(facts.attempt.quarantines[-_MOST_ITEMS:])
    if facts.attempt.evaluations:
        yield "\nthe newest evaluations of its checkpoints:"
        yield display_tables.evaluations_table(facts.attempt.evaluations[-_MOST_ITEMS:])
    if (ended := facts.attempt.record.ended) is not None:
        tail = [line for line in (format.sanitize(it, kept="").rstrip() for it in ended.stderr_tail) if line.strip()]
        yield "\nlast lines on its stderr:" if tail else "\nnothing is on record of its stderr"
        yield from (f"  {line[:_STDERR_CHARACTERS]}" for line in tail[-_MOST_LINES:])
        if len(tail) > _MOST_LINES:
            yield f"  … and {len(tail) - _MOST_LINES} lines before: cairn explain {facts.status.run_id} --json"


def post_mortem_answer(facts: post_mortem.PostMortem) -> str:
    """Return how the attempt ended or stands, its cost and what followed."""
    if facts.attempt is None:
        steps = format.format_count(facts.status.total_steps, "step")
        aim = f"to train {facts.model_family} for {steps}, and nothing was tried"
        opened = f"it was opened on {format.format_time(facts.opened_at)} {aim}"
        return f"Run {facts.status.run_id} has no attempts yet: {opened}. Now: {facts.status.next}."
    return format.one_line(" ".join(f"{sentence}." for sentence in _answer(facts, facts.attempt)))


def post_mortem_sections(facts: post_mortem.PostMortem) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each section behind the answer; none without an attempt."""
    for label, found in _sections(facts, facts.attempt) if facts.attempt else ():
        sentences = [format.one_line(sentence) for sentence in found if sentence]
        sentences[1:] = [f"{sentence[0].upper()}{sentence[1:]}" for sentence in sentences[1:]]
        if sentences:
            yield label, " ".join(item if item.endswith((".", "!", "?", "`")) else f"{item}." for item in sentences)


def _answer(facts: post_mortem.PostMortem, attempt: post_mortem.AttemptFacts) -> Iterator[str]:
    status, receipt, after = facts.status, attempt.receipt, attempt.successor
    name = f"Attempt {receipt.attempt} of {facts.run_attempts} of run {status.run_id}"
    step = f"step {attempt.reached_step:,} of {status.total_steps:,}"
    if attempt.record.ended is None:
        age, lease = attempt.heartbeat_age_seconds, attempt.lease_seconds
        seen = "" if age is None else f"; its last sign of life was {format.format_duration(age)} ago"
        if attempt.is_gone:
            yield f"{name} was at {step} when its process disappeared, and its end is not on record yet{seen}"
        elif age is not None and lease is not None and age > lease:
            limit = f"longer than the {format.format_duration(lease)} after which it counts as lost"
            yield f"{name} was at {step} when it fell silent{seen}, {limit}"
        else:
            yield f"{name} has not ended: it is at {step}{seen}"
        if status.symptom:
            yield f"Warning: {status.symptom}"
        yield f"Now: {status.next}"
        return
    reason, at = attempt.record.ended.reason, f"at {step}, on {format.format_time(receipt.ended_at)}"
    known = read_terminations().get(reason)
    yield f"{name} {known.summary.format(at=at) if known else f'ended {at} for the reason {reason}'}"
    if receipt.injected:
        yield f"This end was injected: CAIRN_FAULTS lists {', '.join(receipt.injected)}"
    yield _cost(attempt)
    if after is None:
        yield f"Now: {status.next.removeprefix(f'attempt {receipt.attempt} ended: {reason}; ')}"
        return
    place = "the same host" if after.placement.host == receipt.placement.host else after.placement.host
    how = f" ({_difference(after)})" if _difference(after) else ""
    did = f"did {format.format_count(after.last_step - after.first_step, 'step')}"
    became = f"ended: {after.termination_reason}" if after.termination_reason else "is still open"
    origin = f"from step {after.first_step:,}{how} {format.format_duration(after.waiting_seconds)} later on {place}"
    yield f"Attempt {after.attempt} went on {origin}, {did} and {became}"
    yield f"The run is {status.state} now. Next: {status.next}"


def _cost(attempt: post_mortem.AttemptFacts) -> str:
    receipt, lost, reached = attempt.receipt, attempt.lost_steps, attempt.reached_step
    seconds, kept = receipt.wasted_gpu_seconds or 0.0, receipt.last_committed_step
    if not lost and seconds < 0.05:
        idle = reached == receipt.first_step
        return "It had trained no step yet, so nothing was lost" if idle else "All it did was kept: nothing was lost"
    which = format.format_steps(reached - lost + 1, reached)
    parts = [f"{format.format_count(lost, 'step')} ({which})"] if lost else []
    parts.append(f"{format.format_duration(seconds)} of its {format.format_duration(receipt.gpu_seconds)} device time")
    now = f"it had committed nothing, so the run stood at step {receipt.first_step:,} again"
    return f"Lost: {' and '.join(parts)}; {now if kept is None else f'everything up to step {kept:,} was kept'}"


def _sections(facts: post_mortem.PostMortem, attempt: post_mortem.AttemptFacts) -> Iterator[tuple[str, Iterable[str]]]:
    receipt, total = attempt.receipt, facts.status.total_steps
    faults, ended = attempt.record.started.faults, attempt.record.ended
    steps = f"this attempt was to do steps {receipt.first_step + 1:,} to {total:,}"
    yield (
        "trying",
        (
            f"train a {facts.model_family} model for {format.format_count(total, 'step')}; {steps}",
            f"Code version {receipt.code_version}, micro-batch {receipt.micro_batch}",
            ", ".join(f"{name} {version}" for name, version in receipt.versions.items()),
            f"CAIRN_FAULTS lists faults to inject: {format.one_line(faults, 160)}" if faults else "",
        ),
    )
    yield "config", [_config(attempt)]
    count = len({window for item in attempt.quarantines for window in item.windows})
    quarantined = f"{format.format_count(count, 'window')} of it quarantined{', never drawn again' if count else ''}"
    drawn = f"Draws {format.describe_mixture(facts.mixture)}" if facts.mixture else ""
    yield "data", [f"snapshot {format.short_digest(receipt.data_snapshot)}, at the start {quarantined}", drawn]
    yield "where", _where(attempt)
    yield "set out", _origin(attempt)
    yield "got to", _progress(attempt)
    if ended is not None:
        yield "ended", _end(attempt, ended.evidence)
    yield "decided", _decision(receipt)
    yield "no effect", (f"its entry {seq} had no effect: {why}" for seq, why in attempt.refused.items())


def _config(attempt: post_mortem.AttemptFacts) -> str:
    receipt = attempt.receipt
    digest, before = f"configuration {format.short_digest(receipt.config_sha256)}", f"attempt {receipt.attempt - 1}"
    if receipt.attempt == 1:
        return f"{digest}; there is none before it to compare with"
    if not attempt.config_changes:
        return f"{digest}, the same as {before}'s in every key"
    changes = []
    for key, values in attempt.config_changes.items():
        shown = ("(absent)" if it is None else format.one_line(format.format_value(it), 60) for it in values)
        changes.append(f"{key} {' → '.join(shown)}")
    by = f" (decided after {before}: {_difference(receipt)})" if _difference(receipt) else ""
    return f"{digest}; different from {before}: {format.format_list(changes, _MOST_CHANGES)}{by}"


def _where(attempt: post_mortem.AttemptFacts) -> Iterator[str]:
    where, peak = attempt.receipt.placement, attempt.receipt.peak
    many = f" × {where.world_size}" if where.world_size > 1 else ""
    moved = {None: "", True: ", the machine of the attempt before", False: ", another machine or boot than before"}
    name = f" ({where.device_name})" if where.device_name else ""
    threads = f"{format.format_count(where.threads, 'thread')} on {format.format_count(where.cores, 'core')}"
    place = f"host {where.host}, process {where.pid}, {where.device}{many}{name}, {threads}, boot {where.boot_id[:8]}"
    yield f"{place}{moved[attempt.same_machine]}"
    if others := where.hosts[1:]:
        yield f"With {format.format_list(others, _MOST_CHANGES)}"
    for host, count in attempt.failed_hosts.items():
        yield f"{count} of this run's attempts were lost or hung with {host} (of all runs: cairn sql 'from hosts')"
    if arithmetic := attempt.receipt.arithmetic:
        yield f"arithmetic {arithmetic.digest} ({arithmetic.name}: {arithmetic})"
    if differs := attempt.receipt.arithmetic_moved:
        yield differs
    if peak:
        yield f"MFU is of {format.format_quantity(peak.flops, 'FLOP/s')} a device ({peak.source})"


def _origin(attempt: post_mortem.AttemptFacts) -> Iterator[str]:
    receipt, resumed, reached = attempt.receipt, attempt.record.started.resumed_from, attempt.reached_before
    if resumed is None:
        is_first = receipt.attempt == 1
        nothing = "nothing was committed yet" if is_first else "no checkpoint was committed that could be read"
        yield f"from the beginning, step 0: {nothing}"
    else:
        when = f" on {format.format_time(attempt.resumed_committed_at)}" if attempt.resumed_committed_at else ""
        names = f"{resumed.prefix.rsplit('/', 1)[-1]}, manifest {format.short_digest(resumed.manifest_sha256)}"
        by = f"committed by attempt {resumed.attempt}{when} and verified at start"
        yield f"from step {resumed.step:,}, {by} ({names})"
    if reached is not None and reached > receipt.first_step:
        again = format.format_steps(receipt.first_step + 1, reached)
        yield f"The attempt before had reached step {reached:,}; {again} had to be done again"
    since = "the opening" if receipt.attempt == 1 else "the last sign of life before it"
    ready = f", {receipt.gathering_seconds:.0f} s of it for other machines" if receipt.gathering_seconds >= 1 else ""
    if receipt.starting_seconds is not None:
        ready += f", ready to train {format.format_duration(receipt.starting_seconds)} later"
    yield f"Started {format.format_duration(receipt.waiting_seconds)} after {since}{ready}"


def _progress(attempt: post_mortem.AttemptFacts) -> Iterator[str]:
    receipt, reached, took = attempt.receipt, attempt.reached_step, format.format_duration(attempt.seconds)
    done, last, is_open = reached - receipt.first_step, attempt.last_record, attempt.record.ended is None
    taking = f" since it started {took} ago" if is_open else f" in {took}"
    if not done:
        why = "its first step is not done yet" if is_open else "it ended before its first step was done"
        yield f"no step at all{taking}: {why}"
        return
    loss = "" if last is None else f"; train loss {last.train_loss:.4g} at step {last.step:,}"
    yield f"step {reached:,}: {format.format_count(done, 'step')}{taking}{loss}"
    if not is_open and reached > receipt.last_step:
        yield f"Its own step records say so; when its end was put on record only step {receipt.last_step:,} was known"
    now = {"quarantined": " (quarantined now)"}
    steps = [f"{item.committed.step:,}{now.get(item.state, '')}" for item in attempt.committed]
    shown = steps if len(steps) <= _MOST_WINDOWS else [steps[0], "…", *steps[-3:]]
    at = f", at step{'' if len(steps) == 1 else 's'} {', '.join(shown)}" if steps else ""
    yield f"{format.format_count(len(steps), 'checkpoint')} committed{at}"


def _end(attempt: post_mortem.AttemptFacts, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the attempt ended, the evidence, why it leads to this reason, and who put the end on record."""
    receipt, writer, where = attempt.receipt, attempt.ended_by, attempt.receipt.placement
    reason, detail = receipt.termination_reason or "", receipt.detail or ""
    yield f"reason {reason}: {format.one_line(detail, _DETAIL_CHARACTERS)}"
    found = list(_evidence(evidence, detail))
    yield from found
    if not found and reason not in (TerminationReason.COMPLETED, TerminationReason.FENCED):
        yield "no exit code, no signal and no last words are on record"
    known = read_terminations().get(reason)
    if known and known.because:
        yield f"That makes it {reason}: {known.because}"
    if writer is not None:
        seconds = attempt.lease_seconds
        lease = f"the lease of {format.format_duration(seconds)}" if seconds else "the lease"
        how = f"which watched its heartbeat stay the same for {lease}"
        if writer.host == where.host:
            how = f"on the same host, where process {where.pid} was no longer there or had been silent for {lease}"
        yield f"It left no last words: its end was put on record by process {writer.pid} on {writer.host}, {how}"


def _evidence(evidence: Mapping[str, Any], detail: str) -> Iterator[str]:
    """Yield what the evidence says beyond the detail of the end."""
    for name, sentence in _EVIDENCE.items():
        value = format.one_line(str(evidence.get(name) or ""), 200)
        if value and value not in detail:
            yield sentence.format(value)
    if evidence.get("silent_seconds") is not None:
        step = _number(evidence, "heartbeat_step")
        yield f"it was killed for its silence {'before its first step' if step is None else f'after step {step:,}'}"
    code, used, limit_bytes = (_number(evidence, name) for name in ("exit_code", "rss_bytes", "memory_limit_bytes"))
    if code is not None and not (code == 0 and evidence.get("finished")):
        number = -code if code < 0 else code - 128
        name = next((f" ({item.name})" for item in signal.Signals if item == number), "")
        how: Mapping[int, str] = {ExitCode.DONE: ", in order", ExitCode.PREEMPTED: ", in order: that of a preemption"}
        ended = f"with exit code {code}{how.get(code, f': signal {number}{name}' if name else '')}"
        yield f"the trainer process {f'was ended by signal {number}{name}' if code < 0 else f'ended {ended}'}"
    if (kills := _number(evidence, "oom_kills") or 0) or code == -signal.SIGKILL:
        yield f"the kernel counted {format.format_count(kills, 'kill')} for memory (oom_kill) in its control group"
    if used:
        sizes = [format.format_quantity(it) for it in (used, limit_bytes) if it]
        yield f"it used up to {' of '.join(sizes)}{' allowed' if limit_bytes else ''}"
    if isinstance(words := evidence.get("last_words"), Mapping):
        yield from _last_words(words, detail)


def _number(evidence: Mapping[str, Any], name: str) -> Any:
    found = evidence.get(name)
    return found if isinstance(found, int | float) and abs(found) < _LARGEST else None


def _last_words(words: Mapping[str, Any], detail: str) -> Iterator[str]:
    step, message, windows = _number(words, "step"), str(words.get("message", "")), stored_list(words, "windows")
    at = f" at step {step:,}" if step is not None else ""
    if message and message in detail:
        yield f"that error was its last words{at}"
    else:
        yield f"its last words{at}: {words.get('exception')}: {format.one_line(message, 200)}"
    frames = [str(line).strip() for line in stored_list(words, "traceback") if str(line).lstrip().startswith("File ")]
    if frames:
        head = frames[-1].partition("\n")[0]
        file, *rest = head.split('"', 2)[1:] or [head]  # `File "trainer/loop.py", line 12, in step`
        yield f"raised in {'/'.join(file.replace(chr(92), '/').rsplit('/', 2)[-2:])}{rest[0] if rest else ''}"
    if windows:
        which = format.format_list(windows, _MOST_WINDOWS)
        yield f"guilty: {format.format_count(len(windows), 'sample')} of the data (windows {which})"
    if (spike := _number(words, "spike_step")) is not None:
        yield f"the loss began to rise at step {spike:,}"


def _decision(receipt: receipts.Receipt) -> Iterator[str]:
    """Yield what was decided at the end, why, and what it was charged to; nothing while the attempt is open."""
    decision = receipt.decision
    if decision is None:
        return
    wait = f", after waiting {format.format_duration(decision.delay_seconds)}" if decision.delay_seconds else ""
    what = "try again" if decision.action == DecisionAction.RESUME else decision.action
    why = format.one_line(decision.reason, _DETAIL_CHARACTERS)
    yield f"{what}{wait}{'' if decision.reason == receipt.detail else f': {why}'}"
    if decision.charged is None:
        yield f"nothing was charged: {receipt.termination_reason} costs no retry"
    elif decision.action == DecisionAction.STOP:
        yield f"the budget {decision.charged} had to pay for this end and could not: it is spent"
    else:
        left = answer_text.describe_left(decision.left)
        yield f"the budget {decision.charged} paid for this end; left of it then: {left}"
        yield "a commit of new steps fills the retries up again"


def _difference(receipt: receipts.Receipt) -> str:
    """Return `micro-batch 4→2` of `after oom: micro-batch 4→2`; empty where nothing is different."""
    return receipt.changed.partition(": ")[2] if receipt.changed.startswith("after ") else receipt.changed
