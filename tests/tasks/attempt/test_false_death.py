"""A process is known dead only where its pid counts and it is gone: not from another namespace, not by a set clock."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cairn.storage.logs.run_entries import Placement
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.codec import encode
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.attempt_entries import Claimant, claim_attempt
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import BudgetsConfig, CheckpointConfig, LeaseConfig
from cairn.tasks.errors import LiveOwner
from cairn.tasks.machine.placement import is_known_dead, this_placement
from tests.entries import started, writer

pytestmark = pytest.mark.linux

ROOT = Path(__file__).parents[3]
JUDGE = (
    "import sys; from cairn.storage.logs.run_entries import Placement\n"
    "from cairn.storage.stores.codec import decode\n"
    "from cairn.tasks.machine.placement import is_known_dead\n"
    "print(is_known_dead(decode(sys.stdin.buffer.read(), Placement, where='stdin')))"
)


@pytest.fixture(scope="module")
def unshare() -> partial[list[str]]:
    """Return what makes a command run in namespaces of its own; skips where this user may not make them."""

    def words(*kinds: str, script: str = 'exec "$@"') -> list[str]:
        return ["unshare", "--mount", *kinds, "sh", "-c", script, "sh"]

    try:
        subprocess.run([*words("--pid", "--fork", "--mount-proc"), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to make a pid namespace")
    return partial(words)


def here() -> Placement:
    return this_placement(device="cpu", threads=1)


def judged(placement: Placement, within: list[str]) -> str:
    """Return what a process within these namespaces says of a placement."""
    command = [*within, sys.executable, "-c", JUDGE]
    done = subprocess.run(command, input=encode(placement), capture_output=True, cwd=ROOT, check=True)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def owned_elsewhere(unshare: partial[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    """A run whose owner lives, and beats, in another pid namespace of this machine; no test takes it over."""
    folder = tmp_path_factory.mktemp("owned")
    command = [*unshare("--pid", "--fork", "--mount-proc", "--kill-child"), sys.executable]
    owner = subprocess.Popen(
        [*command, "-m", "tests.tasks.attempt.beating_owner", folder],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        yield RunLog(LocalStore(folder), "bard")
        assert owner.stdin is not None
        owner.stdin.close()


def test_this_process_is_not_known_dead() -> None:
    assert not is_known_dead(here())


def test_a_process_that_was_waited_for_is_known_dead() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert is_known_dead(replace(here(), pid=gone.pid))


def test_a_zombie_is_known_dead() -> None:
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        assert is_known_dead(replace(here(), pid=process, start_ticks=ticks))
    finally:
        os.waitpid(process, 0)


def test_a_later_process_with_the_same_pid_is_not_taken_for_it() -> None:
    assert is_known_dead(replace(here(), start_ticks=here().start_ticks - 1))


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
@pytest.mark.parametrize("value", ["another", ""])
def test_without_one_sign_of_the_place_nothing_is_known(field: str, value: str) -> None:
    gone = replace(here(), start_ticks=1)
    assert is_known_dead(gone) and not is_known_dead(replace(gone, **{field: value}))


def test_a_living_process_is_not_known_dead_in_another_pid_namespace(unshare: partial[list[str]]) -> None:
    assert judged(here(), unshare("--pid", "--fork", "--mount-proc")) == "False"


def test_a_living_process_is_not_known_dead_where_proc_is_of_another_pid_namespace(
    unshare: partial[list[str]],
) -> None:
    code = "from cairn.tasks.machine.placement import is_known_dead, this_placement\n"
    code += "print(is_known_dead(this_placement(device='cpu', threads=1)))"
    command = [*unshare("--pid", "--fork"), sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout == b"False\n"


def test_a_clock_that_was_set_makes_no_living_process_known_dead(unshare: partial[list[str]], tmp_path: Path) -> None:
    stat = Path("/proc/stat").read_text().split("btime ")
    (tmp_path / "stat").write_text(f"{stat[0]}btime {int(stat[1].split()[0]) + 5400}\n")
    assert judged(here(), unshare(script=f'mount --bind {tmp_path}/stat /proc/stat && exec "$@"')) == "False"


def test_a_process_that_proc_hides_is_not_known_dead(unshare: partial[list[str]]) -> None:
    other = ["setpriv", "--reuid", "65534", "--clear-groups"]
    starts = [*other, sys.executable, "-c", f"open({str(ROOT / 'pyproject.toml')!r})"]
    if subprocess.run(starts, capture_output=True, check=False).returncode:
        pytest.skip("needs a checkout and an interpreter that another user may read")
    script = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --clear-groups "$@"'
    assert judged(here(), unshare(script=script)) == "False"


def test_an_owner_that_beats_in_another_pid_namespace_is_left_alone(owned_elsewhere: RunLog) -> None:
    claimant = Claimant(
        lease=LeaseConfig(seconds=30.0, heartbeat_seconds=0.3),
        budgets=BudgetsConfig(),
        writer=writer(),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    with pytest.raises(LiveOwner, match="still writes its heartbeat"):
        claim_attempt(
            owned_elsewhere, claimant, lambda number, reference, state: started(number, resumed_from=reference)
        )


def test_a_pin_of_an_evaluation_in_another_pid_namespace_stays(owned_elsewhere: RunLog) -> None:
    sweep_run(owned_elsewhere, CheckpointConfig(keep_last=1, keep_best=0), "s")
    assert [pin.step for pin in owned_elsewhere.refresh().pins] == [10]
