"""What the GPU check found, as Markdown and as JSON, each file written anew after every step and never half."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from tests.programs.gpu.rows import Figure, Row

DONE, NOT_BEGUN, CUT_OFF = "done", "not begun: its time is over", "cut off at its limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a step ended, after how long, and what it had said by then: DONE, NOT_BEGUN, CUT_OFF, or what failed."""

    part: str
    step: str
    ended: str
    seconds: float
    rows: tuple[Row, ...]


def is_good(outcomes: Sequence[Outcome]) -> bool:
    """Whether no step failed and nothing that must hold did; a measurement may be cut off behind its first figures."""
    return all(_is_sound(outcome) and _failed(outcome) == 0 for outcome in outcomes)


def read_results(folder: Path) -> list[Outcome]:
    """Return what earlier commands have left in this folder."""
    path = folder / "gpu-check.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [Outcome(**{**one, "rows": tuple(Row(**row) for row in one["rows"])}) for one in said]


def write_results(folder: Path, outcomes: Sequence[Outcome], titles: Mapping[str, str]) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "gpu-check.json", json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    _replace(folder / "gpu-check.md", markdown(outcomes, titles))


def markdown(outcomes: Sequence[Outcome], titles: Mapping[str, str]) -> str:
    """Return the report: a heading for each part, a line and a table for each step."""
    said = ["# The GPU check", ""]
    for part, steps in groupby(outcomes, key=lambda outcome: outcome.part):
        said += [f"## {part}. {titles[part]}", ""]
        for outcome in steps:
            said += [*_step_lines(outcome), ""]
    return "\n".join(said)


def summary(outcome: Outcome) -> str:
    """Return one line about a step."""
    failed, passed = _failed(outcome), sum(row.passed is True for row in outcome.rows)
    verdict = f", {passed} as they must be, **{failed} not**" if failed else f", {passed} as they must be"
    return f"{outcome.step}: {outcome.ended} after {outcome.seconds:.0f} s, {len(outcome.rows)} rows{verdict}"


def _is_sound(outcome: Outcome) -> bool:
    return outcome.ended in (DONE, NOT_BEGUN) or (outcome.ended == CUT_OFF and bool(outcome.rows))


def _failed(outcome: Outcome) -> int:
    return sum(row.passed is False for row in outcome.rows)


def _step_lines(outcome: Outcome) -> list[str]:
    said = [f"**{summary(outcome)}**" if outcome.ended != DONE else summary(outcome)]
    for columns, rows in groupby(outcome.rows, key=lambda row: tuple(row.figures)):
        said += ["", f"| | {' | '.join(('holds', *columns))} |", "|---|" + "---|" * (len(columns) + 1)]
        said += [
            f"| {_cell(row.name)} | {_verdict(row)} | {' | '.join(map(_cell, row.figures.values()))} |" for row in rows
        ]
    return said


def _verdict(row: Row) -> str:
    return {True: "yes", False: "**no**", None: "–"}[row.passed]


def _cell(value: Figure) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", "<br>")


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
