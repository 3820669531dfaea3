"""Every child of Cairn's: nothing of its folder is imported, and it ends with its parent, even one already gone."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cairn.storage.stores.child_process import (
    child_command,
    child_environment,
    end_child,
    start_child,
    temporary_folder,
)
from tests.processes.waiting import prompt_seconds, wait_until

WAITS = "import sys, time\nprint(sys.argv[1:], __name__, flush=True)\ntime.sleep(600)\n"


def test_a_child_runs_a_module_as_a_program_and_imports_nothing_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text("print('a stranger')")
    done = subprocess.run(
        child_command("this"), cwd=tmp_path, capture_output=True, text=True, check=True, env=child_environment({})
    )
    assert "Beautiful is better than ugly." in done.stdout and "stranger" not in done.stdout


def test_a_set_has_one_order_in_all_children(tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text("print(hash('a stone'))")
    found, given = {"PYTHONPATH": str(tmp_path)}, [{}, {"PYTHONHASHSEED": "7"}]
    every = [child_environment({**found, **one}) for one in given]
    one, other = (subprocess.run(child_command("order"), capture_output=True, check=True, env=env) for env in every)
    assert one.stdout == other.stdout != b""


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


FOLDER_AND_WAIT = """
import sys
from pathlib import Path
from cairn.storage.stores.child_process import temporary_folder
with temporary_folder("cairn-test-", Path(sys.argv[1])) as folder:
    (folder / "part").write_text("of something")
    print(folder, flush=True)
    sys.stdin.read()
"""


def in_time(parent: psutil.Popen) -> None:
    parent.stdin.close()


def by_sigkill(parent: psutil.Popen) -> None:
    parent.kill()


def by_sigterm_to_all(parent: psutil.Popen) -> None:
    for process in (*parent.children(), parent):
        process.terminate()


@pytest.mark.parametrize("end", [in_time, by_sigkill, by_sigterm_to_all])
def test_a_temporary_folder_does_not_outlive_the_process_that_made_it(
    tmp_path: Path, end: Callable[[psutil.Popen], None]
) -> None:
    words = [sys.executable, "-c", FOLDER_AND_WAIT, str(tmp_path)]
    with psutil.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        folder = Path(parent.stdout.readline().decode().strip())
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        end(parent)
    wait_until(lambda: not list(tmp_path.iterdir()), "the end of the folder")


def test_a_temporary_folder_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), temporary_folder("cairn-test-", tmp_path) as folder:
        (folder / "part").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


MANY_FOLDERS = """
import sys
import psutil
from pathlib import Path
from cairn.storage.stores.child_process import temporary_folder
for _ in range(20):
    with temporary_folder("cairn-test-", Path(sys.argv[1])):
        children = len(psutil.Process().children())
print(children, flush=True)
sys.stdin.read()
"""


def test_a_process_has_one_remover_however_many_folders_it_makes_and_none_after_its_end(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MANY_FOLDERS, str(tmp_path)]
    with psutil.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"1\n"
        (remover,) = parent.children()
        parent.stdin.close()
        parent.wait()
        assert not remover.is_running()


STARTS_ONE = """
import os, sys
from cairn.storage.stores.child_process import *
child = start_child(child_command("http.server", "0"), stdout=DEVNULL, stderr=DEVNULL, own_group=False, **{})
print(child.pid, flush=True)
sys.stdin.read()
"""


def child_of(code: str) -> tuple["subprocess.Popen[bytes]", psutil.Process]:
    """Return a parent by this code and its child, which watches its parent already."""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: child.num_threads() > 1, "the thread that watches the parent")
    return parent, child


@pytest.mark.linux  # prctl
def test_a_child_that_is_stopped_dies_with_the_thread_that_started_it() -> None:
    parent, child = child_of(STARTS_ONE.replace("**{}", "with_thread=True"))
    with parent:
        child.suspend()
        parent.kill()
    alive = psutil.wait_procs([child], timeout=prompt_seconds())[1]
    for process in alive:
        process.kill()
    assert alive == []


def test_a_child_of_its_parents_group_gets_sigterm_when_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path)!r}, "told").touch(), sys.exit()))
pathlib.Path({str(tmp_path)!r}, "ready").touch()
time.sleep(600)
"""
    (tmp_path / "told_module.py").write_text(told)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent, child = child_of(STARTS_ONE.replace("http.server", "told_module").replace(", **{}", ""))
    with parent:
        wait_until((tmp_path / "ready").exists, "a child that listens")
        parent.kill()
    psutil.wait_procs([child], timeout=prompt_seconds())
    assert (tmp_path / "told").exists()
