"""A trainer's estimated memory beside its measured peak: `python -m tests.programs.benchmarks.bench_memory`.

Every case is a process of its own that trains, stages a checkpoint and trains on, as
`tests.programs.benchmarks.trainer_memory` says. The table is for BENCHMARKS.md; the run fails where an estimate is
further from its peak than `WITHIN`.
"""

import argparse
import sys

from cairn.model.estimates.size_estimate import PARTS, MemoryEstimate
from tests.programs.benchmarks.trainer_memory import CASES, measure

WITHIN = 0.15


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"cases whose name begins like this, of {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print("| case | estimate, MB | peak, MB | estimate / peak | of it |\n|---|---|---|---|---|")
    ratios = []
    for name, case in CASES.items():
        if name.startswith(given.only):
            peak, estimate = measure(case, threads=given.threads).peak_bytes, case.estimate
            ratios.append(estimate.total_bytes / peak)
            sizes = f"{estimate.total_bytes / 1e6:.0f} | {peak / 1e6:.0f}"
            print(f"| {name} | {sizes} | {ratios[-1]:.2f} | {_parts(estimate)} |", flush=True)
    print(f"\n{min(ratios):.2f} to {max(ratios):.2f} of the peak")
    sys.exit(any(abs(ratio - 1) > WITHIN for ratio in ratios))


def _parts(estimate: MemoryEstimate) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {estimate.bytes_of(name) / 1e6:.0f}" for name in PARTS)


if __name__ == "__main__":
    main()
