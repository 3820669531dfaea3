"""What the GPU check does, in which order, and how long each part and step of it may take."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gpu.steps import Step

TITLES = {
    "a": "What only a GPU can test",
    "b": "The same bits",
    "c": "Speed",
    "d": "Checkpoints",
    "e": "A whole run",
}
PART_SECONDS = {"a": 330.0, "b": 240.0, "c": 540.0, "d": 210.0, "e": 240.0}
"""Together 26 minutes; what is left of one is free for the next, and what is left at the end is cut off there."""
TINY_PATIENCE = 4.0
"""Times as long for the program itself, which may run on a machine that has other work."""
SPEED_BATCHES = {"gpt2": ("32,64,128", 75.0), "gpt2-medium": ("32,64", 75.0), "gpt2-xl": ("8,16,32", 110.0)}
"""Windows in a step, more from turn to turn, until the memory is too small; and the seconds for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What was asked for; `tiny` is the program itself at sizes that a CPU manages."""

    device: str = "cuda"
    tiny: bool = False
    nanogpt: Path | None = None


def plan(wanted: Wanted, parts: str) -> Iterator[Step]:
    """Return the steps of these parts, in their order."""
    steps = {
        "a": _tests(wanted), "b": _bits(wanted), "c": _speed(wanted), "d": _checkpoints(wanted), "e": _runs(wanted)
    }  # fmt: skip
    for part in parts:
        for step in steps[part]:
            yield replace(step, seconds=step.seconds * TINY_PATIENCE) if wanted.tiny else step


def _tests(wanted: Wanted) -> list[Step]:
    words = ["pytest", "-m", "gpu", "-p", "tests.gpu.outcome_rows", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    files = ["tests/model/test_on_cuda.py", "tests/model/test_train_state.py", "tests/tasks/test_on_cuda.py"]
    files += ["tests/tasks/test_failures.py"]
    memory = ["tests/model/test_memory_on_cuda.py"]
    chosen = {} if wanted.device == "cuda" else {"CAIRN_TEST_DEVICE": wanted.device}
    return [
        _step("a", "machine", 60, "tests.gpu.machine", "--device", wanted.device),
        Step(part="a", name="tests", words=_python(*words, *files), seconds=180, environment=chosen),
        Step(part="a", name="memory", words=_python(*words, *memory), seconds=150, environment=chosen),
        _step("a", "out of memory", 120, "tests.gpu.whole_run", "out-of-memory", *_device(wanted)),
    ]


def _bits(wanted: Wanted) -> list[Step]:
    return [
        _step("b", "every mode", 180, "tests.gpu.bits", *_device(wanted)),
        _step("b", "one and two processes", 90, "tests.gpu.two_processes", *_device(wanted)),
    ]


def _speed(wanted: Wanted) -> list[Step]:
    """Order: what the targets speak of first, so that a time-out takes what matters least."""
    if wanted.tiny:
        return [_turn(wanted, "tiny", name, "2,4", 100) for name in ("fused", *_peers(wanted, "nanogpt"))]
    first = ("fused-compiled", *_peers(wanted, "nanogpt-compiled"), "fused")
    rest = [("gpt2", name) for name in (*_peers(wanted, "nanogpt"), "stock-compiled", "fused-compiled-any-order")]
    order = [(recipe, name) for recipe in ("gpt2", "gpt2-xl", "gpt2-medium") for name in first] + rest
    return [_turn(wanted, recipe, name, *SPEED_BATCHES[recipe]) for recipe, name in order]


def _turn(wanted: Wanted, recipe: str, name: str, batches: str, seconds: float) -> Step:
    said = ["--recipe", recipe, "--contender", name, "--batches", batches, *_device(wanted)]
    said += ["--nanogpt", str(wanted.nanogpt)] if name in _peers(wanted, name) else []
    return _step("c", f"{recipe}, {name}", seconds, "tests.gpu.speed", *said)


def _peers(wanted: Wanted, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if wanted.nanogpt and name.startswith("nanogpt"))


def _checkpoints(wanted: Wanted) -> list[Step]:
    sizes = ("1M",) if wanted.tiny else ("124M", "1558M")
    rounds = {"1558M": "1"}
    return [
        _step(
            "d",
            size,
            120,
            "tests.gpu.checkpoint",
            "--parameters",
            size,
            "--rounds",
            rounds.get(size, "3"),
            *_device(wanted),
        )
        for size in sizes
    ]


def _runs(wanted: Wanted) -> list[Step]:
    return [_step("e", "killed once", 230, "tests.gpu.whole_run", "killed-once", *_device(wanted))]


def _device(wanted: Wanted) -> list[str]:
    return ["--device", wanted.device, *(["--tiny"] if wanted.tiny else [])]


def _step(part: str, name: str, seconds: float, module: str, *words: str) -> Step:
    return Step(part=part, name=name, words=_python(module, *words), seconds=seconds)


def _python(module: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *words)
