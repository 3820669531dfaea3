"""Loads the weights of a checkpoint into a network without a train state."""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.architectures.gpt import GPT
from model.errors import StateMismatch
from model.training.parallel import copy_into

WEIGHT_PREFIX = "model."
"""Prefix of every parameter's name in the "weights" group of a train state."""


def describe_mismatch(expected: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str | None:
    """Describe the differences in names, shapes and dtypes between two sets of tensors; None if they are equal."""
    missing = sorted(expected.keys() - offered.keys())
    unexpected = sorted(offered.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(offered[name].shape)} {offered[name].dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in sorted(expected.items())
        if name in offered and (offered[name].shape != tensor.shape or offered[name].dtype != tensor.dtype)
    ]
    parts = [
        f"{word}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for word, names in (("missing", missing), ("unexpected", unexpected), ("different", wrong))
        if names
    ]
    return "; ".join(parts) or None


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy the `model.*` tensors of a train state into `model`, in place; other tensors are ignored.

    Different names, shapes or dtypes raise StateMismatch, and nothing is copied.
    """
    expected = {f"{WEIGHT_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    offered = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT_PREFIX)}
    if difference := describe_mismatch(expected, offered):
        raise StateMismatch(f"weights do not fit the model ({difference}); use the config the checkpoint was made with")
    for name, parameter in expected.items():
        copy_into(parameter, offered[name])
