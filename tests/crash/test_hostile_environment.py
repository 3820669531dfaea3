"""No setting, home, proxy or certificate that Prefect finds ends a run, and no home of the user's changes."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.crash.prefect_server import copy_untouched_database
from tests.crash.training_command import configuration
from tests.environment_allow_list import restrict
from tests.processes.fork_server import ROOT
from tests.processes.waiting import patience_seconds

DEAD = "http://127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def of_a_newer_prefect(home: Path) -> None:
    """Leave a database of a revision that no Prefect knows yet; opening it would migrate it or fail."""
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        database.executescript("create table alembic_version (version_num); insert into alembic_version values ('f')")


def with_broken_profiles(home: Path) -> None:
    (home / "profiles.toml").write_text("active = [[[")


def with_profile_of_a_server(home: Path) -> None:
    """Name settings of a server and of the log in the active profile, and no address."""
    lines = ("PREFECT_SERVER_API_BASE_PATH = '/x'", "PREFECT_LOGGING_SETTINGS_PATH = '/nowhere'", "PREFECT_HOME = '/x'")
    (home / "profiles.toml").write_text("\n".join(["active = 'mine'", "[profiles.mine]", *lines]))


def as_a_file(home: Path) -> None:
    """Put a file where Prefect's home would be."""
    home.rmdir()
    home.write_text("no folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a command finds: variables, `None` to unset one, and Prefect homes made by `prepare`."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Path], None] = of_a_newer_prefect


CASES = {
    "proxies": Surroundings(variables=dict.fromkeys(PROXIES, DEAD)),
    "proxies in small letters": Surroundings(variables=dict.fromkeys(map(str.lower, PROXIES), DEAD)),
    "a SOCKS proxy": Surroundings(variables=dict.fromkeys(("ALL_PROXY", "all_proxy"), "socks5://127.0.0.1:9")),
    "a proxy that is no address": Surroundings(variables=dict.fromkeys(PROXIES, "nonsense: //")),
    "NO_PROXY": Surroundings(variables={"http_proxy": DEAD, "NO_PROXY": "[::1, nonsense"}),
    "a database elsewhere": Surroundings(
        variables={"PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://x:9/x"}
    ),
    "a database that is no address": Surroundings(variables={"PREFECT_SERVER_DATABASE_CONNECTION_URL": "nonsense"}),
    "a base path": Surroundings(variables={"PREFECT_SERVER_API_BASE_PATH": "/x", "PREFECT_UI_API_URL": "/y"}),
    "a server's port": Surroundings(variables={"PREFECT_SERVER_API_PORT": "1", "PREFECT_SERVER_API_HOST": "192.0.2.1"}),
    "certificates": Surroundings(
        variables=dict.fromkeys(
            ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PREFECT_API_SSL_CERT_FILE"),
            "/nowhere/cert.pem",
        )
    ),
    "no HOME": Surroundings(variables={"HOME": None, "PREFECT_HOME": None}),
    "an empty HOME": Surroundings(variables={"HOME": "", "PREFECT_HOME": None}),
    "a HOME that cannot be": Surroundings(variables={"HOME": "/dev/null", "PREFECT_HOME": None, "CAIRN_CACHE": None}),
    "a HOME that is absent": Surroundings(
        variables={"HOME": "/proc/nobody", "PREFECT_HOME": None, "CAIRN_CACHE": None}
    ),
    "a Prefect home that is a file": Surroundings(prepare=as_a_file),
    "an unknown profile": Surroundings(variables={"PREFECT_PROFILE": "no such profile"}),
    "broken profiles": Surroundings(prepare=with_broken_profiles),
    "a profile with a server's settings": Surroundings(prepare=with_profile_of_a_server),
    "profiles elsewhere": Surroundings(variables={"PREFECT_PROFILES_PATH": "/dev/null/profiles.toml"}),
    "nonsense about the log": Surroundings(
        variables={
            "PREFECT_LOGGING_LEVEL": "LOUD",
            "PREFECT_LOGGING_SETTINGS_PATH": "/nowhere/logging.yml",
            "PREFECT_LOGGING_TO_API_ENABLED": "perhaps",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "[",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "no.such.Handler",
        }
    ),
    "nonsense about the client": Surroundings(
        variables={"PREFECT_CLIENT_MAX_RETRIES": "many", "PREFECT_RUNNER_PROCESS_LIMIT": "few"}
    ),
    "settings for another server": Surroundings(
        variables={
            "PREFECT_API_KEY": "key",
            "PREFECT_API_REQUEST_TIMEOUT": "0.001",
            "PREFECT_CLIENT_CUSTOM_HEADERS": '{"Authorization": "theirs"}',
        }
    ),
    "Prefect's test mode": Surroundings(variables={"PREFECT_TEST_MODE": "1", "PREFECT_DEBUG_MODE": "1"}),
    "retries by default": Surroundings(
        variables={"PREFECT_TASKS_DEFAULT_RETRIES": "3", "PREFECT_FLOWS_DEFAULT_RETRIES": "3"}
    ),
}
TOGETHER = (
    *("a SOCKS proxy", "proxies in small letters", "a database elsewhere", "a base path", "certificates"),
    *("an empty HOME", "an unknown profile", "nonsense about the log", "nonsense about the client"),
)
CASES["together"] = Surroundings(
    variables={name: value for case in TOGETHER for name, value in CASES[case].variables.items()}
)
COMMAND = ("-m", "cairn.cli.command")
WITHOUT_TENSORS = """
import sys
from cairn.cli import command
from cairn.storage.stores.child_process import child_command
from cairn.tasks.evaluator import evaluator_process
from cairn.tasks.trainer import trainer_group

trainer_group.TRAINER_COMMAND = child_command("tests.wiring.tensorless_trainer")
measured = evaluator_process.Outcome(result=b'{"metrics": {"val_loss": 2.0}, "samples": []}', problem="")
evaluator_process.run_evaluator = lambda *_, **__: measured
assert "prefect" not in sys.modules
command.main(sys.argv[1:])
"""
"""The command, whose trainer and evaluator need not import torch."""


def contents(folder: Path) -> Mapping[str, bytes | None]:
    """Return every file of a folder and its bytes, None for a folder."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def trained(folder: Path, around: Surroundings, *, program: Sequence[str] = COMMAND) -> None:
    """Train a run in these surroundings with a temporary server: it ends well, and no home of the user's changes."""
    users = [folder / "home" / ".prefect", folder / "of-prefect"]
    for home in users:
        home.mkdir(parents=True)
        around.prepare(home)
    own = {"CAIRN_STORE": str(folder / "store"), "CAIRN_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    own |= {"HOME": str(folder / "home"), "PREFECT_HOME": str(users[1]), "PYTHONPATH": str(ROOT)}
    variables = {**restrict(os.environ), **own, **around.variables}
    (folder / "tmp").mkdir()
    copy_untouched_database(folder)
    (folder / "run.toml").write_text(configuration(steps=5))
    before = [contents(home) for home in users]
    done = subprocess.run(
        [sys.executable, "-P", *program, "train", "run.toml"],
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=patience_seconds(),
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    ends = [
        attempt.ended.reason
        for attempt in RunLog(LocalStore(folder / "store"), "run").refresh().attempts
        if attempt.ended
    ]
    assert ends == ["completed"] and said.count("Prefect server") == 1, said
    assert [contents(home) for home in users] == before


def test_a_run_ends_well_in_a_hostile_environment(tmp_path: Path) -> None:
    trained(tmp_path, CASES["together"], program=("-c", WITHOUT_TENSORS))


@pytest.mark.slow  # quick witness: the test above
@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_well_in_each(tmp_path: Path, case: str) -> None:
    trained(tmp_path, CASES[case])
