"""How much memory the built-in evaluator really takes of a device: the network loaded, held-out windows, some text.

`python -m tests.programs.benchmarks.evaluator_memory '{"layers": 4, …}'` prints the bytes; what it measures is a
`MemoryCase`.
"""

import json
import sys
from dataclasses import asdict

import numpy as np

from tests.programs.benchmarks.own_process import answer_of
from tests.programs.benchmarks.trainer_memory import MemoryCase, device_peak_bytes


def measure_evaluator(case: MemoryCase) -> int:
    """Evaluate in a process of its own and return the bytes it took of the device at most; 0 on a CPU."""
    return int(answer_of("tests.programs.benchmarks.evaluator_memory", json.dumps(asdict(case))))


def main() -> None:
    """Be the process that is measured."""
    import torch

    from cairn.model.architectures.gpt import GPT
    from cairn.model.data.token_windows import TokenWindows
    from cairn.model.inference.prediction import Sampling, generate_stream, window_losses
    from cairn.model.training.determinism import make_deterministic

    case = MemoryCase(**json.loads(sys.argv[1]))
    device = torch.device(case.device)
    make_deterministic(seed=1, threads=1)
    network = GPT(case.model, case.vocab_size).to(device).eval()
    tokens = np.arange(case.block * 64 + 1, dtype=np.int64) * 7919 % case.vocab_size
    windows = TokenWindows([tokens.astype(np.uint16)], case.block, case.vocab_size)
    window_losses(network, windows, count=32)
    list(generate_stream(network, [1], new_tokens=16, sampling=Sampling(temperature=0.8, top_k=50)))
    print(device_peak_bytes(device) if device.type == "cuda" else 0)


if __name__ == "__main__":
    main()
