import os
import re
from collections.abc import Mapping
from pathlib import Path

from cairn.tasks.configuration.configuration_source import load_configuration

# Spelled so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/~$}-])/(?:home|root|Users|work|tmp|opt/(?:pypi|wheels))" + r"/\w")
INDEX_ADDRESS = re.compile(r"(?:index-url|find-links|trusted-host)[\s=:]+\S*:" + r"//")


def test_no_tracked_file_names_a_path_of_somebodys_machine(tracked: Mapping[str, str]) -> None:
    assert {path: found[0] for path, text in tracked.items() if (found := MACHINE_PATH.search(text))} == {}


def test_no_tracked_file_names_a_package_index(tracked: Mapping[str, str]) -> None:
    assert {path: found[0] for path, text in tracked.items() if (found := INDEX_ADDRESS.search(text))} == {}


def test_scripts_can_be_run(root: Path) -> None:
    assert all(os.access(root / script, os.X_OK) for script in (".ci/run", "deployments/up.sh"))


def test_what_runs_as_a_program_stands_at_the_end_of_its_file(tracked: Mapping[str, str]) -> None:
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
