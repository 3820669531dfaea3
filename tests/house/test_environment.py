import subprocess
import sys

import pytest

from tests.environment_allow_list import FIXED, restrict

FOREIGN = {
    "ALL_PROXY": "http://127.0.0.1:9",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "CAIRN_STORE": "elsewhere",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "C",
    "NO_COLOR": "1",
    "PREFECT_API_URL": "http://127.0.0.1:9/api",
    "PYTHONUTF8": "0",
    "TERM": "dumb",
    "TZ": "Asia/Kathmandu",
    "http_proxy": "http://127.0.0.1:9",
    "no_proxy": "*",
}


def test_no_foreign_variable_passes_the_allow_list() -> None:
    assert restrict(FOREIGN) == FIXED


@pytest.mark.parametrize("name", ["PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "CAIRN_TEST_CHROMIUM", "PYTEST_ADDOPTS"])
def test_what_a_machine_needs_passes_the_allow_list(name: str) -> None:
    assert restrict({name: "x"})[name] == "x"


def test_a_process_that_a_test_starts_has_the_fixed_values() -> None:
    program = f"import os; print([name for name, value in {FIXED}.items() if os.environ.get(name) != value])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
