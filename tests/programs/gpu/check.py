"""Everything that only a GPU can show, in one command: `python -m tests.programs.gpu.check --output DIR`.

Runs from a checkout on a machine with PyTorch, without an installation and without a network; what is missing there is
brought as wheels (`tests.programs.gpu.wheels`, `tests.programs.gpu.environment`). Parts: a. the tests marked `gpu`, b.
bits, c. speed beside nanoGPT's (`--nanogpt DIR`, a checkout of github.com/karpathy/nanoGPT), d. checkpoints, e. a whole
run, killed once, f. speed of larger networks. Every step is a process with a time limit; after each, DIR/gpu-check.md
and DIR/gpu-check.json are written anew, with what earlier commands found in other parts. Exits 1 where something
failed; what there was no time for is no failure.

    python -m tests.programs.gpu.check --output gpu --nanogpt ../nanoGPT          all of it, at most 40 minutes
    python -m tests.programs.gpu.check --output gpu --only b                      one part, always under 10 minutes
    python -m tests.programs.gpu.check --output gpu --device cpu --tiny           the program itself, anywhere
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.programs.gpu.plan import TITLES, Wanted, plan
from tests.programs.gpu.results import NOT_BEGUN, Outcome, is_good, read_results, summary, write_results
from tests.programs.gpu.steps import Step, run_step

LEAST_SECONDS = 5.0
"""With less time a step is not begun."""


def main() -> None:
    """Do what was asked for."""
    given = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the step under way is ended too
    wanted = Wanted(device=given.device, tiny=given.tiny, nanogpt=given.nanogpt)
    parts = "".join(part for part in TITLES if part in given.only.split(","))
    outcomes = run_steps(list(plan(wanted, parts)), given.output, seconds=60 * given.minutes)
    left = sum(outcome.ended == NOT_BEGUN for outcome in outcomes)
    said = ("all is as it must be" if is_good(outcomes) else "not all is well") + f", {left} not begun" * bool(left)
    print(f"{given.output / 'gpu-check.md'}: {said}")
    sys.exit(not is_good(outcomes))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--only", default=",".join(TITLES), help="some of the parts, by commas")
    parser.add_argument("--minutes", type=float, default=40.0, help="when to end, whatever is left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks of no size, to try the program")
    parser.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    return parser


def run_steps(steps: list[Step], folder: Path, *, seconds: float) -> list[Outcome]:
    """Run one step after the other, each within its own and the whole's time, and write what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, outcomes, parts = time.monotonic(), list[Outcome](), {step.part for step in steps}
    others = [outcome for outcome in read_results(folder) if outcome.part not in parts]
    with (folder / "gpu-check.log").open("a", encoding="utf-8") as log:
        for step in steps:
            limit = min(step.seconds, seconds - (time.monotonic() - begun))
            log.write(f"=== {step.part}. {step.name}: {' '.join(step.words)}\n")
            outcomes.append(run_step(step, seconds=limit, log=log) if limit >= LEAST_SECONDS else _not_begun(step))
            write_results(folder, sorted(others + outcomes, key=lambda outcome: outcome.part), TITLES)
            print(f"{step.part}. {summary(outcomes[-1])}", flush=True)
    return outcomes


def _not_begun(step: Step) -> Outcome:
    return Outcome(part=step.part, step=step.name, ended=NOT_BEGUN, seconds=0.0, rows=())


if __name__ == "__main__":
    main()
