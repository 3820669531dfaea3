"""Capture and restoration of the train state."""

import pytest
import torch

from cairn.model.architectures.gpt import GPT
from cairn.model.errors import StateMismatch
from cairn.model.training.determinism import keeping_generators, seed_generators
from cairn.model.training.train_state import TrainState, load_weights
from tests.device import device_under_test
from tests.model.tiny_run import TinyRun

MODES = {
    "fp32": {},
    "dropout": {"model": {"dropout": 0.3}},
    "bf16": {"precision": "bf16", "model": {"dropout": 0.1}},
    "fp16": {"precision": "fp16"},
    "fused": {"kernels": "fused", "micro_batch": 4},
    "fused bf16": {"kernels": "fused", "precision": "bf16", "micro_batch": 4, "model": {"dropout": 0.1}},
    "accumulation": {"micro_batch": 4, "model": {"dropout": 0.1}},
    "checkpointing": {"activation_checkpointing": True, "model": {"dropout": 0.1}},
    "qwen3": {"kernels": "fused", "precision": "bf16", "model": {"architecture": "qwen3", "dropout": 0.1}},
    "muon": {"optimizer": "muon", "z_loss": 1e-4, "model": {"architecture": "qwen3", "n_kv_head": 1}},
    "adam": {"optimizer": "adam"},
    "momentum": {"optimizer": "momentum", "lr": 0.1},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "no clip, no bias": {"grad_clip": 0.0, "model": {"bias": False}},
}
SECOND_EPOCH = 9
"""The first step that draws from it."""
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@every_mode
def test_two_runs_of_one_configuration_end_in_the_same_bits(mode) -> None:
    first, second = TinyRun(**mode), TinyRun(**mode)
    first.train(4)
    torch.rand(17)  # what else the process draws must not matter
    second.train(4)
    assert first.bits() == second.bits()


@every_mode
def test_a_run_continued_from_its_capture_ends_in_the_bits_of_an_undisturbed_one(mode) -> None:
    undisturbed, killed, continued = TinyRun(**mode), TinyRun(**mode), TinyRun(**mode)
    undisturbed.train(SECOND_EPOCH)
    killed.train(3)
    continued.state.load(killed.tensors())
    torch.manual_seed(99)
    continued.train(5)
    again = TinyRun(**mode)
    again.state.load(continued.tensors())
    again.train(SECOND_EPOCH)
    assert again.bits() == undisturbed.bits()


@pytest.mark.parametrize("mode", ["fp32", "qwen3", "no clip, no bias"])
def test_a_state_filled_tensor_by_tensor_has_the_bits_of_a_network_made_at_once(mode: str) -> None:
    state = TinyRun(**MODES[mode]).state
    with keeping_generators(torch.device("cpu")):
        seed_generators(1337, torch.device("cpu"))
        whole = GPT(state.model.config, state.model.vocab_size)
    for (name, filled), expected in zip(state.model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(filled, expected), name


def test_a_state_to_be_loaded_draws_nothing() -> None:
    made = TinyRun()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    shape = made.state.model.config
    TrainState.create(shape, made.training, made.state.model.vocab_size, torch.device("cpu"), filled=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_continued_losses_are_those_of_the_undisturbed_run() -> None:
    undisturbed, killed, continued = (TinyRun(model={"dropout": 0.1}) for _ in range(3))
    expected = [(r.step, r.train_loss, r.lr, r.grad_norm) for r in undisturbed.train(12)][5:]
    killed.train(5)
    continued.state.load(killed.tensors())
    assert [(r.step, r.train_loss, r.lr, r.grad_norm) for r in continued.train(12)] == expected


def test_loading_returns_to_the_captured_bits_exactly() -> None:
    run = TinyRun(precision="fp16")
    run.train(3)
    captured, bits = run.tensors(), run.bits()
    run.train(6)
    run.state.load(captured)
    assert run.bits() == bits


def test_names_are_the_same_at_every_step_and_sorted() -> None:
    run = TinyRun()
    before = [named.name for named in run.state.named_tensors()]
    run.train(2)
    after = [named.name for named in run.state.named_tensors()]
    assert before == after == sorted(after)


def test_a_capture_is_not_changed_by_later_training() -> None:
    run = TinyRun()
    run.train(2)
    captured = run.tensors()
    copies = {name: tensor.clone() for name, tensor in captured.items()}
    run.train(6)
    assert all(torch.equal(captured[name], copies[name]) for name in captured)


def test_loading_copies_the_tensors() -> None:
    source, target = TinyRun(), TinyRun()
    source.train(2)
    given = source.tensors()
    target.state.load(given)
    expected = target.bits()
    for tensor in given.values():
        tensor.zero_()
    assert target.bits() == expected


def test_the_trainer_group_holds_step_and_cursor() -> None:
    run = TinyRun()
    run.train(4)
    trainer = {named.name: named.tensor for named in run.state.named_tensors() if named.group == "trainer"}
    assert set(trainer) == {"step", "cursor"}
    assert (int(trainer["step"]), int(trainer["cursor"])) == (4, 4 * run.order.global_batch)


def test_an_fp16_state_holds_its_scaler() -> None:
    assert {"scaler.scale", "scaler.growth_tracker"} <= TinyRun(precision="fp16").tensors().keys()


def test_a_new_state_is_a_function_of_its_seed() -> None:
    assert TinyRun(seed=1).bits() == TinyRun(seed=1).bits()
    assert TinyRun(seed=1).bits() != TinyRun(seed=2).bits()


def test_making_a_state_and_training_leave_the_process_generator_alone() -> None:
    before = torch.get_rng_state()
    TinyRun(model={"dropout": 0.5}).train(2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.wpe.weight"), "missing: model.wpe.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda t: t.update({"model.wpe.weight": torch.zeros(3)}), r"different: model.wpe.weight is \(3,\)"),
        (lambda t: t.update({"model.wpe.weight": t["model.wpe.weight"].double()}), "float64"),
        (lambda t: t.update(cursor=torch.tensor(5)), "cursor=5 must be 0: step=0"),
    ],
)
def test_wrong_tensors_are_named_refused_and_change_nothing(change, words) -> None:
    run, tensors = TinyRun(), TinyRun(seed=4).tensors()
    before = run.bits()
    change(tensors)
    with pytest.raises(StateMismatch, match=words):
        run.state.load(tensors)
    assert run.bits() == before


def test_weights_alone_can_be_loaded_into_a_network() -> None:
    run = TinyRun()
    run.train(2)
    network = GPT(run.model_config, 61)
    load_weights(network, run.tensors())
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), run.state.model.parameters(), strict=True))


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(StateMismatch, match=r"model\.wte\.weight"):
        load_weights(GPT(TinyRun().model_config, 62), TinyRun().tensors())


@pytest.mark.gpu
@every_mode
def test_a_continued_run_ends_in_the_undisturbed_bits_on_cuda(mode) -> None:
    cuda = device_under_test()
    undisturbed, killed, continued = (TinyRun(**mode, device=cuda) for _ in range(3))
    undisturbed.train(12)
    killed.train(5)
    continued.state.load(killed.tensors())
    continued.train(12)
    assert continued.bits() == undisturbed.bits()
