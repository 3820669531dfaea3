"""What a step of several processes exchanges by the plan, and what it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cairn.model.configuration.training import Parallel
from cairn.model.estimates.size_estimate import exchanged_together, step_exchanges
from cairn.model.kernels.block_sizes import EXCHANGE_BYTES
from cairn.model.training.parallel import Ranks
from tests.model.rank_legs import Exchanges, Leg, read_seen, train_legs
from tests.model.tiny_run import VOCAB, TinyRun

NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3": {"architecture": "qwen3", "n_kv_head": 1},
    "untied": {"architecture": "qwen3", "tied": False, "norm_gain": False, "ngram_rows": (5, 7)},
}
NUMERICS: dict[str, dict[str, Any]] = {
    "fp32 stock": {},
    "fp32 fused": {"kernels": "fused"},
    "bf16 stock": {"precision": "bf16"},
    "bf16 fused": {"precision": "bf16", "kernels": "fused"},
    "fp16": {"precision": "fp16"},
    "recomputed": {"kernels": "fused", "activation_checkpointing": True},
    "unclipped": {"grad_clip": 0},
}
MODES: tuple[Parallel, ...] = ("ddp", "fsdp")
Counted = dict[str, list[int]]


def planned(size: int, mode: Parallel, numerics: str, network: str, batch: int, micro_batch: int) -> Counted:
    run = TinyRun(model=NETWORKS[network], **settings(mode, numerics, batch, micro_batch))
    exchanges = step_exchanges(run.model_config, run.training, VOCAB, micro_batch=micro_batch, processes=size)
    return {each.operation: [each.calls, each.bytes] for each in exchanges}


def settings(mode: Parallel, numerics: str, batch: int, micro_batch: int) -> dict[str, Any]:
    return {"parallel": mode, "global_batch": batch, "micro_batch": micro_batch, **NUMERICS[numerics]}


@contextmanager
def fake_ranks(size: int, mode: Parallel) -> Iterator[Ranks]:
    """The first of so many processes, the others of which are not there: PyTorch's process group `fake`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Ranks(0, size, mode)
    finally:
        dist.destroy_process_group()


def counted(size: int, mode: Parallel, numerics: str, network: str, batch: int, micro_batch: int) -> Counted:
    with fake_ranks(size, mode) as ranks:
        run = TinyRun(model=NETWORKS[network], ranks=ranks, **settings(mode, numerics, batch, micro_batch))
        with Exchanges() as exchanges:
            run.train(1, stop=partial(ranks.any, False))
    return exchanges.operations


Case = tuple[int, Parallel, str, str, int, int]
FAKE: list[Case] = [
    (64, "ddp", "fp32 fused", "gpt2", 64, 1),
    (64, "fsdp", "bf16 fused", "qwen3", 65, 1),
    (5, "fsdp", "fp32 stock", "untied", 7, 1),
    (2, "ddp", "fp16", "untied", 8, 2),
]


@pytest.mark.parametrize("case", FAKE, ids=str)
def test_a_step_exchanges_what_is_planned(case: Case) -> None:
    assert counted(*case) == planned(*case)


REAL: dict[str, Case] = {
    f"{size} {mode} {numerics} {network}": (size, mode, numerics, network, 8 if mode == "ddp" else 9, micro_batch)
    for size in (2, 4)
    for mode in MODES
    for numerics, network, micro_batch in (
        *((numerics, "gpt2", 2) for numerics in NUMERICS),
        *(("bf16 fused", network, 1) for network in NETWORKS if network != "gpt2"),
        ("fp32 stock", "untied", 1),
    )
}


@pytest.mark.slow  # beside: test_a_step_exchanges_what_is_planned
def test_four_real_processes_exchange_what_is_planned(tmp_path: Path) -> None:
    legs = [
        Leg(
            size=size,
            until_step=2,
            settings=settings(mode, numerics, batch, micro_batch),
            model=NETWORKS[network],
            end=str(tmp_path / f"{name}.npz"),
        )
        for name, (size, mode, numerics, network, batch, micro_batch) in REAL.items()
    ]
    train_legs(legs, processes=4)
    found = {name: read_seen(tmp_path / f"{name}.npz")["operations"] for name in REAL}
    assert found == {name: planned(*case) for name, case in REAL.items()}


def test_one_process_exchanges_nothing() -> None:
    assert planned(1, "ddp", "fp32 stock", "gpt2", 8, 2) == {}


def test_gradients_are_exchanged_in_order_some_megabytes_at_once_and_a_larger_one_alone() -> None:
    half, sizes = EXCHANGE_BYTES // 2, [1, 2, 2 * EXCHANGE_BYTES, 0, 0, 0, 5]
    sizes[3:6] = [half, half, half]
    together = [sizes[each] for each in exchanged_together(sizes)]
    assert together == [[1, 2], [2 * EXCHANGE_BYTES], [half, half], [half, 5]]
    assert list(exchanged_together([])) == []
