"""The password of `make up`: a new one at each start, or the operator's. No server starts.

Where it lies: tests/flows/test_session_server.py, for the same file of a temporary server.
"""

from pathlib import Path

import pytest

from cairn.flows.orchestrator.prefect_server import ServerHome, up_environment

PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"


def up(folder: Path, **environment: str) -> dict[str, str]:
    return up_environment(environment, ServerHome(folder), 4200)


def test_each_start_has_another_password(tmp_path: Path) -> None:
    first, second = up(tmp_path), up(tmp_path, **{PASSWORD: ""})
    assert first[PASSWORD] != second[PASSWORD] and len(first[PASSWORD]) > 30


def test_the_operators_is_taken_and_so_are_database_key_and_retention_and_no_other_setting(tmp_path: Path) -> None:
    taken = {
        PASSWORD: "admin:canary",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://x",
        "PREFECT_SERVER_ENCRYPTION_KEY": "key",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P9D",
    }
    foreign = {"PREFECT_SERVER_API_BASE_PATH": "/x", "HTTPS_PROXY": "x", "SSL_CERT_FILE": "x", "PREFECT_PROFILE": "x"}
    settled = up(tmp_path, **taken, **foreign)
    assert taken.items() <= settled.items() and not foreign.keys() & settled.keys()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true"),
        ("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "http://127.0.0.1:4200"),
    ],
)
def test_the_server_is_told_to_ask_for_tokens_and_to_let_no_other_origin_read(
    tmp_path: Path, setting: str, value: str
) -> None:
    assert up(tmp_path)[setting] == value
