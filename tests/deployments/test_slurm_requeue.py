"""The recipes for several machines: what they tell the command, and how a job returns into Slurm's queue."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cairn.tasks.configuration.configuration_source import load_configuration
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.trainer.trainer_group import trainer_group
from tests.commands import ROOT
from tests.deployments.slurm_page import page_lines

SCRIPT = "deployments/slurm/multi_node.sbatch"
ALONE = {"SLURM_JOB_ID": "41"}
OF_AN_ARRAY = {"SLURM_JOB_ID": "52", "SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "2"}
NAMED_AS_THE_ARRAY = {"SLURM_JOB_ID": "50", "SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "7"}
TASK_ZERO = {"SLURM_JOB_ID": "51", "SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "0"}


def script_lines(root: Path) -> str:
    return (root / SCRIPT).read_text(encoding="utf-8")


@pytest.mark.parametrize("lines", [page_lines, script_lines])
@pytest.mark.parametrize(
    ("variables", "code", "asked"),
    [
        (ALONE, 75, "requeue 41"),
        (OF_AN_ARRAY, 75, "requeue 50_2"),
        (NAMED_AS_THE_ARRAY, 75, "requeue 50_7"),
        (TASK_ZERO, 75, "requeue 50_0"),
        (OF_AN_ARRAY, 0, ""),
        (ALONE, 4, ""),
    ],
)
def test_a_preempted_task_is_put_back_alone(
    tmp_path: Path, lines: Callable[[Path], str], variables: dict[str, str], code: int, asked: str
) -> None:
    programs = {
        "srun": f"exit {code}",
        "scontrol": f'[ "$1" = show ] && echo n0 || echo "$@" >> {tmp_path}/asked',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    usual = {"SLURM_JOB_NODELIST": "n0", "SLURM_JOB_NUM_NODES": "1", "CAIRN_STORE": "/nowhere"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **usual, **variables}
    script = ["bash", "-c", lines(ROOT), "job", "run.toml", "bard"]
    subprocess.run(script, env=environment, check=False, timeout=60)
    written = tmp_path / "asked"
    assert (written.read_text().strip() if written.exists() else "") == asked


FOLDER = Path(__file__).parents[2] / "deployments"
SBATCH = FOLDER / "slurm" / "multi_node.sbatch"
SERVICE, JOB = yaml.safe_load_all((FOLDER / "kubernetes" / "multi-node.yaml").read_text(encoding="utf-8"))
(CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]


def environment(node_rank: int) -> dict[str, str]:
    values = {item["name"]: item.get("value", str(node_rank)) for item in CONTAINER["env"]}
    said = {name: value for name, value in values.items() if name.startswith("CAIRN_N") or name == "CAIRN_RENDEZVOUS"}
    return {**said, "CAIRN_RENDEZVOUS_SECRET": "from the Secret the README makes"}


def test_the_pods_of_the_job_are_the_nodes_of_the_group() -> None:
    config = load_configuration(FOLDER / "kubernetes" / "trainer.toml", overrides=(), environment={})
    groups = [trainer_group(config.training, environment(rank)) for rank in range(JOB["spec"]["completions"])]
    assert [group.node_rank for group in groups] == [0, 1] and {group.nodes for group in groups} == {2}
    assert JOB["spec"]["parallelism"] == JOB["spec"]["completions"] == groups[0].nodes


def test_the_rendezvous_is_the_first_pods_name_in_its_service() -> None:
    name, subdomain = JOB["metadata"]["name"], JOB["spec"]["template"]["spec"]["subdomain"]
    (port,) = [port["port"] for port in SERVICE["spec"]["ports"]]
    assert environment(0)["CAIRN_RENDEZVOUS"] == f"{name}-0.{subdomain}:{port}"
    assert SERVICE["metadata"]["name"] == subdomain and SERVICE["spec"]["selector"] == {"job-name": name}


def test_the_script_is_one_that_bash_reads_and_sets_what_the_command_asks_for() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    text = SBATCH.read_text(encoding="utf-8")
    assert {"CAIRN_NODES", "CAIRN_NODE_RANK", "CAIRN_RENDEZVOUS", "CAIRN_RENDEZVOUS_SECRET"} <= set(
        re.findall(r"(CAIRN_\w+)=", text)
    )


def test_the_script_queues_its_job_again_unless_the_run_is_done_or_for_a_person_to_look_at() -> None:
    ends = re.search(r"^  ([\d |]+)\) ;;$", SBATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert ends is not None
    hopeless = {ExitCode.ERROR, ExitCode.USAGE, ExitCode.BUDGET_EXHAUSTED, ExitCode.INTEGRITY, ExitCode.CONFIG_DRIFT}
    assert {int(code) for code in ends[1].split("|")} == {ExitCode.DONE, ExitCode.INTERRUPTED, *hopeless}


def test_the_secret_of_the_machines_is_one_of_those_the_readme_has_made() -> None:
    readme = (FOLDER / "kubernetes" / "README.md").read_text(encoding="utf-8")
    (source,) = CONTAINER["envFrom"]
    made = readme.partition(f"create secret generic {source['secretRef']['name']} ")[2].partition("\n\n")[0]
    assert "--from-literal=CAIRN_RENDEZVOUS_SECRET=" in made
