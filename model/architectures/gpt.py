"""The GPT-2 network and its initialisation.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (pre-LayerNorm, tanh GELU, learned
positions, tied head, residual projections scaled by 1/sqrt(2 n_layer) at initialisation). Key-value cache: Pope et al.
2022, "Efficiently Scaling Transformer Inference", section 2.1.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.configuration.network import ModelConfig
from model.errors import InvalidInput
from model.kernels.document_attention import attend_documents
from model.kernels.fused_block import fused_block, uses_fused_block

INITIAL_STD = 0.02


class KeyValueCache:
    """Keys and values of a text's first `length` tokens; positions are absolute: another beginning needs `length` 0."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        shape = (2, config.n_layer, 1, config.n_head, config.block_size, config.n_embd // config.n_head)
        self._keys, self._values = torch.zeros(shape, device=device, dtype=dtype)  # each (L, 1, H, T, C/H)
        self._tokens = torch.zeros((1, config.block_size), device=device, dtype=torch.int64)
        self.length = 0

    def begin(self, tokens: Tensor) -> Tensor:
        """Add the ids (1, T) and return all, (1, length); every layer then appends their keys and values."""
        self._tokens[:, self.length : self.length + tokens.shape[1]] = tokens
        self.length += tokens.shape[1]
        return self._tokens[:, : self.length]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of the newest ids, each (1, H, T, C/H); return all, (1, H, length, C/H)."""
        newest = slice(self.length - key.shape[2], self.length)
        self._keys[layer, :, :, newest], self._values[layer, :, :, newest] = key, value
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, cache: KeyValueCache | None = None, layer: int = 0
    ) -> Tensor:
        """Attend: (B, T, C) -> (B, T, C); `visible` (B, 1, T, S) marks each query's keys, None is plain causal.

        The keys are those of `x`, S = T; with `cache` (B = 1) those of all cached positions, the newest T being `x`.
        `visible` may also be the `document_starts` of the batch.
        """
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.n_head, width // self.n_head)  # (B, T, C) -> (B, T, H, C/H)
            for part in self.c_attn(x).split(width, dim=2)  # (B, T, 3C) -> 3 x (B, T, C)
        )
        dropout = self.dropout if self.training else 0.0
        if visible is not None and visible.ndim == 1:
            joined = attend_documents(query, key, value, visible, dropout).flatten(2)  # (B, T, H, C/H) -> (B, T, C)
            return F.dropout(self.c_proj(joined), self.dropout, self.training)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (B, T, H, C/H) -> (B, H, T, C/H)
        if cache is not None:
            key, value = cache.append(layer, key, value)  # (1, H, T, C/H) -> (1, H, S, C/H)
        causal = visible is None and time == key.shape[2]  # a single new query sees every key
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, is_causal=causal
        )
        joined = mixed.transpose(1, 2).reshape(batch, time, width)  # (B, H, T, C/H) -> (B, T, C)
        return F.dropout(self.c_proj(joined), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with a tanh GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: (B, T, C) -> (B, T, C)."""
        hidden = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, C) -> (B, T, 4C)
        return F.dropout(self.c_proj(hidden), self.dropout, self.training)


class Block(nn.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fused = False
        """Whether bf16 on a CPU uses `fused_block`, which is faster there and rounds differently."""
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, cache: KeyValueCache | None = None, layer: int = 0
    ) -> Tensor:
        """Add attention, then feed-forward: (B, T, C) -> (B, T, C); arguments as in Attention."""
        if self.fused and cache is None and uses_fused_block(x):
            attn, mlp = self.attn, self.mlp
            parts = (self.ln_1, attn.c_attn, attn.c_proj, self.ln_2, mlp.c_fc, mlp.c_proj)
            dropout = attn.dropout if self.training else 0.0
            return fused_block(x, visible, parts, heads=attn.n_head, epsilon=self.ln_1.eps, dropout=dropout)
        attended: Tensor = x + self.attn(_normed(x, self.ln_1), visible, cache, layer)
        result: Tensor = attended + self.mlp(_normed(attended, self.ln_2))
        return result


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    bias = None if norm.bias is None else norm.bias.to(x.dtype)  # sharded processes gather it in half precision
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), bias, norm.eps)


def same_document_mask(tokens: Tensor, boundary_id: int | None, begin: int = 0) -> Tensor:
    """Return the causal mask, within documents unless `boundary_id` is None: ids (B, S) -> bool (B, 1, S - begin, S).

    The end-of-text token is the next document's: no prediction sees another document. Positions are not reset.
    """
    document = torch.zeros_like(tokens) if boundary_id is None else (tokens == boundary_id).cumsum(dim=1)  # (B, S)
    same = document[:, begin:, None] == document[:, None, :]  # (B, T, S)
    return same.tril(begin)[:, None]


class GPT(nn.Module):
    """A GPT-2 whose head is its token embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int, activation_checkpointing: bool = False) -> None:
        """Initialise the weights from the process's CPU generator; `vocab_size` in tokens."""
        super().__init__()
        if vocab_size < 1:
            raise InvalidInput(f"vocab_size={vocab_size} must be at least 1")
        self.config = config
        self.vocab_size = vocab_size
        self.activation_checkpointing = activation_checkpointing
        self.gathered_dtype: torch.dtype | None = None
        """The half precision in which sharded processes gather the layers, which run under autocast only."""
        self.boundary_id: int | None = None
        """The end-of-text id, to keep attention within documents; None, as in GPT-2, lets attention cross documents."""
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.compiled_layers: list[Callable[..., Tensor]] | None = None
        """Compiled forms of `h` for training; evaluation has too many shapes to compile."""
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self._initialise()

    @property
    def parameter_count(self) -> int:
        """Number of all parameters, as `count_parameters` tells it without a network."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.wte.weight.device

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Predict every next token: ids (B, T) -> logits (B, T, V). T above block_size raises InvalidInput."""
        return F.linear(self.hidden(tokens, starts), self.wte.weight)  # (B, T, C) -> (B, T, V)

    def hidden(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the head's input: ids (B, T) -> (B, T, C), normalised. T above block_size raises InvalidInput.

        With the `document_starts` of the batch, attention within documents needs no mask.
        """
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise InvalidInput(f"sequence of {time} tokens must be at most block_size={self.config.block_size}")
        x = self.wte(tokens) + self.wpe.weight[:time]  # (B, T, C) + (T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        visible = starts
        if self.boundary_id is not None and starts is None:
            visible = same_document_mask(tokens, self.boundary_id)
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.compiled_layers if self.compiled_layers and self.training else self.h:
            x = checkpoint(block, x, visible, use_reentrant=False) if recompute else block(x, visible)
        normed: Tensor = self.ln_f(x)
        return normed

    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Append `tokens` to `cache` and predict the next token: ids (1, T) -> logits (1, V).

        Equals the last position of `forward` up to rounding. InvalidInput above block_size tokens changes nothing.
        """
        time, begin = tokens.shape[1], cache.length
        if begin + time > self.config.block_size:
            raise InvalidInput(f"text of {begin + time} tokens must be at most block_size={self.config.block_size}")
        text = cache.begin(tokens)  # (1, T) -> (1, S)
        x = self.wte(tokens) + self.wpe.weight[begin : begin + time]  # (1, T, C) + (T, C)
        is_plain = self.boundary_id is None and (begin == 0 or time == 1)
        visible = None if is_plain else same_document_mask(text, self.boundary_id, begin)
        for layer, block in enumerate(self.h):
            x = block(x, visible, cache, layer)
        return F.linear(self.ln_f(x[:, -1]), self.wte.weight)  # (1, T, C) -> (1, C) -> (1, V)

    def fuse_blocks(self, fused: bool) -> None:
        """Choose whether bf16 on a CPU uses `fused_block`: faster there, equal up to rounding."""
        for block in self.h:
            assert isinstance(block, Block)
            block.fused = fused

    @torch.no_grad()
    def _initialise(self) -> None:
        residual_std = INITIAL_STD / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.ndim >= 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
