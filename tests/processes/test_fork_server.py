"""A forked process is like a started one: id, exit code, files, folder, environment and command line are its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes.fork_server import fork_server
from tests.processes.forking import changed_place
from tests.processes.stacks import stacks_of
from tests.processes.waiting import wait_for

CAIRN = (sys.executable, "-m", "cairn.cli.command")


def test_a_forked_command_prints_what_a_started_one_prints_and_leaves_with_the_same_code(tmp_path: Path) -> None:
    words = (*CAIRN, "status", "nowhere", "--store", str(tmp_path), "--json")
    forked = fork_server().popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started = subprocess.run(words, capture_output=True, check=False)
    assert forked.communicate() == (started.stdout, started.stderr)
    assert forked.returncode == started.returncode != 0


def test_it_is_a_child_of_its_starter_with_its_own_command_line_session_and_folder(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "cairn.tasks.trainer.trainer")
    pipe = subprocess.PIPE
    given = {"env": {"RANK": "7"}, "cwd": tmp_path, "start_new_session": True}
    child = fork_server().popen(words, stdin=pipe, stdout=pipe, stderr=pipe, **given)
    process = psutil.Process(child.pid)
    assert process.environ()["RANK"] == "7"
    assert [word for word in process.cmdline() if word] == list(words)
    assert (process.ppid(), Path(process.cwd()), os.getsid(child.pid)) == (os.getpid(), tmp_path, child.pid)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_its_environment_is_the_one_it_was_given(tmp_path: Path) -> None:
    asked = {"HOME": str(tmp_path), "CAIRN_STORE": str(tmp_path / "given-by-its-starter")}
    child = fork_server().popen((*CAIRN, "status", "nowhere"), stderr=subprocess.PIPE, cwd=tmp_path, env=asked)
    assert b"given-by-its-starter" in child.communicate()[1]


def test_its_files_may_have_the_numbers_of_the_fork_server_s_own() -> None:
    server, null = fork_server(), os.open(os.devnull, os.O_RDONLY)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(3, 39) if number not in taken]
    for number in free:
        os.dup2(null, number)
    children = [
        server.popen((*CAIRN, "--version"), stdout=subprocess.DEVNULL, pass_fds=kept) for kept in batched(range(3, 39))
    ]
    for number in (null, *free):
        os.close(number)
    assert [child.wait() for child in children] == [0, 0, 0]


def batched(numbers: range) -> list[range]:
    return [numbers[begin : begin + 12] for begin in range(0, len(numbers), 12)]


def test_one_that_dies_before_its_program_begins_is_not_waited_for(tmp_path: Path) -> None:
    assert fork_server().popen(CAIRN, cwd=tmp_path / "gone", stderr=subprocess.DEVNULL).wait() != 0


def test_what_is_not_a_program_of_the_fork_server_is_started_as_always() -> None:
    child = fork_server().popen([sys.executable, "-c", "print(6 * 7)"], stdout=subprocess.PIPE)
    assert child.communicate()[0] == b"42\n"


def test_a_process_that_waits_says_in_which_line_it_stands() -> None:
    words = (sys.executable, "-m", "cairn.tasks.trainer.trainer")
    child = fork_server().popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: "trainer.py" in stacks_of(child.pid), child, "its stacks")
    child.kill()
    child.communicate()


def test_half_of_a_pointer_that_looks_like_the_process_id_is_not_taken_for_it() -> None:
    pid, child, pointer = 0x7F02, 0x7F0E, 0x7F02_7906_BB80
    halves = [pointer & 0xFFFFFFFF, pointer >> 32]
    assert changed_place([*halves, 3, pid, pid], [*halves, 3, child, pid], pid, child) == 3


def test_the_process_id_that_the_c_library_keeps_is_found() -> None:
    found = "from tests.processes.forking import find_thread_id, _thread_words; import os; "
    code = f"{found}print(_thread_words()[find_thread_id()] == os.getpid())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"
