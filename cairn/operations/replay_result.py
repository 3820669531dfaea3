"""What a replay found, segment by segment; known without torch, so that the help can name the fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tasks.policy.termination import ExitCode


class Verdict(StrEnum):
    """What was found of a segment."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    UNREADABLE = "unreadable"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedSegment:
    """A segment: where it was trained, the committed and the recomputed digest, and which step its records blame."""

    from_step: int
    to_step: int
    attempt: int
    device: str
    host: str
    world_size: int
    expected_sha256: str
    verdict: Verdict = Verdict.SKIPPED
    computed_sha256: str | None = None
    last_equal_step: int | None = None
    first_different_step: int | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The segments that were chosen of all committed ones, and how many of them came to which verdict."""

    version: int
    run_id: str
    committed: int
    verdicts: Mapping[str, int]
    segments: tuple[ReplayedSegment, ...]

    @property
    def failed(self) -> tuple[ReplayedSegment, ...]:
        """The segments that do not come to what was committed, or cannot be read."""
        return tuple(item for item in self.segments if item.verdict not in (Verdict.EQUAL, Verdict.SKIPPED))

    @property
    def exit_code(self) -> ExitCode:
        """INTEGRITY if one failed, USAGE if none was computed."""
        if all(item.verdict is Verdict.SKIPPED for item in self.segments):
            return ExitCode.USAGE
        return ExitCode.INTEGRITY if self.failed else ExitCode.DONE
