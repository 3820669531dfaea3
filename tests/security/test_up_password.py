"""The password of `make up`, by the script's own function: a new one each time, or the operator's. No server starts."""

import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deployments" / "up.sh"
ASKED = """
set -euo pipefail
umask 000
BIN={bin} KEY={key} PREFECT_API_URL=http://127.0.0.1:4200/api
{function}
choose_password
printf '%s\\n' "$password" "$shell" "$(printenv PREFECT_SERVER_API_AUTH_STRING)" "$(printenv PREFECT_API_AUTH_STRING)"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What `make up` prints about its password, and what server and worker are given."""

    key: Path
    shown: str
    shell: str
    server: str
    worker: str


def choose(folder: Path, **environment: str) -> Chosen:
    function = re.search(
        r"^choose_password\(\) \{$.*?^\}$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert function is not None
    key = folder / "home" / "cairn-4200" / "shell"
    quoted = {"bin": shlex.quote(str(Path(sys.executable).parent)), "key": shlex.quote(str(key))}
    script = ASKED.format(function=function[0], **quoted)
    variables = {"PATH": os.environ["PATH"], **environment}
    ended = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, check=True, timeout=120
    )
    shown, shell, server, worker = ended.stdout.splitlines()
    return Chosen(key=key, shown=shown, shell=shell, server=server, worker=worker)


def test_it_is_kept_where_only_this_user_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    chosen = choose(tmp_path)
    assert stat.S_IMODE(chosen.key.stat().st_mode) == 0o600 and stat.S_IMODE(chosen.key.parent.stat().st_mode) == 0o700
    assert chosen.shown in chosen.key.read_text() and chosen.shell == f". {shlex.quote(str(chosen.key))}"


def test_server_and_worker_have_it_and_each_start_has_another(tmp_path: Path) -> None:
    first, second = choose(tmp_path), choose(tmp_path)
    assert first.shown == first.server == first.worker and len(first.shown) > 30
    assert first.shown != second.shown and first.shown not in second.key.read_text()


def test_a_file_that_another_user_could_have_left_there_is_not_written_into(tmp_path: Path) -> None:
    key = tmp_path / "home" / "cairn-4200" / "shell"
    key.parent.mkdir(parents=True, mode=0o777)
    key.symlink_to(tmp_path / "elsewhere")
    choose(tmp_path)
    assert not (tmp_path / "elsewhere").exists() and not key.is_symlink()


def test_the_operators_is_taken_written_nowhere_and_not_shown(tmp_path: Path) -> None:
    chosen = choose(tmp_path, PREFECT_SERVER_API_AUTH_STRING="admin:canary")
    assert (chosen.server, chosen.worker, chosen.key.exists()) == ("admin:canary", "admin:canary", False)
    assert "canary" not in chosen.shown + chosen.shell


@pytest.mark.parametrize(
    "setting", ["PREFECT_SERVER_CSRF_PROTECTION_ENABLED=true", 'CORS_ALLOWED_ORIGINS="http://$HOST:$PORT"']
)
def test_the_server_is_told_to_ask_for_tokens_and_to_let_no_other_origin_read(setting: str) -> None:
    exported = [line for line in SCRIPT.read_text(encoding="utf-8").splitlines() if line.startswith("export ")]
    assert any(setting in line for line in exported)
