"""A rank that waits in C for what never comes, after one collective call (`python -m tests.tasks.waiting_rank`)."""

import datetime
import signal

import torch
import torch.distributed as dist

from cairn.tasks.trainer.trainer import write_collectives_at


def main() -> None:
    """Make the call, say so, and wait."""
    write_collectives_at(signal.SIGQUIT)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, 5))
    print("waits", flush=True)
    store.wait(["what never comes"], datetime.timedelta(days=1))


if __name__ == "__main__":
    main()
