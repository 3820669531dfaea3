"""The texts on the plot of a run: title, state, footer, numbers on axes."""

from reports.plots.run_curves import RunCurves
from tasks.text.format import format_count, short_digest

_TITLE_CHARACTERS = 44
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_title(curves: RunCurves) -> str:
    """Return the run's id, shortened in the middle where it is long, and the model family."""
    name, half = curves.run_id, _TITLE_CHARACTERS // 2
    shown = name if len(name) <= _TITLE_CHARACTERS else f"{name[:half]}…{name[-half:]}"
    return "  ·  ".join(word for word in (shown, curves.model_family) if word)


def describe_state(curves: RunCurves) -> str:
    """Return the state, and the verdict on the curve where there is one."""
    return "  ·  ".join(word for word in (curves.state, curves.verdict) if word)


def describe_run(curves: RunCurves) -> str:
    """Return steps, tokens, device time, attempts and data snapshot."""
    total = f" of {curves.total_steps:,}" if curves.total_steps else ""
    parts = [f"step {curves.last_step:,}{total}"]
    if curves.tokens_per_step:
        parts.append(f"{format_number(curves.last_step * curves.tokens_per_step)} tokens")
    hours, minutes = curves.gpu_seconds / 3600, curves.gpu_seconds / 60
    parts.append(f"{hours:,.1f} device hours" if hours >= 1 else f"{minutes:.1f} device minutes")
    parts.append(format_count(curves.attempts, "attempt"))
    parts.append(f"data snapshot {short_digest(curves.snapshot_id or None)}")
    return "   ·   ".join(parts)


def describe_end(curves: RunCurves) -> str:
    """Return how a finished run ended; empty for any other."""
    if curves.end is None:
        return ""
    return f"stopped early at step {curves.end.step:,}" if curves.end.stopped else "finished"


def format_number(number: float) -> str:
    """Return a number with at most four digits and a unit: `1.25M`."""
    size = next(((unit, name) for unit, name in _UNITS if abs(number) >= unit), (1.0, ""))
    return f"{number / size[0]:.4g}{size[1]}"


def format_small_number(number: float) -> str:
    """Return a number of any size with few characters: `3e-4`."""
    digits, _, exponent = f"{number:.3g}".partition("e")
    if not exponent and 0 < abs(number) < 1e-3:
        digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}" if exponent else digits
