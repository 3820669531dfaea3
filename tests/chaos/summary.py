"""What a campaign says at its end: kills by kind and moment, runs, violations, goodput; as text and as JSON. Pure."""

from collections import Counter
from dataclasses import asdict, dataclass

from storage.document import encode
from tests.chaos.plan import RunPlan
from tests.chaos.strikes import Strike


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one run."""

    plan: RunPlan
    strikes: tuple[Strike, ...]
    missed: int
    seconds: float
    attempts: int = 0
    reasons: dict[str, int] | None = None
    is_comparable: bool = True
    gpu_seconds: float = 0.0
    useful_gpu_seconds: float = 0.0
    violations: tuple[str, ...] = ()

    @property
    def struck(self) -> list[Strike]:
        """What was really done."""
        return [strike for strike in self.strikes if not strike.skipped]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """How often one kind of fault struck at one kind of moment."""

    kind: str
    moment: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run in the document."""

    seed: int
    store: str
    driver: str
    faults: int
    kills: int
    missed: int
    skipped: tuple[str, ...]
    attempts: int
    reasons: dict[str, int]
    is_comparable: bool
    seconds: float
    violations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The campaign as a whole; `goodput` is useful over all device-seconds of the disturbed runs."""

    seeds: tuple[int, ...]
    runs: int
    faults: int
    kills: int
    violations: int
    compared_elsewhere: int
    goodput: float
    seconds: float
    table: tuple[Cell, ...]
    rows: tuple[RunRow, ...]


def summarize(outcomes: list[Outcome], seconds: float) -> Summary:
    """Add up what became of the runs."""
    struck = [strike for outcome in outcomes for strike in outcome.struck]
    cells = Counter((strike.fault.kind.value, strike.fault.moment.value) for strike in struck)
    spent = sum(outcome.gpu_seconds for outcome in outcomes)
    return Summary(
        seeds=tuple(outcome.plan.seed for outcome in outcomes),
        runs=len(outcomes),
        faults=len(struck),
        kills=sum(strike.kills for strike in struck),
        violations=sum(len(outcome.violations) for outcome in outcomes),
        compared_elsewhere=sum(not outcome.is_comparable for outcome in outcomes),
        goodput=sum(outcome.useful_gpu_seconds for outcome in outcomes) / spent if spent else 0.0,
        seconds=seconds,
        table=tuple(Cell(kind=kind, moment=moment, count=n) for (kind, moment), n in sorted(cells.items())),
        rows=tuple(_row(outcome) for outcome in outcomes),
    )


def _row(outcome: Outcome) -> RunRow:
    return RunRow(
        seed=outcome.plan.seed,
        store=outcome.plan.store,
        driver=outcome.plan.driver,
        faults=len(outcome.struck),
        kills=sum(strike.kills for strike in outcome.struck),
        missed=outcome.missed,
        skipped=tuple(f"{strike.fault.kind}: {strike.skipped}" for strike in outcome.strikes if strike.skipped),
        attempts=outcome.attempts,
        reasons=outcome.reasons or {},
        is_comparable=outcome.is_comparable,
        seconds=round(outcome.seconds, 1),
        violations=outcome.violations,
    )


def as_json(summary: Summary) -> bytes:
    """Return the summary as a sorted JSON document."""
    return encode(summary)


def as_text(summary: Summary) -> str:
    """Return the summary for people: faults down, moments across."""
    moments = sorted({cell.moment for cell in summary.table})
    counts = {(cell.kind, cell.moment): cell.count for cell in summary.table}
    lines = ["".join([f"{'':22}", *(f"{moment:>12}" for moment in moments)])]
    for kind in sorted({cell.kind for cell in summary.table}):
        row = [f"{counts.get((kind, moment), '·'):>12}" for moment in moments]
        lines.append("".join([f"{kind:22}", *row]))
    lines += [
        "",
        f"{summary.runs} runs, {summary.faults} faults, {summary.kills} processes killed",
        f"{summary.seconds / 60:.0f} minutes",
        f"goodput {summary.goodput:.0%}; {summary.compared_elsewhere} run(s) with data left out or another micro-batch",
        f"violations: {summary.violations}",
    ]
    lines += [
        f"  seed {row.seed} ({row.store}, {row.driver}): {said}" for row in summary.rows for said in row.violations
    ]
    return "\n".join(lines) + "\n"


def one_line(outcome: Outcome) -> str:
    """Return what is said of a run as soon as it is over."""
    verdict = "ok" if not outcome.violations else f"{len(outcome.violations)} VIOLATION(S)"
    plan, document = outcome.plan, asdict(_row(outcome))
    return (
        f"seed {plan.seed} {plan.store} {plan.driver}: {document['faults']} faults, {document['kills']} killed, "
        f"{outcome.missed} missed, {outcome.attempts} attempts {outcome.reasons or {}}, "
        f"{outcome.seconds:.0f} s: {verdict}"
    )
