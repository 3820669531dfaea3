"""Mutants drawn by a seed over some folders, each tried on the tests near it: `make mutation ARGS="storage --seed 1"`.

Near a module are the test files that name it; `--whole` tries a survivor on the whole default suite as well. Prints a
line a mutant, and the survivors again at the end; exits 1 where there are some.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.programs.mutation.mutated_copy import ROOT, MutatedCopy
from tests.programs.mutation.operators import Mistake, mistakes_of

NO_TESTS = 5
"""Pytest's exit code where it found none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A mistake in a file, whose path is relative to the checkout."""

    path: str
    mistake: Mistake

    def describe(self, source: bytes) -> str:
        """Return operator, place and both texts in a line."""
        line = source[: self.mistake.start].count(b"\n") + 1
        before = source[self.mistake.start : self.mistake.end].decode()
        old, new = (" ".join(text.split()) for text in (before, self.mistake.text))
        return f"{self.mistake.operator} {self.path}:{line}: {old} → {new}"


def drawn(folders: Sequence[str], seed: str, count: int) -> list[Mutant]:
    """Return so many mutants of the folders' files; the same for the same seed and files."""
    every = [
        Mutant(path=str(path.relative_to(ROOT)), mistake=mistake)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for mistake in mistakes_of(path.read_bytes())
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


def tests_near(path: str) -> list[str]:
    """Return the test files that name a module: that of its name first, then the shortest."""
    module = "cairn." + path.removeprefix("cairn/").removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    found = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if module in (text := file.read_text(encoding="utf-8")) or f"from {package} import {name}" in text
    ]
    order = sorted(found, key=lambda file: (name not in file.stem, file.stat().st_size))
    return [str(file.relative_to(ROOT)) for file in order]


def survives(copy: MutatedCopy, mutant: Mutant, tests: Sequence[str], seconds: float) -> bool:
    """Return whether the tests are green with the mutant in the copy; one that takes longer is caught."""
    mutated = mutant.mistake.apply((ROOT / mutant.path).read_bytes())
    try:
        done = copy.run_tests(mutant.path, mutated, tests, seconds=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, NO_TESTS)


def survivors(mutants: Sequence[Mutant], *, whole: bool, seconds: float) -> Iterator[str]:
    """Try each mutant, saying so; yield the descriptions of those that no test noticed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = MutatedCopy(Path(folder))
        for mutant in mutants:
            described = mutant.describe((ROOT / mutant.path).read_bytes())
            near = tests_near(mutant.path)
            is_alive = not near or survives(copy, mutant, near, seconds)
            if is_alive and whole:
                is_alive = survives(copy, mutant, (), 4 * seconds)
            print("survived" if is_alive else "caught  ", described, f"({len(near)} files)", flush=True)
            if is_alive:
                yield described


def main() -> int:
    """Draw, try, and say which survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders of the product, such as storage or tasks/policy")
    parser.add_argument("--seed", required=True, help="any text; the hash of the commit that the tests are of, say")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--whole", action="store_true", help="try survivors on the whole default suite")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which a mutant counts as caught")
    given = parser.parse_args()
    left = list(survivors(drawn(given.folders, given.seed, given.count), whole=given.whole, seconds=given.seconds))
    print(f"{len(left)} of {given.count} survived", *left, sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
