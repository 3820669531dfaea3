"""Seeded kills of ranks (`make chaos-ranks`): four processes on one machine, or two on each of two.

Each run kills one to three of the ranks that are not the first, at places of a step that the seed draws, or those that
join in their place, or a whole machine: no step is lost, every checkpoint has the digest of the run of one process, no
process is left, and the next step begins in time.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.programs.chaos.rank_run import STEPS, Ended, RankRun
from tests.programs.chaos.rank_victim import MACHINE, NAMES, SUSPENDED

PROCESSES = 4
BOUND_SECONDS = {1: 2.0, 2: 5.0}
"""By the number of machines."""
_COUNTS = {"forward": 24, "backward": 24, "flags": 30, "whole": 24, "copy": 4, "stage": 4, "publish": 4}
"""How often a rank comes to a place in a run of four; to the others once a step, or once a loss."""
_MOST = 12
_HANGS, _MACHINES, _JOINS = 0.05, 0.4, 0.5
_STEP_SECONDS = 0.15
PHASES = {
    "forward": ("forward", "after-forward"),
    "backward": ("backward", "after-backward"),
    "exchange: usable? stop?": ("flags", "after-flags"),
    "exchange: gradients": ("parts", "after-parts", "whole", "after-whole"),
    "exchange: losses": ("losses", "after-losses"),
    "update": ("clip", "after-clip", "update", "after-update"),
    "staging": ("copy", "after-copy", "stage", "after-stage", "publish"),
    "commit": ("after-publish",),
    "meeting again": ("meet", "after-meet", "connect", "after-connect"),
    "joining": ("hand-over", "after-hand-over"),
}
"""The phases of a step, by the places where a rank is struck; a commit begins when all parts are published."""
_OF_JOINING = ("hand-over", "after-hand-over", "meet", "after-meet", "connect", "after-connect", "forward", "copy")


def draw_kills(random_numbers: random.Random, machines: int = 1) -> str:
    """Return one to three kills, the first anywhere, the later ones often while the others meet; or one hang.

    In half of the runs one more while a rank joins in the place of a lost one; on two machines often of one of them.
    """
    kills = _draw_losses(random_numbers)
    if machines > 1 and random_numbers.random() < _MACHINES and SUSPENDED not in kills:
        rank, place, count = kills.split(",")[0].split(":")
        kills = f"{rank if rank in '23' else random_numbers.choice('23')}:{MACHINE}{place}:{count}"
    if random_numbers.random() < _JOINS:
        joining = random_numbers.choice(_OF_JOINING)
        victim = 4 if joining == "copy" or random_numbers.random() < 0.7 else random_numbers.randint(1, 3)
        count = 2 if joining.endswith("connect") and victim < 4 else 1
        kills += f",{victim}:{joining}:{count}" if f"{victim}:" not in kills else ""
    return kills


def _draw_losses(random_numbers: random.Random) -> str:
    if random_numbers.random() < _HANGS:
        place, rank = (
            random_numbers.choice(("forward", "flags", "parts", "losses", "update")),
            random_numbers.randint(1, 3),
        )
        return f"{rank}:{SUSPENDED}{place}:{random_numbers.randint(2, _MOST)}"
    victims = random_numbers.sample(range(1, PROCESSES), random_numbers.choice((1, 1, 2, 2, 3)))
    kills = []
    for number, rank in enumerate(victims):
        is_meeting = number > 0 and random_numbers.random() < 0.5
        names = [name for name in NAMES if name.endswith(("meet", "connect")) == is_meeting]
        name = random_numbers.choice(names)
        count = random_numbers.randint(1, number + 1 if is_meeting else _COUNTS.get(name.removeprefix("after-"), _MOST))
        if name.endswith(("connect", "flags")):
            count += 1  # the first is the start's, before which an attempt begins anew
        kills.append(f"{rank}:{name}:{count}")
    return ",".join(kills)


def find_problems(ended: Ended, reference: Ended, *, bound_seconds: float) -> list[str]:
    """Return what does not hold of a run that was struck."""
    problems = [ended.problem] if ended.problem else []
    if ended.steps != tuple(range(1, STEPS + 1)):
        problems.append(f"steps {ended.steps}")
    if wrong := [step for step, digest in ended.digests.items() if reference.digests.get(step) != digest]:
        problems.append(f"other bits at steps {wrong}")
    if missing := set(reference.digests) - set(ended.digests) - set(ended.dropped):
        problems.append(f"no checkpoint of steps {sorted(missing)}")
    if STEPS not in ended.digests:
        problems.append("no last checkpoint")
    is_hang = any(death.startswith(SUSPENDED) for death in ended.deaths)
    if not is_hang and (late := [gap for gap in ended.gaps if gap > bound_seconds]):
        problems.append(f"the next step came after {late} s")
    if not ended.survivors_kept:
        problems.append("a process that was not killed has ended")
    return problems


def phase_table(deaths: Counter[str]) -> str:
    """Return how often each phase was struck by a kill, a stop or the loss of a whole machine, and what never was."""
    kinds = {"killed": "", "stopped": SUSPENDED, "machine": MACHINE}
    rows = {
        phase: [sum(deaths[f"{kind}{place}"] for place in PHASES[phase]) for kind in kinds.values()] for phase in PHASES
    }
    lines = [f"{'phase':<25}" + "".join(f"{kind:>9}" for kind in kinds)]
    lines += [f"{phase:<25}" + "".join(f"{count:>9}" for count in counts) for phase, counts in rows.items()]
    empty = [
        f"{phase} ({kind})"
        for phase, counts in rows.items()
        for kind, count in zip(kinds, counts, strict=True)
        if not count
    ]
    return "\n".join([*lines, f"never struck: {', '.join(empty) or 'nothing'}"])


def main() -> None:
    """Run the campaign, print each run that fails, and exit with their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--kills", default="", help="the kills of one run instead")
    parser.add_argument("--machines", type=int, default=1, choices=(1, 2))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, failed, places, longest, began = RankRun(Path(folder)), 0, Counter[str](), 0.0, time.monotonic()
        reference, deaths, dropped, joined = runs.run(1), 0, 0, 0
        done = 0
        for seed in range(given.seed, given.seed + given.runs):
            if time.monotonic() - began > 60 * given.minutes:
                break
            done += 1
            kills = given.kills or draw_kills(random.Random(seed), given.machines)
            ended = runs.run(PROCESSES, kills, machines=given.machines, step_seconds=_STEP_SECONDS)
            joined += sum(len(change.joined) for change in ended.changes)
            deaths, dropped = deaths + len(ended.deaths), dropped + len(ended.dropped)
            places.update(ended.deaths)
            if SUSPENDED not in kills:
                longest = max(longest, *ended.gaps, 0.0)
            if problems := find_problems(ended, reference, bound_seconds=BOUND_SECONDS[given.machines]):
                failed += 1
                print(f"seed {seed}, {kills}: {'; '.join(problems)}", flush=True)
        seconds = time.monotonic() - began
    print(
        f"{done} runs, {deaths} ranks killed, {joined} joined, {failed} failed, {dropped} checkpoints dropped, ", end=""
    )
    print(f"longest wait {longest:.2f} s, {seconds:.0f} s in all")
    print(phase_table(places))
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
