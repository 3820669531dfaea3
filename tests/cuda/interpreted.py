"""The head's kernel, as Inductor writes it, run by Triton's interpreter on a CPU beside the function that it is of.

TRITON_INTERPRET=1 python -m tests.cuda.interpreted Z_LOSS < SOURCE     prints the greatest differences as JSON
"""

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cairn.model.kernels.head_loss import loss_and_gradient, padded_vocabulary
from tests.cuda.trace import VOCABULARY

ROWS = 2
"""The interpreter takes some ten seconds a row."""


def main() -> None:
    """Compare losses and gradients of random logits."""
    z_loss, source = float(sys.argv[1]), sys.stdin.read()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, padded_vocabulary(VOCABULARY), generator=generator).mul(3).bfloat16()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    gradient, losses = torch.full_like(logits, torch.nan), torch.full((ROWS,), torch.nan)
    kernel(source)[(ROWS,)](logits, targets, gradient, losses, ROWS, logits.shape[1], XBLOCK=1, R0_BLOCK=2048)
    expected_losses, expected = loss_and_gradient(logits, targets, VOCABULARY, z_loss)
    differences = {"losses": losses - expected_losses, "gradient": gradient.float() - expected.float()}
    print(json.dumps({name: float(each.abs().max()) for name, each in differences.items()}))


def kernel(source: str) -> Any:
    """Return the kernel without what chooses its configuration; the interpreter has no library of the device's."""
    plain = re.sub(r"@triton_heuristics\..*?\n\)\n", "", source, flags=re.DOTALL).replace("libdevice.exp", "tl.exp")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.py")
        path.write_text(plain.replace("triton_helpers.set_driver_to_gpu()", ""))
        found = importlib.util.spec_from_file_location("kernel", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    return next(value for name, value in vars(module).items() if name.startswith("triton_red"))


if __name__ == "__main__":
    main()
