"""What the GPU check does, in which order, and how long each part and step of it may take."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.programs.gpu.steps import Step

TITLES = {
    "a": "What only a GPU can test",
    "b": "The same bits",
    "c": "Speed",
    "d": "Checkpoints",
    "e": "A whole run",
    "f": "Speed of larger networks",
}
TINY_PATIENCE = 4.0
"""Times as long for the program itself, which may run on a machine that has other work."""
SPEED_BATCHES = {"gpt2": "32,64,128", "gpt2-medium": "32,64", "gpt2-xl": "8,16,32"}
"""Windows in a step, more from turn to turn, until memory or time is too small."""
TURNS = {
    "c": (
        ("gpt2", "fused", 70), ("gpt2", "nanogpt", 70), ("gpt2", "fused-compiled", 85),
        ("gpt2", "nanogpt-compiled", 100), ("gpt2", "stock-compiled", 85), ("gpt2", "fused-compiled-any-order", 85),
    ),
    "f": (
        ("gpt2-medium", "fused", 50), ("gpt2-medium", "fused-compiled", 75), ("gpt2-medium", "nanogpt-compiled", 80),
        ("gpt2-xl", "fused", 90), ("gpt2-xl", "fused-compiled", 110), ("gpt2-xl", "nanogpt-compiled", 130),
    ),
}  # fmt: skip
"""Recipe, contender and seconds, shorter ones first, so that a time-out takes as little as possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What was asked for; `tiny` is the program itself at sizes that a CPU manages."""

    device: str = "cuda"
    tiny: bool = False
    nanogpt: Path | None = None


def plan(wanted: Wanted, parts: str) -> Iterator[Step]:
    """Return the steps of these parts, in their order."""
    steps = {
        "a": _tests(wanted), "b": _bits(wanted), "c": _speed(wanted, "c"), "d": _checkpoints(wanted),
        "e": _runs(wanted), "f": _speed(wanted, "f"),
    }  # fmt: skip
    for part in parts:
        for step in steps[part]:
            yield replace(step, seconds=step.seconds * TINY_PATIENCE) if wanted.tiny else step


def _tests(wanted: Wanted) -> list[Step]:
    words = [
        "pytest",
        "-m",
        "gpu",
        "-p",
        "tests.programs.gpu.outcome_rows",
        "-p",
        "no:cacheprovider",
        "-q",
        "-W",
        "ignore",
    ]
    files = [
        "tests/model/training/test_on_cuda.py",
        "tests/model/training/test_train_state.py",
        "tests/tasks/machine/test_on_cuda.py",
    ]
    files += ["tests/tasks/policy/test_failures.py"]
    memory = ["tests/model/estimates/test_memory_on_cuda.py"]
    chosen = {} if wanted.device == "cuda" else {"CAIRN_TEST_DEVICE": wanted.device}
    return [
        _step("a", "machine", 60, "tests.programs.gpu.machine", "--device", wanted.device),
        Step(part="a", name="tests", words=_python(*words, *files), seconds=180, environment=chosen),
        Step(part="a", name="memory", words=_python(*words, *memory), seconds=140, environment=chosen),
        _step("a", "out of memory", 100, "tests.programs.gpu.whole_run", "out-of-memory", *_device(wanted)),
    ]


def _bits(wanted: Wanted) -> list[Step]:
    return [
        _step("b", "every mode", 480, "tests.programs.gpu.bits", *_device(wanted)),
        _step("b", "one and two processes", 90, "tests.programs.gpu.two_processes", *_device(wanted)),
    ]


def _speed(wanted: Wanted, part: str) -> list[Step]:
    turns = [turn for turn in TURNS[part] if not turn[1].startswith("nanogpt") or wanted.nanogpt]
    if wanted.tiny:  # the same program for any network
        turns = list(dict.fromkeys(("tiny", name, 100) for _, name, _ in turns if name in ("fused", "nanogpt")))
    return [_turn(wanted, part, *turn) for turn in turns]


def _turn(wanted: Wanted, part: str, recipe: str, name: str, seconds: float) -> Step:
    said = ["--recipe", recipe, "--contender", name, "--batches", SPEED_BATCHES.get(recipe, "2,4"), *_device(wanted)]
    said += ["--nanogpt", str(wanted.nanogpt)] if name.startswith("nanogpt") else []
    return replace(_step(part, f"{recipe}, {name}", seconds, "tests.programs.gpu.speed", *said), measures=True)


def _checkpoints(wanted: Wanted) -> list[Step]:
    sizes = (("1M", "3", 90),) if wanted.tiny else (("124M", "3", 80), ("1558M", "1", 140))
    return [
        _step(
            "d",
            size,
            seconds,
            "tests.programs.gpu.checkpoint",
            "--parameters",
            size,
            "--rounds",
            rounds,
            *_device(wanted),
        )
        for size, rounds, seconds in sizes
    ]


def _runs(wanted: Wanted) -> list[Step]:
    return [_step("e", "killed once", 200, "tests.programs.gpu.whole_run", "killed-once", *_device(wanted))]


def _device(wanted: Wanted) -> list[str]:
    return ["--device", wanted.device, *(["--tiny"] if wanted.tiny else [])]


def _step(part: str, name: str, seconds: float, module: str, *words: str) -> Step:
    return Step(part=part, name=name, words=_python(module, *words), seconds=seconds)


def _python(module: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *words)
