"""The keys of `[model]` and `[training]`, each seen in a trainer's tensors, records or process."""

import os
import signal
from typing import Any, cast

import pytest
import torch

from cairn.model.architectures import gpt
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput
from cairn.model.training import determinism
from cairn.model.training.parallel import SINGLE_RANK
from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.network_module import keep_files
from cairn.tasks.trainer import trainer as trainer_module
from cairn.tasks.trainer import trainer_channel
from cairn.tasks.trainer.trainer import Trainer
from cairn.tasks.trainer.trainer_channel import ParentChannel, Place, RankChannel
from cairn.tasks.trainer.trainer_group import TrainerGroup
from cairn.tasks.trainer.trainer_protocol import Finish, StepDone, TrainerSpec
from tests.networks.own_files import layers
from tests.tasks.trainer_in_process import MODEL, TRAINING, ParentEnd
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import NotedWarmTrainer
from tests.wiring.key_table import acts, seen_by

FLOW, TRAINER = "tests/wiring/test_flow.py", "tests/wiring/test_trainer.py"
seen_by(f"{FLOW}::test_the_spec_that_a_trainer_is_sent_says_what_configuration_and_log_say", "training.micro_batch")
seen_by(f"{TRAINER}::test_a_gradient_is_cut_to_its_greatest_norm", "training.grad_clip")
seen_by(f"{TRAINER}::test_attention_stays_within_documents_where_the_run_says_so", "training.mask_documents")
seen_by(f"{TRAINER}::test_the_probe_measures_held_out_text_and_not_the_train_split", "training.probe_batches")
seen_by(
    "tests/security/test_network_of_a_log.py::test_a_machine_that_allows_it_samples_exports_and_replays", "code.allow"
)
seen_by(
    "tests/tasks/trainer/test_initial_weights.py::test_step_0_has_exactly_the_exported_weights", "training.init_from"
)


@acts("model.n_layer", "model.n_embd", "model.block_size", "model.bias")
def the_shape_of_the_network(bench: Bench) -> None:
    shape = {"n_layer": 3, "n_embd": 12, "block_size": 20, "bias": False}
    tensors = bench.train(1, model=shape).tensors
    assert {name.split(".")[2] for name in tensors if name.startswith("model.h.")} == {"0", "1", "2"}
    assert tensors["model.wte.weight"].shape[1] == 12
    assert tensors["model.wpe.weight"].shape == (20, 12)
    assert not [name for name in tensors if name.endswith(".bias")]


def shapes(bench: Bench, **model: Any) -> dict[str, tuple[int, ...]]:
    """The tensors of a network of one layer and their shapes."""
    tensors = bench.train(0, model={"n_layer": 1, "n_head": 2, "n_embd": 12, "bias": False, **model}).tensors
    return {name.removeprefix("model."): tuple(found.shape) for name, found in tensors.items() if "model." in name}


@acts("model.n_kv_head", "model.head_size", "model.n_inner", "model.norm_gain", "model.tied")
def the_shapes_of_its_parts(bench: Bench) -> None:
    found = shapes(bench, n_kv_head=1, head_size=5, n_inner=7, norm_gain=False, tied=False)
    assert found["h.0.attn.c_attn.weight"] == (10 + 5 + 5, 12) and found["h.0.attn.c_proj.weight"] == (12, 10)
    assert found["h.0.mlp.c_fc.weight"] == (7, 12) and found["lm_head.weight"] == found["wte.weight"]
    assert not [name for name in found if "ln_" in name]


@acts("model.architecture", "model.positions", "model.qk_norm", "model.feed_forward")
def the_parts_of_an_architecture(bench: Bench) -> None:
    plain, other = shapes(bench), shapes(bench, architecture="qwen3")
    assert "wpe.weight" in plain and "wpe.weight" not in other
    assert other["h.0.attn.q_norm.weight"] == (6,) and other["h.0.mlp.c_fc.weight"] == (2 * 36, 12)
    mixed = shapes(bench, positions="rotary", qk_norm=True, feed_forward="swiglu")
    assert mixed.keys() == other.keys() and mixed == other


@acts("model.module", "model.imports")
def a_network_of_ones_own(bench: Bench) -> None:
    files = {"net.py": b"import yaml\n" + layers()["net.py"]}
    model = {"module": "net.py:build", "imports": ["yaml"], "files": {"net.py": sha256(files["net.py"])}}
    keep_files(bench.world.store, bench.world.spec(model=model).model, files)
    allowed = {"allowed_code": tuple(model["files"].values()), "training": {"kernels": "stock"}}
    tensors = bench.train(1, model=model, **allowed).tensors
    assert {"model.table.weight", "optimizer.head.bias.exp_avg"} <= tensors.keys()


@acts("model.norm", "model.norm_epsilon", "model.rotary_base")
def what_norms_and_rotations_compute(bench: Bench) -> None:
    assert bench.differs(model={"norm": "rms"}) and bench.differs(model={"norm_epsilon": 1e-2})
    near, far = (bench.train(model={"positions": "rotary", "rotary_base": base}) for base in (10.0, 1e6))
    assert near.staged.state_sha256 != far.staged.state_sha256


@acts("model.rotary_scaling")
def wavelengths_that_are_stretched(bench: Bench) -> None:
    scalings: tuple[Any, ...] = (None, [4.0], [4.0, 1.0, 4.0, 16])
    digests = {
        bench.train(1, model={"positions": "rotary", "rotary_scaling": scaling}).staged.state_sha256
        for scaling in scalings
    }
    assert len(digests) == 3


@acts("model.vocab_size")
def rows_beyond_the_ids(bench: Bench) -> None:
    plain, padded = shapes(bench, tied=False), shapes(bench, tied=False, vocab_size=1000)
    assert plain["wte.weight"][0] < 1000 and padded["wte.weight"][0] == padded["lm_head.weight"][0] == 1000


@acts("model.zero_projections")
def projections_that_begin_as_zeros(bench: Bench) -> None:
    tensors = bench.train(0, model={"zero_projections": True}).tensors
    projections = [found for name, found in tensors.items() if name.startswith("model.") and "c_proj.weight" in name]
    assert projections and not any(bool(found.any()) for found in projections)


@acts("model.ngram_rows")
def tables_of_pairs_and_triples(bench: Bench) -> None:
    found = shapes(bench, ngram_rows=[5, 7])
    assert found["ngrams.0.weight"] == (5, 12) and found["ngrams.1.weight"] == (7, 12)


@acts("training.optimizer", "training.muon_lr", "training.momentum")
def how_gradients_move_weights(bench: Bench) -> None:
    rate = {"optimizer": "muon", "warmup_steps": 1, "lr": 1e-9, "min_lr": 0.0, "weight_decay": 0.0}
    began, slow, fast = (
        bench.train(steps, training={**rate, "muon_lr": muon_lr}).tensors
        for steps, muon_lr in ((0, 0.1), (1, 0.1), (1, 0.2))
    )
    name = "model.h.0.mlp.c_fc.weight"
    assert (slow[name] - began[name]).abs().max() > 1e-3
    assert torch.allclose(fast[name] - began[name], 2 * (slow[name] - began[name]), atol=1e-6)
    assert "optimizer.h.0.mlp.c_fc.weight.momentum_buffer" in slow and "optimizer.wte.weight.exp_avg" in slow
    kept = {"optimizer": "momentum", "warmup_steps": 1}
    first, other = (bench.train(2, training={**kept, "momentum": share}).tensors for share in (0.0, 0.5))
    assert not torch.equal(first[name], other[name])


@acts("training.z_loss")
def scores_kept_small(bench: Bench) -> None:
    for kernels in ("stock", "fused"):
        plain, small = (bench.train(2, training={"kernels": kernels, "z_loss": share}) for share in (0.0, 0.1))
        assert plain.parent.records[0].train_loss == small.parent.records[0].train_loss
        assert plain.staged.state_sha256 != small.staged.state_sha256


@acts("training.lora.rank", "training.lora.alpha", "training.lora.targets")
def adapters_beside_the_weights(bench: Bench) -> None:
    base = bench.world.keep_weights()

    def trained(**lora: Any) -> Any:
        return bench.train(2, training={"lora": lora}, initial_weights_sha256=base)

    plain, other = trained(rank=2, alpha=2.0).tensors, trained(rank=2, alpha=4.0, targets=["mlp.c_fc"]).tensors
    name = "model.h.0.mlp.c_fc.lora.c_fc.B"
    assert plain[name].shape == (32, 2) and len([one for one in plain if one.endswith("B")]) == 4
    assert [one for one in other if one.startswith("model.") and one.endswith("B")] == [name]
    same = trained(rank=2, alpha=2.0, targets=["mlp.c_fc"]).tensors
    assert not torch.equal(same[name], other[name])


@acts("model.n_head")
def heads_that_share_the_width(bench: Bench) -> None:
    assert bench.differs(model={"n_head": 4})


@acts("model.dropout")
def activations_set_to_zero(bench: Bench) -> None:
    sure = bench.train(1, model={"dropout": 0.0}).parent.losses
    assert sure == bench.train(1, model={"dropout": 0.0}, training={"kernels": "fused"}).parent.losses
    assert sure != bench.train(1, model={"dropout": 0.5}).parent.losses != bench.train(1).parent.losses


@acts("training.steps", "training.lr", "training.min_lr", "training.warmup_steps")
def the_schedule_of_the_learning_rate(bench: Bench) -> None:
    schedule = {"steps": 6, "lr": 0.02, "min_lr": 0.005, "warmup_steps": 4}
    rates = [record.lr for record in bench.train(6, training=schedule).parent.records]
    assert rates[:4] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert rates[5] == 0.005 < rates[4] < 0.02


@acts("training.schedule", "training.decay_fraction")
def the_schedule_that_stays_and_then_falls(bench: Bench) -> None:
    schedule = {"steps": 8, "lr": 0.02, "min_lr": 0.0, "warmup_steps": 2, "schedule": "wsd", "decay_fraction": 0.5}
    rates = [record.lr for record in bench.train(8, training=schedule).parent.records]
    assert rates == pytest.approx([0.01, 0.02, 0.02, 0.02, 0.015, 0.01, 0.005, 0.0])


@acts("training.global_batch")
def the_windows_of_a_step(bench: Bench) -> None:
    events = bench.train(2, training={"global_batch": 6}).parent.all(StepDone)
    assert [event.tokens for event in events] == [6 * MODEL["block_size"], 12 * MODEL["block_size"]]


@acts("training.weight_decay")
def the_decay_of_the_matrices(bench: Bench) -> None:
    rate = {"lr": 0.1, "warmup_steps": 1, "grad_clip": 0.0}
    start, *after = (
        bench.train(steps, training={**rate, "weight_decay": decay}).tensors["model.wte.weight"]
        for steps, decay in ((0, 0.0), (1, 0.0), (1, 0.5))
    )
    assert torch.allclose(after[0] - after[1], 0.1 * 0.5 * start, rtol=1e-3, atol=1e-6)


@acts("training.betas")
def the_decay_of_the_moments(bench: Bench) -> None:
    tensors = bench.train(1, training={"betas": (0.5, 0.75), "grad_clip": 0.01}).tensors
    first = sum(float(tensor.square().sum()) for name, tensor in tensors.items() if name.endswith(".exp_avg"))
    second = sum(float(tensor.sum()) for name, tensor in tensors.items() if name.endswith(".exp_avg_sq"))
    assert first**0.5 / (1 - 0.5) == pytest.approx(0.01, rel=1e-3)
    assert second / (1 - 0.75) == pytest.approx(0.01**2, rel=1e-3)


@acts("training.precision")
def another_number_format(bench: Bench) -> None:
    assert bench.differs(training={"precision": "bf16"})


@acts("training.compile", "training.kernels")
def another_implementation(bench: Bench) -> None:
    def opened(**training: Any) -> tuple[bool, bool]:
        with bench.world.opened(bench.world.spec(900, training=training)) as (trainer, _):
            model = trainer._state.model
            return trainer._state.network is not model, bool(model.h[0].fused)

    assert opened(kernels="stock") == (False, False)
    bench.patch.setattr(torch, "compile", lambda network, **options: torch.nn.Identity())  # importing it takes seconds
    assert opened(kernels="stock", compile=True) == (True, False)
    assert opened(kernels="fused") == (False, True)


@acts("training.seed")
def other_weights_and_another_order(bench: Bench) -> None:
    drawn: list[list[int]] = []
    gather = TokenWindows.gather

    def noting(self: TokenWindows, indexes: Any, into: Any = None) -> Any:
        drawn[-1].extend(indexes.tolist())
        return gather(self, indexes, into)

    bench.patch.setattr(TokenWindows, "gather", noting)
    weights = []
    for seed in (7, 8, 7):
        drawn.append([])
        weights.append(bench.train(0, training={"seed": seed}).tensors["model.wte.weight"])
        bench.train(2, training={"seed": seed})
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[1])
    assert set(drawn[0]) == set(drawn[2]) != set(drawn[1])


@acts("training.device")
def the_device_of_the_tensors(bench: Bench) -> None:
    join = ParentChannel.join
    assert join(cast(Any, None), bench.world.spec(901)).device == torch.device("cpu")
    with pytest.raises(InvalidInput, match="device='cuda:63'"):
        join(cast(Any, None), bench.world.spec(902, training={"device": "cuda:63"}))


@acts("training.activation_checkpointing")
def activations_computed_twice(bench: Bench) -> None:
    def compute_twice(block: Any, *given: Any, use_reentrant: bool) -> Any:
        block(*given)
        return block(*given)

    bench.patch.setattr(gpt, "checkpoint", compute_twice)  # torch's own imports its compiler

    def forwards(recompute: bool) -> int:
        calls: list[int] = []
        with bench.world.opened(bench.world.spec(903, activation_checkpointing=recompute)) as (trainer, _):
            trainer._state.model.h[0].register_forward_pre_hook(lambda *_: calls.append(1))
            trainer.train_segment(1)
        return len(calls)

    assert forwards(True) == 2 * forwards(False) > 0
    with bench.flow.opened("training.activation_checkpointing=true") as run:
        assert run.config.training.activation_checkpointing


@acts("training.probe_every_steps", "training.sample_tokens")
def the_rhythm_of_the_probe(bench: Bench) -> None:
    records = bench.train(6, training={"probe_every_steps": 3, "sample_tokens": 4}, prompt="a").parent.records
    assert [record.probe_loss is not None for record in records] == [False, False, True] * 2
    silent = bench.train(3, training={"probe_every_steps": 3, "sample_tokens": 0}).parent.records
    assert records[2].sample is not None and silent[2].probe_loss is not None and silent[2].sample is None


class Channel(ParentEnd):
    """A channel whose parent sends a spec and then asks to finish."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__()
        self._spec, self.threads = spec, 0

    def read_spec(self) -> TrainerSpec:
        return self._spec

    def join(self, spec: TrainerSpec) -> Place:
        return Place(device=torch.device("cpu"))

    def next_command(self) -> Finish:
        self.threads = torch.get_num_threads()
        return Finish()


class ClosedTrainer(Trainer):
    """Closes its step log at the end, as the end of its process does."""

    def finish(self) -> None:
        super().finish()
        self._reporter._log._file.close()


def serve_spec(bench: Bench, spec: TrainerSpec) -> Channel:
    """Run the trainer's own program with this spec and no steps; this process's threads are then as before."""
    before, channel = torch.get_num_threads(), Channel(spec)
    bench.patch.setattr(trainer_module, "open_channel", lambda: channel)
    bench.patch.setattr(trainer_module, "Trainer", ClosedTrainer)
    bench.patch.setattr(trainer_module.signal, "signal", lambda *_: signal.SIG_DFL)
    bench.patch.setattr(os, "_exit", lambda code: None)
    try:
        trainer_module.main()
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    return channel


@acts("training.arithmetic")
def instructions_that_every_machine_has(bench: Bench) -> None:
    chosen = list[str]()
    bench.patch.setattr(determinism, "choose_arithmetic", chosen.append)
    bench.flow.train("training.arithmetic='portable'")
    for number, name in ((905, "native"), (906, "portable")):
        serve_spec(bench, bench.world.spec(number, training={"arithmetic": name}))
    assert chosen == ["native", "portable"]
    assert bench.flow.evaluators.specs[-1]["plan"]["arithmetic"] == "portable"


@acts("training.threads")
def the_threads_of_the_process(bench: Bench) -> None:
    assert serve_spec(bench, bench.world.spec(904, threads=3)).threads == 3
    with bench.flow.opened("training.threads=2") as run:
        assert run.evaluation.threads == 2


@acts("training.workers")
def micro_batches_at_once(bench: Bench) -> None:
    with bench.world.opened(bench.world.spec(907, workers=3)) as (trainer, _):
        assert trainer._state.workers.count == 3
    bench.flow.train("training.micro_batch=1", "training.workers=3")
    spec, _ = bench.flow.heard(1)
    assert spec.workers == 3


@acts("training.processes")
def several_processes(bench: Bench) -> None:
    warm = NotedWarmTrainer()
    with bench.flow.opened("training.processes=2", warm=warm) as run:
        assert run.group.size == 2
        assert warm._command == TrainerGroup(processes=2).command()


@acts("training.parallel")
def how_they_share_the_network(bench: Bench) -> None:
    asked: list[Any] = []
    bench.patch.setattr(
        trainer_channel.parallel, "join_ranks", lambda *_, mode, **rest: asked.append(mode) or SINGLE_RANK
    )
    channel = RankChannel.__new__(RankChannel)
    channel._rank, channel._size, channel._rendezvous = (
        0,
        2,
        cast(Any, type("Meeting", (), {"store": None, "meetings": None})),
    )
    for mode in ("ddp", "fsdp"):
        RankChannel.join(channel, bench.world.spec(905, training={"parallel": mode}))
    assert asked == ["ddp", "fsdp"] and TRAINING["global_batch"] >= 2
