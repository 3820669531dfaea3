"""What a campaign knows at its end: what became of each run, and sums over all of them; summaries add up. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.programs.chaos.environment import CommandEnd, Kill
from tests.programs.chaos.faults import InjectedFault
from tests.programs.chaos.kinds import Kind, Moment
from tests.programs.chaos.plan import Fault, RunPlan


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
    reasons: dict[str, int] = field(default_factory=dict)
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

    @property
    def kills(self) -> int:
        """How many processes were killed, others' included."""
        return sum(fault.kills for fault in self.struck)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Campaigns as a whole, `seconds` long by the clock."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def struck(self) -> list[InjectedFault]:
        """What was really done to all of the runs."""
        return [fault for outcome in self.outcomes for fault in outcome.struck]

    @property
    def killed(self) -> list[Kill]:
        """The runs' own processes among the killed."""
        return [kill for fault in self.struck for kill in fault.killed]

    @property
    def kills(self) -> int:
        """How many processes were killed."""
        return sum(outcome.kills for outcome in self.outcomes)

    @property
    def violations(self) -> int:
        """How often something did not hold."""
        return sum(len(outcome.violations) for outcome in self.outcomes)

    @property
    def goodput(self) -> float:
        """Useful over all device seconds of disturbed runs."""
        spent = sum(outcome.gpu_seconds for outcome in self.outcomes)
        return sum(outcome.useful_gpu_seconds for outcome in self.outcomes) / spent if spent else 0.0

    def counts(self) -> Counter[tuple[Kind, Moment]]:
        """Return how often each kind of fault struck at each kind of moment."""
        return Counter((one.fault.kind, one.fault.moment) for one in self.struck)

    def kills_of(self, kind: Kind, moment: Moment) -> int:
        """Return how many processes a kind of fault killed at a kind of moment."""
        return sum(one.kills for one in self.struck if (one.fault.kind, one.fault.moment) == (kind, moment))


def added(summaries: Sequence[Summary], *, seconds: float | None = None) -> Summary:
    """Return several campaigns as one; `seconds` by the clock where they ran side by side."""
    outcomes = sorted(
        (outcome for one in summaries for outcome in one.outcomes),
        key=lambda outcome: (outcome.plan.store, outcome.plan.seed),
    )
    spent = sum(one.seconds for one in summaries) if seconds is None else seconds
    return Summary(outcomes=tuple(outcomes), seconds=spent)
