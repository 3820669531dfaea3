"""Compiled layers: the same network and learning, in training alone."""

import pytest
import torch

from cairn.model.kernels.head_loss import can_compile
from cairn.model.training.train_state import compile_layers
from tests.model.tiny_run import CPU, TinyRun

FUSED = {"precision": "fp32", "kernels": "fused"}
Asked = list[tuple[torch.nn.Module, dict[str, object]]]


def counted_layers(model):
    calls = []

    def counted(block):
        def run(*given):
            calls.append(block)
            return block(*given)

        return run

    model.compiled_layers = [counted(block) for block in model.h]
    return calls


def test_only_training_runs_the_compiled_layers() -> None:
    run = TinyRun(**FUSED)
    calls, tokens = counted_layers(run.state.model), torch.zeros((1, 4), dtype=torch.int64)
    run.state.model.eval()
    run.state.model(tokens)
    assert not calls
    run.train(1)
    assert calls == list(run.state.model.h)


def test_compiled_layers_take_part_in_activation_checkpointing() -> None:
    plain, run = TinyRun(**FUSED), TinyRun(**FUSED, activation_checkpointing=True)
    counted_layers(run.state.model)
    plain.train(3)
    run.train(3)
    assert run.bits() == plain.bits()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Stand in for the compiler, which takes seconds to load, and note what it is asked to compile."""
    asked: Asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append((module, options)) or module.forward)
    return asked


def test_compiling_adds_no_weight_and_no_name(compiler: Asked) -> None:
    run = TinyRun(**FUSED)
    before = list(run.state.model.state_dict())
    compile_layers(run.state.model)
    assert [module for module, _ in compiler] == list(run.state.model.h)
    assert list(run.state.model.state_dict()) == before


def test_no_timing_decides_which_kernel_is_taken(compiler: Asked) -> None:
    compile_layers(TinyRun(**FUSED).state.model)
    assert all(options == {"dynamic": False, "options": {"deterministic": True}} for _, options in compiler)


def test_fused_and_compiled_are_layers_by_themselves_and_stock_is_the_whole_network(compiler: Asked) -> None:
    layers = TinyRun(**FUSED, compile=True).state
    whole = TinyRun(compile=True, kernels="stock", precision="fp32").state
    assert layers.model.compiled_layers is not None and layers.network is layers.model
    assert whole.model.compiled_layers is None and whole.network is not whole.model


def test_kernels_are_made_for_no_cpu() -> None:
    assert not can_compile(CPU)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_layers_learn_what_the_plain_ones_learn(precision) -> None:
    plain, compiled = (TinyRun(precision=precision, kernels="fused", compile=wanted) for wanted in (False, True))
    expected, got = ([record.train_loss for record in run.train(5)] for run in (plain, compiled))
    assert got == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)
