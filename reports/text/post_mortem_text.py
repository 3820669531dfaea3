"""A post-mortem as text: first the answer, then the facts behind it, on one screen."""

from collections.abc import Iterable, Iterator

from cairn.reports.queries.post_mortem import AttemptFacts, PostMortem
from cairn.reports.text import termination_text
from cairn.tasks.policy.termination import TERMINATIONS, TerminationReason
from cairn.tasks.text import format
from cairn.tasks.text.output import wrap, wrap_beside

WIDTH = 110
_LABEL = 12
_MOST_CHANGES, _MOST_WINDOWS, _MOST_QUARANTINES, _MOST_LINES, _MOST_PASSED_OVER = 6, 8, 3, 5, 4
_AFTER_BLANK = frozenset({"trying", "ended", "then"})


def post_mortem_lines(facts: PostMortem, columns: int | None = None) -> list[str]:
    """Return the lines of the post-mortem, none longer than 110 characters or the terminal's columns."""
    width, ended = min(columns or WIDTH, WIDTH), facts.attempt.ended if facts.attempt else None
    stderr = ended.stderr_tail if ended else ()
    tail = [line for line in (format.sanitize(item, kept="").rstrip() for item in stderr) if line.strip()]
    sections = list(post_mortem_sections(facts))
    if not tail and ended is not None:
        sections.append(("stderr", "nothing was recorded"))
    lines = wrap(post_mortem_answer(facts), width)
    for label, text in sections:
        lines += [""] if label in _AFTER_BLANK else []
        lines += wrap_beside(label, text, start=_LABEL, width=width)
    lines += ["", "last lines on its stderr:"] if tail else []
    lines += [f"  {line}" if len(line) <= width - 2 else f"  {line[: width - 3]}…" for line in tail[-_MOST_LINES:]]
    if len(tail) > _MOST_LINES:
        lines.append(f"  … and {len(tail) - _MOST_LINES} lines before: cairn explain {facts.status.run_id} --json")
    return lines


def post_mortem_answer(facts: PostMortem) -> str:
    """Return what happened in two or three sentences, on one line."""
    if facts.attempt is None:
        steps = format.format_count(facts.status.total_steps, "step")
        aim = f"to train {facts.model_family} for {steps}, and nothing was tried"
        opened = f"it was opened on {format.format_time(facts.opened_at)} {aim}"
        return f"Run {facts.status.run_id} has no attempts yet: {opened}. Now: {facts.status.next}."
    return format.one_line(" ".join(_answer(facts, facts.attempt)))


def post_mortem_sections(facts: PostMortem) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each section behind the answer; none without an attempt."""
    for label, found in _sections(facts, facts.attempt) if facts.attempt else ():
        sentences = [format.one_line(sentence) for sentence in found if sentence]
        sentences[1:] = [f"{sentence[0].upper()}{sentence[1:]}" for sentence in sentences[1:]]
        if sentences:
            yield label, " ".join(item if item.endswith((".", "!", "?", "`")) else f"{item}." for item in sentences)


def _answer(facts: PostMortem, attempt: AttemptFacts) -> Iterator[str]:
    status, receipt = facts.status, attempt.receipt
    name = f"Attempt {receipt.attempt} of {facts.run_attempts} of run {status.run_id}"
    step = f"step {attempt.reached_step:,} of {status.total_steps:,}"
    if attempt.ended is None:
        yield f"{name} {_describe_open(attempt, step)}."
        if status.symptom:
            yield f"Warning: {status.symptom}."
        yield f"Now: {status.next}."
        return
    reason, at = attempt.ended.reason, f"at {step}, on {format.format_time(receipt.ended_at)}"
    known = TERMINATIONS.get(reason)
    yield f"{name} {known.summary.format(at=at) if known else f'ended {at} for the reason {reason}'}."
    if receipt.injected:
        yield f"This end was injected: CAIRN_FAULTS lists {', '.join(receipt.injected)}."
    yield f"{_cost(attempt)}."
    yield f"{_afterwards(facts, attempt)}."


def _describe_open(attempt: AttemptFacts, where: str) -> str:
    age, lease = attempt.heartbeat_age_seconds, attempt.lease_seconds
    seen = "" if age is None else f"; its last sign of life was {format.format_duration(age)} ago"
    if attempt.is_gone:
        return f"was at {where} when its process disappeared, and its end is not on record yet{seen}"
    if age is not None and lease is not None and age > lease:
        limit = format.format_duration(lease)
        return f"was at {where} when it fell silent{seen}, longer than the {limit} after which it counts as lost"
    return f"has not ended: it is at {where}{seen}"


def _cost(attempt: AttemptFacts) -> str:
    receipt, lost = attempt.receipt, attempt.lost_steps
    seconds = receipt.wasted_gpu_seconds or 0.0
    if not lost and seconds < 0.05:
        idle = attempt.reached_step == receipt.first_step
        return "It had trained no step yet, so nothing was lost" if idle else "All it did was kept: nothing was lost"
    kept = f"it had committed nothing, so the run stood at step {receipt.first_step:,} again"
    if receipt.last_committed_step is not None:
        kept = f"everything up to step {receipt.last_committed_step:,} was kept"
    steps = [format.format_count(lost, "step")] if lost else []
    times = [f"{format.format_duration(seconds)} of device time"] if seconds >= 0.05 else []
    return f"{' and '.join(steps + times)} {'was' if lost == 1 and not times else 'were'} lost; {kept}"


def _afterwards(facts: PostMortem, attempt: AttemptFacts) -> str:
    after, receipt = attempt.successor, attempt.receipt
    if after is None:
        ended = f"attempt {receipt.attempt} ended: {receipt.termination_reason}; "
        return f"Now: {facts.status.next.removeprefix(ended)}"
    different = difference(after.changed)
    how = f" ({different})" if different else ""
    reached = f"got to step {after.last_step:,}" if after.last_step > after.first_step else "did no step"
    became = f"{reached} before it ended ({after.termination_reason})"
    if after.termination_reason is None:
        became = "is still open"
    elif after.termination_reason == TerminationReason.COMPLETED:
        became = "finished the run"
    state = "" if after.termination_reason == TerminationReason.COMPLETED else f"; the run is {facts.status.state} now"
    return f"Attempt {after.attempt} went on from step {after.first_step:,}{how} and {became}{state}"


def _sections(facts: PostMortem, attempt: AttemptFacts) -> Iterator[tuple[str, Iterable[str]]]:
    receipt, total, run_id = attempt.receipt, facts.status.total_steps, facts.status.run_id
    steps = f"this attempt was to do steps {receipt.first_step + 1:,} to {total:,}"
    yield (
        "trying",
        (
            f"train a {facts.model_family} model for {format.format_count(total, 'step')}; {steps}",
            f"Code version {receipt.code_version}, micro-batch {receipt.micro_batch}",
            ", ".join(f"{name} {version}" for name, version in receipt.versions.items()),
        ),
    )
    yield "config", [_config(attempt)]
    yield "data", _data(attempt, run_id)
    yield "where", _where(attempt)
    if attempt.faults:
        yield "faults", [f"CAIRN_FAULTS lists faults to inject: {format.one_line(attempt.faults, 160)}"]
    yield "set out", _origin(attempt)
    yield "got to", _progress(attempt)
    if attempt.ended is not None:
        detail = format.one_line(receipt.detail or "", termination_text.DETAIL_CHARACTERS)
        yield "ended", [f"reason {receipt.termination_reason}: {detail}"]
        evidence = termination_text.evidence_sentences(attempt.ended.evidence, receipt)
        yield "evidence", [*evidence, termination_text.end_writer_sentence(attempt)]
        yield "lost", [_lost(attempt)]
        yield "budget", termination_text.budget_sentences(receipt)
    yield "decided", termination_text.decision_sentences(receipt)
    yield "then", _then(facts, attempt)
    yield "measured", termination_text.evaluation_sentences(attempt.evaluations, run_id)
    if attempt.verdict is not None:
        yield "curve", [f"{attempt.verdict.kind}: {attempt.verdict.why}"]
    yield "no effect", (f"its entry {it.seq} ({it.kind}) had no effect because {it.why}" for it in attempt.refused)


def _config(attempt: AttemptFacts) -> str:
    receipt = attempt.receipt
    digest, before = f"configuration {format.short_digest(receipt.config_sha256)}", f"attempt {receipt.attempt - 1}"
    if receipt.attempt == 1:
        return f"{digest}; this was the first attempt, there is none to compare with"
    if not attempt.config_changes:
        return f"{digest}, the same as {before}'s in every key"
    changes, different = list[str](), difference(receipt.changed)
    for item in attempt.config_changes:
        values = (
            "(absent)" if it is None else format.one_line(format.format_value(it), 60)
            for it in (item.before, item.after)
        )
        changes.append(f"{item.key} {' → '.join(values)}")
    by = f" (decided after {before}: {different})" if different else ""
    return f"{digest}; different from {before}: {format.format_list(changes, _MOST_CHANGES)}{by}"


def _data(attempt: AttemptFacts, run_id: str) -> Iterator[str]:
    yield f"snapshot {format.short_digest(attempt.receipt.data_snapshot)}, the same for the whole run"
    quarantines = attempt.quarantines
    windows = {window for item in quarantines for window in item.windows}
    if not windows:
        yield "No part of it was quarantined when this attempt started"
        return
    count = format.format_count(len(windows), "window")
    yield f"{count} of it quarantined (never drawn again) when this attempt started"
    for item in quarantines[-_MOST_QUARANTINES:]:
        which = format.format_list(sorted(item.windows), _MOST_WINDOWS, more=f"cairn log {run_id} --json")
        noun = "window" if len(item.windows) == 1 else "windows"
        yield f"Attempt {item.attempt}, {item.reason}: {noun} {which} ({format.one_line(item.detail, 120)})"
    if len(quarantines) > _MOST_QUARANTINES:
        yield f"And {len(quarantines) - _MOST_QUARANTINES} earlier: cairn log {run_id}"


def _where(attempt: AttemptFacts) -> Iterator[str]:
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
    if peak:
        yield f"MFU is of {peak.flops / 1e12:.4g} TFLOP/s a device ({peak.source})"


def _origin(attempt: AttemptFacts) -> Iterator[str]:
    receipt, resumed, reached = attempt.receipt, attempt.resumed, attempt.reached_before
    if resumed is None:
        is_first = receipt.attempt == 1
        nothing = "nothing was committed yet" if is_first else "no checkpoint was committed that could be read"
        yield f"from the beginning, step 0: {nothing}"
    else:
        when = f" on {format.format_time(attempt.resumed_committed_at)}" if attempt.resumed_committed_at else ""
        names = f"{resumed.prefix.rsplit('/', 1)[-1]}, manifest {format.short_digest(resumed.manifest_sha256)}"
        by = f"committed by attempt {resumed.attempt}{when} and verified at start"
        yield f"from step {resumed.step:,}, {by} ({names})"
    for item in attempt.passed_over[-_MOST_PASSED_OVER:]:
        why = f"it is {item.state}{f': {format.one_line(item.detail, 120)}' if item.detail else ''}"
        why = "its bytes were being written, but never committed" if item.state == "writing" else why
        yield f"Not from step {item.step:,} of attempt {item.attempt}: {why}"
    if reached is not None and reached > receipt.first_step:
        again = format.format_steps(receipt.first_step + 1, reached)
        yield f"The attempt before had reached step {reached:,}; {again} had to be done again"
    elif resumed is not None and not attempt.passed_over:
        yield "That was the newest checkpoint there was"
    since = "the opening" if receipt.attempt == 1 else "the last sign of life before it"
    ready = f", {receipt.gathering_seconds:.0f} s of it for other machines" if receipt.gathering_seconds >= 1 else ""
    if receipt.starting_seconds is not None:
        ready += f", ready to train {format.format_duration(receipt.starting_seconds)} later"
    yield f"Started {format.format_duration(receipt.waiting_seconds)} after {since}{ready}"


def _progress(attempt: AttemptFacts) -> Iterator[str]:
    receipt, reached, took = attempt.receipt, attempt.reached_step, format.format_duration(attempt.seconds)
    done, is_open = reached - receipt.first_step, attempt.ended is None
    taking = f" since it started {took} ago" if is_open else f" in {took}"
    if not done:
        end = "its first step is not done yet" if is_open else "it ended before its first step was done"
        yield f"no step at all{taking}: {end}"
        return
    last = attempt.last_record
    loss = "" if last is None else f"; train loss {last.train_loss:.4g} at step {last.step:,}"
    yield f"step {reached:,}: {format.format_count(done, 'step')}{taking}{loss}"
    if not is_open and reached > receipt.last_step:
        yield f"Its own step records say so; when its end was put on record only step {receipt.last_step:,} was known"
    steps = [f"{item.committed.step:,}" for item in attempt.committed]
    if not steps:
        yield "Nothing committed"
        return
    shown = steps if len(steps) <= _MOST_WINDOWS else [steps[0], "…", *steps[-3:]]
    plural = "" if len(steps) == 1 else "s"
    yield f"{format.format_count(len(steps), 'checkpoint')} committed, at step{plural} {', '.join(shown)}"
    excluded = [f"{it.committed.step:,} is quarantined now" for it in attempt.committed if it.state == "quarantined"]
    yield format.format_list(excluded, 3)


def _lost(attempt: AttemptFacts) -> str:
    receipt, lost, reached = attempt.receipt, attempt.lost_steps, attempt.reached_step
    wasted, whole = (
        format.format_duration(receipt.wasted_gpu_seconds or 0.0),
        format.format_duration(receipt.gpu_seconds),
    )
    of_all = f"{wasted} of its {whole} device time"
    if not lost:
        return f"no step; {of_all}"
    which = format.format_steps(reached - lost + 1, reached)
    return f"{format.format_count(lost, 'step')} ({which}), trained but not committed; {of_all}, as far as is known"


def _then(facts: PostMortem, attempt: AttemptFacts) -> list[str]:
    after, receipt = attempt.successor, attempt.receipt
    if after is None:
        return [] if attempt.ended is None else [f"nothing has happened since; the run is {facts.status.state}"]
    later = max((after.started_at - (receipt.ended_at or after.started_at)).total_seconds(), 0.0)
    how = f", {difference(after.changed)}" if difference(after.changed) else ""
    outcome = f"then it ended: {after.termination_reason}" if after.termination_reason else "it is still open"
    done = after.last_step - after.first_step
    steps = f"{format.format_count(done, 'step')} done" if done else "no step done"
    place = "the same host" if after.placement.host == receipt.placement.host else after.placement.host
    return [
        f"attempt {after.attempt} started {format.format_duration(later)} later on {place} "
        f"from step {after.first_step:,}{how}; {steps}, {outcome}",
        f"The run is {facts.status.state} now. Next: {facts.status.next}",
    ]


def difference(changed: str) -> str:
    """Return `micro-batch 4→2` of `after oom: micro-batch 4→2`; empty where nothing is different."""
    return changed.partition(": ")[2] if changed.startswith("after ") else changed
