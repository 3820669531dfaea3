"""What a report says, section by section, before it is a page: tables, facts, text, things to unfold.

Owns order, headings, words and how much of a long list is shown. Refuses Markdown and HTML: nothing here is escaped.
"""

from collections.abc import Iterator, Sequence

from reports.pages.evaluation_tables import others
from reports.pages.report_blocks import CURVE, TIMELINE, Block, Facts, Fold, Picture, Section, Table, Verbatim, Words
from reports.pages.run_report import RunReport
from reports.queries.evaluations import EvaluationSummary
from reports.queries.receipts import Receipt
from reports.queries.run_timeline import OPEN, Stretch, group_receipts
from tasks.text.format import (
    format_count,
    format_duration,
    format_list,
    format_time,
    format_value,
    one_line,
    short_digest,
)

_MOST_ROWS = 60
_MOST_RECEIPTS = 1500
_MOST_STRETCHES = 400
_DETAIL_CHARACTERS = 200
_RECEIPT = ("attempt", "started (UTC)", "lasted", "ended for", "steps", "device time", "lost", "next", "why")


def report_sections(report: RunReport) -> tuple[Section, ...]:
    """Return the sections in order; those with nothing to say are left out."""
    made = (
        ("In short", _short(report)),
        ("Curve", _curve(report)),
        ("Timeline", _timeline(report)),
        ("Why attempts ended", _reasons(report)),
        ("Receipts", _receipts(report)),
        ("Cost", _cost(report)),
        ("Budgets", _budgets(report)),
        ("Evaluations", _evaluations(report)),
        ("Samples", _samples(report)),
        ("Checkpoints", _checkpoints(report)),
        ("Promotions", _promotions(report)),
        ("Data", _data(report)),
        ("Environment", _environment(report)),
        ("How to make it again", _reproduction(report)),
    )
    sections = (Section(title=title, blocks=tuple(blocks)) for title, blocks in made)
    return tuple(section for section in sections if section.blocks)


def _short(report: RunReport) -> Iterator[Block]:
    status, best = report.status, report.best
    rows = [
        ("state", f"{status.state}{f', {status.stopped_early}' if status.stopped_early else ''}"),
        ("step", f"{status.step:,} of {status.total_steps:,}"),
        ("newest commit", "none yet" if status.newest_committed_step is None else f"{status.newest_committed_step:,}"),
        ("best held-out loss", f"{best.val_loss:.4g} nats per token at step {best.step:,}" if best else "not measured"),
        ("aliases", _aliases(report)),
        ("attempts", _ends(report)),
        ("device time", _device_time(report)),
        ("next", status.next),
    ]
    yield Facts(rows=tuple(rows))
    if report.state_sha256:
        sizes = {view.micro_batch for view in report.attempts}
        unless = "; here the micro-batch changed on the way, which can change the last bits" if len(sizes) > 1 else ""
        yield Words(
            text=f"State digest at step {status.newest_committed_step:,}: {report.state_sha256}. It covers weights, "
            "optimizer, random generators and the place in the data. A run of the same configuration that "
            f"nobody interrupts has the same digest at this step{unless}."
        )


def _aliases(report: RunReport) -> str:
    current = dict[str, str]()
    for item in reversed(report.promotions):
        if item.decision == "promoted":
            current[item.alias] = f"{item.alias} was pointed at step {item.step:,}"
    return "; ".join(current.values()) or "none points at it"


def _ends(report: RunReport) -> str:
    counts = ", ".join(f"{row.attempts:,} {row.reason}" for row in report.reasons)
    return f"{len(report.attempts):,}{f': {counts}' if counts else ''}"


def _device_time(report: RunReport) -> str:
    cost, share = report.cost, report.cost.useful_share
    return f"{format_duration(cost.gpu_seconds)}{f', {share:.1%} of it kept' if share is not None else ''}"


def _curve(report: RunReport) -> Iterator[Block]:
    if not report.curve:
        yield Words(text="No step is on record yet.")
        return
    last = report.curve[-1]
    least = min((point.val_loss for point in report.held_out), default=None)
    held = f", least held-out loss {least:.4g}" if least is not None else ""
    seen = f"train loss from {report.curve[0].train_loss:.4g} to {last.train_loss:.4g} at step {last.step:,}{held}"
    yield Picture(name=CURVE, text=f"Loss over steps: {seen}; one line, whatever was interrupted.")
    if report.verdict is not None:
        cures = f" Usual cures: {'; '.join(report.verdict.cures)}." if report.verdict.cures else ""
        yield Words(text=f"Verdict on the curve: {report.verdict.kind}. {report.verdict.why}.{cures}")


def _timeline(report: RunReport) -> Iterator[Block]:
    if not report.attempts:
        return
    cost = report.cost
    yield Picture(
        name=TIMELINE,
        text=f"{format_count(len(report.attempts), 'attempt')} over {format_duration(cost.elapsed_seconds)}, "
        f"{format_duration(cost.between_seconds)} of it between attempts.",
    )


def _reasons(report: RunReport) -> Iterator[Block]:
    if report.reasons:
        yield Words(text="The rarest first: what happens often is rarely what needs a person.")
        yield Table(
            columns=("reason", "attempts", "device time", "lost", "last attempt", "ended (UTC)", "said last"),
            rows=tuple(
                (
                    row.reason,
                    f"{row.attempts:,}",
                    format_duration(row.gpu_seconds),
                    format_duration(row.wasted_gpu_seconds),
                    row.last_attempt,
                    row.last_at,
                    one_line(row.last_detail, _DETAIL_CHARACTERS),
                )
                for row in report.reasons
            ),
            reasons="reason",
        )


def _receipts(report: RunReport) -> Iterator[Block]:
    groups = group_receipts(report.attempts)
    if not groups:
        yield Words(text="No attempt yet.")
        return
    shown = groups[-_MOST_STRETCHES:]
    if len(groups) > len(shown):
        yield Words(
            text=f"The newest {len(shown):,} of {len(groups):,} stretches; all: `cairn attempts {report.run_id}`"
        )
    yield Table(columns=_RECEIPT, rows=tuple(_stretch_row(item) for item in shown), reasons="ended for")
    left = _MOST_RECEIPTS
    for item in shown:
        if len(item.attempts) < 2 or left <= 0:
            continue
        views = item.attempts[:left]
        left -= len(views)
        title = f"{format_count(len(item.attempts), 'attempt')} in a row, {item.first.attempt} to {item.last.attempt}"
        columns = (*_RECEIPT[:3], *_RECEIPT[4:8])
        rows = tuple(tuple(_receipt_row(view)[:3] + _receipt_row(view)[4:8]) for view in views)
        yield Fold(title=f"{title}: {item.reason}", block=Table(columns=columns, rows=rows))


def _receipt_row(view: Receipt) -> tuple[object, ...]:
    lasted = format_duration((view.ended_at - view.started_at).total_seconds()) if view.ended_at else None
    return (
        view.attempt,
        view.started_at,
        lasted,
        view.termination_reason or OPEN,
        f"{view.first_step:,} → {view.last_step:,}",
        format_duration(view.gpu_seconds),
        None if view.wasted_gpu_seconds is None else format_duration(view.wasted_gpu_seconds),
        view.decision.action if view.decision else None,
        one_line(view.detail or "", _DETAIL_CHARACTERS) or None,
    )


def _stretch_row(item: Stretch) -> tuple[object, ...]:
    if len(item.attempts) == 1:
        return _receipt_row(item.first)
    lasted = (item.last.ended_at or item.last.started_at) - item.first.started_at
    return (
        f"{item.first.attempt} to {item.last.attempt}",
        item.first.started_at,
        format_duration(lasted.total_seconds()),
        f"{item.reason} × {len(item.attempts):,}",
        f"{item.first.first_step:,} → {item.last.last_step:,}",
        format_duration(sum(view.gpu_seconds for view in item.attempts)),
        format_duration(sum(view.wasted_gpu_seconds or 0.0 for view in item.attempts)),
        item.last.decision.action if item.last.decision else None,
        one_line(item.last.detail or "", _DETAIL_CHARACTERS) or None,
    )


def _cost(report: RunReport) -> Iterator[Block]:
    cost = report.cost
    if not report.attempts:
        return
    rows = [
        ("device time", f"{format_duration(cost.gpu_seconds)} ({cost.gpu_seconds / 3600:,.4g} GPU hours)"),
        ("kept in a commit", format_duration(cost.useful_gpu_seconds)),
        (
            "lost",
            f"{format_duration(cost.wasted_gpu_seconds)}; {format_count(cost.replayed_steps, 'step')} trained again",
        ),
        *([("not settled yet", format_duration(cost.open_gpu_seconds))] if cost.open_gpu_seconds else []),
        ("from first start to end", format_duration(cost.elapsed_seconds)),
        ("between attempts", format_duration(cost.between_seconds)),
        (
            "open, not training",
            f"{format_duration(cost.unused_seconds)} (starting, waiting, or gone before it was noticed)",
        ),
    ]
    if cost.money is not None and cost.wasted_money is not None and cost.gpu_hour_price is not None:
        money = f"about {cost.money:,.2f} {cost.currency}, of it {cost.wasted_money:,.2f} lost"
        price = f"{cost.gpu_hour_price:g} {cost.currency} a GPU hour"
        rows.append(("money (an estimate)", f"{money}; {price}, device time alone"))
    yield Facts(rows=tuple(rows))


def _budgets(report: RunReport) -> Iterator[Block]:
    budgets = report.status.budgets.items()
    yield Table(
        columns=("reason", "retries left", "spent since progress", "spent in all", "left in all"),
        rows=tuple(
            (reason, f"{item.left:,}", f"{item.spent:,}", f"{item.spent_total:,}", item.left_total)
            for reason, item in budgets
        ),
    )


def _evaluations(report: RunReport) -> Iterator[Block]:
    views = report.evaluations
    if not views:
        yield Words(text="Nothing was evaluated yet.")
        return
    if len(views) > _MOST_ROWS:
        yield Words(text=f"The newest {_MOST_ROWS} of {len(views):,}; all: `cairn evaluations {report.run_id}`")
    yield Table(
        columns=("step", "suite", "status", "val loss", "perplexity", "bits/byte", "others", "verdict", "detail"),
        rows=tuple(_evaluation_row(view) for view in views[-_MOST_ROWS:]),
    )


def _evaluation_row(view: EvaluationSummary) -> tuple[object, ...]:
    numbers = (view.metrics.get(name) for name in ("val_loss", "perplexity", "bits_per_byte"))
    verdict = view.verdict.kind if view.verdict else None
    detail = one_line(view.detail, _DETAIL_CHARACTERS) if view.detail else None
    return (f"{view.step:,}", view.suite, view.status, *numbers, others(view.metrics), verdict, detail)


def _samples(report: RunReport) -> Iterator[Block]:
    written = [view for view in report.evaluations if view.samples]
    if written:
        newest = written[-1]
        yield Words(text=f"Written at step {newest.step:,} by the suite {newest.suite}.")
        yield from (Verbatim(text=text[:4000]) for text in newest.samples[:8])


def _checkpoints(report: RunReport) -> Iterator[Block]:
    views = report.checkpoints
    if not views:
        yield Words(text="No checkpoint yet.")
        return
    if len(views) > _MOST_ROWS:
        yield Words(text=f"The newest {_MOST_ROWS} of {len(views):,}; all: `cairn checkpoints {report.run_id}`")
    yield Table(
        columns=("step", "attempt", "state", "bytes", "committed (UTC)", "manifest", "state digest"),
        rows=tuple(
            (
                f"{view.step:,}",
                view.attempt,
                view.state,
                f"{view.bytes:,}",
                view.committed_at,
                short_digest(view.manifest_sha256),
                short_digest(view.state_sha256),
            )
            for view in views[-_MOST_ROWS:]
        ),
    )


def _promotions(report: RunReport) -> Iterator[Block]:
    if not report.promotions:
        yield Words(text="No alias was offered a checkpoint of this run.")
        return
    yield Table(
        columns=("alias", "decision", "step", "at (UTC)", "by", "why"),
        rows=tuple(
            (
                item.alias,
                f"{item.decision}: {item.gate}" if item.gate else item.decision,
                item.step,
                item.at,
                item.by,
                one_line(item.why, _DETAIL_CHARACTERS),
            )
            for item in report.promotions[:_MOST_ROWS]
        ),
    )


def _data(report: RunReport) -> Iterator[Block]:
    data = report.data
    sources = format_list(data.sources, 8, more=f"cairn data {report.run_id}")
    windows = {window for item in data.quarantines for window in item.windows}
    rows = (
        ("snapshot", data.snapshot),
        ("sources", sources),
        ("tokenizer", data.tokenizer),
        ("quarantined", f"{format_count(len(windows), 'window')}, never drawn again" if windows else "nothing"),
    )
    yield Facts(rows=rows)
    if data.quarantines:
        yield Table(
            columns=("attempt", "reason", "windows", "why"),
            rows=tuple(
                (item.attempt, item.reason, format_list(item.windows, 12), one_line(item.detail, _DETAIL_CHARACTERS))
                for item in data.quarantines[-_MOST_ROWS:]
            ),
            reasons="reason",
        )


def _environment(report: RunReport) -> Iterator[Block]:
    if report.machines:
        rows: Sequence[tuple[object, ...]] = [
            (row.host, f"{row.world_size} × {row.device}", row.code_version, row.attempts) for row in report.machines
        ]
        if len(rows) > _MOST_ROWS:
            yield Words(text=f"The newest {_MOST_ROWS} of {len(rows):,}.")
        yield Table(columns=("host", "devices", "code version", "attempts"), rows=tuple(rows[-_MOST_ROWS:]))
    if report.versions:
        yield Facts(rows=tuple((name, format_value(version)) for name, version in sorted(report.versions.items())))


def _reproduction(report: RunReport) -> Iterator[Block]:
    made = report.reproduction
    yield Verbatim(text=made.command)
    if made.state_sha256:
        given = "; ".join(made.same)
        yield Words(text=f"At step {made.step:,} its state digest is then {made.state_sha256}, given {given}.")
    yield Words(
        text=f"Opened on {format_time(report.opened_at)}; told from entries 0 to {report.newest_seq:,} of the run log."
    )
