"""The real command where the locale knows only ASCII: other characters are escaped, and no verb fails for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(folder: Path, *arguments: str, **chosen: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **(chosen or ASCII), "CAIRN_STORE": str(folder / "store")}
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "cairn.cli.command", *arguments], cwd=root, env=environment, capture_output=True
    )


@pytest.mark.parametrize("arguments", ["status bard", "explain bard", "attempts bard", "--help"])
def test_a_verb_escapes_what_an_ascii_stream_cannot_hold(bard: FabricatedRun, tmp_path: Path, arguments: str) -> None:
    done = command(tmp_path, *arguments.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_json_on_an_ascii_stream_is_the_same_document(bard: FabricatedRun, tmp_path: Path) -> None:
    done = command(tmp_path, "sql", "select chr(233) || chr(128512) || chr(8594) as word", "--json")
    assert json.loads(done.stdout) == [{"word": "é😀→"}], done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("verb", ["attempts", "status"])
def test_our_own_signs_have_plain_ones_beside_them(bard: FabricatedRun, tmp_path: Path, verb: str) -> None:
    done = command(tmp_path, verb, "bard", PYTHONIOENCODING="ascii", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"\\u" not in done.stdout


def test_a_message_has_plain_signs_too(tmp_path: Path) -> None:
    script = "from cairn.cli.command import escape_unencodable_output, say; escape_unencodable_output(); say('0 → 1 é')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, check=True)
    assert done.stderr == b"0 > 1 \\u00e9\n"
