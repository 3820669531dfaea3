import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cairn.tasks.configuration.configuration_source import load_configuration

# Spelled so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/~$}-])/(?:home|root|Users|work|tmp|opt/(?:pypi|wheels))" + r"/\w")
INDEX_ADDRESS = re.compile(r"(?:index-url|find-links|trusted-host)[\s=:]+\S*:" + r"//")
TEXT = {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".sh", ".html", ".json", ""}


@pytest.fixture(scope="module")
def tracked(root: Path) -> dict[str, str]:
    """Path → text of everything git tracks here."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [root / name for name in listed.split("\0") if name and Path(name).suffix in TEXT]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def test_no_tracked_file_names_a_path_of_somebodys_machine(tracked: dict[str, str]) -> None:
    assert {path: found[0] for path, text in tracked.items() if (found := MACHINE_PATH.search(text))} == {}


def test_no_tracked_file_names_a_package_index(tracked: dict[str, str]) -> None:
    assert {path: found[0] for path, text in tracked.items() if (found := INDEX_ADDRESS.search(text))} == {}


def test_scripts_can_be_run(root: Path) -> None:
    assert all(os.access(root / script, os.X_OK) for script in (".ci/run", "deployments/up.sh"))


def test_what_runs_as_a_program_stands_at_the_end_of_its_file(tracked: dict[str, str]) -> None:
    guarded = {
        path: text.partition('\nif __name__ == "__main__":\n') for path, text in tracked.items() if ".py" in path
    }
    assert [path for path, (_, _, after) in guarded.items() if re.search(r"^\S", after, re.MULTILINE)] == []


def test_every_run_configuration_is_accepted(root: Path) -> None:
    paths = sorted((root / "deployments").glob("*.toml"))
    families = {load_configuration(path, overrides=(), environment={}).model_family for path in paths}
    assert families == {"quickstart", "shakespeare", "gpt2-shakespeare", "fast-shakespeare", "wide-shakespeare"}


def test_the_deployments_name_their_flows_by_dotted_path(root: Path) -> None:
    text = (root / "prefect.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entrypoint: (\S+)", text) == [
        "cairn.flows.train_gpt.train_gpt",
        "cairn.flows.train_set.train_set",
        "cairn.flows.tokenize_part.tokenize_part",
        "cairn.flows.watch_runs.watch_runs",
        "cairn.flows.watch_runs.watch_runs",
        "cairn.flows.sweep_checkpoints.sweep_checkpoints",
        "cairn.flows.evaluate_promoted.evaluate_promoted",
    ]
