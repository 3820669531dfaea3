"""Names are compared part by part, and the table of other tools' words names only what there is."""

import pytest

from cairn.tasks.configuration.key_reference import keys_by_name, suggest_key, unknown_key
from cairn.tasks.configuration.synonyms import ALIKE, find_alike, likeness, meanings

MEANT = {
    "training.stepz": "training.steps",
    "model.n_heads": "model.n_head",
    "model.lr": "training.lr",
    "lr": "training.lr",
    "trainning.lr": "training.lr",
    "training.learning_rate": "training.lr",
    "training.batch_size": "training.global_batch",
    "training.dropout": "model.dropout",
    "checkpoint.every": "checkpoint.every_steps",
    "budgets.oom.retry": "budgets.oom.retries",
    "evaluation.evaluators.nam": "evaluation.evaluators.name",
    "training.learnig_rate": "training.lr",
    "training.learning-rate": "training.lr",
    "learningRate": "training.lr",
    "trainer.max_epochs": "training.steps",
    "training.max_iters": "training.steps",
    "step": "training.steps",
    "training.per_device_train_batch_size": "training.micro_batch",
    "training.gradient_accumulation_steps": "training.global_batch",
    "batchsize": "training.global_batch",
    "model.hiden_size": "model.n_embd",
    "model.d_model": "model.n_embd",
    "num_hidden_layer": "model.n_layer",
    "model.numLayers": "model.n_layer",
    "model.num_attention_heads": "model.n_head",
    "model.max_position_embeddings": "model.block_size",
    "model.intermediate_size": "model.n_inner",
    "model.rope_theta": "model.rotary_base",
    "model.n_vocab": "data.tokenizer",
    "training.adam_beta2": "training.betas",
    "training.max_grad_norm": "training.grad_clip",
    "optim.weight_decay": "training.weight_decay",
    "training.lr_scheduler_type": "training.schedule",
    "training.mixed_precision": "training.precision",
    "training.gradient_checkpointing": "training.activation_checkpointing",
    "training.torch_compile": "training.compile",
    "training.nproc_per_node": "training.processes",
    "training.save_steps": "checkpoint.every_steps",
    "checkpoint.save_total_limit": "checkpoint.keep_last",
    "evaluation.eval_iters": "evaluation.batches",
    "training.output_dir": "store",
    "data.train_file": "data.sources",
    "exporters.mlflow_tracking_uri": "exporters.mlflow",
}


@pytest.mark.parametrize("unknown", MEANT)
def test_a_key_of_another_tool_or_misspelled_by_parts_is_known(unknown: str) -> None:
    suggested = suggest_key(unknown)
    assert suggested is not None and suggested.key == MEANT[unknown]


def test_every_synonym_of_a_key_suggests_a_key_there_is() -> None:
    keys = {here.partition("=")[0] for _, here in meanings("options") if " " not in here and not here.startswith("--")}
    assert keys - keys_by_name().keys() == set()


def test_every_word_of_a_key_is_nearer_to_it_than_to_another_keys_name() -> None:
    names = {key.name for key in keys_by_name().values()}
    first = dict(reversed([(word, here) for word, here in meanings("options") if " " not in here]))
    of_keys = {word: here.partition("=")[0] for word, here in first.items() if here[:2] != "--" and word not in names}
    sampled = sorted(of_keys)[::10]
    suggested = {word: suggest_key(word) for word in sampled}
    assert {word: key.key for word, key in suggested.items() if key} == {word: of_keys[word] for word in sampled}


def test_no_word_of_another_tool_is_a_command_of_ours_or_named_twice() -> None:
    from cairn.cli.app import app

    words = [word for word, _ in meanings("commands")]
    assert len(words) == len(set(words)) and not set(words) & set(app)


def test_what_a_key_does_without_is_said() -> None:
    assert unknown_key("training.num_workers") == (
        "unknown key; the text is read once, when it is tokenized: leave it out"
    )


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("learnig_rate", "learning_rate"),
        ("n-layers", "n_layer"),
        ("numLayers", "num_layers"),
        ("eval_steps", "evaluation_steps"),
        ("stroe", "store"),
    ],
)
def test_names_of_like_parts_are_alike(word: str, name: str) -> None:
    assert likeness(word, name) >= ALIKE


@pytest.mark.parametrize(
    ("word", "name"), [("learnig_rate", "kernels"), ("min_lr", "max_lr"), ("warmup_ratio", "warmup_steps"), ("", "x")]
)
def test_names_of_other_parts_are_not(word: str, name: str) -> None:
    assert likeness(word, name) < ALIKE


def test_nothing_is_alike_among_no_names() -> None:
    assert find_alike("runs", []) == ""
