"""Low-rank adapters beside a network's frozen linear layers: made, filled, and added to the weights.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; first values are those of peft.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.training import AdapterRow, LoraConfig, adapter_table
from cairn.model.errors import StateMismatch

BASE, ALPHA = "lora.base_sha256", "lora.alpha"
WITHIN = ".lora."
"""Part of the names of all tensors of adapters, and of no others."""


class Adapter(nn.Module):
    """A change of low rank: x A' B' times a scale."""

    def __init__(self, row: AdapterRow, lora: LoraConfig) -> None:
        super().__init__()
        down, up = row.shapes(lora.rank)
        self.A, self.B = nn.Parameter(torch.empty(down)), nn.Parameter(torch.empty(up))
        self.scale = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's result: (B, T, C) -> (B, T, R)."""
        return F.linear(F.linear(x, self.A) * self.scale, self.B)  # (B, T, C) -> (B, T, r) -> (B, T, R)


class Adapters(nn.Module):
    """The adapters of one linear layer, each of some of its rows."""

    def __init__(self, width: int, rows: Sequence[AdapterRow], lora: LoraConfig) -> None:
        super().__init__()
        self.starts = {row.rows.start: row.leaf for row in rows}
        ends = {0, width, *(end for row in rows for end in (row.rows.start, row.rows.stop))}
        self.cuts = sorted(ends)
        for row in rows:
            self.add_module(row.leaf, Adapter(row, lora))

    def forward(self, x: Tensor, result: Tensor) -> Tensor:
        """Return the layer's result with all changes: (B, T, C) and (B, T, R) -> (B, T, R)."""
        x = x.to(result.dtype)  # once for all: under autocast each product would keep a copy
        sizes = [end - start for start, end in zip(self.cuts, self.cuts[1:], strict=False)]
        parts = [
            part + self.get_submodule(self.starts[start])(x) if start in self.starts else part
            for start, part in zip(self.cuts, result.split(sizes, dim=2), strict=False)  # (B, T, R) -> parts of R
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def adapt(model: GPT, lora: LoraConfig) -> None:
    """Freeze all weights, and put adapters beside the targeted layers; InvalidInput names a target that is none."""
    rows = adapter_table(model.config, lora.targets)
    model.requires_grad_(False)
    for layer, own in groupby(rows, key=lambda row: row.layer):
        linear = model.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        linear.add_module("lora", Adapters(linear.out_features, tuple(own), lora))
        linear.register_forward_hook(_add)


def _add(linear: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> Tensor:
    # A hook without a state of its own: the copy of a network calls its own adapters.
    changed: Tensor = linear.get_submodule("lora")(inputs[0], result)
    return changed


def fill(model: GPT, put: Callable[[Tensor, Tensor], None]) -> None:
    """Call `put` with each tensor of the adapters and its first values, which change nothing: B is zero."""
    for adapter in (module for module in model.modules() if isinstance(module, Adapter)):
        put(adapter.A, nn.init.kaiming_uniform_(torch.empty(adapter.A.shape), a=math.sqrt(5)))
        put(adapter.B, torch.zeros(adapter.B.shape))


def name_base(sha256: str, lora: LoraConfig) -> dict[str, Tensor]:
    """Return the tensors by which a train state names the weights beside its adapters, and how these are added."""
    base = torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)  # (32,)
    return {BASE: base, ALPHA: torch.tensor(lora.alpha, dtype=torch.float64)}


def named_base(tensors: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the SHA-256 and alpha that such tensors name; raises StateMismatch."""
    base, alpha = tensors[BASE], tensors.get(ALPHA)
    if alpha is None or (base.dtype, base.shape, alpha.dtype, alpha.shape) != (torch.uint8, (32,), torch.float64, ()):
        raise StateMismatch("the checkpoint names no weights beside its adapters; it was not made by cairn")
    return bytes(base.tolist()).hex(), float(alpha)


@torch.no_grad()
def merge(model: GPT, trained: Mapping[str, Tensor], alpha: float) -> None:
    """Add adapters, by their names in a network, to the weights beside them; StateMismatch for another network's."""
    left, weights = dict(trained), dict(model.named_parameters())
    for row in adapter_table(model.config):
        down, up = left.pop(f"{row.name}.A", None), left.pop(f"{row.name}.B", None)
        if down is None and up is None:
            continue
        if down is None or up is None or (down.shape, up.shape) != row.shapes(rank := max((1, *down.shape[:1]))):
            raise StateMismatch(f"adapter {row.name} does not fit the network; use the config it was made with")
        weights[f"{row.layer}.weight"][row.rows] += (alpha / rank) * (up @ down)  # (R, r) x (r, C) -> (R, C)
    if left:
        raise StateMismatch(f"adapters of another network: {', '.join(sorted(left)[:5])}")
