"""The real command where the locale knows only ASCII: other characters are escaped, and no verb fails for them."""

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.text.output import escape_unencodable_output, say
from tests.commands import run_python
from tests.fabricated_run import store_bard

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
READING = ("status bard", "explain bard", "attempts bard", "--help")
SQL = 'sql "select chr(233) || chr(128512) || chr(8594) as word" --json'
OUR_SIGNS = ("attempts bard", "status bard")
RUNS_ALL = """
import json, os, shlex, sys, cairn.cli.command as c
for number, line in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 1)
        c.main(shlex.split(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def printed(folder: Path, *lines: str, **environment: str) -> dict[str, str]:
    """Return what each command line prints that ends with 0, in processes forked from one with this environment."""
    store_bard(LocalStore(folder / "store"))
    done = run_python(("-c", RUNS_ALL, *lines), folder, environment)
    assert done.out.split() == ["0"] * len(lines), done.err
    return {line: (folder / f"{number}.txt").read_text(encoding="utf-8") for number, line in enumerate(lines)}


@pytest.fixture(scope="module")
def in_ascii(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What command lines print where the locale knows only ASCII."""
    return printed(tmp_path_factory.mktemp("ascii"), *READING, SQL, **ASCII)


@pytest.fixture(scope="module")
def in_plain_signs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What command lines print where Python's streams know only ASCII."""
    return printed(tmp_path_factory.mktemp("plain"), *OUR_SIGNS, PYTHONIOENCODING="ascii", COLUMNS="80")


@pytest.mark.parametrize("line", READING)
def test_a_verb_escapes_what_an_ascii_stream_cannot_hold(in_ascii: dict[str, str], line: str) -> None:
    assert in_ascii[line].strip() and in_ascii[line].isascii()


def test_json_on_an_ascii_stream_is_the_same_document(in_ascii: dict[str, str]) -> None:
    assert json.loads(in_ascii[SQL]) == [{"word": "é😀→"}]
    assert in_ascii[SQL].isascii()


@pytest.mark.parametrize("line", OUR_SIGNS)
def test_our_own_signs_have_plain_ones_beside_them(in_plain_signs: dict[str, str], line: str) -> None:
    assert in_plain_signs[line].isascii() and "\\u" not in in_plain_signs[line]


def test_a_message_has_plain_signs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", TextIOWrapper(written, encoding="ascii", write_through=True))
    escape_unencodable_output()
    say("0 → 1 é")
    assert written.getvalue() == b"0 > 1 \\u00e9\n"
