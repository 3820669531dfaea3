"""Everything that only a GPU can show, in one command: `python -m tests.gpu.check --output DIR`.

Runs from a checkout on a machine with PyTorch, without an installation and without a network; what is missing there is
brought as wheels (`tests.gpu.wheels`, `tests.gpu.environment`). Parts: a. the tests marked `gpu`, b. bits, c. speed
beside nanoGPT's (`--nanogpt DIR`, a checkout of github.com/karpathy/nanoGPT), d. checkpoints, e. a whole run, killed
once. Every step is a process with a time limit; after each, DIR/gpu-check.md and DIR/gpu-check.json are written anew.

    python -m tests.gpu.check --output gpu --nanogpt ../nanoGPT          all of it, at most 25 minutes
    python -m tests.gpu.check --output gpu --only a,b --minutes 9        some parts, in a shorter time
    python -m tests.gpu.check --output gpu --device cpu --tiny           the program itself, anywhere
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.gpu.plan import PART_SECONDS, TINY_PATIENCE, TITLES, Wanted, plan
from tests.gpu.results import Outcome, is_good, summary, write_results
from tests.gpu.steps import Step, run_step

LEAST_SECONDS = 5.0
"""With less time a step is not begun."""


def main() -> None:
    """Do what was asked for; the exit status is 1 where something failed or did not come to its end."""
    given = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the step under way is ended too
    wanted = Wanted(device=given.device, tiny=given.tiny, nanogpt=given.nanogpt)
    parts = "".join(part for part in TITLES if part in given.only.split(","))
    patience = TINY_PATIENCE if given.tiny else 1.0
    outcomes = run_steps(list(plan(wanted, parts)), given.output, seconds=60 * given.minutes, patience=patience)
    print(f"{given.output / 'gpu-check.md'}: {'all is as it must be' if is_good(outcomes) else 'not all is well'}")
    sys.exit(not is_good(outcomes))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--only", default=",".join(TITLES), help="some of the parts, by commas")
    parser.add_argument("--minutes", type=float, default=25.0, help="when to end, whatever is left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks of no size, to try the program")
    parser.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    return parser


def run_steps(steps: list[Step], folder: Path, *, seconds: float, patience: float = 1.0) -> list[Outcome]:
    """Run one step after the other, each within its own, its part's and the whole's time, and write what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, outcomes = time.monotonic(), list[Outcome]()
    spent = dict.fromkeys(TITLES, 0.0)
    with (folder / "gpu-check.log").open("a", encoding="utf-8") as log:
        for step in steps:
            left = seconds - (time.monotonic() - begun)
            limit = min(step.seconds, PART_SECONDS[step.part] * patience - spent[step.part], left)
            log.write(f"=== {step.part}. {step.name}: {' '.join(step.words)}\n")
            outcomes.append(run_step(step, seconds=limit, log=log) if limit >= LEAST_SECONDS else _not_begun(step))
            spent[step.part] += outcomes[-1].seconds
            write_results(folder, outcomes, TITLES)
            print(f"{step.part}. {summary(outcomes[-1])}", flush=True)
    return outcomes


def _not_begun(step: Step) -> Outcome:
    return Outcome(part=step.part, step=step.name, ended="not begun: its time is over", seconds=0.0, rows=())


if __name__ == "__main__":
    main()
