"""Peak rates of accelerators as their vendors specify them, which MFU is a share of.

Dense half-precision matrix products with fp32 accumulation, at the highest clocks and power.
Source: the vendors' data sheets; half the rate where one gives the rate with sparsity only.
"""

from model.configuration.training import Precision

_DENSE_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.5),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 311.8),
    ("A800", 311.8),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.3),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 4080", 97.5),
    ("RTX 3090", 71.2),
)
"""Part of the driver's device name, and TFLOP/s in bf16 and fp16 alike; the first match counts."""

_WITHOUT_BF16: tuple[tuple[str, float], ...] = (("V100-PCIE", 112.0), ("V100", 125.0), ("T4", 65.0))
"""Older devices, whose matrix units multiply fp16 only."""


def peak_flops_of_device(device_name: str, precision: Precision) -> float | None:
    """Return the specified FLOP/s of the device of this name in `precision`; None where it is not listed."""
    if precision not in ("bf16", "fp16"):
        return None
    listed = _DENSE_TFLOPS if precision == "bf16" else (*_DENSE_TFLOPS, *_WITHOUT_BF16)
    words = f" {device_name} "
    for part, teraflops in listed:
        if any(f"{before}{part}{behind}" in words for before in " -" for behind in " -"):
            return teraflops * 1e12
    return None
