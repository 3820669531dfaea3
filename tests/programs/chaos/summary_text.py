"""The summary in words: as BENCHMARKS.md and a terminal show it, and one line for a run that is just over. Pure."""

from collections import Counter
from collections.abc import Iterable
from statistics import median

from cairn.storage.stores.codec import decode, encode
from tests.programs.chaos.kinds import Kind, Moment
from tests.programs.chaos.processes import Role
from tests.programs.chaos.summary import Outcome, Summary


def as_json(summary: Summary) -> bytes:
    """Return the summary as a sorted JSON document."""
    return encode(summary)


def from_json(data: bytes, *, where: str) -> Summary:
    """Return the summary in `data`; raises `IntegrityError` naming `where` on anything else."""
    return decode(data, Summary, where=where)


def as_markdown(summary: Summary) -> str:
    """Return totals, the table of kinds and moments, a row for each store and driver, and what does not hold."""
    counts = summary.counts()
    moments = [moment for moment in Moment if any(moment is struck for _, struck in counts)]
    lines = [
        *(f"- {said}" for said in _totals(summary)),
        "",
        f"| struck (processes killed) | {' | '.join(moments)} |",
        f"|---|{'---|' * len(moments)}",
    ]
    for kind in [kind for kind in Kind if any(kind is struck for struck, _ in counts)]:
        cells = (_shown(counts[kind, moment], summary.kills_of(kind, moment)) for moment in moments)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += [
        "",
        "| store | continued by | runs | faults | killed | minutes | violations |",
        "|---|---|---|---|---|---|---|",
    ]
    for store, driver in sorted({(outcome.plan.store, outcome.plan.driver) for outcome in summary.outcomes}):
        same = [one for one in summary.outcomes if (one.plan.store, one.plan.driver) == (store, driver)]
        own = Summary(outcomes=tuple(same), seconds=sum(one.seconds for one in same))
        sums = f"{len(own.struck)} | {own.kills} | {own.seconds / 60:.0f} | {own.violations}"
        lines.append(f"| {store} | {driver} | {len(same)} | {sums} |")
    lines += [
        f"\nseed {one.plan.seed} ({one.plan.store}, {one.plan.driver}): {said}"
        for one in summary.outcomes
        for said in one.violations
    ]
    return "\n".join(lines) + "\n"


def one_line(outcome: Outcome) -> str:
    """Return what is said of a run as soon as it is over."""
    plan, verdict = outcome.plan, f"{len(outcome.violations)} VIOLATION(S)" if outcome.violations else "ok"
    return (
        f"seed {plan.seed} {plan.store} {plan.driver}: {len(outcome.struck)} faults, {outcome.kills} killed, "
        f"{len(outcome.missed)} missed, {outcome.attempts} attempts {outcome.reasons}, "
        f"{f'{outcome.reference_run}, ' if outcome.reference_run else ''}{outcome.seconds:.0f} s: {verdict}"
    )


def _seeds(outcomes: Iterable[Outcome]) -> str:
    """Return the seeds by store, runs of consecutive ones as ranges."""
    by_store: dict[str, list[int]] = {}
    for outcome in outcomes:
        by_store.setdefault(outcome.plan.store, []).append(outcome.plan.seed)
    return "; ".join(f"{store} {_ranges(sorted(set(found)))}" for store, found in sorted(by_store.items()))


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def _totals(summary: Summary) -> list[str]:
    outcomes, killed = summary.outcomes, summary.killed
    roles = {role: sum(kill.role is role for kill in killed) for role in (Role.LAUNCHER, Role.EVALUATOR)}
    missed = Counter((fault.kind, fault.moment) for outcome in outcomes for fault in outcome.missed)
    references = Counter(outcome.reference_run for outcome in outcomes if outcome.reference_run)
    segments = Counter[str]()
    for outcome in outcomes:
        segments.update(outcome.segments)
    skipped = Counter(f"{one.fault.kind}: {one.skipped}" for run in outcomes for one in run.injected if one.skipped)
    said = [
        f"{len(outcomes)} runs, {len(summary.struck)} faults, {summary.kills} processes killed, "
        f"{sum(outcome.attempts for outcome in outcomes)} attempts, {summary.seconds / 60:.0f} minutes",
        f"of the killed: {sum(kill.is_early for kill in killed)} within three seconds of their command's start, "
        f"{roles[Role.LAUNCHER]} launchers, {roles[Role.EVALUATOR]} evaluators",
        f"goodput {summary.goodput:.1%} of {sum(outcome.gpu_seconds for outcome in outcomes):.0f} device seconds",
        f"violations: {summary.violations}",
        f"compared with {', '.join(f'{name} ({count})' for name, count in sorted(references.items())) or '–'}",
        f"planned, but the moment never came: {missed.total()}{_most(missed)}",
        f"seeds: {_seeds(outcomes)}",
        *_ends(outcomes),
    ]
    if segments:
        said.append(f"segments computed again: {', '.join(f'{n} {name}' for name, n in sorted(segments.items()))}")
    return said + [f"not done {count} time(s): {words}" for words, count in sorted(skipped.items())]


def _ends(outcomes: Iterable[Outcome]) -> list[str]:
    """Return how long commands took from the last fault to their end, the slowest kind of fault first."""
    seconds: dict[str, list[float]] = {}
    for end in (end for outcome in outcomes for end in outcome.ends):
        seconds.setdefault(end.after, []).append(end.seconds)
    slowest = sorted(seconds.items(), key=lambda item: -max(item[1]))
    shown = "; ".join(f"{name} {len(taken)}: {median(taken):.1f}, {max(taken):.1f}" for name, taken in slowest)
    return [f"from the last fault to the command's end, in seconds (median, longest): {shown}"] if shown else []


def _most(missed: Counter[tuple[Kind, Moment]]) -> str:
    common = ", ".join(f"{kind}@{moment} {count}" for (kind, moment), count in missed.most_common(5))
    return f" (most often {common})" if common else ""


def _shown(count: int, kills: int) -> str:
    return f"{count} ({kills})" if kills else f"{count}" if count else "·"
