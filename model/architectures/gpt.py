"""The network: layers of attention and feed-forward as `ModelConfig` describes them, and its initialisation.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (pre-LayerNorm, tanh GELU, learned
positions, tied head); Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Shazeer 2020, "GLU Variants
Improve Transformer"; Huang et al. 2025, "Over-Tokenized Transformer" (tables of n-grams).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cairn.model.configuration.network import WIDENED, ModelConfig, parameter_table
from cairn.model.errors import InvalidInput
from cairn.model.kernels.attention import Attention, KeyValueCache, rotations
from cairn.model.kernels.fused_block import fused_block, uses_fused_block


class FeedForward(nn.Module):
    """Two linear layers with a tanh GELU, a squared ReLU or a SwiGLU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.dropout = config.feed_forward, config.dropout
        self.c_fc = nn.Linear(config.n_embd, config.n_inner * WIDENED[self.kind], bias=config.bias)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: (B, T, C) -> (B, T, C)."""
        hidden = self.c_fc(x)  # (B, T, C) -> (B, T, I), of SwiGLU (B, T, 2I)
        if self.kind == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)  # (B, T, 2I) -> 2 x (B, T, I)
            hidden = F.silu(gate) * up
        else:
            hidden = F.relu(hidden).square() if self.kind == "relu2" else F.gelu(hidden, approximate="tanh")
        return F.dropout(self.c_proj(hidden), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer, normalised before attention and before feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.fused = config, False
        """Whether bf16 on a CPU uses `fused_block`, which is faster there and rounds differently."""
        self.ln_1 = _norm(config)
        self.attn = Attention(config)
        self.ln_2 = _norm(config)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, cache: KeyValueCache | None = None, turned: Tensor | None = None
    ) -> Tensor:
        """Add attention, then feed-forward: (B, T, C) -> (B, T, C); arguments as in Attention."""
        if self.fused and cache is None and uses_fused_block(x):
            attn, mlp = self.attn, self.mlp
            parts = (self.ln_1, attn.c_attn, attn.q_norm, attn.k_norm, attn.c_proj, self.ln_2, mlp.c_fc, mlp.c_proj)
            dropout = attn.dropout if self.training else 0.0
            return fused_block(x, visible, turned, parts, self.config, dropout=dropout)
        attended: Tensor = x + self.attn(_normed(x, self.ln_1), visible, cache, turned)
        result: Tensor = attended + self.mlp(_normed(attended, self.ln_2))
        return result


def _norm(config: ModelConfig) -> nn.LayerNorm | nn.RMSNorm:
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, config.norm_epsilon, config.norm_gain)
    return nn.LayerNorm(config.n_embd, config.norm_epsilon, config.norm_gain, config.bias)


def _normed(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
    gain = None if norm.weight is None else norm.weight.to(x.dtype)  # sharded processes gather it in half precision
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, gain, norm.eps)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(x, norm.normalized_shape, gain, bias, norm.eps)


def same_document_mask(tokens: Tensor, boundary_id: int | None, begin: int = 0) -> Tensor:
    """Return the causal mask, within documents unless `boundary_id` is None: ids (B, S) -> bool (B, 1, S - begin, S).

    The end-of-text token is the next document's: no prediction sees another document. Positions are not reset.
    """
    document = torch.zeros_like(tokens) if boundary_id is None else (tokens == boundary_id).cumsum(dim=1)  # (B, S)
    same = document[:, begin:, None] == document[:, None, :]  # (B, T, S)
    return same.tril(begin)[:, None]


def _table(rows: int, width: int) -> nn.Embedding:
    # Drawing values on "meta", where there are none, would import torch's compiler: more than a second.
    values = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=values if values.is_meta else None)


class GPT(nn.Module):
    """A network that predicts each next token."""

    def __init__(self, config: ModelConfig, vocab_size: int, activation_checkpointing: bool = False) -> None:
        """Draw first values from the process's CPU generator, on "meta" none: see `fill`; `vocab_size` counts ids."""
        super().__init__()
        if vocab_size < 1:
            raise InvalidInput(f"vocab_size={vocab_size} must be at least 1")
        self.config, self.vocab_size, self.activation_checkpointing = config, vocab_size, activation_checkpointing
        self.gathered_dtype: torch.dtype | None = None
        """The half precision in which sharded processes gather the layers, which run under autocast only."""
        self.boundary_id: int | None = None
        """The end-of-text id, to keep attention within documents; None, as in GPT-2, lets attention cross documents."""
        rows = config.rows(vocab_size)
        self.wte = _table(rows, config.n_embd)
        self.wpe = _table(config.block_size, config.n_embd) if config.positions == "learned" else None
        self.ngrams = nn.ModuleList(_table(rows, config.n_embd) for rows in config.ngram_rows)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.compiled_layers: list[Callable[..., Tensor]] | None = None
        """Compiled forms of `h` for training; evaluation has too many shapes to compile."""
        self.ln_f = _norm(config)
        self.lm_head = None if config.tied else nn.Linear(config.n_embd, rows, bias=False)
        if not self.wte.weight.is_meta:
            self._initialise()

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns `hidden` into logits, (V, C): the token embedding where they are tied."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

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
        return F.linear(self.hidden(tokens, starts), self.head_weight)  # (B, T, C) -> (B, T, V)

    def hidden(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the head's input: ids (B, T) -> (B, T, C), normalised. T above block_size raises InvalidInput.

        With the `document_starts` of the batch, attention within documents needs no mask.
        """
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise InvalidInput(f"sequence of {time} tokens must be at most block_size={self.config.block_size}")
        x = self._embed(tokens, 0)
        x = F.dropout(x, self.config.dropout, self.training)
        visible = starts
        if self.boundary_id is not None and starts is None:
            visible = same_document_mask(tokens, self.boundary_id)
        turned = rotations(self.config, 0, time, tokens.device)
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.compiled_layers if self.compiled_layers and self.training else self.h:
            given = (x, visible) if turned is None else (x, visible, None, turned)
            x = checkpoint(block, *given, use_reentrant=False) if recompute else block(*given)
        normed: Tensor = self.ln_f(x)
        return normed

    def _embed(self, text: Tensor, begin: int) -> Tensor:
        """Return the residual stream's first values from position `begin` on: ids (B, S) -> (B, S - begin, C)."""
        x: Tensor = self.wte(text[:, begin:])
        if self.wpe is not None:
            x = x + self.wpe.weight[begin : text.shape[1]]  # (B, T, C) + (T, C)
        key = before = text
        for table, rows in zip(self.ngrams, self.config.ngram_rows, strict=True):
            before = F.pad(before, (1, 0))[:, :-1]  # (B, S), one token further back; 0 before the first
            if self.boundary_id is not None:
                before = before.masked_fill(text == self.boundary_id, 0)
            key = key * self.vocab_size + before
            x = x + table(key[:, begin:] % rows)  # (B, T) -> (B, T, C)
        return x

    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Append `tokens` to `cache` and predict the next token: ids (1, T) -> logits (1, V).

        Equals the last position of `forward` up to rounding. InvalidInput above block_size tokens changes nothing.
        """
        time, begin = tokens.shape[1], cache.length
        if begin + time > self.config.block_size:
            raise InvalidInput(f"text of {begin + time} tokens must be at most block_size={self.config.block_size}")
        text = cache.begin(tokens)  # (1, T) -> (1, S)
        x, turned = self._embed(text, begin), rotations(self.config, begin, time, tokens.device)
        is_plain = self.boundary_id is None and (begin == 0 or time == 1)
        visible = None if is_plain else same_document_mask(text, self.boundary_id, begin)
        for block in self.h:
            x = block(x, visible, cache, turned)
        return F.linear(self.ln_f(x[:, -1]), self.head_weight)  # (1, T, C) -> (1, C) -> (1, V)

    def fuse_blocks(self, fused: bool) -> None:
        """Choose whether layers in bf16 on a CPU use `fused_block`: faster there, equal up to rounding."""
        for block in self.h:
            assert isinstance(block, Block)
            block.fused = fused

    def fill(self, put: Callable[[Tensor, Tensor], None]) -> None:
        """Call `put` with each parameter of a network made on "meta" and its first values, one after the other.

        They have the bits that they would have in a network made on the CPU, however it is sharded by now.
        """
        for module in self.modules():  # in the order in which torch draws when it makes them
            if isinstance(module, nn.Embedding):
                torch.empty(module.weight.shape).normal_()
            elif isinstance(module, nn.Linear):
                for parameter in module.parameters(recurse=False):
                    torch.empty(parameter.shape).uniform_()
        self._initialise(put)

    @torch.no_grad()
    def _initialise(self, put: Callable[[Tensor, Tensor], None] | None = None) -> None:
        table = {row.name: row for row in parameter_table(self.config, self.vocab_size)}
        for name, parameter in self.named_parameters():
            if (row := table.get(name)) is None:
                continue  # an adapter's
            values = parameter if put is None else torch.empty(parameter.shape)
            if row.std:
                nn.init.normal_(values, std=row.std)
            else:
                nn.init.constant_(values, row.constant)
            if put is not None:
                put(parameter, values)
