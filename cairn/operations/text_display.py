"""Text on stdout while it is drawn: at once, and on a terminal without what would command the terminal.

Owns the looks of samples. A byte-level network may write any character, the escape that begins a terminal's commands
too; a person is shown its picture, a pipe is given it as it is. Refuses to know who writes.
"""

import sys
from collections.abc import Callable

from cairn.operations.text_sampling import RunSampler, Sample, SampleRequest
from reports.queries.run_lookup import FoundCheckpoint
from storage.logs.run_entries import CheckpointReference
from tasks.policy.termination import ExitCode
from tasks.text.output import say

_KEPT = "\n\t"
_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in _KEPT},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
}


def show_text(piece: str) -> None:
    """Print a piece of text at once, no newline after it."""
    sys.stdout.write(piece.translate(_PICTURES) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def show_nothing(piece: str) -> None:
    """Keep a piece of text to ourselves: it will be in a document."""


def write_checkpoint(
    found: FoundCheckpoint, request: SampleRequest, *, show: Callable[[str], None]
) -> tuple[Sample, ...]:
    """Let a committed checkpoint write `request.count` texts; raises `IntegrityError` where it is not what it was."""
    sampler = RunSampler(found.log, request)
    sampler.load(found.reference)
    return write_samples(sampler, request, show=show)


def write_samples(sampler: RunSampler, request: SampleRequest, *, show: Callable[[str], None]) -> tuple[Sample, ...]:
    """Let loaded weights write `request.count` texts, each under a heading where there are several."""
    samples = []
    for number in range(request.count):
        seed = request.seed + number
        if request.count > 1:
            show("\n" * (number > 0) + f"sample {number + 1} of {request.count} · seed {seed}\n")
        samples.append(sampler.write(seed, show))
        show("\n")
    return tuple(samples)


def end_interrupted() -> ExitCode:
    """Leave the line that Ctrl-C cut, say so, and return the exit code for it."""
    if sys.stdout.isatty():
        show_text("\n")
    say("interrupted")
    return ExitCode.INTERRUPTED


def checkpoint_heading(reference: CheckpointReference) -> str:
    """Return what stands above the text of one checkpoint among others."""
    return f"step {reference.step} · attempt {reference.attempt}"
