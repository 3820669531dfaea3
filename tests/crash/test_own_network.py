"""nanoGPT's own file, unchanged, under the promise: killed, moved, continued elsewhere, refused where not allowed."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.crash.training_command import RUN, Command, configuration
from tests.networks.own_files import layers, nanogpt

ALLOWED = ",".join(sha256(data).hexdigest() for data in nanogpt().values())
SHORT = ("--set", "training.steps=24", "--set", "evaluation.every_commits=100", "--set", "training.micro_batch=2")

pytestmark = (
    pytest.mark.slow
)  # quick: tests/model/architectures/test_own_network.py, tests/security/test_network_of_a_log.py


def own(folder: Path, api_url: str, files: dict[str, bytes], module: str) -> Command:
    folder.mkdir()
    command = Command(folder, api_url)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    text = configuration().replace('architecture = "gpt2"', f'module = "{module}"').replace("n_kv_head = 2\n", "")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return command


@pytest.fixture
def command(tmp_path: Path, api_url: str) -> Command:
    return own(tmp_path / "run", api_url, nanogpt(), "nano.py:build")


def test_it_ends_with_the_same_bits_after_kills_and_on_one_two_and_four_processes(
    command: Command, tmp_path: Path, api_url: str
) -> None:
    digests = set()
    for processes, faults in ((1, ""), (2, "kill@7,kill@13"), (4, "kill@9")):
        moved = own(tmp_path / f"by-{processes}", api_url, nanogpt(), "nano.py:build")
        recomputed = ("--set", "training.activation_checkpointing=true") if processes == 4 else ()
        moved.train(*SHORT, "--set", f"training.processes={processes}", *recomputed, CAIRN_FAULTS=faults)
        assert len(moved.state().attempts) == 1 + faults.count("kill")
        digests.add(moved.state_sha256())
    assert len(digests) == 1


def test_another_machine_goes_on_only_with_the_digests_that_it_allows(command: Command) -> None:
    command.train(*SHORT, exit_code=75, CAIRN_FAULTS="preempt@9")
    (command.folder / "run.toml").unlink()
    by_id = ("train", "--run-id", RUN)
    assert command.start_verb(*by_id).wait() == 2
    assert f"CAIRN_CODE__ALLOW={ALLOWED}" in command.output()
    assert command.start_verb(*by_id, CAIRN_CODE__ALLOW=ALLOWED).wait() == 0, command.output()
    first, second = command.state().attempts
    for name, data in nanogpt().items():
        assert first.started.versions[name] == second.started.versions[name] == sha256(data).hexdigest()
    assert command.start_verb("fork", RUN, "longer", "--set", "training.steps=30").wait() == 0, command.output()
    assert command.start_verb("train", "--run-id", "longer").wait() == 2
    assert command.start_verb("train", "--run-id", "longer", CAIRN_CODE__ALLOW=ALLOWED).wait() == 0, command.output()


def test_a_changed_file_is_another_run_and_a_missing_one_is_none(command: Command) -> None:
    command.train(*SHORT, exit_code=75, CAIRN_FAULTS="preempt@9")
    (command.folder / "model.py").write_bytes(nanogpt()["model.py"] + b"# changed\n")
    command.train(*SHORT, exit_code=6)
    assert "model.files.model.py: run has" in command.output()
    (command.folder / "nano.py").unlink()
    command.train(*SHORT, exit_code=2)
    assert "nano.py cannot be read" in command.output()


def test_what_could_not_be_trained_opens_no_run(tmp_path: Path, api_url: str) -> None:
    files = layers("self.norm = nn.BatchNorm1d(n_embd)", "x = self.norm(x.mT).mT")
    command = own(tmp_path / "run", api_url, files, "net.py:build")
    command.train(*SHORT, exit_code=2)
    assert "buffer norm.running_mean changes in forward" in command.output()
    assert command.state().opened is None and list(command.store.keys("code")) == []


def test_a_plan_names_its_size_and_the_overfit_check_what_cannot_be_repeated(tmp_path: Path, api_url: str) -> None:
    command = own(tmp_path / "run", api_url, layers("", "x = x * random.random()"), "net.py:build")
    command.train("--overfit-one-batch", exit_code=2)
    assert "draws random numbers elsewhere" in command.output()
    (command.folder / "net.py").write_bytes(layers()["net.py"])
    command.train("--dry-run", "--json")
    plan = json.loads(command.output()[command.output().index("{") :])
    assert plan["parameters"] == 2 * 257 * 32 + 257 + 2 * (32 * 32 + 32)
    assert plan["memory"]["total_bytes"] > 0 and list(command.store.keys("runs")) == []
