"""Runs that are made once a session and looked at by many tests, in whatever process those run."""

from collections.abc import Callable

from tests.crash.prefect_api import ask
from tests.crash.training_command import Command
from tests.log_judge import judge_files
from tests.processes.fork_server import DRAWS
from tests.processes.waiting import patience_seconds, start_seconds, wait_for
from tests.session_folder import once, session_folder

SHOWN = "pause@6"
"""The first command trains on once its flow run is known: it could end before its server had answered."""
FAULTS = "preempt@12,kill@22,bad-data@31,hang@44,oom@52,evaluator@1"
_FLOOR_SECONDS, _FLOOR_STARTS = 3.0, 25
"""The silence after which a trainer hangs: longer than that of one that is only slow, on a slow machine too."""


def undisturbed_run(api_url: str, architecture: str = "gpt2") -> Command:
    """Return the run nobody touched."""
    return _trained_once("undisturbed", api_url, Command.train, architecture)


def scarred_run(api_url: str) -> Command:
    """Return a run of qwen3 that met every fault of `CAIRN_FAULTS`, each once; after the first it was called again."""
    rules = ("--set", f"watchdog.floor_seconds={max(_FLOOR_SECONDS, _FLOOR_STARTS * start_seconds())}")

    def train(command: Command) -> None:
        process = command.start(CAIRN_FAULTS=f"{SHOWN},{FAULTS}")
        command.wait_for_fault(SHOWN, process)
        wait_for(lambda: _is_shown(command), process, "a task run of its flow run", command.output)
        command.let_go(SHOWN)
        assert process.wait(timeout=patience_seconds()) == 75, command.output()
        command.train(*rules, **{DRAWS: "1"})

    return _trained_once("scarred", api_url, train, "qwen3", CAIRN_FAULTS=FAULTS)


def _is_shown(command: Command) -> bool:
    """Whether the command knows its flow run, since it has sent a task run there."""
    flow_runs = ask(command.api_url, "flow_runs/filter", {})
    own = [item["id"] for item in flow_runs if str(command.folder) in str(item["parameters"])]
    return bool(own and ask(command.api_url, "task_runs/filter", {"flow_runs": {"id": {"any_": own}}}))


def _trained_once(
    kind: str, api_url: str, train_command: Callable[[Command], None], architecture: str, **environment: str
) -> Command:
    name = f"{kind}-{architecture}"
    folder = session_folder() / name

    def train() -> str:
        folder.mkdir()
        command = Command(folder, api_url, environment=environment, architecture=architecture)
        train_command(command)
        judge_files(folder)
        return command.state_sha256()

    once(name, train)
    return Command(folder, api_url, environment=environment, architecture=architecture)
