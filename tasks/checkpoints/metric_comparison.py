"""Compares two checkpoints by a metric of one suite on the same data, with the difference's error where one is known.

Held-out losses have a paired error over the same windows. Another evaluator's metric has one where it prints a standard
error beside it, as lm-evaluation-harness does: `accuracy_stderr` for `accuracy`, `acc_stderr,none` for `acc,none`.
Source: Miller 2024, "Adding Error Bars to Evals" (paired differences, clustered errors).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cairn.storage.errors import IntegrityError
from cairn.storage.logs import registry, run_entries, run_log, window_losses
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.settings import MetricGate

Measured: TypeAlias = registry.Promoted | run_entries.EvaluationRecorded
ReadLosses: TypeAlias = Callable[[str, run_entries.EvaluationRecorded], window_losses.WindowLosses | None]
"""Returns the losses by window of an evaluation of a run, None where there are none; raises `IntegrityError`."""
BLOCKS = 32
"""Neighbouring windows of one document are alike: differences are averaged over so many runs of windows first."""
LEAST_WINDOWS = 8
"""With fewer windows no error is estimated."""
NOISE_IN_ERRORS = 1.7
"""The one-sided 5 % point of Student's distribution with the 31 degrees of freedom of 32 blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two: the checkpoint as a command names it, its run and what was measured of it, newest first."""

    named: str
    run_id: str
    measured: tuple[Measured, ...]


def losses_reader(store: ObjectStore) -> ReadLosses:
    """Return the reader of losses by window of the runs of a store."""

    def read(run_id: str, item: run_entries.EvaluationRecorded) -> window_losses.WindowLosses | None:
        digest = item.window_losses_sha256
        return window_losses.read_losses(store, run_log.run_prefix(run_id), digest) if digest else None

    return read


def is_measured_like(one: Measured, other: Measured) -> bool:
    """Whether metrics are comparable: the same suite on the same data."""
    return (one.suite_sha256, one.data_snapshot) == (other.suite_sha256, other.data_snapshot)


def find_alike(measured: Iterable[Measured], like: Measured) -> Measured | None:
    """Return the first that was measured under the suite and on the data of `like`."""
    return next((item for item in measured if is_measured_like(item, like)), None)


def compare_metric(
    gate: MetricGate, item: Measured, run_id: str, champion: Side, read_losses: ReadLosses
) -> registry.MetricDifference | str:
    """Return the difference of the evaluation `item` from the champion's, or why the two cannot be compared."""
    other, metric = find_alike(champion.measured, item), gate.metric
    if other is None or metric not in other.metrics:
        return _unlike(item, champion, metric)
    value, before = item.metrics[metric], other.metrics[metric]
    name, comma, rest = metric.partition(",")
    printed = [one.metrics.get(f"{name}_stderr{comma}{rest}") for one in (item, other)]
    known = [error for error in printed if error is not None]
    error = math.hypot(*known) if len(known) == len(printed) else None
    if isinstance(item, run_entries.EvaluationRecorded) and isinstance(other, run_entries.EvaluationRecorded):
        sides = [(run_id, item), (champion.run_id, other)]
        try:
            ours, theirs = (read_losses(*side) for side in sides)
        except IntegrityError as damage:
            return f"losses by window cannot be read: {damage}; `cairn evaluate REF --again` measures both anew"
        if ours and theirs and metric in ours.losses and metric in theirs.losses:
            windows = [(found.window_tokens, len(found.losses[metric])) for found in (ours, theirs)]
            if windows[0] != windows[1]:
                (tokens, count), (others, of_others) = windows
                here = f"{of_others} windows of {others} tokens, here {count} of {tokens}"
                return f"the champion {champion.named} was measured on other text of the same data: {here}"
            error = paired_error(ours.losses[metric], theirs.losses[metric])
    better_by = before - value if gate.direction == "lower" else value - before
    return registry.MetricDifference(
        suite_sha256=item.suite_sha256, metric=metric, value=value, before=before, better_by=better_by, error=error
    )


def paired_error(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the standard error of the mean difference over the same windows; None with too few of them."""
    differences = [loss - other for loss, other in zip(losses, others, strict=True)]
    if len(differences) < LEAST_WINDOWS:
        return None
    blocks = min(BLOCKS, len(differences))
    edges = [len(differences) * number // blocks for number in range(blocks + 1)]
    means = [statistics.fmean(differences[start:end]) for start, end in itertools.pairwise(edges)]
    return statistics.stdev(means) / math.sqrt(blocks)


def describe_failure(gate: MetricGate, key: str, difference: registry.MetricDifference) -> str:
    """Return why the gate of a key refuses: an improvement is not shown, or a regression is; empty if it does not."""
    noise = NOISE_IN_ERRORS * (difference.error or 0.0)
    if gate.no_regression:
        is_refused, verb = -difference.better_by - gate.margin > noise, "must not be"
    else:
        is_refused, verb = difference.better_by <= 0 or difference.better_by - gate.margin < noise, "must be"
    if not is_refused:
        return ""
    where = "below" if (gate.direction == "lower") != gate.no_regression else "above"
    parts = [f"{gate.margin:g} ({key})"] * (gate.margin > 0) + [f"{noise:.4f} (noise of the sample)"] * (noise > 0)
    by = f" by {' and '.join(parts)}" if parts else ""
    suite = f" of {gate.suite}" if gate.suite else ""
    limit = f"{where} the champion's {difference.before:.4f}{by}"
    return f"{difference.metric}{suite} {difference.value:.4f} {verb} {limit}, and is {difference}"


def _unlike(item: Measured, champion: Side, metric: str) -> str:
    named = f"the champion {champion.named}"
    same_suite = [other for other in champion.measured if other.suite_sha256 == item.suite_sha256]
    if any(is_measured_like(item, other) for other in same_suite):
        return f"{named} has no {metric} under this suite; `cairn evaluate {champion.named} --again` measures it anew"
    if same_suite:
        data = f"other data ({same_suite[0].data_snapshot[:8]}, here {item.data_snapshot[:8]})"
        return f"{named} was measured on {data}, so the two cannot be compared"
    suites = ", ".join(dict.fromkeys(other.suite_sha256[:8] for other in champion.measured)) or "none"
    here = f"{item.suite if isinstance(item, run_entries.EvaluationRecorded) else 'this one'} {item.suite_sha256[:8]}"
    remedy = f"measure it under this one (`cairn evaluate {champion.named} --suite FILE`) and offer again"
    return f"{named} was measured under another suite ({suites}, here {here}); {remedy}"
