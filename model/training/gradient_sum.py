"""Adds the gradients of micro-batches along a binary tree over their indices, by several threads of a process.

Threads and processes that compute whole subtrees, and add the rest together, have the same bits in any number.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cairn.model.architectures.own_network import Network

_SWITCH_SECONDS = 0.0002
"""A layer of a small network takes less than the interpreter's own 5 ms, after which it lets another thread go on."""


class TreeSum:
    """Adds lists of equally shaped tensors in index order along the tree; the tensors given are used up.

    Partial sums are kept as in a binary counter: two neighbours of one level become one of the next. Addition of two
    numbers commutes, so partners that exchange their sums agree bit for bit.
    """

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
    """Run the backward passes in index order and leave the sum of their gradients in `parameters`, which had none.

    Autograd itself adds pairs: two passes need no more memory than one, n need log2(n) - 1 further gradients. A
    parameter that takes no part in a pass, as a module of one's own may have some, has a gradient of zeros.
    """
    tree, passes = TreeSum(), list(backwards)
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for number, backward in enumerate(passes):
        backward()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        is_odd = number % 2 == 1
        if len(passes) > 2 and (is_odd or number == len(passes) - 1):
            tree.push([parameter.grad for parameter in parameters if parameter.grad is not None], level=int(is_odd))
            for parameter in parameters:
                parameter.grad = None
    if len(passes) > 2:
        for parameter, gradient in zip(parameters, tree.total(), strict=True):
            parameter.grad = gradient


class Workers:
    """Threads of this process that compute micro-batches at once, each by a network of its own over the same weights.

    No bit depends on their number: each adds up whole subtrees of the sum.
    """

    def __init__(self, count: int = 1) -> None:
        """Start none yet."""
        self.count, self._networks = count, list[Network]()
        self._pool = ThreadPoolExecutor(max(1, count - 1), "worker")

    def accumulate(self, model: Network, backward: Callable[[Network, int], None], passes: int) -> None:
        """Run so many backward passes, and leave the sum of their gradients in the model's parameters."""
        level = max(0, (passes // self.count).bit_length() - 1)
        blocks = [range(begin, min(begin + (1 << level), passes)) for begin in range(0, passes, 1 << level)]
        if len(blocks) == 1 or self.count == 1:
            accumulate(list(model.parameters()), (partial(backward, model, number) for number in range(passes)))
            return
        self._prepare(model)
        sums, ahead = dict[int, list[Tensor]](), iter(range(len(blocks)))

        def work(network: Network) -> None:
            parameters = list(network.parameters())
            for number in ahead:  # all workers take from the same
                accumulate(parameters, (partial(backward, network, one) for one in blocks[number]))
                sums[number] = [parameter.grad for parameter in parameters if parameter.grad is not None]
                network.zero_grad(set_to_none=True)

        others = [self._pool.submit(work, network) for network in self._networks]
        try:
            work(model)
        finally:
            wait(others)
        for other in others:
            other.result()
        tree = TreeSum()
        for number, block in enumerate(blocks):
            tree.push(sums.pop(number), level=len(block).bit_length() - 1)
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        for parameter, gradient in zip(trained, tree.total(), strict=True):
            parameter.grad = gradient

    def _prepare(self, model: Network) -> None:
        if not self._networks:
            sys.setswitchinterval(_SWITCH_SECONDS)
            for _ in range(self.count - 1):
                shared: dict[int, Any] = {
                    id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()
                }
                self._networks.append(deepcopy(model, shared))
