"""Evaluators killed in the middle, each of them: the run does not notice, and every evaluation is there once."""

from collections import Counter
from pathlib import Path

import psutil
import pytest

from cairn.storage.logs.run_log import RunLog
from tests.crash.session_runs import undisturbed_run
from tests.crash.training_command import ARCHITECTURES, STEPS, Command
from tests.processes.waiting import patience_seconds, wait_for

# One killed evaluator is in the default suite: test_injected_faults.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("evaluator-kills")]

EVERY = ("--set", "checkpoint.every_steps=6", "--set", "evaluation.every_commits=2")

EVALUATED = [12, 24, 36, 48, 60]
SCORE = """
import os, sys, time
marker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seen-" + os.environ["CAIRN_STEP"])
if not os.path.exists(marker):
    open(marker, "w").close()
    time.sleep(600)
print('{"files": %d}' % len(os.listdir(sys.argv[1])))
"""

HANG = """
import os, time
if os.path.exists("hang"):
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", "pid")
    time.sleep(600)
print('{"score": 1}')
"""


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie, which only the first process of the system reaps."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", params=ARCHITECTURES)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Command:
    """A run whose every evaluation had its first evaluator killed."""
    faults = ",".join(f"evaluator@{2 * number + 1}" for number in range(len(EVALUATED)))
    folder = tmp_path_factory.mktemp("killed")
    command = Command(folder, api_url, environment={"CAIRN_FAULTS": faults}, architecture=request.param)
    command.train(*EVERY)
    return command


def test_the_weights_are_those_of_the_run_nobody_touched(killed: Command, api_url: str) -> None:
    assert killed.state_sha256() == undisturbed_run(api_url, killed.architecture).state_sha256()


def test_every_evaluation_is_there_exactly_once(killed: Command) -> None:
    assert [item.step for item in killed.state().evaluations] == EVALUATED


def test_every_kill_is_on_record_as_the_evaluators(killed: Command) -> None:
    failed = killed.state().failed_evaluations
    assert [item.step for item in failed] == EVALUATED
    words = "the evaluator exited with -9: nothing on stderr"
    assert [item.detail for item in failed] == [
        f"injected (evaluator@{2 * number + 1}): {words}" for number in range(len(EVALUATED))
    ]


def test_no_attempt_was_lost_or_charged_for_it(killed: Command) -> None:
    [ended] = killed.receipts()
    assert (ended.reason, ended.decision.charged) == ("completed", None)


def test_evaluators_of_ones_own_that_hang_crash_and_lie_touch_nothing(
    tmp_path: Path, api_url: str, undisturbed_sha256: str
) -> None:
    command = Command(tmp_path, api_url)
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "suite.toml").write_text(
        "batches = 1\nbatch_size = 8\nsample_tokens = 8\n"
        '[[evaluators]]\nname = "slow-once"\ncommand = "python score.py"\ntimeout_seconds = 25\n'
        '[[evaluators]]\nname = "crash"\ncommand = ["python", "-c", "raise SystemExit(\'no data here\')"]\n'
        '[[evaluators]]\nname = "nonsense"\ncommand = ["python", "-c", "print(\'NaN\')"]\n'
    )
    command.train("--set", "evaluation.suite=suite.toml", "--set", "checkpoint.every_steps=30")
    state = command.state()
    assert command.state_sha256() == undisturbed_sha256
    assert Counter(item.suite for item in state.evaluations) == {"held-out": 1, "slow-once": 1}
    assert Counter(item.suite for item in state.failed_evaluations) == {"slow-once": 1, "crash": 2, "nonsense": 2}
    details = {item.suite: item.detail for item in state.failed_evaluations}
    assert "within 25 s" in details["slow-once"] and "no data here" in details["crash"]
    assert "printed nonsense" in details["nonsense"]
    [own] = [item for item in state.evaluations if item.suite == "slow-once"]
    assert (own.step, own.metrics) == (STEPS, {"files": 6.0})
    assert state.pins == () or {hold.alias for hold in state.pins} == {"champion"}
    assert list((tmp_path / "cache" / "evaluations").iterdir()) == []
    assert RunLog(command.store, "bard").refresh().finished is not None


def test_a_run_that_has_to_leave_waits_for_no_evaluator(tmp_path: Path, api_url: str, undisturbed_sha256: str) -> None:
    command = Command(tmp_path, api_url)
    (tmp_path / "score.py").write_text(HANG)
    (tmp_path / "hang").touch()
    rules = ("--set", "evaluation.command=python score.py", "--set", "evaluation.every_commits=2")
    process = command.start(*rules)
    wait_for((tmp_path / "pid").exists, process, "the evaluator")
    process.terminate()
    assert process.wait(timeout=patience_seconds()) == 75, command.output()
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert "command" not in {item.suite for item in command.state().failed_evaluations}
    (tmp_path / "hang").unlink()
    command.train(*rules)
    assert command.state_sha256() == undisturbed_sha256
    last = [item.suite for item in command.state().evaluations if item.step == STEPS]
    assert sorted(last) == ["command", "held-out"]
