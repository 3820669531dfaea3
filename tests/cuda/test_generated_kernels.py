"""The kernels that Inductor writes for a GPU: machine code for two of them, and the head's beside its reference.

Needs Triton, which no environment for CPUs has: that of constraints/cuda.txt, 190 MB to download, 700 MB on disk.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.cuda import fake_cuda
from tests.cuda.traces import ROOT, Trace, traced

MISSING = fake_cuda.missing() or (None if importlib.util.find_spec("triton") else "Triton is not installed")
pytestmark = [
    pytest.mark.slow,  # alone: what is compiled has no other test without a GPU
    pytest.mark.skipif(MISSING is not None, reason=f"no kernels for a GPU: {MISSING}"),
]
CAPABILITIES, Z_LOSS = (80, 90), 1e-3
CASES: dict[str, Trace] = {
    "eager": {},
    "eager, 1 window": {"training": {"global_batch": 1, "micro_batch": 1}},
    "eager, z-loss": {"training": {"z_loss": Z_LOSS}},
    "eager, fp32": {"training": {"precision": "fp32"}},
    "compiled": {"training": {"compile": True}},
    "compiled, fp32": {"training": {"compile": True, "precision": "fp32"}},
    "compiled, qwen3": {"training": {"compile": True}, "model": {"architecture": "qwen3", "n_kv_head": 4}},
    "compiled, stock": {"training": {"compile": True, "kernels": "stock"}},
}
REGISTERS = 65536
"""Of a multiprocessor; a warp is 32 threads."""
Kernels = dict[str, list[Trace]]


@pytest.fixture(scope="module", params=CAPABILITIES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """What is written and compiled for each case, for one capability."""
    cases = ({"capability": request.param, **case} for case in CASES.values())
    return dict(zip(CASES, traced(*cases, module="tests.cuda.generated"), strict=True))  # type: ignore[arg-type]


def test_no_kernel_spills_registers_and_each_fits_a_multiprocessor(kernels: Kernels) -> None:
    every = [
        (case, kernel["name"], used)
        for case in kernels
        for kernel in kernels[case]
        for used in kernel["configurations"]
    ]
    print("\n" + "\n".join(f"{case:20} {name[:60]:60} {used}" for case, name, used in every))
    assert [one for one in every if one[2]["local"] or one[2]["stack"]] == []
    assert [one for one in every if one[2]["reg"] * one[2]["warps"] * 32 > REGISTERS] == []


def test_no_timing_chooses_how_a_kernel_adds_up(kernels: Kernels) -> None:
    adding = [kernel for case in kernels.values() for kernel in case if kernel["reduces"]]
    assert len(adding) > 20 and [one["name"] for one in adding if len(one["configurations"]) != 1] == []


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("eager")])
def test_the_head_s_loss_and_gradient_are_one_kernel(kernels: Kernels, case: str) -> None:
    assert len(kernels[case]) == 1


def test_the_head_s_kernel_computes_what_its_reference_does(kernels: Kernels) -> None:
    words = [sys.executable, "-m", "tests.cuda.interpreted", str(Z_LOSS)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    source = kernels["eager, z-loss"][0]["source"]
    done = subprocess.run(words, input=source, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    differences = json.loads(done.stdout)
    assert differences["losses"] < 1e-5 and differences["gradient"] <= 2**-8  # the last digit of bf16 below 1
