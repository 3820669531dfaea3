"""GPT-2: the network and nothing else.

Owns architecture and initialisation. Refuses to know loss, optimizer, device placement and data.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (pre-LayerNorm, tanh GELU, learned
positions, tied head, residual projections scaled by 1/sqrt(2 n_layer) at initialisation).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.architectures.key_value_cache import KeyValueCache
from model.configuration.network import ModelConfig
from model.errors import InvalidInput
from model.kernels.fused_block import BlockShape, fused_block, takes_fused_block

INITIAL_STD = 0.02


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the fused query-key-value projection and the output projection."""
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Mix positions: (B, T, C) -> (B, T, C).

        `visible` (B, 1, T, T) says which key each query may see; None for every one that is not later.
        """
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2)  # (B, T, C) -> (B, H, T, C/H)
            for part in self.c_attn(x).split(width, dim=2)  # (B, T, 3C) -> 3 x (B, T, C)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, is_causal=visible is None
        )
        joined = mixed.transpose(1, 2).reshape(batch, time, width)  # (B, H, T, C/H) -> (B, T, C)
        return F.dropout(self.c_proj(joined), self.dropout, self.training)

    def extend(self, x: Tensor, cache: KeyValueCache, layer: int, visible: Tensor | None) -> Tensor:
        """Mix the newest positions with all that `cache` remembers: (1, T, C) -> (1, T, C).

        `visible` (1, 1, T, length) as `forward` takes it; None for one new token, or where nothing precedes them.
        """
        _, time, width = x.shape
        query, key, value = (
            part.view(1, time, self.n_head, width // self.n_head).transpose(1, 2)  # (1, T, C) -> (1, H, T, C/H)
            for part in self.c_attn(x).split(width, dim=2)  # (1, T, 3C) -> 3 x (1, T, C)
        )
        keys, values = cache.append(layer, key, value)  # (1, H, T, C/H) -> (1, H, length, C/H)
        causal = visible is None and time == cache.length
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, is_causal=causal)
        joined: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(1, time, width))  # (1, H, T, C/H) -> (1, T, C)
        return joined


class FeedForward(nn.Module):
    """Two linear layers with a tanh GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the widening and the narrowing projection."""
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
        """Make the layer's two norms, its attention and its feed-forward part."""
        super().__init__()
        self.fused = False
        """Whether bf16 on a CPU takes `fused_block`, which is faster there and rounds differently."""
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Add what attention and feed-forward find: (B, T, C) -> (B, T, C); `visible` as Attention takes it."""
        if self.fused and takes_fused_block(x):
            attn, mlp = self.attn, self.mlp
            dropout = attn.dropout if self.training else 0.0
            shape = BlockShape(heads=attn.n_head, epsilon=self.ln_1.eps, dropout=dropout)
            return fused_block(
                x, visible, shape, (self.ln_1, attn.c_attn, attn.c_proj, self.ln_2, mlp.c_fc, mlp.c_proj)
            )
        attended: Tensor = x + self.attn(self.ln_1(x), visible)
        result: Tensor = attended + self.mlp(self.ln_2(attended))
        return result

    def extend(self, x: Tensor, cache: KeyValueCache, layer: int, visible: Tensor | None) -> Tensor:
        """Do what `forward` does for the newest positions alone, (1, T, C) -> (1, T, C), as Attention.extend does."""
        attended: Tensor = x + self.attn.extend(self.ln_1(x), cache, layer, visible)
        result: Tensor = attended + self.mlp(self.ln_2(attended))
        return result


def same_document(tokens: Tensor, boundary_id: int) -> Tensor:
    """Return which key each query may see, (B, T) -> bool (B, 1, T, T): those of its own document that are not later.

    The end-of-text token opens the document it stands before, as it does where a text is generated from nothing; so
    nothing that predicts a token of a document, not even its first, sees another one. Positions run on over borders.
    """
    document = (tokens == boundary_id).cumsum(dim=1)  # (B, T)
    same = document[:, :, None] == document[:, None, :]  # (B, T, T)
    return same.tril()[:, None]


def visible_to_newest(tokens: Tensor, newest: int, boundary_id: int | None) -> Tensor | None:
    """Return which of `tokens` (1, S) each of its last `newest` T may see, bool (1, 1, T, S), as `same_document` does.

    None where attention needs no mask: no borders, and one new token or nothing but new ones.
    """
    length = tokens.shape[1]
    if boundary_id is None and newest in (1, length):
        return None
    document = torch.zeros_like(tokens) if boundary_id is None else (tokens == boundary_id).cumsum(dim=1)  # (1, S)
    same = document[:, -newest:, None] == document[:, None, :]  # (1, T, S)
    return same.tril(length - newest)[:, None]


class GPT(nn.Module):
    """A GPT-2 whose head is its token embedding, held and stored once."""

    def __init__(self, config: ModelConfig, vocab_size: int, activation_checkpointing: bool = False) -> None:
        """Make and initialise the network from the process's current CPU generator; `vocab_size` in tokens."""
        super().__init__()
        if vocab_size < 1:
            raise InvalidInput(f"vocab_size={vocab_size} must be at least 1")
        self.config = config
        self.vocab_size = vocab_size
        self.activation_checkpointing = activation_checkpointing
        self.boundary_id: int | None = None
        """The end-of-text id, to keep attention within documents; None, as in GPT-2, lets it cross their borders."""
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.compiled_layers: list[Callable[..., Tensor]] | None = None
        """What training runs in place of `h`, over the same weights; evaluation meets too many shapes for it."""
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self._initialise()

    @property
    def parameter_count(self) -> int:
        """Number of parameters without the position table, which does no matrix work."""
        return sum(parameter.numel() for parameter in self.parameters()) - self.wpe.weight.numel()

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.wte.weight.device

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict every next token: ids (B, T) -> logits (B, T, V). T above block_size is an InvalidInput."""
        return F.linear(self.hidden(tokens), self.wte.weight)  # (B, T, C) -> (B, T, V)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the head reads: ids (B, T) -> (B, T, C), normed. T above block_size is an InvalidInput."""
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise InvalidInput(f"sequence of {time} tokens must be at most block_size={self.config.block_size}")
        x = self.wte(tokens) + self.wpe.weight[:time]  # (B, T, C) + (T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        visible = None if self.boundary_id is None else same_document(tokens, self.boundary_id)
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.compiled_layers if self.compiled_layers and self.training else self.h:
            x = checkpoint(block, x, visible, use_reentrant=False) if recompute else block(x, visible)
        normed: Tensor = self.ln_f(x)
        return normed

    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Predict what follows `tokens`, which follow what `cache` remembers: ids (1, T) -> logits (1, V).

        Agrees with the last position of `forward` over the whole text in evaluation mode, up to rounding, at the cost
        of the new tokens alone. More than block_size tokens in all are an InvalidInput and change nothing.
        """
        time, begin = tokens.shape[1], cache.length
        if begin + time > self.config.block_size:
            raise InvalidInput(f"text of {begin + time} tokens must be at most block_size={self.config.block_size}")
        cache.begin(tokens)
        x = self.wte(tokens) + self.wpe.weight[begin : begin + time]  # (1, T, C) + (T, C)
        visible = visible_to_newest(cache.tokens, time, self.boundary_id)
        for layer, block in enumerate(self.h):
            assert isinstance(block, Block)
            x = block.extend(x, cache, layer, visible)
        return F.linear(self.ln_f(x[:, -1]), self.wte.weight)  # (1, T, C) -> (1, C) -> (1, V)

    def fuse_blocks(self, wanted: bool) -> None:
        """Choose whether bf16 on a CPU takes `fused_block`: faster there, equal up to rounding."""
        for block in self.h:
            assert isinstance(block, Block)
            block.fused = wanted

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
