"""Text from a model, token by token.

Owns sampling. Refuses to know text: ids in, ids out. Draws from its own generator, never from the process's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.errors import InvalidInput
from model.gpt import GPT
from model.modes import evaluating


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
    generators are left as they were.
    """
    _check(model, prompt_ids, new_tokens=new_tokens, temperature=temperature, top_k=top_k)
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    with evaluating(model):
        for _ in range(new_tokens):
            context = torch.tensor([ids[-model.config.block_size :]], dtype=torch.int64, device=model.device)  # (1, T)
            logits = model(context)[0, -1].float().cpu()  # (1, T, V) -> (V,)
            ids.append(_pick(logits, temperature=temperature, top_k=top_k, generator=generator))
    return ids[len(prompt_ids) :]


def _pick(logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        smallest_kept = torch.topk(logits, top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def _check(model: GPT, prompt_ids: Sequence[int], *, new_tokens: int, temperature: float, top_k: int | None) -> None:
    if not prompt_ids:
        raise InvalidInput("prompt_ids is empty; start from the end-of-text id to sample without a prompt")
    if not all(0 <= token < model.vocab_size for token in prompt_ids):
        raise InvalidInput(f"prompt_ids must be in [0, {model.vocab_size}); encode the prompt with the run's tokenizer")
    if new_tokens < 0 or temperature < 0:
        raise InvalidInput(f"new_tokens={new_tokens} and temperature={temperature} must not be negative")
    if top_k is not None and top_k < 1:
        raise InvalidInput(f"top_k={top_k} must be at least 1, or None for all tokens")
