"""Commands and options as nanoGPT, Trainer, Lightning, W&B, MLflow, torchrun, git and docker have them.

That an answer imports no settings is in `test_real_commands`.
"""

import shlex

import pytest

from cairn.cli.app import app
from cairn.cli.command import run_command
from cairn.tasks.configuration.synonyms import meanings

COMMANDS = {
    "ls": "cairn runs",
    "list": "cairn runs",
    "ps -a": "cairn runs",
    "dir": "cairn runs",
    "rm quickstart": "cairn delete quickstart",
    "remove 'a b'": "cairn delete 'a b'",
    "rmi quickstart -f": "cairn delete",
    "resume quickstart": "cairn train --run-id quickstart",
    "continue quickstart": "cairn train --run-id quickstart",
    "generate champion": "cairn sample champion",
    "genrate champion": "cairn sample champion",
    "predict quickstart": "cairn sample quickstart",
    "diff a b": "cairn compare a b",
    "fit run.toml": "cairn train run.toml",
    "torchrun train.py": "cairn train train.py",
    "test quickstart": "cairn evaluate quickstart",
    "validate quickstart": "cairn evaluate quickstart",
    "eval quickstart": "cairn evaluate quickstart",
    "show quickstart": "cairn status quickstart",
    "inspect quickstart": "cairn status quickstart",
    "logs quickstart": "cairn log quickstart",
    "tail quickstart": "cairn log quickstart",
    "tensorboard": "cairn ui",
    "server": "cairn ui",
    "images": "cairn models",
    "tag quickstart": "cairn promote quickstart",
    "annotate quickstart good": "cairn note quickstart good",
    "revert": "cairn rollback",
    "branch quickstart next": "cairn fork quickstart next",
    "clone quickstart next": "cairn fork quickstart next",
    "gc quickstart": "cairn sweep quickstart",
    "prune quickstart": "cairn sweep quickstart",
    "fsck quickstart": "cairn verify quickstart",
    "blame quickstart": "cairn explain quickstart",
    "draw quickstart curve.png": "cairn plot quickstart curve.png",
    "push quickstart out": "cairn export quickstart out",
    "new text.txt": "cairn init text.txt",
    "version": "cairn --version",
    "agent": "cairn watch",
    "stop quickstart": "Ctrl-C where it trains",
    "kill quickstart": "the same command continues it",
    "login": "there is no account",
    "commit": "training itself commits",
    "sync": "cairn config exporters",
    "tokenize text.txt": "cairn data run.toml",
    "--json runs": "cairn runs --json",
    "--steps 100": "cairn train --steps 100",
}
OPTIONS = {
    "train --steps 100": "--set training.steps=100",
    "train run.toml --steps=100": "--set training.steps=100",
    "train run.toml --max_steps 100": "--set training.steps=100",
    "train run.toml --max-iters 100": "--set training.steps=100",
    "train run.toml --epochs 3": "--set training.steps=N",
    "train run.toml --num_train_epochs=3": "--set training.steps=N",
    "train run.toml --trainer.max_epochs 3": "--set training.steps=N",
    "train run.toml --device cuda": "--set training.device=cuda",
    "train run.toml --accelerator cpu": "--set training.device=cpu",
    "train run.toml --gpu": "--set training.device=cuda",
    "train run.toml --devices 2": "--set training.processes=2",
    "train run.toml --nproc_per_node=8": "--set training.processes=8",
    "train run.toml --lr 3e-4": "--set training.lr=3e-4",
    "train run.toml --learning-rate 3e-4": "--set training.lr=3e-4",
    "train run.toml --learnig_rate 3e-4": "--set training.lr=3e-4",
    "train run.toml --training.lr 3e-4": "--set training.lr=3e-4",
    "train run.toml --batch-size 8": "--set training.global_batch=8",
    "train run.toml --batch_size=8": "--set training.global_batch=8",
    "train run.toml --per_device_train_batch_size 8": "--set training.micro_batch=8",
    "train run.toml --n_layer 8": "--set model.n_layer=8",
    "train run.toml --hidden-size 64": "--set model.n_embd=64",
    "train run.toml --seq-len 64": "--set model.block_size=64",
    "train run.toml --dropout 0.1": "--set model.dropout=0.1",
    "train run.toml --seed -1": "--set training.seed=-1",
    "train run.toml --weight-decay 0": "--set training.weight_decay=0",
    "train run.toml --grace-seconds 9": "--set checkpoint.grace_seconds=9",
    "train run.toml --save_steps 50": "--set checkpoint.every_steps=50",
    "train run.toml --eval_iters 50": "--set evaluation.batches=50",
    "train run.toml --bf16": "--set training.precision=bf16",
    "train run.toml --compile": "--set training.compile=true",
    "train --compile run.toml": "--set training.compile=true",
    "train run.toml --compile=False": "--set training.compile=false",
    "train run.toml --vocab_size 4096": "--set data.tokenizer=bpe:4096",
    "train run.toml --dataset a.txt": "--set 'data.sources=[\"a.txt\"]'",
    "train run.toml --optim adamw": "--set training.optimizer=adamw",
    "train run.toml --wandb_log=True": "--set exporters.wandb=FOLDER",
    "train run.toml steps=100": "--set training.steps=100",
    "train run.toml training.lr=1 --dry-run": "--set training.lr=1",
    "fork bard next --lr 1": "--set training.lr=1",
    "train run.toml --resume": "the same command again continues",
    "train run.toml --resume_from_checkpoint last": "the same command again continues",
    "train run.toml --ckpt-path last": "the same command again continues",
    "train run.toml --log_interval 10": "every step is logged",
    "train run.toml --nnodes 2": "deployments/multi_node.md",
    "train run.toml --num_workers 2": "the text is read once",
    "train run.toml --report_to wandb": "exporters.wandb",
    "train run.toml --output_dir out": "it is --store out",
    "train run.toml --out-dir=out": "it is --store out",
    "train run.toml --name rates": "it is --run-id rates",
    "train run.toml --force": "--run-id NAME",
    "train run.toml --fast_dev_run": "it is --overfit-one-batch",
    "train run.toml --stroe x": "Did you mean --store?",
    "sample bard --max_new_tokens 50": "it is --tokens 50",
    "sample bard --num-samples 5": "it is --count 5",
    "sample bard -n 5": "it is --count 5",
    "ui -p 8000": "it is --port 8000",
    "sample bard --start 'To be'": "it is --prompt 'To be'",
    "delete bard -f": "it is --yes",
    "delete bard --force": "it is --yes",
    "runs -a": "it is --archived",
    "promote bard --tag next": "it is --alias next",
    "promote bard -m good": "it is --why good",
    "report bard -o report.html": "it is --html report.html",
    "evaluate bard --tasks repetition": "it is --suite repetition",
}


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cairn: ") and len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize("line", [*COMMANDS, *OPTIONS])
def test_a_word_of_another_tool_is_answered_with_ours(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert {**COMMANDS, **OPTIONS}[line] in refused(line, capsys)


@pytest.mark.parametrize("line", ["train --zzz", "train --host 0", "ui --host 0", "export a b --form gguf"])
def test_an_option_like_none_is_answered_with_the_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, typed = line.split()[0], next(word for word in line.split() if word.startswith("-"))
    assert f"Unknown option: {typed}; `cairn {verb} --help` shows" in refused(line, capsys)


def test_no_answer_repeats_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in refused("train --mlflow http://me:secret@host", capsys)


def test_every_command_that_the_table_names_is_one() -> None:
    known = {here.split()[0] for _, here in meanings("commands")}
    assert {name for name in known if name[0].islower() and name not in app} == {"there", "training", "every", "a"}


def test_every_option_that_the_table_names_is_one_of_some_command(capsys: pytest.CaptureFixture[str]) -> None:
    helped = [run_command([verb, "--help"]) for verb in app if not verb.startswith("-")]
    text = capsys.readouterr().out
    assert helped and {here for _, here in meanings("options") if here.startswith("--") and here not in text} == set()


@pytest.mark.parametrize("verb", ["", "train", "status"])
def test_help_may_be_typed_as_a_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", *verb.split()]) == 0
    typed = capsys.readouterr().out
    assert run_command([*verb.split(), "--help"]) == 0
    assert capsys.readouterr().out == typed
