"""What a campaign says at its end: kills by kind and moment, runs, violations, goodput; records that add up. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.programs.chaos.environment import CommandEnd
from tests.programs.chaos.faults import InjectedFault
from tests.programs.chaos.plan import Fault, RunPlan
from tests.programs.chaos.processes import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one run; `reference_run` names what it had to equal: the untouched run or its counterpart.

    `segments` counts the outcomes of `cairn replay`, if the campaign asked it.
    """

    plan: RunPlan
    injected: tuple[InjectedFault, ...]
    missed: tuple[Fault, ...]
    seconds: float
    attempts: int = 0
    reasons: dict[str, int] | None = None
    reference_run: str = ""
    gpu_seconds: float = 0.0
    useful_gpu_seconds: float = 0.0
    segments: dict[str, int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()
    ends: tuple[CommandEnd, ...] = ()

    @property
    def struck(self) -> list[InjectedFault]:
        """What was really done."""
        return [fault for fault in self.injected if not fault.skipped]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """How often one kind of fault struck at one kind of moment, and how many processes it killed there."""

    kind: str
    moment: str
    count: int
    kills: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run in the document; of the killed processes `early` were within three seconds of their command's start."""

    seed: int
    store: str
    driver: str
    faults: int
    kills: int
    missed: int
    skipped: tuple[str, ...]
    attempts: int
    reasons: dict[str, int]
    seconds: float
    violations: tuple[str, ...]
    reference_run: str = ""
    ends: tuple[CommandEnd, ...] = ()
    segments: dict[str, int] = field(default_factory=dict)
    early: int = 0
    launchers: int = 0
    evaluators: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Campaigns as a whole; `goodput` is useful over all device seconds of disturbed runs, `seconds` by the clock."""

    runs: int
    faults: int
    kills: int
    violations: int
    goodput: float
    seconds: float
    gpu_seconds: float
    useful_gpu_seconds: float
    table: tuple[Cell, ...]
    missed: tuple[Cell, ...]
    rows: tuple[RunRow, ...]


def summarize(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    """Add up what became of the runs."""
    struck = [fault for outcome in outcomes for fault in outcome.struck]
    hits = [Cell(kind=s.fault.kind, moment=s.fault.moment, count=1, kills=s.kills) for s in struck]
    misses = [Cell(kind=f.kind, moment=f.moment, count=1) for outcome in outcomes for f in outcome.missed]
    return _totals(
        tuple(_row(outcome) for outcome in outcomes),
        hits,
        misses,
        seconds=seconds,
        gpu_seconds=sum(outcome.gpu_seconds for outcome in outcomes),
        useful_gpu_seconds=sum(outcome.useful_gpu_seconds for outcome in outcomes),
    )


def added(summaries: Sequence[Summary], *, seconds: float | None = None) -> Summary:
    """Return several campaigns as one; `seconds` by the clock where they ran side by side."""
    return _totals(
        tuple(sorted((row for one in summaries for row in one.rows), key=lambda row: (row.store, row.seed))),
        [cell for one in summaries for cell in one.table],
        [cell for one in summaries for cell in one.missed],
        seconds=sum(one.seconds for one in summaries) if seconds is None else seconds,
        gpu_seconds=sum(one.gpu_seconds for one in summaries),
        useful_gpu_seconds=sum(one.useful_gpu_seconds for one in summaries),
    )


def _totals(
    rows: tuple[RunRow, ...],
    hits: Iterable[Cell],
    misses: Iterable[Cell],
    *,
    seconds: float,
    gpu_seconds: float,
    useful_gpu_seconds: float,
) -> Summary:
    return Summary(
        runs=len(rows),
        faults=sum(row.faults for row in rows),
        kills=sum(row.kills for row in rows),
        violations=sum(len(row.violations) for row in rows),
        goodput=useful_gpu_seconds / gpu_seconds if gpu_seconds else 0.0,
        seconds=round(seconds, 1),
        gpu_seconds=gpu_seconds,
        useful_gpu_seconds=useful_gpu_seconds,
        table=_table(hits),
        missed=_table(misses),
        rows=rows,
    )


def _table(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    counts, kills = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cell in cells:
        counts[str(cell.kind), str(cell.moment)] += cell.count
        kills[str(cell.kind), str(cell.moment)] += cell.kills
    return tuple(Cell(kind=key[0], moment=key[1], count=counts[key], kills=kills[key]) for key in sorted(counts))


def _row(outcome: Outcome) -> RunRow:
    killed = [kill for fault in outcome.struck for kill in fault.killed]
    return RunRow(
        seed=outcome.plan.seed,
        store=outcome.plan.store,
        driver=outcome.plan.driver,
        faults=len(outcome.struck),
        kills=sum(fault.kills for fault in outcome.struck),
        missed=len(outcome.missed),
        skipped=tuple(f"{fault.fault.kind}: {fault.skipped}" for fault in outcome.injected if fault.skipped),
        attempts=outcome.attempts,
        reasons=outcome.reasons or {},
        seconds=round(outcome.seconds, 1),
        violations=outcome.violations,
        reference_run=outcome.reference_run,
        ends=outcome.ends,
        segments=outcome.segments,
        early=sum(kill.is_early for kill in killed),
        launchers=sum(kill.role is Role.LAUNCHER for kill in killed),
        evaluators=sum(kill.role is Role.EVALUATOR for kill in killed),
    )
