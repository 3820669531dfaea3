"""Made-up loss curves with known ends: a family and a seed make one, always the same.

The sizes follow the real curves beside (`real_curves.jsonl`): noise of 0.03 to 0.25 nats, norms that vary by a fifth to
a third, harder batches with one to six times the usual norm, real spikes with seven to five hundred times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.tasks.policy.curve_statistics import Curve
from cairn.tasks.policy.curve_verdict import VerdictKind

Floats = NDArray[np.float64]
VOCAB = 257


@dataclass(kw_only=True, slots=True)
class Draft:
    """A healthy curve that a family changes in place; `clean` has no noise and is what held-out losses follow."""

    drawn: np.random.Generator
    clean: Floats
    noise: Floats
    norms: Floats
    rates: Floats
    clip: float
    gap: Floats

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.clean)

    def place(self, low: float, high: float) -> int:
        """Return a step between two shares of the curve."""
        return int(self.drawn.uniform(low, high) * self.count)

    def between(self, low: float, high: float) -> float:
        """Return a number whose logarithm is uniform."""
        return float(np.exp(self.drawn.uniform(math.log(low), math.log(high))))


def draft(seed: int) -> Draft:
    """Return a curve that falls from ln(257) along a power law and a cosine, 200 to 6,000 steps long."""
    drawn = np.random.default_rng(seed)
    count = int(np.exp(drawn.uniform(math.log(200), math.log(6000))))
    steps, warm = np.arange(1, count + 1), max(1, int(count * drawn.uniform(0.01, 0.1)))
    progress = np.clip((steps - warm) / (count - warm), 0, 1)
    lr, least = 10 ** drawn.uniform(-4, -2), drawn.choice([0.0, 0.1])
    rates = lr * np.where(steps < warm, steps / warm, least + (1 - least) * 0.5 * (1 + np.cos(np.pi * progress)))
    end, scale = drawn.uniform(1.2, 3.2), count * drawn.uniform(0.01, 0.06)
    clean = end + (math.log(VOCAB) - end) * (1 + steps / scale) ** -drawn.uniform(0.5, 0.9)
    clean = clean * (1 - drawn.uniform(0.02, 0.06) * progress)
    middle = 10 ** drawn.uniform(-0.7, 0.3)
    norms = middle * (1 + 2 * np.exp(-steps / warm)) * np.exp(drawn.normal(0, drawn.uniform(0.15, 0.35), count))
    norms *= drawn.uniform(0.7, 3.0) ** progress
    bursts = drawn.integers(warm, 3 * warm + 2, drawn.integers(0, 3))  # of the norm, with little in the loss
    norms[bursts] *= np.exp(drawn.uniform(math.log(8), math.log(200), len(bursts)))
    noise = drawn.normal(0, drawn.uniform(0.02, 0.1), count)
    noise[bursts] += drawn.uniform(0.0, 0.4, len(bursts))
    return Draft(
        drawn=drawn,
        clean=clean,
        noise=noise,
        norms=norms,
        rates=rates,
        clip=float(drawn.choice([0.0, 0.7, 1.5, 4.0]) * np.median(norms)),
        gap=np.full(count, drawn.uniform(1.0, 1.04)),
    )


def plain(made: Draft) -> None:
    """Change nothing."""


def mixture(made: Draft) -> None:
    """A tenth of the steps come from a harder source."""
    hard = made.drawn.random(made.count) < made.drawn.uniform(0.05, 0.15)
    made.noise[hard] += made.between(0.3, 2.5) * made.drawn.uniform(0.6, 1.3, hard.sum())
    made.norms[hard] *= np.exp(made.drawn.normal(math.log(made.between(1.0, 3.0)), 0.2, hard.sum()))


def heavy_tails(made: Draft) -> None:
    """Noise of Student's t with two to four degrees of freedom, and norms that follow its upper side."""
    tails = made.drawn.standard_t(made.drawn.uniform(2.0, 4.0), made.count)
    made.noise = made.drawn.uniform(0.03, 0.1) * np.clip(tails, -8, 25)
    made.norms *= 1 + 0.12 * np.maximum(np.clip(tails, -8, 25), 0)


def small_batches(made: Draft) -> None:
    """Batches of a window or two: much noise, skewed upwards, norms above the clip norm."""
    made.noise = made.drawn.uniform(0.15, 0.35) * (made.drawn.gamma(4.0, 0.5, made.count) - 2.0)
    made.clip = float(np.median(made.norms)) / made.drawn.uniform(1.1, 2.0)


def restarts(made: Draft) -> None:
    """The learning rate rises to its maximum once or twice more, and the loss with it; half begin with the last."""
    cycles, lr = int(made.drawn.integers(2, 4)), made.rates.max()
    length = made.count // cycles
    since = np.arange(made.count) % length
    made.rates = lr * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * since / length)))
    later = np.arange(made.count) >= length
    height, settle = made.drawn.uniform(0.02, 0.1), made.between(3, 30)
    made.clean *= 1 + later * height * (1 - np.exp(-since / settle)) * 0.5 * (1 + np.cos(np.pi * since / length))
    if made.drawn.random() < 0.5:
        _keep_from(made, length * (cycles - 1))


def wsd(made: Draft) -> None:
    """The rate stays and falls linearly at the end, where the loss falls faster."""
    steps, decay = np.arange(made.count), made.drawn.uniform(0.1, 0.5)
    left = np.clip((made.count - steps) / (decay * made.count), 0, 1)
    made.rates = made.rates.max() * np.minimum(left, np.clip((steps + 1) / (0.02 * made.count), 0, 1))
    made.clean *= 1 - made.drawn.uniform(0.03, 0.12) * (1 - left)


def jump(made: Draft) -> None:
    """From a step on, all text is harder: the loss jumps and falls from there."""
    at, height = made.place(0.3, 0.9), made.between(0.2, 2.0)
    since = np.arange(made.count - at)
    fall = (1 + since / (0.05 * made.count)) ** -made.drawn.uniform(0.2, 0.8)
    made.gap[:at] *= (made.clean[at] + height) / made.clean[at]  # the held-out text is the harder one
    made.clean[at:] += height * fall
    made.norms[at:] *= 1 + made.drawn.uniform(0.0, 3.0) * np.exp(-since / made.between(2, 40))


def recovering_spike(made: Draft) -> None:
    """The loss rises within a few steps and comes back, with loud gradients; not in the warm-up."""
    newest = max(made.count // 2, min(480, int(0.8 * made.count)))
    _spike(made, made.count - int(made.drawn.uniform(0.04, 1.0) * newest), made.between(1, 30))


def lasting_spike(made: Draft) -> None:
    """A spike from which the loss does not come back."""
    at = made.place(0.4, 0.85)
    _spike(made, at, 1e9)


def divergence(made: Draft) -> None:
    """The loss rises for the rest of the run or to a high level, within 30 steps or hundreds; norms grow."""
    at = made.place(0.2, 0.8)
    since = np.arange(made.count - at)
    share = np.clip(since / made.between(30, max(31, made.count - at)), 0, 1)
    made.clean[at:] = made.clean[at] + made.between(0.5, 4.0) * share
    made.norms[at:] *= made.between(2, 50) ** share


def stuck(made: Draft) -> None:
    """The loss stays within 4 % of a uniform guess."""
    made.clean = math.log(VOCAB) * (1 - made.drawn.uniform(0.0, 0.04) * np.linspace(0, 1, made.count) ** 0.5)
    made.noise *= 0.2
    made.rates *= made.drawn.choice([1.0, 1e-9])


def dead_rate(made: Draft) -> None:
    """The learning rate is nearly 0 after a fifth to a third of the run, and the loss stays where it was."""
    at = made.place(0.1, 0.3)
    made.clean[at:] = made.clean[at]
    made.rates[at:] = made.rates.max() * 1e-6


def clipping(made: Draft) -> None:
    """Nearly every gradient is several times as long as the clip norm."""
    made.clip = float(np.median(made.norms)) / made.between(4, 40)


def overfitting(made: Draft) -> None:
    """The held-out loss turns, while the train loss goes on falling."""
    turn = made.place(0.2, 0.6)
    later = np.clip((np.arange(made.count) - turn) / (made.count - turn), 0, None)
    best = made.clean[turn] * made.gap[turn]
    made.clean *= 1 - made.drawn.uniform(0.2, 0.6) * later
    made.gap[turn:] = best * (1 + made.drawn.uniform(0.08, 0.6) * later[turn:]) / made.clean[turn:]


def _spike(made: Draft, at: int, recovery: float) -> None:
    rise, loud = made.between(0.8, 4.0), made.between(10, 300)
    onset = int(made.drawn.integers(1, 4))
    since = np.arange(made.count - at)
    shape = np.minimum((since + 1) / onset, np.exp(-np.maximum(since + 1 - onset, 0) / recovery))
    made.clean[at:] += rise * shape
    made.norms[at:] *= loud ** np.minimum(shape, np.exp(-np.maximum(since + 1 - onset, 0) / min(recovery, 10.0)))


def _keep_from(made: Draft, first: int) -> None:
    for name in ("clean", "noise", "norms", "rates", "gap"):
        setattr(made, name, getattr(made, name)[first:])


HEALTHY: tuple[Callable[[Draft], None], ...] = (plain, mixture, heavy_tails, small_batches, restarts, wsd, jump)
SICK: dict[Callable[[Draft], None], frozenset[VerdictKind]] = {
    recovering_spike: frozenset({VerdictKind.SPIKING, VerdictKind.DIVERGING}),  # the latter while it is high
    lasting_spike: frozenset({VerdictKind.SPIKING, VerdictKind.DIVERGING}),
    divergence: frozenset({VerdictKind.DIVERGING}),
    stuck: frozenset({VerdictKind.STUCK}),
    dead_rate: frozenset({VerdictKind.PLATEAU}),
    clipping: frozenset({VerdictKind.CLIPPING}),
    overfitting: frozenset({VerdictKind.OVERFITTING}),
}
FAMILIES = (*HEALTHY, *SICK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A curve, its family, and the verdicts that are right."""

    family: str
    curve: Curve
    right: frozenset[VerdictKind]
    is_sick: bool


def example(seed: int) -> Example:
    """Return the curve of a seed; the families take turns."""
    family, made = FAMILIES[seed % len(FAMILIES)], draft(seed)
    family(made)
    every = max(1, made.count // int(made.drawn.integers(8, 25)))
    at = np.arange(every, made.count + 1, every)
    held_out = made.clean[at - 1] * made.gap[at - 1] * (1 + made.drawn.normal(0, 0.002, len(at)))
    curve = Curve(
        steps=range(1, made.count + 1),
        train_losses=np.maximum(made.clean + made.noise, 0.01),
        grad_norms=made.norms.tolist(),
        learning_rates=made.rates.tolist(),
        val=tuple(zip(at.tolist(), held_out.tolist(), strict=True)),
        vocab_size=VOCAB,
        total_steps=made.count,
        grad_clip=made.clip,
    )
    right = SICK.get(family, frozenset({VerdictKind.HEALTHY}))
    return Example(family=family.__name__, curve=curve, right=right, is_sick=family in SICK)
