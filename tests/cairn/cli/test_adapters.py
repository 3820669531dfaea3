"""Commands on a run that trained adapters: exports with and without its base, forks, and what is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cairn.model.configuration.training import adapter_table
from cairn.storage.logs.run_log import RunLog
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights
from tests.commands import Cairn
from tests.tasks.committed_model import CommittedModel, commit_model, small_configuration

LLAMA: dict[str, Any] = {"architecture": "qwen3", "qk_norm": False, "n_kv_head": 1}
PEFT_KEYS = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "bias", "fan_in_fan_out",
    "target_modules", "inference_mode",
}  # fmt: skip
"""Keys of peft's LoraConfig, of version 0.5 or later, that are written."""


def tuned(cairn: Cairn, store: LocalStore, folder: Path, network: dict[str, Any], **lora: Any) -> CommittedModel:
    """The run `tuned`: adapters beside the weights of the run `bard`, which lie in `out`."""
    model = commit_model(store, folder, small_configuration(model=network))
    assert cairn("export", "bard", "out").code == 0
    config, opened = small_configuration(model=network, init_from="out", lora=lora), model.log.state.opened
    assert opened is not None
    snapshot = open_snapshot(store, opened.data_snapshot, folder / "cache")
    given = {"tokenizer_json": snapshot.tokenizer_json, "vocab_size": snapshot.manifest.vocab_size}
    kept = keep_initial_weights(store, InitialDirectory("out", folder), config.model, **given)  # type: ignore[arg-type]
    names = {"initial_weights_sha256": kept.weights_sha256, "initial_source_sha256": kept.source_sha256}
    return commit_model(store, folder, config, "tuned", **names)


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, cairn: Cairn, store: LocalStore, tmp_path: Path) -> CommittedModel:
    return tuned(cairn, store, tmp_path, LLAMA if request.param == "llama" else {}, rank=3, alpha=5.0)


def by_peft_s_rules(weights: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Add an adapter to the weights of a folder of transformers, reading nothing but what peft's format says.

    Source: peft, `set_peft_model_state_dict` and `LoraLayer.get_delta_weight`.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config.keys() == PEFT_KEYS and (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    found, added = load_file(weights / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    modules = {name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for name in added}
    for module in modules:
        name = module.removeprefix("base_model.model.")
        targets = config["target_modules"]
        assert name in targets or any(name.endswith(f".{target}") for target in targets)
        down, up = (added.pop(f"{module}.lora_{part}.weight") for part in "AB")
        assert down.shape[0] == up.shape[1] == config["r"] and down.dtype == up.dtype == torch.float32
        change = (up @ down) * (config["lora_alpha"] / config["r"])
        found[f"{name}.weight"] += change.T if config["fan_in_fan_out"] else change
    targeted = {name.removesuffix(".weight") for name in found if name.endswith(".weight")}
    matched = {name for name in targeted if any(name.endswith(f".{one}") for one in config["target_modules"])}
    assert added == {} and {module.removeprefix("base_model.model.") for module in modules} >= matched
    return found


def test_an_adapter_added_by_peft_s_rules_is_the_whole_export(
    cairn: Cairn, model: CommittedModel, tmp_path: Path
) -> None:
    assert cairn("export", "tuned", "adapter", "--adapter").code == cairn("export", "tuned", "whole").code == 0
    whole, added = (
        load_file(tmp_path / "whole" / "model.safetensors"),
        by_peft_s_rules(tmp_path / "out", tmp_path / "adapter"),
    )
    assert whole.keys() == added.keys()
    assert all(torch.allclose(whole[name], added[name], atol=1e-6) for name in whole)
    base = load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in whole if not torch.equal(whole[name], base[name])}
    assert changed == {f"{row.theirs}.weight" for row in adapter_table(model.config.model)}
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: peft\npipeline_tag: text-generation\nbase_model: "out"\n')
    assert "PeftModel" in card and "PeftModel" not in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.usefixtures("model")
@pytest.mark.slow  # beside: the test above; peft is no part of the developers' environment
def test_peft_itself_opens_an_adapter_and_computes_the_same(cairn: Cairn, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    assert cairn("export", "tuned", "adapter", "--adapter").code == cairn("export", "tuned", "whole").code == 0
    from transformers import AutoModelForCausalLM

    base, whole = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("out", "whole")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    tokens = torch.randint(0, 301, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted = (network.eval()(tokens).logits for network in (adapted, whole))
        with adapted.disable_adapter():
            plain = adapted(tokens).logits
    assert torch.allclose(found, wanted, atol=1e-4) and (found - plain).abs().max() > 0.01


@pytest.mark.xdist_group("transformers")  # importing it takes seconds
def test_transformers_computes_with_a_whole_export_what_was_trained(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    model = tuned(cairn, store, tmp_path, LLAMA, rank=3)
    assert cairn("export", "tuned", "whole").code == 0
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    tokens = torch.randint(0, 301, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model.state.model.eval()(tokens), atol=1e-4)


def test_targets_of_some_layers_only_are_written_whole(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    tuned(cairn, store, tmp_path, LLAMA, rank=2, targets=["layers.1.self_attn.q_proj", "mlp.down_proj"])
    assert cairn("export", "tuned", "adapter", "--adapter").code == 0
    by_peft_s_rules(tmp_path / "out", tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and len(file.keys()) == 2 * 3


def test_a_run_without_adapters_has_none_to_export(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    commit_model(store, tmp_path, small_configuration())
    ended = cairn("export", "bard", "out", "--adapter")
    assert ended.code == 2 and "run bard was trained without training.lora; leave it out" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_fork_s_adapters_go_on_beside_the_same_weights_and_no_others(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    tuned(cairn, store, tmp_path, LLAMA, rank=3)
    for setting in ("training.lora.rank=4", "training.lora.alpha=1", 'training.lora.targets=["q_proj"]'):
        ended = cairn("fork", "tuned", "twin", "--set", setting)
        assert ended.code == 2 and "a fork keeps its network, adapters" in ended.err
    assert cairn("fork", "bard", "twin", "--set", "training.lora.rank=4").code == 2
    assert cairn("fork", "tuned", "twin", "--set", "training.weight_decay=0.0").code == 0
    opened, forked = (RunLog(store, run).refresh().opened for run in ("tuned", "twin"))
    assert opened is not None and forked is not None
    assert forked.initial_weights_sha256 == opened.initial_weights_sha256 is not None


def test_the_weights_beside_adapters_stay_when_one_of_the_runs_beside_them_is_deleted(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    tuned(cairn, store, tmp_path, LLAMA, rank=3)
    kept = store.keys("initial")
    assert cairn("fork", "tuned", "twin").code == 0
    assert cairn("delete", "twin", "--yes").code == 0 and store.keys("initial") == kept
    assert cairn("sample", "tuned", "--tokens", "2").code == 0


def test_verify_reads_the_weights_beside_the_adapters(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    model = tuned(cairn, store, tmp_path, LLAMA, rank=3)
    opened = model.log.state.opened
    assert opened is not None and opened.initial_weights_sha256 is not None
    path = tmp_path / "store" / "initial" / opened.initial_weights_sha256 / "weights.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert f"initial/{opened.initial_weights_sha256}/weights.safetensors" in cairn("verify", "tuned").err
    ended = cairn("sample", "tuned", "--tokens", "2")
    assert ended.code == 5 and "initial/" in ended.err


def test_a_target_that_is_no_linear_layer_of_the_network_is_refused_with_those_there_are(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    commit_model(store, tmp_path, small_configuration())
    assert cairn("export", "bard", "out").code == 0
    (tmp_path / "run.toml").write_text('[data]\nsources = ["text.jsonl"]\n[training]\nsteps = 2\ndevice = "cpu"\n')
    settings = ("--set", 'training.lora.targets=["q"]', "--set", "training.init_from=out")
    ended = cairn("train", "run.toml", *settings, "--dry-run")
    assert ended.code == 2 and "'q' is no linear layer of the network; it has c_attn" in ended.err


def test_a_plan_counts_what_is_trained_and_no_batch_is_learned_by_heart_beside_random_weights(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    commit_model(store, tmp_path, small_configuration())
    assert cairn("export", "bard", "out").code == 0
    text = '[data]\nsources = ["text.jsonl"]\nval_fraction = 0.3\n[training]\nsteps = 2\ndevice = "cpu"\n'
    (tmp_path / "run.toml").write_text(f'{text}init_from = "out"\nlora = {{}}\n')
    planned = cairn("train", "run.toml", "--dry-run")
    assert "trains        3,072 numbers of adapters of rank 8; the weights stay" in planned.out, planned.out
    ended = cairn("train", "run.toml", "--overfit-one-batch")
    assert ended.code == 2 and "beside which adapters learn nothing; leave training.lora out" in ended.err
