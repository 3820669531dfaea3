"""The identity of the arithmetic that bits were computed with, and a run's moves from one to another.

A child that imports torch reads it where no trainer is at hand.
"""

import subprocess
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import Arithmetic, CheckpointReference
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores import child_process, codec

if TYPE_CHECKING:
    from cairn.model.configuration.training import Arithmetic as ArithmeticName

_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
_VECTORS = ("fma", "avx", "sse4", "amx", "bf16", "f16c", "asimd", "sve", "fp16", "i8mm")
"""Beginnings of the flags that libraries choose their kernels by."""


def arithmetic_of(device: str, name: "ArithmeticName") -> Arithmetic:
    """Return the arithmetic of this process on a device; the portable one names no processor."""
    import torch

    from cairn.model.training.determinism import arithmetic_facts

    accelerator, instructions, libraries, flags = arithmetic_facts(torch.device(device))
    processor = "x86-64" if name == "portable" else describe_processor()
    if accelerator:
        processor = f"{accelerator}; {processor}"
    digest = codec.sha256("\n".join((name, processor, instructions, libraries, flags)).encode())[:12]
    return Arithmetic(
        digest=digest, name=name, processor=processor, instructions=instructions, libraries=libraries, flags=flags
    )


def describe_processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return make, family and model of the processor, and a digest of the vector instructions that it has."""
    from cairn.tasks.machine.machine_speed import cpu_facts  # other commands need no more than what a log says

    facts = cpu_facts(path, (*_PROCESSOR, "flags", "Features"))
    flags = sorted(flag for flag in facts.get("flags", facts.get("Features", "")).split() if flag.startswith(_VECTORS))
    named = " ".join(facts[name] for name in _PROCESSOR if name in facts) or facts.get("model name", "unknown")
    return f"{named}, {len(flags)} vector flags {codec.sha256(' '.join(flags).encode())[:8]}" if flags else named


def arithmetic_here(device: str, name: "ArithmeticName") -> Arithmetic | None:
    """Return the arithmetic that a trainer would have here, as a child finds it; None if the child cannot say."""
    try:
        printed = child_process.call_child(f"{__name__}:choose_and_describe", device, name)
        return codec.decode(printed, Arithmetic, where="the arithmetic of this machine")
    except (OSError, subprocess.SubprocessError, IntegrityError):
        return None


def arithmetic_before(state: RunState, resumed: CheckpointReference | None) -> Arithmetic | None:
    """Return the arithmetic that computed a checkpoint to resume; None if it is unknown, or if there is none.

    Of an attempt that left no account of it, it is that of the newest one before.
    """
    if resumed is None:
        return None
    origin = state.origin
    if origin is not None and resumed == origin.checkpoint:
        return origin.arithmetic
    for record in reversed(state.attempts):
        ended = record.ended
        if record.started.attempt <= resumed.attempt and ended is not None and ended.arithmetic:
            return ended.arithmetic
    return origin.arithmetic if origin is not None else None


def describe_move(before: Arithmetic | None, now: Arithmetic | None) -> str:
    """Return the sentence that a start on another arithmetic deserves; empty if it is the same, or not known."""
    if before is None or now is None or before.digest == now.digest:
        return ""
    pairs = zip(astuple(before)[1:], astuple(now)[1:], strict=True)  # the digests come first
    changes = "; ".join(f"{then} → {here}" for then, here in pairs if then != here)
    return f"bits may differ from here: arithmetic {now.digest}, not {before.digest} as before ({changes})"


def choose_and_describe(device: str, name: "ArithmeticName") -> Arithmetic:
    """Return the arithmetic of this process, which it chooses."""
    import torch

    from cairn.model.training.determinism import make_deterministic

    make_deterministic(seed=0, threads=1, arithmetic=name)
    return arithmetic_of(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device, name)
