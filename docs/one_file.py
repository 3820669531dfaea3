"""All that a run computes, in one file: PyTorch and safetensors, nothing of Cairn.

    python docs/one_file.py TEXT...                                 # the configuration of docs/tutorial.md
    python docs/one_file.py TEXT... architecture=qwen3 steps=100    # any field of Config

With `training.precision = "fp32"` and `training.kernels = "stock"` `cairn train` computes the same bits on the same
machine: `state_sha256` is equal. What else Cairn does happens around this, so that the same bits come out although
machines are taken away; its other kernels and precisions are faster, and round otherwise.

Shapes: B windows of T tokens, b of them at once, C the width, H heads, D = C / H, V the vocabulary.
"""

import hashlib
import json
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

END_OF_TEXT, VOCABULARY = 256, 257  # the 256 bytes, and a mark where a text ends


@dataclass(frozen=True)
class Config:
    """Names are those of Cairn's keys, values those of the tutorial's my.toml."""

    architecture: str = "gpt2"  # or "qwen3"
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 64
    block_size: int = 64  # tokens of a window
    steps: int = 300
    global_batch: int = 16  # windows of a step
    micro_batch: int = 8  # windows that pass the network at once; Cairn's "auto" halves this batch, too
    lr: float = 3e-3
    min_lr: float = 1e-4
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 1337
    val_fraction: float = 0.1  # the end of the text, which is not trained on
    every_steps: int = 100  # between held-out losses, and between checkpoints
    resume: str = ""  # a checkpoint to go on from


class Attention(nn.Module):
    """Causal self-attention: each token looks at itself and at those before it, in several heads side by side."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.is_qwen3 = config.n_head, config.architecture == "qwen3"
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=not self.is_qwen3)  # for query, key and value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=not self.is_qwen3)
        if self.is_qwen3:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (B, T, C) -> (B, T, C)."""
        query, key, value = self.c_attn(x).unflatten(2, (3, self.heads, -1)).unbind(2)  # (B, T, 3C) -> 3 x (B, T, H, D)
        if self.is_qwen3:
            query, key = rotate(self.q_norm(query)), rotate(self.k_norm(key))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (B, T, H, D) -> (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: turn pairs of numbers by their place, so that products depend on distances: (B, T, H, D)."""
    time, size = x.shape[1], x.shape[3]
    frequencies = 1.0 / 1e6 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)  # (D/2,)
    angles = torch.outer(torch.arange(time, dtype=torch.float32), frequencies)[:, None]  # (T, 1, D/2)
    left, right = x.chunk(2, dim=-1)  # (B, T, H, D) -> 2 x (B, T, H, D/2)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class FeedForward(nn.Module):
    """Each token by itself: to a wider layer, a non-linear function, and back. GPT-2 has GELU, Qwen3 gates (SwiGLU)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.is_gated = config.architecture == "qwen3"
        inner = (3 if self.is_gated else 4) * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, 2 * inner if self.is_gated else inner, bias=not self.is_gated)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=not self.is_gated)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: (B, T, C) -> (B, T, C)."""
        if not self.is_gated:
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # by way of (B, T, 4C)
        gate, up = self.c_fc(x).chunk(2, dim=-1)  # (B, T, 6C) -> 2 x (B, T, 3C)
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention between tokens, then the feed-forward part of each; both are added to the stream `x`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1, self.attn = make_norm(config), Attention(config)
        self.ln_2, self.mlp = make_norm(config), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: (B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def make_norm(config: Config) -> nn.Module:
    """Return the norm before each part of a layer, which keeps the numbers of a token near 1 in size."""
    return nn.RMSNorm(config.n_embd, eps=1e-6) if config.architecture == "qwen3" else nn.LayerNorm(config.n_embd)


class GPT(nn.Module):
    """Predicts each next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(VOCABULARY, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.architecture == "gpt2" else None
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)
        # All draws come from one generator, so their order matters: first PyTorch's own for each layer, then these.
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # 2 n_layer projections are added to the stream, which should not grow by it
                is_added = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if is_added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for each token that may come next: ids (B, T) -> (B, T, V)."""
        x = self.wte(tokens)  # (B, T) -> (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe.weight[: tokens.shape[1]]  # (B, T, C) + (T, C)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)  # the head is the token embedding: (B, T, C) -> (B, T, V)


def read_tokens(paths: list[str], val_fraction: float) -> tuple[Tensor, Tensor]:
    """Return the bytes of texts as ids, (N,) to train on and (M,) held out, the end of each text."""
    train, val = list[int](), list[int]()
    for text in (Path(path).read_bytes() for path in sorted(paths)):
        border = int(len(text) * (1 - val_fraction))
        while text[border] & 0xC0 == 0x80:  # within a character of UTF-8
            border += 1
        train += [*text[:border], END_OF_TEXT]
        val += [*text[border:], END_OF_TEXT]
    return torch.tensor(train), torch.tensor(val)


def permute(place: int, size: int, key: str) -> int:
    """Return where this key's permutation of 0 to size - 1 sends a place, without a list of all places.

    A Feistel cipher permutes the numbers below a power of four; one that comes out too large goes through it again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, round_keys = (1 << half) - 1, hashlib.shake_256(f"{key}/{size}".encode()).digest(64)
    while True:
        left, right = place >> half, place & mask
        for round_key in struct.unpack("<8Q", round_keys):
            mixed = (right + round_key) % 2**64  # SplitMix64's mixing: each bit depends on all
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        place = left << half | right
        if place < size:
            return place


def first_token(draw: int, token_count: int, config: Config) -> int:
    """Return where the window of a draw, counted from 0, begins: as its number decides, there is no order to save.

    An epoch has each window once. In later ones they begin some tokens later, but for the last, which has no room.
    """
    block, windows = config.block_size, (token_count - 1) // config.block_size
    epoch, place = divmod(draw, windows)
    window = permute(place, windows, f"draw/{config.seed}/{epoch}")
    first, own = (permute(number % block, block, f"shift/{config.seed}/0") for number in (0, epoch))
    return window * block + ((own - first) % block if window < windows - 1 else 0)


def learning_rate(step: int, config: Config) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then half a cosine down to `min_lr`."""
    if step <= (warmup := min(2000, config.steps // 10)):
        return config.lr * step / warmup
    progress = (step - warmup) / (config.steps - warmup)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_optimizer(model: GPT, config: Config) -> torch.optim.AdamW:
    """Return AdamW: weight decay is for matrices and tables, not for gains and biases."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def add_up(parts: list[list[Tensor]]) -> list[Tensor]:
    """Add gradients of micro-batches along a tree: rounding depends on the order, but not on who adds a branch."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1  # the largest power of two that leaves something
    return [left + right for left, right in zip(add_up(parts[:half]), add_up(parts[half:]), strict=True)]


def take_step(model: GPT, optimizer: torch.optim.AdamW, tokens: Tensor, step: int, config: Config) -> dict[str, float]:
    """Train on the batch of a step, counted from 1; return its loss in nats per token, rate and gradient norm."""
    batch, losses, gradients = config.global_batch, [], []
    starts = [first_token(draw, len(tokens), config) for draw in range((step - 1) * batch, step * batch)]
    windows = tokens[torch.tensor(starts)[:, None] + torch.arange(config.block_size + 1)]  # (B, 1) + (T+1,) -> (B, T+1)
    for part in windows.split(config.micro_batch):  # (b, T+1)
        mean = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())  # (bT, V), (bT,) -> scalar
        loss = mean * (len(part) / batch)  # the sum of these is the mean over the batch
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters()])
    for parameter, gradient in zip(model.parameters(), add_up(gradients), strict=True):
        parameter.grad = gradient
    norm, rate = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip), learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return {"train_loss": math.fsum(losses), "lr": rate, "grad_norm": float(norm)}


@torch.no_grad()
def held_out_loss(model: GPT, tokens: Tensor, at_most: int) -> float:
    """Return the mean loss in nats of all held-out windows, or of so many, spread evenly."""
    block, losses = model.config.block_size, []
    count = min(at_most, whole := (len(tokens) - 1) // block)
    starts = torch.arange(count) * whole // count * block  # (M,)
    for part in tokens[starts[:, None] + torch.arange(block + 1)].split(max(1, 4096 // block)):  # (b, T+1)
        each = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="none")  # (bT,)
        losses += each.view(-1, block).double().mean(dim=1).tolist()  # (bT,) -> (b, T) -> (b,)
    return math.fsum(losses) / count


def state_of(model: GPT, optimizer: torch.optim.AdamW, step: int, config: Config) -> dict[str, Tensor]:
    """Return all that the steps to come depend on: weights, AdamW's moments, and how far training is."""
    state = {"step": torch.tensor(step), "cursor": torch.tensor(step * config.global_batch)}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        state |= {f"optimizer.{name}.{moment}": value for moment, value in optimizer.state[parameter].items()}
    return state


def load_state(path: str, model: GPT, optimizer: torch.optim.AdamW) -> int:
    """Go on from a checkpoint; return how many steps it has behind it."""
    state = load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data = state[f"model.{name}"]
        for moment in ("step", "exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][moment] = state[f"optimizer.{name}.{moment}"]
    return int(state["step"])


def state_sha256(state: dict[str, Tensor]) -> str:
    """Return a digest of all names, shapes and bits; long tensors in pieces, which threads can hash side by side."""
    digest, piece = hashlib.sha256(b"cairn train state 2\n"), 8 * 1024 * 1024
    for name, tensor in sorted(state.items()):
        data, kind = tensor.numpy().tobytes(), {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        hashes = [hashlib.sha256(data[begin : begin + piece]).digest() for begin in range(0, len(data), piece)]
        for text in (name, kind, ",".join(map(str, tensor.shape))):
            digest.update(struct.pack("<Q", len(text)) + text.encode())
        digest.update(hashlib.sha256(b"".join(hashes)).digest())
    return digest.hexdigest()


def main(*arguments: str) -> None:
    """Train; print each step, and write the log one-file.jsonl and the checkpoints into this folder."""
    paths, given = [one for one in arguments if "=" not in one], dict(one.split("=") for one in arguments if "=" in one)
    config = Config(**{name: type(getattr(Config, name))(value) for name, value in given.items()})
    torch.manual_seed(config.seed)
    torch.set_num_threads(1)  # more threads cut sums into other parts
    (train, val), model = read_tokens(paths, config.val_fraction), GPT(config)
    optimizer = make_optimizer(model, config)
    done = load_state(config.resume, model, optimizer) if config.resume else 0
    with open("one-file.jsonl", "a", encoding="utf-8") as log:
        for step in range(done + 1, config.steps + 1):
            record = {"step": step, **take_step(model, optimizer, train, step, config)}
            print(*(f"{name} {value:.5g}" for name, value in record.items()))
            if step % config.every_steps == 0 or step == config.steps:
                state = state_of(model, optimizer, step, config)
                save_file(state, f"one-file-{step}.safetensors")
                record |= {"probe_loss": held_out_loss(model, val, at_most=32), "state_sha256": state_sha256(state)}
                print(f"probe_loss {record['probe_loss']:.5g} state_sha256 {record['state_sha256']}")
            log.write(json.dumps(record) + "\n")
    print(f"held-out loss {held_out_loss(model, val, at_most=len(val)):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
