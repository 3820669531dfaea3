"""The errors of the model package.

Owns one root and the subclasses a caller answers differently. Refuses to know how a failure is classified or budgeted.
"""

from collections.abc import Sequence


class ModelError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInput(ModelError):
    """A size, name or argument that cannot work; the message says which, its value and the rule."""


class StateMismatch(ModelError):
    """Tensors offered to a model or train state whose names, shapes or dtypes are not the expected ones."""


class TokenOutOfRange(ModelError):
    """A token id the vocabulary does not have; `window` is the guilty window's index."""

    def __init__(self, *, window: int, token: int, vocab_size: int) -> None:
        """Name the window, the token id found in it and the vocabulary's size."""
        super().__init__(
            f"window {window}: token id {token} is outside the vocabulary of {vocab_size}; "
            "the shard is damaged or was made with another tokenizer: quarantine the window or rebuild the snapshot"
        )
        self.window = window
        self.token = token
        self.vocab_size = vocab_size


class NonFiniteLoss(ModelError):
    """Loss or gradient norm of a step is not finite; raised before the optimizer touches a weight.

    `step` is the 1-based number of the step that failed, `quantity` is "loss" or "grad_norm", `windows` the windows
    of the first micro-batch with a non-finite loss (of the whole batch for a gradient norm).
    """

    def __init__(self, *, step: int, quantity: str, value: float, windows: Sequence[int]) -> None:
        """Name the step, what was not finite, its value and the windows it was computed from."""
        super().__init__(
            f"step {step}: {quantity} is {value}; weights are unchanged. "
            f"Quarantine the {len(windows)} windows it came from, lower lr, or go back to an older checkpoint"
        )
        self.step = step
        self.quantity = quantity
        self.value = value
        self.windows = tuple(int(window) for window in windows)


class BadBatch(ModelError):
    """Samples of one batch that no finite weights can learn from, while the rest of the batch is sound.

    `step` is the 1-based number of the step they were drawn for, `windows` exactly the guilty ones.
    """

    def __init__(self, *, step: int, windows: Sequence[int], why: str) -> None:
        """Name the step, the windows and what is wrong with them."""
        shown = ", ".join(map(str, list(windows)[:8])) + (", …" if len(windows) > 8 else "")
        super().__init__(f"step {step}: {why} in {len(windows)} window(s) of its batch and in no other: {shown}")
        self.step = step
        self.windows = tuple(int(window) for window in windows)


class LossExploded(ModelError):
    """The loss rose far above what it was and stayed there: the run learns no more.

    `step` is the last completed step, `spike_step` the first of the bad ones, `windows` what was drawn for them.
    """

    def __init__(self, *, step: int, spike_step: int, level: float, baseline: float, windows: Sequence[int]) -> None:
        """Name where the spike begins, how high the loss is, and how high it was."""
        super().__init__(
            f"loss is {level:.3f} since step {spike_step}, was {baseline:.3f} before; go back before the spike and "
            "leave its data out, or lower lr"
        )
        self.step = step
        self.spike_step = spike_step
        self.windows = tuple(int(window) for window in windows)
