"""The summary in words: for a terminal, for BENCHMARKS.md, and one line for a run that is just over. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from cairn.storage.stores.codec import decode, encode
from tests.programs.chaos.plan import Kind, Moment
from tests.programs.chaos.summary import Cell, Outcome, RunRow, Summary, summarize


def as_json(summary: Summary) -> bytes:
    """Return the summary as a sorted JSON document."""
    return encode(summary)


def from_json(data: bytes, *, where: str) -> Summary:
    """Return the summary in `data`; raises `IntegrityError` naming `where` on anything else."""
    return decode(data, Summary, where=where)


def as_text(summary: Summary) -> str:
    """Return the summary for people: faults down, moments across; in brackets the processes killed."""
    moments = _moments(summary)
    lines = ["".join([f"{'':22}", *(f"{moment:>12}" for moment in moments)])]
    for kind, cells in _kinds(summary):
        lines.append("".join([f"{kind:22}", *(f"{_shown(cells.get(moment)):>12}" for moment in moments)]))
    lines += ["", *_totals(summary)]
    lines += [
        f"  seed {row.seed} ({row.store}, {row.driver}): {said}" for row in summary.rows for said in row.violations
    ]
    return "\n".join(lines) + "\n"


def as_markdown(summary: Summary) -> str:
    """Return the summary as BENCHMARKS.md shows it: totals, the table of kinds and moments, the seeds."""
    moments = _moments(summary)
    lines = [
        *(f"- {said}" for said in _totals(summary)),
        "",
        f"| struck (processes killed) | {' | '.join(moments)} |",
        f"|---|{'---|' * len(moments)}",
    ]
    for kind, cells in _kinds(summary):
        lines.append(f"| {kind} | {' | '.join(_shown(cells.get(moment)) for moment in moments)} |")
    lines += [
        "",
        "| store | continued by | runs | faults | killed | minutes | violations |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = sorted({(row.store, row.driver) for row in summary.rows})
    for store, driver in groups:
        rows = [row for row in summary.rows if (row.store, row.driver) == (store, driver)]
        lines.append(_markdown_group(store, driver, rows))
    return "\n".join(lines) + "\n"


def one_line(outcome: Outcome) -> str:
    """Return what is said of a run as soon as it is over."""
    verdict = "ok" if not outcome.violations else f"{len(outcome.violations)} VIOLATION(S)"
    (row,) = summarize([outcome], outcome.seconds).rows
    return (
        f"seed {row.seed} {row.store} {row.driver}: {row.faults} faults, {row.kills} killed, "
        f"{row.missed} missed, {row.attempts} attempts {row.reasons}, "
        f"{f'{row.reference_run}, ' if row.reference_run else ''}{row.seconds:.0f} s: {verdict}"
    )


def seeds(rows: Iterable[RunRow]) -> str:
    """Return the seeds by store, runs of consecutive ones as ranges."""
    by_store: dict[str, list[int]] = {}
    for row in rows:
        by_store.setdefault(row.store, []).append(row.seed)
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
    missed, skipped = (
        sum(cell.count for cell in summary.missed),
        Counter(said for row in summary.rows for said in row.skipped),
    )
    reference_runs = Counter(row.reference_run for row in summary.rows if row.reference_run)
    said = [
        f"{summary.runs} runs, {summary.faults} faults, {summary.kills} processes killed, "
        f"{sum(row.attempts for row in summary.rows)} attempts, {summary.seconds / 60:.0f} minutes",
        _killed(summary.rows),
        f"goodput {summary.goodput:.1%}: {summary.useful_gpu_seconds:.0f} of {summary.gpu_seconds:.0f} device seconds",
        f"violations: {summary.violations}",
        f"compared with {', '.join(f'{name} ({count})' for name, count in sorted(reference_runs.items())) or '–'}",
        f"planned, but the moment never came: {missed}" + _most(summary.missed),
        f"seeds: {seeds(summary.rows)}",
        *_segments(summary.rows),
        *_ends(summary.rows),
    ]
    return said + [f"not done {count} time(s): {words}" for words, count in sorted(skipped.items())]


def _killed(rows: Sequence[RunRow]) -> str:
    early = f"{sum(row.early for row in rows)} within three seconds of their command's start"
    launchers, evaluators = sum(row.launchers for row in rows), sum(row.evaluators for row in rows)
    return f"of the killed: {early}, {launchers} launchers, {evaluators} evaluators"


def _segments(rows: Iterable[RunRow]) -> list[str]:
    """Return what `cairn replay` said of all segments, if it was asked."""
    counts = Counter[str]()
    for row in rows:
        counts.update(row.segments)
    return (
        [f"segments computed again: {', '.join(f'{n} {said}' for said, n in sorted(counts.items()))}"] if counts else []
    )


def _ends(rows: Iterable[RunRow]) -> list[str]:
    """Return how long commands took from the last fault to their end, the slowest kind of fault first."""
    seconds: dict[str, list[float]] = {}
    for end in (end for row in rows for end in row.ends):
        seconds.setdefault(end.after, []).append(end.seconds)
    slowest = sorted(seconds.items(), key=lambda item: -max(item[1]))
    shown = "; ".join(f"{name} {len(taken)}: {median(taken):.1f}, {max(taken):.1f}" for name, taken in slowest)
    return [f"from the last fault to the command's end, in seconds (median, longest): {shown}"] if shown else []


def _most(cells: Iterable[Cell]) -> str:
    common = sorted(cells, key=lambda cell: -cell.count)[:5]
    return f" (most often {', '.join(f'{cell.kind}@{cell.moment} {cell.count}' for cell in common)})" if common else ""


def _moments(summary: Summary) -> list[str]:
    return [moment for moment in Moment if any(cell.moment == moment for cell in summary.table)]


def _kinds(summary: Summary) -> list[tuple[str, dict[str, Cell]]]:
    """Return each kind that struck with its cells by moment, in the order kinds are declared."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in summary.table:
        found.setdefault(cell.kind, {})[cell.moment] = cell
    return [(kind, found[kind]) for kind in Kind if kind in found]


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "·"
    return f"{cell.count} ({cell.kills})" if cell.kills else f"{cell.count}"


def _markdown_group(store: str, driver: str, rows: list[RunRow]) -> str:
    violations = sum(len(row.violations) for row in rows)
    faults, kills = sum(row.faults for row in rows), sum(row.kills for row in rows)
    minutes = sum(row.seconds for row in rows) / 60
    return f"| {store} | {driver} | {len(rows)} | {faults} | {kills} | {minutes:.0f} | {violations} |"
