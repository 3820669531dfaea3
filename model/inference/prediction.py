"""A network in use: held-out loss, in fp32 except on layers that are gathered in less, and sampled text.

Sources: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration" (nucleus sampling); Fan et al. 2018,
"Hierarchical Neural Story Generation" (top-k).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cairn.model.architectures.own_network import Network, OwnNetwork
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput, ModelError
from cairn.model.kernels import attention, block_sizes, head_loss


@contextlib.contextmanager
def evaluation_mode(model: Network) -> Iterator[None]:
    """Turn dropout and gradients off for the block, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, model.gathered_dtype, model.gathered_dtype is not None):
            yield
    finally:
        model.train(was_training)


def window_losses(
    model: Network,
    windows: TokenWindows,
    *,
    count: int,
    among: range | None = None,
    note: Callable[[int], object] = lambda measured: None,
) -> tuple[float, ...]:
    """Return the loss of each window in nats per token, in the data's order: of `count` windows, or all, if fewer.

    The windows are evenly spread over the data, or over those `among` it, and always the same ones. They are measured
    some thousand tokens at a time: a loss depends on nothing but its window. `note` gets the number measured so far.
    Where the loss counts answers alone, those of a window are divided by the windows' mean number of them: the mean
    over windows is that over the answers' tokens.
    """
    among, losses = range(windows.window_count) if among is None else among, list[float]()
    count = min(count, len(among))
    chosen = among.start + np.arange(count, dtype=np.int64) * len(among) // count
    share = windows.count_targets(chosen) / max(1, count * windows.block_size)
    with evaluation_mode(model):
        at_once = max(1, block_sizes.HELD_OUT_TOKENS // windows.block_size)
        for start in range(0, len(chosen), at_once):
            tokens = torch.from_numpy(windows.gather(chosen[start : start + at_once])).to(model.device)  # (b, T+1)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (b, T+1) -> 2 x (b, T)
            if isinstance(model, OwnNetwork):
                measured = model.window_losses(inputs, targets)
            else:
                hidden = model.hidden(head_loss.as_ids(inputs))
                measured = head_loss.window_losses(hidden, model.head_weight, targets)
            losses += (measured / (share or 1.0)).tolist()
            note(len(losses))
    return tuple(losses)


def held_out_loss(model: Network, windows: TokenWindows, *, batches: int, batch_size: int) -> tuple[float, int]:
    """Return the mean loss in nats per token and the number of windows: `batches * batch_size`, or all, if fewer."""
    losses = window_losses(model, windows, count=batches * batch_size)
    return math.fsum(losses) / len(losses), len(losses)


def describe_losses(losses: Sequence[float], *, bytes_per_token: float | None) -> dict[str, float]:
    """Return the metrics of held-out windows, whose losses are in nats per token, by their recorded names."""
    loss = math.fsum(losses) / len(losses)
    bits = {} if bytes_per_token is None else {"bits_per_byte": loss / math.log(2.0) / bytes_per_token}
    return {"val_loss": loss, "perplexity": math.exp(min(loss, 700.0)), **bits, "samples": float(len(losses))}


_MIN_TEMPERATURE = 1e-6
"""Below this temperature logits would overflow, so the likeliest token is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The likeliest `top_k` (None: all) in the nucleus `top_p` (1: all) are drawn; temperature 0: the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInput(f"temperature={self.temperature} must not be negative; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInput(f"top_k={self.top_k} must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p={self.top_p} must be above 0 and at most 1, which leaves every token in")

    def sample(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Draw an id from logits (V,) on the CPU; logits that are not finite raise ModelError."""
        if not bool(torch.isfinite(logits).all()):
            raise ModelError("the network's scores are not finite: these weights have diverged; take older ones")
        if self.temperature < _MIN_TEMPERATURE:
            return int(logits.argmax())
        if self.top_k is not None and self.top_k < logits.numel():
            smallest_kept = torch.topk(logits, self.top_k).values[-1]
            logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
        probabilities = torch.softmax(logits / self.temperature, dim=-1)
        if self.top_p < 1:
            likeliest, places = torch.sort(probabilities, descending=True, stable=True)
            before = likeliest.cumsum(dim=0) - likeliest
            nucleus = likeliest.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(0, places, nucleus)
        return int(torch.multinomial(probabilities, 1, generator=generator))


def generate_stream(
    model: Network, prompt_ids: Sequence[int], *, new_tokens: int, sampling: Sampling, seed: int = 0
) -> Iterator[int]:
    """Return an iterator over the `new_tokens` ids that follow `prompt_ids` (not empty), each drawn on demand.

    A token costs one pass over itself. The model sees the last block_size tokens of the prompt; whenever the block is
    full, the newest half is read again and the rest forgotten. A module of one's own reads the last block_size tokens
    for each. Equal arguments give equal ids; the model's mode and the process's generators stay unchanged.
    """
    if not prompt_ids:
        raise InvalidInput("prompt_ids is empty; start from the end-of-text id to sample without a prompt")
    if not all(0 <= token < model.vocab_size for token in prompt_ids):
        raise InvalidInput(f"prompt_ids must be in [0, {model.vocab_size}); encode the prompt with the run's tokenizer")
    if new_tokens < 0:
        raise InvalidInput(f"new_tokens={new_tokens} must not be negative")
    return _sample(model, list(prompt_ids), new_tokens, sampling, torch.Generator().manual_seed(seed))


def sample_text(
    model: Network, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, new_tokens: int, seed: int = 0
) -> str:
    """Return text that follows the prompt, drawn as probes and evaluations draw it."""
    sampling = Sampling(temperature=0.8, top_k=50)
    return decode(list(generate_stream(model, prompt_ids, new_tokens=new_tokens, sampling=sampling, seed=seed)))


def _sample(
    model: Network, ids: list[int], new_tokens: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    block_size, cache = model.config.block_size, None
    if isinstance(model, OwnNetwork):
        predict: Callable[[torch.Tensor], torch.Tensor] = model.next_logits
    else:
        cache = attention.KeyValueCache(model.config, device=model.device, dtype=model.wte.weight.dtype)
        predict = functools.partial(model.extend, cache=cache)
    new_ids = ids = ids[-block_size:]
    for _ in range(new_tokens):
        if cache is None:
            new_ids = ids[-block_size:]
        elif cache.length + len(new_ids) > block_size:
            cache.length = 0
            new_ids = ids = ids[-max(block_size // 2, 1) :]
        with evaluation_mode(model):  # not across a yield: the caller may change the mode in between
            context = torch.tensor([new_ids], dtype=torch.int64, device=model.device)  # (1, T)
            # Rows of the embedding beyond the ids mean no token, and none of them is drawn.
            logits = predict(context)[0, : model.vocab_size].float().cpu()  # (1, V) -> (ids,)
        new_ids = [sampling.sample(logits, generator)]
        ids += new_ids
        yield ids[-1]


class TextStream:
    """Decodes sampled ids to text in whole characters; with a byte-level tokenizer the pieces join to one decoding.

    A token may end inside a character or read differently at a text's start, so ids are decoded with earlier ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids, self._returned = list(after), len(after)
        self._returned_text = decode(self._ids) if after else ""

    def push(self, token: int) -> str:
        """Add `token`, return the text now complete; bytes that are not UTF-8 are replaced once other text follows."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(self._returned_text):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the rest; no token follows."""
        return self._take(self._decode(self._ids)) if len(self._ids) > self._returned else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._returned_text) :]
        self._ids = self._ids[self._returned :]
        self._returned, self._returned_text = len(self._ids), self._decode(self._ids)
        return piece
