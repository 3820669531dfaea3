"""A network of one's own is trained as the others are, or refused by the name of what cannot be."""

import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cairn.model.architectures.own_network import OwnFiles, OwnNetwork, make_network
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput
from cairn.model.inference.prediction import Sampling, generate_stream, window_losses
from cairn.model.training.optimizer import make_optimizers
from tests.model.tiny_run import VOCAB, TinyRun
from tests.networks.own_files import NANO, NANOGPT, layers, nanogpt

OWN, NANO_MODEL = {"module": "net.py:build"}, {"module": "nano.py:build"}


def own(files: dict[str, bytes], **training: Any) -> TinyRun:
    return TinyRun(model={**OWN, "dropout": 0.2}, files=files, **training)


def nano(**training: Any) -> TinyRun:
    return TinyRun(model={**NANO_MODEL, "dropout": 0.2}, files=nanogpt(), **training)


@pytest.mark.parametrize("make", [lambda **training: own(layers(), **training), nano], ids=["logits", "nanogpt"])
def test_a_run_that_goes_on_from_a_state_ends_with_the_bits_of_one_that_was_not_interrupted(
    make: Callable[..., TinyRun],
) -> None:
    whole, begun, resumed = make(micro_batch=2), make(micro_batch=2), make(micro_batch=2)
    whole.train(6)
    begun.train(3)
    resumed.state.load(begun.tensors())
    resumed.train(6)
    assert resumed.bits() == whole.bits()


@pytest.mark.parametrize("make", [lambda **training: own(layers(), **training), nano], ids=["logits", "nanogpt"])
def test_recomputed_activations_change_no_bit(make: Callable[..., TinyRun]) -> None:
    kept, recomputed = make(), make(activation_checkpointing=True)
    kept.train(3)
    recomputed.train(3)
    assert recomputed.bits() == kept.bits()


def test_the_loss_of_nanogpt_is_its_own() -> None:
    run, again = (TinyRun(model=NANO_MODEL, files=nanogpt()) for _ in range(2))
    (record,) = run.train(1)
    tokens, model = torch.from_numpy(run.windows.gather(run.order.windows_of(0))), again.state.model
    assert isinstance(model, OwnNetwork)
    _, loss = model.module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    assert record.train_loss == float(loss.detach())


def test_nanogpts_file_is_unchanged_and_its_builder_has_at_most_ten_lines() -> None:
    assert sha256(NANOGPT.read_bytes()).hexdigest().startswith("7c01703240dbec5d554527dc666e35b3")
    assert len(NANO.read_text().splitlines()) <= 10


def test_a_head_weight_is_multiplied_with_what_forward_returns() -> None:
    text = layers(made="network.head_weight = network.head.weight; network.head = nn.Identity()")["net.py"]
    model = own({"net.py": text.replace(b"n_embd, vocab_size)", b"n_embd, vocab_size, bias=False)")}).state.model
    assert isinstance(model, OwnNetwork)
    ids = torch.arange(8).view(1, 8)
    expected = F.linear(model.eval().module(ids), model.module.head_weight)
    assert expected.shape == (1, 8, VOCAB) and torch.equal(model(ids, ids), expected)


def test_a_parameter_with_two_names_is_stored_once() -> None:
    names = [name for name, _ in nano().state.model.named_parameters()]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert not [name for name in names if name.startswith(("blocks", "module"))]


def test_held_out_losses_and_samples_come_from_its_logits() -> None:
    run = nano()
    before = torch.get_rng_state()
    losses = window_losses(run.state.model, run.windows, count=3)
    alone = window_losses(run.state.model, run.windows, count=run.windows.window_count)
    assert len(losses) == 3 and set(losses) <= set(alone)
    drawn = [list(generate_stream(run.state.model, [1], new_tokens=12, sampling=Sampling(), seed=4)) for _ in range(2)]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 12 and max(drawn[0]) < VOCAB
    assert torch.equal(torch.get_rng_state(), before)


def test_matrices_decay_and_the_rest_does_not_unless_the_module_has_groups() -> None:
    model = own(layers()).state.model
    (optimizer,) = make_optimizers(model, own(layers(), weight_decay=0.3).training)
    decays = {id(one): group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    assert {one.dim() > 1: decays[id(one)] for one in model.parameters()} == {True: 0.3, False: 0.0}
    hook = 'network.optimizer_groups = lambda: [{"params": network.parameters(), "weight_decay": 0.7}]'
    (grouped,) = own(layers(made=hook)).state.optimizers
    assert [group["weight_decay"] for group in grouped.param_groups] == [0.7]


def test_a_parameter_without_part_in_the_loss_has_a_gradient_of_zeros_and_the_others_keep_their_bits() -> None:
    idle, plain = own(layers("self.idle = nn.Parameter(torch.ones(3))"), micro_batch=1), own(layers(), micro_batch=1)
    idle.train(2)
    plain.train(2)
    assert {name: bits for name, bits in idle.bits().items() if "idle" not in name} == plain.bits()
    assert torch.equal(idle.tensors()["model.idle"], torch.ones(3)), "a vector, which does not decay"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (layers("self.norm = nn.BatchNorm1d(n_embd)", "x = self.norm(x.mT).mT"), "buffer norm.running_mean changes"),
        (layers('self.register_buffer("noise", torch.randn(4))'), "buffer noise is made of random numbers"),
        (
            layers("self.table.weight.data.fill_(random.random())"),
            "table.weight is made by random numbers",
        ),
        (layers("", "x = x * random.random()"), "draws random numbers elsewhere"),
        (layers("", "x = x * (random.random() > 1e-9)"), "draws random numbers elsewhere"),
        (layers("", "x = x * (np.random.rand() > 1e-9)"), "draws random numbers elsewhere"),
        (layers("self.scale = random.random()", "x = x * self.scale"), "draws random numbers elsewhere"),
        (layers("self.passes = 0", "self.passes += 1; x = x * self.passes"), "or knows of others"),
        (layers("", "x = x + torch.rand_like(x)"), "a prediction draws random numbers; rule: only where self.training"),
        (layers("", "x = x + x.mean(1, keepdim=True)"), "a prediction changes with a later token"),
        (
            layers("", "x = torch.cat([one + one.mean(1, keepdim=True) for one in x.split(7, dim=1)], dim=1)"),
            "a prediction changes with a later token",
        ),
        (layers("", "x = x * float('nan')"), "forward returned NaN"),
        (layers("", "self.late = nn.Parameter(torch.ones(3))"), "parameter late changes in forward"),
        (layers("", "self.head.weight.data.mul_(0.9)"), "parameter head.weight changes in forward"),
        (layers("self.small = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))"), "small is torch.bfloat16"),
        (layers("self.turned = nn.Parameter(torch.zeros(2, 3).t())"), "turned is torch.float32 and not contiguous"),
        (layers("self.table.weight.requires_grad = False"), "table.weight is frozen"),
        (layers("", "return x"), "at least 61 ids"),
        (layers("", "return self.head(x)[:, -1]"), "forward returned (2, 61) for ids (2, 8)"),
        (layers("", 'return {"logits": x}'), "forward returned dict"),
        (layers(made="network = 3"), "made a int; rule: an nn.Module"),
        (layers(made="network = nn.Identity()"), "has no parameter"),
        (layers(made="network.optimizer_groups = lambda: [dict(params=[network.head.weight])]"), "in exactly one"),
        (layers(made="network.optimizer_groups = lambda: None"), "in exactly one"),
        (layers(made="network.optimizer_groups = lambda: [{}]"), "in exactly one"),
        (layers(made="network.optimizer_groups = lambda: [dict(params=[], lr=3)]"), "rule: params and weight_decay"),
        (layers(made="network.optimizer_groups = lambda: [dict(params=[], weight_decay=-1)]"), "not negative"),
    ],
)
def test_what_no_checkpoint_could_hold_is_refused_by_name(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        own(files)
    assert said in str(refused.value) and "net.py:build" in str(refused.value)


@pytest.mark.parametrize("body", ["", "self.blocks = [1, 2]"])
def test_recomputation_without_blocks_is_refused(body: str) -> None:
    text = layers("BODY")["net.py"].replace(b"self.blocks", b"self.parts").replace(b"BODY", body.encode())
    with pytest.raises(InvalidInput, match="offers no blocks"):
        own({"net.py": text}, activation_checkpointing=True)


EXPERTS = """self.gate = nn.Linear(n_embd, 4)
        wide = lambda: nn.Sequential(nn.Linear(n_embd, 64), nn.Linear(64, n_embd))
        self.experts = nn.ModuleList(wide() for _ in range(4))"""
ROUTED = """flat = x.flatten(0, 1)
        chosen = self.gate(flat).argmax(1)
        parts = [(chosen == number).nonzero().squeeze(1) for number in range(4)]
        found = torch.cat([expert(flat[part]) for expert, part in zip(self.experts, parts)])
        x = torch.zeros_like(flat).index_copy(0, torch.cat(parts), found).view_as(x)"""


def test_experts_that_round_otherwise_for_other_numbers_of_tokens_see_no_later_ones() -> None:
    assert TinyRun(model={**OWN, "block_size": 16}, files=layers(EXPERTS, ROUTED)).train(1)


def test_a_tuple_comes_as_a_tuple_out_of_a_log_too() -> None:
    text = b"def build(sizes: tuple[int, ...], more: list[int]):\n    assert sizes + (2,) and more + [2]\n"
    files = {"net.py": b"from torch import nn\n" + text + b"    return nn.Linear(1, 1)\n"}
    config = ModelConfig.model_validate({**OWN, "block_size": 8, "sizes": [], "more": [1]})
    assert make_network(files, config, VOCAB).called_with == {"sizes": [], "more": [1]}


def test_a_loss_of_its_own_is_used_wherever_targets_stand() -> None:
    text = layers("", "loss = None if targets is None else 3 * targets.new_ones(()).float() * x.mean()")["net.py"]
    text = text.replace(b"forward(self, ids)", b"forward(self, ids, mask=None, *, targets=None)")
    (record,) = own({"net.py": text.replace(b"return self.head(x)", b"return self.head(x), loss")}).train(1)
    assert abs(record.train_loss) < 3


def test_random_numbers_of_the_process_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    own(layers())
    assert torch.equal(torch.get_rng_state(), before)


def load(text: str, **others: str) -> Any:
    return OwnFiles({"net.py": text.encode(), **{f"{name}.py": one.encode() for name, one in others.items()}}).load(
        "net"
    )


def test_files_import_each_other_by_either_form_and_each_runs_once() -> None:
    shared = "from dataclasses import dataclass\nLOADED = []\n@dataclass\nclass Sizes:\n    width: 'int' = 3"
    net = load(
        "import shared, torch.nn as nn\nfrom . import other\nfrom .shared import LOADED\nfrom other import twice\n"
        "LOADED.append(1)\nmade = other.twice + len(shared.LOADED) + shared.Sizes().width",
        shared=shared,
        other="import shared, net\ntwice = 2",
    )
    assert net.made == 2 + 1 + 3 and net.nn is torch.nn


@pytest.mark.parametrize("line", ["import yaml", "import cairn.api", "from .gone import x", "import prefect.flows"])
def test_no_package_that_the_run_does_not_name_is_imported_not_even_late(line: str) -> None:
    net = load(f"def late():\n    {line}")
    with pytest.raises(ImportError, match="not one that this run may depend on"):
        net.late()


def test_a_file_means_its_bytes_and_no_module_of_the_process_or_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.path)
    assert load("import helper\nfrom helper import value", helper="value = 5").value == 5
    assert "helper" not in sys.modules and sys.path == before


def test_a_traceback_shows_the_lines_of_the_file() -> None:
    try:
        load("def fail():\n    raise RuntimeError  # this one").fail()
    except RuntimeError as error:
        assert "this one" in "".join(traceback.format_exception(error))


def test_what_the_files_print_is_no_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig.model_validate({**NANO_MODEL, "block_size": 8})
    make_network(nanogpt(), model, VOCAB)
    talkative = make_network(layers("print('made')", "print('passed')"), model.model_copy(update=OWN), VOCAB)
    talkative(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("made\npassed\n")
