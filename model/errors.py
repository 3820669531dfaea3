"""The errors of the model package."""

from collections.abc import Sequence


class ModelError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInput(ModelError):
    """A size, name or argument that cannot work; the message gives it, its value and the rule."""


class StateMismatch(ModelError):
    """Tensors whose names, shapes or dtypes are not those of the model or train state."""


class TokenOutOfRange(ModelError):
    """A token id outside the vocabulary; `window` is the index of the window that holds it."""

    def __init__(self, *, window: int, token: int, vocab_size: int) -> None:
        cause = "the shard is damaged or was made with another tokenizer: quarantine the window or rebuild the snapshot"
        super().__init__(f"window {window}: token id {token} is outside the vocabulary of {vocab_size}; {cause}")
        self.window, self.token, self.vocab_size = window, token, vocab_size


class NonFiniteLoss(ModelError):
    """The loss or gradient norm of a step is not finite; raised before the optimizer changes a weight.

    `step` is the failed step (1-based), `quantity` is "loss" or "grad_norm", `windows` are those of the first
    micro-batch with a non-finite loss (of the whole batch for a gradient norm).
    """

    def __init__(self, *, step: int, quantity: str, value: float, windows: Sequence[int]) -> None:
        advice = f"Quarantine the {len(windows)} windows it came from, lower lr, or go back to an older checkpoint"
        super().__init__(f"step {step}: {quantity} is {value}; weights are unchanged. {advice}")
        self.step, self.quantity, self.value = step, quantity, value
        self.windows = tuple(int(window) for window in windows)


class BadBatch(ModelError):
    """Windows of one batch that give no finite loss, while the rest of the batch does; `step` is 1-based."""

    def __init__(self, *, step: int, windows: Sequence[int], why: str) -> None:
        listed = ", ".join(map(str, list(windows)[:8])) + (", …" if len(windows) > 8 else "")
        super().__init__(f"step {step}: {why} in {len(windows)} window(s) of its batch and in no other: {listed}")
        self.step, self.windows = step, tuple(int(window) for window in windows)


class LossExploded(ModelError):
    """The loss stayed far above its baseline: last `step`, first bad `spike_step`, `windows` drawn from there on."""

    def __init__(self, *, step: int, spike_step: int, level: float, baseline: float, windows: Sequence[int]) -> None:
        advice = "go back before the spike and leave its data out, or lower lr"
        super().__init__(f"loss is {level:.3f} since step {spike_step}, was {baseline:.3f} before; {advice}")
        self.step, self.spike_step = step, spike_step
        self.windows = tuple(int(window) for window in windows)
