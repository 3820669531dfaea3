"""What the machine is and can do: its device's name and rates, and which packages are there."""

import argparse
import importlib.metadata
import platform
import time

import torch

from cairn.model.estimates.utilization import measure_peak_flops, peak_flops_of_device
from cairn.model.kernels.head_loss import can_compile
from tests.programs.gpu.rows import say

PACKAGES = ("torch", "triton", "numpy", "pydantic", "msgspec", "pyarrow", "tokenizers", "prefect", "pytest")
COPY_BYTES, COPIES = 2**30, 10


def main() -> None:
    """Say it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    say("packages", said=f"Python {platform.python_version()}, CUDA {torch.version.cuda}, {versions}")
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    memory = torch.cuda.mem_get_info(device) if is_cuda else (0, 0)
    say("device", is_called=name, free_gib=memory[0] / 2**30, gib=memory[1] / 2**30, can_compile=can_compile(device))
    promised = (peak_flops_of_device(name, "bf16") or 0.0) / 1e12
    say("bf16 products", measured_tflops=measure_peak_flops(device, "bf16") / 1e12, data_sheet_tflops=promised)
    say("fp32 products", measured_tflops=measure_peak_flops(device, "fp32") / 1e12, data_sheet_tflops=0.0)
    if is_cuda:
        say("copies in GB/s", **copy_rates(device))


def version_of(name: str) -> str:
    """Return a package's version, or that there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def copy_rates(device: torch.device) -> dict[str, float]:
    """Return the rates of copies within the device, counting bytes read and written, and from it to locked memory."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    within, host = torch.empty_like(source), torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "within": 2 * _rate(source, within, device),
        "to_host": _rate(source, host, device),
        "from_host": _rate(host, within, device),
    }


def _rate(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    target.copy_(source)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return COPIES * COPY_BYTES / (time.perf_counter() - begun) / 1e9


if __name__ == "__main__":
    main()
