"""The sum of a step's gradients, in one order whoever computes which of them: a binary tree over micro-batch indices.

Partial sums are kept as in a binary counter: two neighbours of one level become one of the next. Addition of two
numbers commutes, so partners that exchange their sums agree bit for bit. Pairs of micro-batches are added by autograd
itself, so a step of two micro-batches needs no more memory than one of one; n need log2(n) - 1 further gradients.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class TreeSum:
    """Adds lists of equally shaped tensors in index order along the tree; the tensors given are used up."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[Tensor]]] = []

    def push(self, tensors: list[Tensor], *, level: int = 0) -> None:
        """Add the next 2**level indices, which the tensors are the sum of."""
        while self._partial and self._partial[-1][0] == level:
            _, left = self._partial.pop()
            torch._foreach_add_(left, tensors)
            tensors, level = left, level + 1
        self._partial.append((level, tensors))

    def total(self) -> list[Tensor]:
        """Return the sum of everything that was pushed; nothing is left."""
        _, total = self._partial.pop()
        while self._partial:
            _, left = self._partial.pop()
            torch._foreach_add_(left, total)
            total = left
        return total


def accumulate(parameters: Sequence[nn.Parameter], backwards: Iterable[Callable[[], None]]) -> None:
    """Run the backward passes in index order and leave the sum of their gradients in `parameters`, which had none."""
    tree, passes = TreeSum(), list(backwards)
    for number, backward in enumerate(passes):
        backward()
        is_odd = number % 2 == 1
        if len(passes) > 2 and (is_odd or number == len(passes) - 1):
            tree.push([_taken(parameter) for parameter in parameters], level=int(is_odd))
    if len(passes) > 2:
        for parameter, gradient in zip(parameters, tree.total(), strict=True):
            parameter.grad = gradient


def _taken(parameter: nn.Parameter) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None  # every parameter takes part in every forward
    return gradient
