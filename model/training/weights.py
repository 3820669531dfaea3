"""Weights of a checkpoint into a network, for those who need no train state.

Owns the names of weights in a train state. Refuses to know where tensors are stored.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.architectures.gpt import GPT
from model.errors import StateMismatch
from model.training.parallel import fill

WEIGHT_PREFIX = "model."
"""Stands before every parameter's name in the "weights" group of a train state."""


def describe_mismatch(expected: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str | None:
    """Say what differs in names, shapes or dtypes between two sets of tensors; None when nothing does."""
    missing = sorted(expected.keys() - offered.keys())
    unexpected = sorted(offered.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(offered[name].shape)} {offered[name].dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in sorted(expected.items())
        if name in offered and (offered[name].shape != tensor.shape or offered[name].dtype != tensor.dtype)
    ]
    parts = [
        f"{word}: {', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}"
        for word, found in (("missing", missing), ("unexpected", unexpected), ("different", wrong))
        if found
    ]
    return "; ".join(parts) or None


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy the `model.*` tensors of a train state into `model`, in place; other groups may be present.

    Names, shapes and dtypes must match exactly, else StateMismatch names what differs and nothing is copied.
    """
    expected = {f"{WEIGHT_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    offered = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT_PREFIX)}
    if difference := describe_mismatch(expected, offered):
        raise StateMismatch(f"weights do not fit the model ({difference}); use the config the checkpoint was made with")
    for name, parameter in expected.items():
        fill(parameter, offered[name])
