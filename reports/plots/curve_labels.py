"""The texts on the plot of a run: title, state, footer, numbers on axes."""

from reports.plots.run_curves import RunCurves
from tasks.text.format import short_digest

_TITLE_CHARACTERS = 44
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def title(curves: RunCurves) -> str:
    """Return the run's id, shortened in the middle where it is long, and what was trained."""
    name, half = curves.run_id, _TITLE_CHARACTERS // 2
    shown = name if len(name) <= _TITLE_CHARACTERS else f"{name[:half]}…{name[-half:]}"
    return "  ·  ".join(word for word in (shown, curves.model_family) if word)


def standing(curves: RunCurves) -> str:
    """Return the state, and the verdict on the curve where there is one."""
    return "  ·  ".join(word for word in (curves.state, curves.verdict) if word)


def footer(curves: RunCurves) -> str:
    """Return what the picture is of: steps, tokens, GPU time, attempts, data."""
    total = f" of {curves.total_steps:,}" if curves.total_steps else ""
    words = [f"step {curves.last_step:,}{total}"]
    if curves.tokens_per_step:
        words.append(f"{written(curves.last_step * curves.tokens_per_step)} tokens")
    words.append(_duration(curves.gpu_seconds))
    words.append(f"{curves.attempts:,} attempt{'' if curves.attempts == 1 else 's'}")
    words.append(f"data snapshot {short_digest(curves.snapshot_id or None)}")
    return "   ·   ".join(words)


def run_end(curves: RunCurves) -> str:
    """Return how a finished run ended; empty for any other."""
    if curves.end is None:
        return ""
    return f"stopped early at step {curves.end.step:,}" if curves.end.stopped else "finished"


def written(number: float) -> str:
    """Return a number as axes show it: at most four digits and a unit."""
    size = next(((unit, name) for unit, name in _UNITS if abs(number) >= unit), (1.0, ""))
    return f"{number / size[0]:.4g}{size[1]}"


def written_small(number: float) -> str:
    """Return a number that may be small as axes show it: few characters, whatever its size."""
    digits, _, exponent = f"{number:.3g}".partition("e")
    if not exponent and 0 < abs(number) < 1e-3:
        digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}" if exponent else digits


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} GPU hours" if seconds >= 3600 else f"{seconds / 60:.1f} GPU minutes"
