"""Held-out loss and a sample text during training, without any effect on it: the probe has its own generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.architectures.gpt import GPT
from model.data.token_windows import TokenWindows
from model.errors import InvalidInput
from model.inference.evaluation import held_out_loss
from model.inference.generation import generate


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Measures a fixed slice of held-out windows every `every_steps` steps and samples text after `prompt_ids`."""

    windows: TokenWindows
    every_steps: int
    batches: int
    batch_size: int
    sample_tokens: int
    prompt_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise InvalidInput(f"every_steps={self.every_steps} must be at least 1; pass no probe to switch it off")

    def is_due(self, step: int) -> bool:
        """Whether to measure after `step` completed steps."""
        return step % self.every_steps == 0

    def measure(self, model: GPT) -> tuple[float, str | None]:
        """Return loss in nats per token, and text unless `sample_tokens` is 0; mode and generators stay unchanged."""
        loss, _ = held_out_loss(model, self.windows, batches=self.batches, batch_size=self.batch_size)
        if self.sample_tokens == 0:
            return loss, None
        ids = generate(model, self.prompt_ids, new_tokens=self.sample_tokens, temperature=0.8, top_k=50)
        return loss, self.decode(ids)
