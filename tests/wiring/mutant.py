"""A wiring mutant: one wrong wire in the product's text, and the few tests of the default suite that must turn red."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """In the file at `path`, `before` (which occurs once) becomes `after`; at least one of `tests` must fail."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]

    def mutate(self, text: str) -> str:
        """Return the text with the wrong wire; raises ValueError unless `before` occurs exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {text.count(self.before)} times in {self.path}")
        return text.replace(self.before, self.after)


def mutant(name: str, path: str, before: str, after: str, *tests: str) -> Mutant:
    """Return a mutant, one line each in the lists."""
    return Mutant(name=name, path=path, before=before, after=after, tests=tests)


def key(case: str) -> str:
    """Return the test of a case of the table of configuration keys."""
    return f"tests/wiring/test_configuration_keys.py::test_the_key_acts[{case}]"
