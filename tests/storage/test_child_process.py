"""Every child of Cairn's: nothing of its folder is imported, and it ends with its parent, even one already gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.storage.stores.child_process import child_command, child_environment, end_child, start_child

WAITS = "import sys, time\nprint(sys.argv[1:], __name__, flush=True)\ntime.sleep(600)\n"


def test_a_child_runs_a_module_as_a_program_and_imports_nothing_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text("print('a stranger')")
    done = subprocess.run(
        child_command("this"), cwd=tmp_path, capture_output=True, text=True, check=True, env=child_environment({})
    )
    assert "Beautiful is better than ugly." in done.stdout and "stranger" not in done.stdout


@pytest.mark.linux  # /proc
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    done = subprocess.run(
        child_command("http.server", "0"),
        env={"CAIRN_PARENT_PID": "1"},
        start_new_session=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9


def test_a_child_ends_with_its_parent_and_takes_its_group_along(tmp_path: Path) -> None:
    code = (
        "import sys; from cairn.storage.stores.child_process import *; "
        "child = start_child(child_command('http.server', '0', '--bind', '127.0.0.1'), stdout=None, stderr=None); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.kill()
        rest = parent.stdout.read()  # the end of file comes when the child has ended too
    assert b"Traceback" not in rest


def test_ending_a_child_twice_returns_the_same_code() -> None:
    child = start_child((sys.executable, "-S", "-c", "input()"))
    assert (end_child(child), end_child(child)) == (-9, -9)
    child.communicate()
