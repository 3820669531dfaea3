"""Runs that are made once a session and looked at by many tests, in whatever process those run."""

from tests.crash.training_command import Command
from tests.log_judge import judge_files
from tests.processes.waiting import start_seconds
from tests.session_folder import once, session_folder

FAULTS = "preempt@12,kill@22,bad-data@31,hang@44,oom@52,evaluator@1"
_FLOOR_SECONDS, _FLOOR_STARTS = 3.0, 25
"""The silence after which a trainer hangs: longer than that of one that is only slow, on a slow machine too."""


def undisturbed_run(api_url: str, architecture: str = "gpt2") -> Command:
    """Return the run nobody touched."""
    return _trained_once("undisturbed", api_url, [()], architecture)


def scarred_run(api_url: str) -> Command:
    """Return a run of qwen3 that met every fault of `CAIRN_FAULTS`, each once; after the first it was called again."""
    rules = ("--set", f"watchdog.floor_seconds={max(_FLOOR_SECONDS, _FLOOR_STARTS * start_seconds())}")
    return _trained_once("scarred", api_url, [rules, rules], "qwen3", CAIRN_FAULTS=FAULTS)


def _trained_once(
    kind: str, api_url: str, calls: list[tuple[str, ...]], architecture: str, **environment: str
) -> Command:
    name = f"{kind}-{architecture}"
    folder = session_folder() / name

    def train() -> str:
        folder.mkdir()
        command = Command(folder, api_url, environment=environment, architecture=architecture)
        for place, extra in enumerate(calls):
            command.train(*extra, exit_code=0 if place == len(calls) - 1 else 75)
        judge_files(folder)
        return command.state_sha256()

    once(name, train)
    return Command(folder, api_url, environment=environment, architecture=architecture)
