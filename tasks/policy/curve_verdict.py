"""The verdict on a loss curve: a pure function to the worst rule that holds, its numbers, and the usual cures.

Sources: spikes and their cure (go back, skip the batches): PaLM, section 5.1 (Chowdhery et al. 2022). Learning rates,
warm-up and clipping: OPT-175B, section 2.5 (Zhang et al. 2022), and GPT-3, appendix B (Brown et al. 2020). A loss of
ln(vocabulary) is that of a uniform guess. Overfitting: Prechelt, Early Stopping, 1998.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from storage.logs.run_entries import CurveVerdict
from tasks.policy.curve_statistics import Curve, Floats, Level, Spikes, level_of, levels_at, spikes_of


class VerdictKind(StrEnum):
    """The verdicts, by their stored words."""

    HEALTHY = "healthy"
    TOO_EARLY = "too-early"
    PLATEAU = "plateau"
    SPIKING = "spiking"
    OVERFITTING = "overfitting"
    STUCK = "stuck"
    DIVERGING = "diverging"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRules:
    """Thresholds; losses are in nats per token, shares are of the loss itself.

    diverging: above the best level by `rise_share`, `rise_errors` and `rise_nats`, or above ln(vocabulary) by
    `guess_share`. stuck: at most `stuck_share` below ln(vocabulary). spiking: a step over the median of the 16 before
    it by `spike_sigmas` and `spike_share`. overfitting, for `overfit_evaluations`: held-out over train loss at least
    `overfit_ratio`, or `overfit_gap` if the held-out loss is above its best by `overfit_rise`. plateau: improvement
    below `plateau_share` over `plateau_evaluations`, or of the train loss below `flat_share` over two thirds of a run
    of at least `flat_steps`.
    """

    fewest_steps: int = 10
    fewest_stuck_steps: int = 20
    rise_share: float = 0.05
    rise_errors: float = 6.0
    rise_nats: float = 0.1
    guess_share: float = 0.1
    stuck_share: float = 0.05
    spike_sigmas: float = 8.0
    spike_share: float = 0.1
    overfit_ratio: float = 1.3
    overfit_gap: float = 1.05
    overfit_rise: float = 0.02
    overfit_evaluations: int = 3
    plateau_share: float = 0.005
    plateau_evaluations: int = 5
    flat_share: float = 0.02
    flat_steps: int = 300


CURES: Mapping[str, tuple[str, ...]] = {
    VerdictKind.HEALTHY: (),
    VerdictKind.TOO_EARLY: ("Wait for more steps.",),
    VerdictKind.PLATEAU: (
        "Let the learning rate fall: a lower training.min_lr or fewer training.steps.",
        "If it was flat early on, lower training.lr: a rate that is too high learns only token frequencies.",
        "Make the model larger or bring more data; else stop here ([early_stop] patience).",
    ),
    VerdictKind.SPIKING: (
        "Clip gradients: training.grad_clip = 1.0.",
        "Lower training.lr or lengthen training.warmup_steps.",
        "Look at the data of the spike's step; go back before it and leave that batch out.",
    ),
    VerdictKind.OVERFITTING: (
        "Stop earlier ([early_stop] overfit_ratio or patience); the best checkpoint is kept.",
        "Bring more data, or train fewer steps on what there is.",
        "Raise model.dropout and training.weight_decay, or make the model smaller.",
    ),
    VerdictKind.STUCK: (
        "Check that training.lr is not zero or tiny, and that warm-up is not longer than the run.",
        "Raise training.lr by steps of 3.",
        "Check the data: noise, or text with the wrong tokenizer, cannot be learned.",
    ),
    VerdictKind.DIVERGING: (
        "Lower training.lr (try a tenth) and go back to a checkpoint before the rise.",
        "Lengthen training.warmup_steps.",
        "Clip gradients: training.grad_clip = 1.0.",
    ),
}
_DEFAULT_RULES = CurveRules()
_MOST_VAL = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """Measurements that the rules share."""

    curve: Curve
    losses: Floats
    level: Level
    spikes: Spikes
    uniform: float
    val: tuple[tuple[int, float], ...]
    train_at_val: tuple[float, ...]


def judge(curve: Curve, rules: CurveRules = _DEFAULT_RULES) -> CurveVerdict:
    """Return the verdict on a curve of any length; the worst rule that holds gives the reason."""
    losses = np.asarray(curve.train_losses, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(losses))
    if len(broken):
        step = int(curve.steps[int(broken[0])])
        return _verdict(VerdictKind.DIVERGING, f"the train loss at step {step} is not a number", {"step": step})
    if len(losses) < rules.fewest_steps:
        why = f"{len(losses)} steps are on record; a verdict needs {rules.fewest_steps}"
        return _verdict(VerdictKind.TOO_EARLY, why, {"steps": len(losses)})
    seen = _measure(curve, losses, rules)
    for rule in (_diverging, _stuck, _overfitting, _spiking, _plateau):
        for verdict in rule(seen, rules):
            return verdict
    return _verdict(VerdictKind.HEALTHY, _healthy_words(seen), _numbers(seen))


def _measure(curve: Curve, losses: Floats, rules: CurveRules) -> _Measured:
    # Of many held-out losses, the newest and the best are kept.
    val = [(step, loss) for step, loss in curve.val if step >= curve.steps[0]]
    best = min(val[:-_MOST_VAL], key=lambda point: point[1], default=None)
    val = [*([best] if best else []), *val[-_MOST_VAL:]]
    return _Measured(
        curve=curve,
        losses=losses,
        level=level_of(curve.steps, losses),
        spikes=spikes_of(curve, losses, sigmas=rules.spike_sigmas, share=rules.spike_share),
        uniform=math.log(curve.vocab_size) if curve.vocab_size > 1 else 0.0,
        val=tuple(val),
        train_at_val=levels_at(curve, losses, [step for step, _ in val]),
    )


def _diverging(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    level, guess = seen.level, seen.uniform * (1 + rules.guess_share)
    if seen.val and not math.isfinite(seen.val[-1][1]):
        why = f"the val loss at step {seen.val[-1][0]} is not a number"
        yield _verdict(VerdictKind.DIVERGING, why, _numbers(seen))
    margin = max(rules.rise_share * level.best, rules.rise_errors * level.standard_error, rules.rise_nats)
    if level.now > level.best + margin:
        why = (
            f"train loss {level.now:.2f} (median of the last {level.window_steps} steps) lies "
            f"{level.now - level.best:.2f} nats above {level.best:.2f} at step {level.best_step}; "
            f"up to {margin:.2f} would be noise"
        )
        yield _verdict(VerdictKind.DIVERGING, why, _numbers(seen))
    if seen.uniform and level.now > guess:
        why = (
            f"train loss {level.now:.2f} (median of the last {level.window_steps} steps) is worse than a uniform "
            f"guess, ln({seen.curve.vocab_size}) = {seen.uniform:.2f} nats"
        )
        yield _verdict(VerdictKind.DIVERGING, why, _numbers(seen))


def _stuck(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    level, steps = seen.level, len(seen.losses)
    if not seen.uniform or level.now < seen.uniform * (1 - rules.stuck_share):
        return
    rate = seen.curve.learning_rates[-1] if seen.curve.learning_rates else None
    rate_words = "" if rate is None else f"; the learning rate is {rate:.3g}"
    near = (
        f"train loss {level.now:.2f} after {steps} steps is near ln({seen.curve.vocab_size}) = {seen.uniform:.2f} "
        f"nats, the loss of a uniform guess{rate_words}"
    )
    if steps < rules.fewest_stuck_steps or _is_warming_up(seen.curve, level.window_steps):
        yield _verdict(VerdictKind.TOO_EARLY, f"{near}; warm-up is not over", _numbers(seen))
    else:
        yield _verdict(VerdictKind.STUCK, near, _numbers(seen))


def _is_warming_up(curve: Curve, window_steps: int) -> bool:
    # The learning rate rose, and its maximum lies within the newest window.
    if not curve.learning_rates:
        return False
    rates = np.asarray(curve.learning_rates)
    return bool(rates[-1] > rates[0]) and len(rates) - int(np.argmax(rates)) <= window_steps


def _overfitting(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    count, val = rules.overfit_evaluations, [loss for _, loss in seen.val]
    if len(val) <= count:
        return
    best, recent = int(np.argmin(val)), val[-count:]
    ratios = [loss / max(train, 1e-9) for loss, train in zip(recent, seen.train_at_val[-count:], strict=True)]
    is_past_best = len(val) - 1 - best >= count
    has_risen = is_past_best and min(recent) > val[best] * (1 + rules.overfit_rise) and min(ratios) > rules.overfit_gap
    has_left = is_past_best and min(ratios) >= rules.overfit_ratio
    if seen.train_at_val[-1] < seen.train_at_val[best] * (1 - rules.overfit_rise) and (has_risen or has_left):
        why = (
            f"val loss {val[-1]:.2f} is {ratios[-1]:.2f} × train loss {seen.train_at_val[-1]:.2f}; over the last "
            f"{count} evaluations it was never better than at step {seen.val[best][0]} ({val[best]:.2f}), while the "
            f"train loss fell from {seen.train_at_val[best]:.2f}"
        )
        yield _verdict(VerdictKind.OVERFITTING, why, _numbers(seen))


def _spiking(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    spikes = seen.spikes
    if not spikes.count:
        return
    norm = f", gradient norm {spikes.worst_grad_ratio:.1f} × its median" if spikes.worst_grad_ratio else ""
    many = "1 spike" if spikes.count == 1 else f"{spikes.count} spikes"
    why = (
        f"{many} of the train loss in the last {spikes.looked_back_steps} steps, the worst at step "
        f"{spikes.worst_step}: {spikes.worst_rise:.2f} nats above the steps before it (noise {spikes.noise:.2f} nats"
        f"{norm})"
    )
    yield _verdict(VerdictKind.SPIKING, why, _numbers(seen))


def _plateau(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    yield from _flat_train_loss(seen, rules)
    count, val = rules.plateau_evaluations, [loss for _, loss in seen.val]
    if len(val) <= count:
        return
    before, since = min(val[:-count]), min(val[-count:])
    if since > before * (1 - rules.plateau_share):
        why = (
            f"the best val loss of the last {count} evaluations, {since:.3f}, improves on {before:.3f} before them by "
            f"less than {rules.plateau_share:.1%}"
        )
        yield _verdict(VerdictKind.PLATEAU, why, _numbers(seen))


def _flat_train_loss(seen: _Measured, rules: CurveRules) -> Iterator[CurveVerdict]:
    if len(seen.losses) < rules.flat_steps:
        return
    step = int(seen.curve.steps[len(seen.losses) // 3])
    then = levels_at(seen.curve, seen.losses, [step])[0]
    if seen.level.now > then * (1 - rules.flat_share):
        why = (
            f"train loss {seen.level.now:.3f} improves on {then:.3f} at step {step}, two thirds of the run ago, by "
            f"less than {rules.flat_share:.0%}"
        )
        yield _verdict(VerdictKind.PLATEAU, why, _numbers(seen))


def _healthy_words(seen: _Measured) -> str:
    level = seen.level
    fell = f"train loss {level.now:.2f} (median of the last {level.window_steps} steps), best before {level.best:.2f}"
    if not seen.val:
        return f"{fell}; no evaluation yet"
    loss, train = seen.val[-1][1], seen.train_at_val[-1]
    return f"{fell}; val loss {loss:.2f} is {loss / max(train, 1e-9):.2f} × train loss {train:.2f}"


def _numbers(seen: _Measured) -> dict[str, float]:
    level, spikes = seen.level, seen.spikes
    numbers = {
        "steps": len(seen.losses),
        "window_steps": level.window_steps,
        "train_loss": level.now,
        "best_train_loss": level.best,
        "best_train_step": level.best_step,
        "noise_nats": spikes.noise,
        "spikes": spikes.count,
    }
    if seen.uniform:
        numbers["uniform_guess_nats"] = seen.uniform
    if spikes.count:
        numbers |= {"worst_spike_step": spikes.worst_step, "worst_spike_nats": spikes.worst_rise}
    if seen.val:
        best = min(seen.val, key=lambda point: point[1])
        numbers |= {"val_loss": seen.val[-1][1], "best_val_loss": best[1], "best_val_step": best[0]}
        numbers["val_over_train"] = seen.val[-1][1] / max(seen.train_at_val[-1], 1e-9)
    return numbers


def _verdict(kind: VerdictKind, why: str, numbers: Mapping[str, float]) -> CurveVerdict:
    finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    return CurveVerdict(kind=kind.value, why=why, numbers=finite, cures=CURES[kind])
