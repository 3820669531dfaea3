"""Names as drivers give them have their own rate, and no other."""

import pytest

from cairn.model.estimates.utilization import peak_flops_of_device

AS_DRIVERS_SAY = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H20": 148.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA A100-SXM4-80GB": 311.8,
    "NVIDIA A100 80GB PCIe": 311.8,
    "NVIDIA A10G": 70.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.1,
    "NVIDIA L4": 121.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
}


@pytest.mark.parametrize("name", AS_DRIVERS_SAY)
def test_a_device_has_the_rate_of_its_own_specification(name) -> None:
    assert peak_flops_of_device(name, "bf16") == pytest.approx(AS_DRIVERS_SAY[name] * 1e12)
    assert peak_flops_of_device(name, "fp16") == peak_flops_of_device(name, "bf16")


@pytest.mark.parametrize("name", ["NVIDIA H2000", "NVIDIA GeForce GTX 1080", "NVIDIA A1000 Laptop GPU", "cpu", ""])
def test_an_unlisted_device_has_no_rate(name) -> None:
    assert peak_flops_of_device(name, "bf16") is None


def test_older_devices_have_a_rate_in_fp16_alone() -> None:
    assert peak_flops_of_device("Tesla T4", "fp16") == 65e12
    assert peak_flops_of_device("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flops_of_device("Tesla T4", "bf16") is None


def test_fp32_has_no_rate_of_the_matrix_units() -> None:
    assert peak_flops_of_device("NVIDIA H200", "fp32") is None
