"""Every process is started by the one way that ends it with its parent, or is listed here with a reason."""

import re
from pathlib import Path

import pytest

from tests.house.packages import TOP_LEVEL

ROOT = Path(__file__).parents[2]
START = re.compile(r"(?:\bPopen\(|subprocess\.(?:run|Popen|call|check_output)\(|os\.(?:fork|spawn\w+|posix_spawn)\()")
FOLDER = re.compile(r"tempfile\.(?:mkdtemp|TemporaryDirectory)\(")
STARTS = {
    "storage/stores/child_process.py": "the one way",
    "flows/orchestrator/prefect_server.py": "outlives a command whose server another one uses; ends with the last lock",
    "flows/watching/run_watcher.py": "a continuation outlives the watcher",
    "reports/notices/notice.py": "a person's command, for a limited time",
    "tasks/attempt/preemption_notice.py": "scontrol, for five seconds",
    "tasks/evaluator/confinement.py": "the boundary is probed on it; the kernel ends it with the one that forked it",
    "tasks/evaluator/evaluator.py": "a person's command, in the group that the guard ends",
    "tasks/machine/placement.py": "git, and a person's command for a limited time",
}
FOLDERS = {"storage/stores/store_probe.py": "for an instant, in the folder that is probed"}


def files_with(pattern: re.Pattern[str]) -> set[str]:
    paths = [path for name in TOP_LEVEL for path in (ROOT / name).rglob("*.py")]
    found = {path for path in paths if pattern.search(path.read_text(encoding="utf-8"))}
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.parametrize(("pattern", "known"), [(START, STARTS), (FOLDER, FOLDERS)], ids=["processes", "folders"])
def test_what_a_killed_process_could_leave_is_made_by_the_one_way_or_known(
    pattern: re.Pattern[str], known: dict[str, str]
) -> None:
    assert files_with(pattern) == set(known)
