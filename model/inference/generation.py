"""Text from a model, token by token.

Owns sampling. Refuses to know text: ids in, ids out. Draws from its own generator, never from the process's.
Source: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration" (nucleus sampling); Fan et al. 2018,
"Hierarchical Neural Story Generation" (top-k).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.architectures.gpt import GPT
from model.architectures.key_value_cache import KeyValueCache
from model.errors import InvalidInput, ModelError
from model.inference.evaluation_mode import evaluation_mode

_COLDEST = 1e-6
"""Below this temperature scores would overflow, and nothing but the likeliest token has a chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """How a token is drawn from scores: only the likeliest `top_k`, of those only the nucleus that holds `top_p`.

    Temperature 0 takes the likeliest token, `top_k` None and `top_p` 1 leave every token in.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what draws nothing."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInput(f"temperature={self.temperature} must not be negative; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInput(f"top_k={self.top_k} must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p={self.top_p} must be above 0 and at most 1, which leaves every token in")

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return an id drawn from scores (V,), on the CPU; a ModelError where they are not finite."""
        if not bool(torch.isfinite(logits).all()):
            raise ModelError("the network's scores are not finite: these weights have diverged; take older ones")
        if self.temperature < _COLDEST:
            return int(logits.argmax())
        if self.top_k is not None and self.top_k < logits.numel():
            smallest_kept = torch.topk(logits, self.top_k).values[-1]
            logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
        chances = torch.softmax(logits / self.temperature, dim=-1)
        if self.top_p < 1:
            chances = _nucleus(chances, self.top_p)
        return int(torch.multinomial(chances, 1, generator=generator))


def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Return the `new_tokens` ids that follow `prompt_ids` (not empty); the model sees the last block_size tokens.

    Temperature 0 takes the likeliest token. Equal arguments give equal ids; the model's mode and the process's
    generators are left as they were. Every token costs a pass over the whole context: what is on record was drawn this
    way, and the last bits of `generate_stream` may differ.
    """
    drawing = Drawing(temperature=temperature, top_k=top_k)
    _check(model, prompt_ids, new_tokens=new_tokens)
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    with evaluation_mode(model):
        for _ in range(new_tokens):
            context = torch.tensor([ids[-model.config.block_size :]], dtype=torch.int64, device=model.device)  # (1, T)
            logits = model(context)[0, -1].float().cpu()  # (1, T, V) -> (V,)
            ids.append(drawing.pick(logits, generator))
    return ids[len(prompt_ids) :]


def generate_stream(
    model: GPT, prompt_ids: Sequence[int], *, new_tokens: int, drawing: Drawing, seed: int = 0
) -> Iterator[int]:
    """Return an iterator over the `new_tokens` ids that follow `prompt_ids` (not empty), each drawn when asked for.

    A token costs a pass over itself. The model sees the last block_size tokens of the prompt; whenever the block is
    full, it goes on from the newest half of it, read anew: from then on it sees between half a block and a block.
    Equal arguments give equal ids; the model's mode and the process's generators are left as they were.
    """
    _check(model, prompt_ids, new_tokens=new_tokens)
    return _draw(model, list(prompt_ids), new_tokens, drawing, torch.Generator().manual_seed(seed))


def _draw(model: GPT, ids: list[int], new_tokens: int, drawing: Drawing, generator: torch.Generator) -> Iterator[int]:
    block_size = model.config.block_size
    cache = KeyValueCache(model.config, device=model.device, dtype=model.wte.weight.dtype)
    unread = ids = ids[-block_size:]
    for _ in range(new_tokens):
        if cache.length + len(unread) > block_size:
            cache.forget()
            unread = ids = ids[-max(block_size // 2, 1) :]
        with evaluation_mode(model):  # never across a yield: whoever asks has a mode of their own
            context = torch.tensor([unread], dtype=torch.int64, device=model.device)  # (1, T)
            logits = model.extend(context, cache)[0].float().cpu()  # (1, V) -> (V,)
        token = drawing.pick(logits, generator)
        yield token
        unread = [token]
        ids.append(token)


def _nucleus(chances: Tensor, top_p: float) -> Tensor:
    """Return the chances (V,) with 0 for all but the fewest likeliest that together have at least `top_p`."""
    likeliest, places = torch.sort(chances, descending=True, stable=True)
    before = likeliest.cumsum(dim=0) - likeliest
    return torch.zeros_like(chances).scatter(0, places, likeliest.masked_fill(before >= top_p, 0.0))


def _check(model: GPT, prompt_ids: Sequence[int], *, new_tokens: int) -> None:
    if not prompt_ids:
        raise InvalidInput("prompt_ids is empty; start from the end-of-text id to sample without a prompt")
    if not all(0 <= token < model.vocab_size for token in prompt_ids):
        raise InvalidInput(f"prompt_ids must be in [0, {model.vocab_size}); encode the prompt with the run's tokenizer")
    if new_tokens < 0:
        raise InvalidInput(f"new_tokens={new_tokens} must not be negative")
