"""A network of one's own: the module that files make, run from memory, and the form in which training uses any network.

The files' names mean the bytes given and nothing else: no folder is imported from. This is no wall against what the
files do; whether they may run at all is decided before. Source: Python Language Reference, "The import system".
"""

import builtins
import contextlib
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import FILLED_IN, KNOWN_PACKAGES, RUN_AS, ModelConfig
from cairn.model.errors import InvalidInput


class OwnFiles:
    """The modules of some files, each run once, when it is first imported; `imports` are packages besides the usual."""

    def __init__(self, files: Mapping[str, bytes], imports: Sequence[str] = ()) -> None:
        """Run nothing yet."""
        self._files, self._packages = files, KNOWN_PACKAGES.union(imports)
        self._modules = dict[str, ModuleType]()
        digest = hashlib.sha256(b"".join(name.encode() + data for name, data in sorted(files.items())))
        self._prefix = f"{RUN_AS}{digest.hexdigest()[:12]}"

    def load(self, stem: str) -> ModuleType:
        """Return the module of the file `stem`.py."""
        if stem not in self._modules:
            source = self._files[f"{stem}.py"]
            module = self._modules[stem] = sys.modules[f"{self._prefix}.{stem}"] = ModuleType(f"{self._prefix}.{stem}")
            read: Any = SimpleNamespace(get_source=lambda name: source.decode(errors="replace"))  # for tracebacks
            own = {"__import__": self._import, "print": partial(print, file=sys.stderr)}  # no output of the command
            module.__dict__.update(__loader__=read, __builtins__={**vars(builtins), **own})
            exec(compile(source, f"{self._prefix}/{stem}.py", "exec"), module.__dict__)
        return self._modules[stem]

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        root = name.partition(".")[0]
        if level and not name:
            return SimpleNamespace(**{stem: self.load(stem) for stem in fromlist})
        if f"{root}.py" in self._files:
            return self.load(root)
        if level == 0 and root in self._packages:
            return builtins.__import__(name, globals, locals, fromlist, 0)
        rule = "torch, numpy, the standard library, the files given, and the packages of model.imports"
        raise ImportError(f"import of {name}: not one that this run may depend on; rule: {rule}", name=name)


class OwnNetwork(nn.Module):
    """A network that predicts each next token by a module of one's own, whose parameters keep their names.

    The module's `forward(ids)` returns logits (B, T, V), or with an attribute `head_weight` (V, C) what is multiplied
    by it (B, T, C); `forward(ids, targets)` returns logits and loss. It may have `blocks`, whose activations can be
    recomputed, and `optimizer_groups()`: mappings with `params` and `weight_decay`.
    """

    boundary_id: int | None = None
    gathered_dtype: torch.dtype | None = None
    files: Mapping[str, bytes] = {}
    called_with: Mapping[str, Any] = {}
    """Those that made the module, and what its function was called with."""

    def __init__(self, module: nn.Module, config: ModelConfig, vocab_size: int) -> None:
        """Take a module that was made; InvalidInput names a tensor or form that cannot be trained."""
        super().__init__()
        self.module, self.config, self.vocab_size = module, config, vocab_size
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                kind = f"{parameter.dtype}{'' if parameter.is_contiguous() else ' and not contiguous'}"
                raise self.refusal(f"{name} is {kind}; rule: parameters are float32 and contiguous, as they are made")
            if not parameter.requires_grad:
                raise self.refusal(f"{name} is frozen; rule: what is not trained is a buffer, which the file makes")
        if not any(True for _ in module.parameters()):
            raise self.refusal("has no parameter")
        self._has_own_loss = "targets" in inspect.signature(module.forward).parameters

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's own."""
        return self.module.named_parameters(*arguments, **named)

    @property
    def parameter_count(self) -> int:
        """Number of all parameters; one that has two names counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Predict every next token: ids (B, T), targets (B, T) -> logits (B, T, V)."""
        return self._predict(tokens, targets)[0]

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Predict the token after the last one: ids (1, T) -> logits (1, V)."""
        return self._predict(tokens, None)[0][:, -1]  # (1, T or 1, V) -> (1, V)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the module's own loss, else the mean cross-entropy in nats: ids (B, T), targets (B, T) -> scalar."""
        logits, loss = self._predict(tokens, targets)
        if loss is None:
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # (B, T, V) -> (B*T, V)
        if not isinstance(loss, Tensor) or loss.dim():
            raise self.refusal("its loss is no scalar; rule: the mean over all tokens, in nats")
        return loss.float()

    def window_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of each row in nats, by the logits: ids (B, T), targets (B, T) -> (B,)."""
        logits = self(tokens, targets).flatten(0, 1).float()  # (B, T, V) -> (B*T, V)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape).double().mean(dim=1)

    def optimizer_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the module's groups, else matrices and tables, which decay, and the rest, which does not."""
        hook, every = getattr(self.module, "optimizer_groups", None), list(self.parameters())
        if hook is None:
            flat, deep = [one for one in every if one.dim() < 2], [one for one in every if one.dim() > 1]
            return [{"params": deep, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
        kept = ({"weight_decay": weight_decay, "params": (), **group} for group in hook() or ())
        groups = [{**group, "params": list(group["params"])} for group in kept]
        if any(group.keys() != {"params", "weight_decay"} or group["weight_decay"] < 0 for group in groups):
            raise self.refusal("optimizer_groups() has other keys; rule: params and weight_decay, not negative")
        if sorted(id(one) for group in groups for one in group["params"]) != sorted(map(id, every)):
            raise self.refusal("optimizer_groups(); rule: each parameter is in exactly one of them")
        return groups

    def recompute_blocks(self) -> None:
        """Recompute the activations of the module's `blocks` in the backward pass; InvalidInput if it has none."""
        blocks = [one for one in getattr(self.module, "blocks", ()) if isinstance(one, nn.Module)]
        if not blocks:
            problem = "it offers no blocks, so training.activation_checkpointing has nothing to recompute"
            raise self.refusal(f"{problem}; rule: an attribute blocks, such as a ModuleList")
        for block in blocks:
            block.forward = partial(_recomputed, block, block.forward)

    def _predict(self, tokens: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return logits of all positions, without targets at least of the last, and the module's own loss if any."""
        own = {"targets": targets if targets is None else targets.contiguous()} if self._has_own_loss else {}
        found = self.module(tokens.contiguous(), **own)  # somebody's file may take views of them
        logits, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        head = getattr(self.module, "head_weight", None)
        if isinstance(head, Tensor) and isinstance(logits, Tensor) and logits.shape[-1:] == head.shape[1:]:
            logits = F.linear(logits, head)  # (B, T, C) -> (B, T, V)
        time = tokens.shape[1] if targets is not None else 1
        is_right = isinstance(logits, Tensor) and logits.dim() == 3 and len(logits) == len(tokens)
        if not is_right or logits.shape[1] < time or logits.shape[2] < self.vocab_size:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            rule = f"logits of the shape {(len(tokens), tokens.shape[1])} and at least {self.vocab_size} ids"
            raise self.refusal(f"forward returned {found} for ids {tuple(tokens.shape)}; rule: {rule}")
        return logits, loss if self._has_own_loss else None

    def refusal(self, problem: str) -> InvalidInput:
        """Return the error that names the module."""
        return InvalidInput(f"model.module = {self.config.module!r}: {problem}")


def _recomputed(block: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*given, **named)
    return checkpoint(forward, *given, use_reentrant=False, **named)


Network = GPT | OwnNetwork
"""A network that is trained, measured and sampled."""


def make_network(files: Mapping[str, bytes], config: ModelConfig, vocab_size: int) -> OwnNetwork:
    """Run the files and make the network on the CPU, from the process's generators; what they print goes to stderr.

    Raises InvalidInput for a module that cannot be trained, and what the files raise.
    """
    path, _, name = (config.module or "").rpartition(":")
    with contextlib.redirect_stdout(sys.stderr):
        make = getattr(OwnFiles(files, config.imports).load(PurePosixPath(path).stem), name)
        filled = {"vocab_size": vocab_size, "block_size": config.block_size} | (config.arguments or {})
        taken = inspect.signature(make).parameters
        given = {name: value for name, value in filled.items() if name in taken or name not in FILLED_IN}
        tuples = {name for name in given.keys() & taken.keys() if "tuple[" in str(taken[name].annotation)}
        lists = {name: given[name] for name in tuples if given[name] is not None}  # as JSON has them
        module = make(**given | {name: tuple(value) for name, value in lists.items()})
    if not isinstance(module, nn.Module):
        raise InvalidInput(f"model.module = {config.module!r}: made a {type(module).__name__}; rule: an nn.Module")
    network = OwnNetwork(module, config, vocab_size)
    network.files, network.called_with = files, given
    return network


_REPEATED = 4
"""Forward passes that must agree: one that depends on what was before shows in some of them."""


@torch.no_grad()
def check_network(network: OwnNetwork, make: Callable[[], OwnNetwork]) -> None:
    """Raise InvalidInput for what no checkpoint could hold, and for predictions that see a later token.

    That is a tensor that a forward pass makes or changes, a buffer that other random numbers make otherwise, and what
    is drawn from elsewhere than torch's generators, since a network made by equal numbers is equal. Those of the
    process stand as they stood when this network was made, and are seeded anew.
    """
    again, other = make(), make()
    kept, others = _tensors(again), _tensors(other)
    for name, tensor in _tensors(network).items():
        if name not in kept or not torch.equal(tensor.cpu(), kept[name]):
            raise network.refusal(f"{name} is made by random numbers from elsewhere; rule: from torch's generators")
    time = network.config.block_size
    ids = torch.arange(2 * time, device=network.device).view(2, time) % network.vocab_size  # (2, T)
    torch.manual_seed(0)
    expected = network.train()(ids, ids)
    if expected.isnan().any():
        raise network.refusal("forward returned NaN; rule: numbers, from the first values on")
    is_drawn = [_draws_or_differs(network, ids, expected) for _ in range(_REPEATED)]
    for name, tensor in _tensors(network).items():
        if name not in kept or not torch.equal(tensor.cpu(), kept[name]):
            raise network.refusal(f"{name} changes in forward; rule: only steps change what is kept (no BatchNorm)")
        if name.startswith("buffer") and not torch.equal(tensor.cpu(), others[name].cpu()):
            raise network.refusal(f"{name} is made of random numbers; rule: a parameter, or a seed of its own")
    if any(is_drawn) or _draws_or_differs(again.to(network.device).train(), ids, expected):
        problem = "a forward pass draws random numbers elsewhere, or knows of others"
        raise network.refusal(f"{problem}; rule: it depends on tokens, parameters and torch's own generators alone")
    expected = network.eval()(ids, ids)
    if not torch.equal(expected, network(ids, ids)):
        raise network.refusal("a prediction draws random numbers; rule: only where self.training is true")
    for begin in {time // 3, time // 2, time - 1}:
        changed = torch.cat((ids[:, :begin], (ids[:, begin:] + 1) % network.vocab_size), dim=1)
        # Nearly: products of other sizes, as those of experts that got other tokens, are rounded otherwise.
        if not torch.allclose(expected[:, :begin], network(changed, ids)[:, :begin], rtol=1e-4, atol=1e-5):
            raise network.refusal("a prediction changes with a later token; rule: each sees only those before it")
    network.train()


def _tensors(network: OwnNetwork) -> dict[str, Tensor]:
    every = {"parameter": network.module.named_parameters(), "buffer": network.module.named_buffers()}
    return {f"{kind} {name}": tensor for kind, named in every.items() for name, tensor in named}


def _draws_or_differs(network: OwnNetwork, ids: Tensor, expected: Tensor) -> bool:
    """Whether a pass (B, T) -> (B, T, V) draws from Python's or NumPy's generators, or is another than expected."""
    torch.manual_seed(0)
    before = repr((random.getstate(), np.random.get_state()))
    return not torch.equal(network(ids, ids), expected) or before != repr((random.getstate(), np.random.get_state()))
