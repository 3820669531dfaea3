"""The lines that put a job back into Slurm's queue, with a `scontrol` that writes down what it is asked for."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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
