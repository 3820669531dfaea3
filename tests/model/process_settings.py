"""Says how settings of the whole process hold: `python -m tests.model.process_settings`."""

import json
import random
import resource

import numpy as np
import torch

from cairn.model.training.determinism import keep_freed_memory, make_deterministic


def draw() -> tuple[float, ...]:
    """Draw a number from every generator."""
    return random.random(), np.random.random(), torch.rand(1).item()


def count_faults() -> int:
    """Take and free a block of memory again and again; return how many of its pages were given anew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(25):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def main() -> None:
    """Print what was found."""
    is_kept = keep_freed_memory()
    count_faults()
    faults = count_faults() if is_kept else 0
    make_deterministic(seed=5, threads=1)
    settings, first = [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()], draw()
    make_deterministic(seed=5, threads=None)
    found = {"faults": faults, "settings": settings, "draws again": draw() == first, "threads": torch.get_num_threads()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
