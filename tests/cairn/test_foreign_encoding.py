"""The real command where the locale knows only ASCII: other characters are escaped, and no verb fails for them."""

import json
from pathlib import Path

import pytest

from tests.commands import Cairn, run_python
from tests.fabricated_run import FabricatedRun

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("line", ["status bard", "explain bard", "attempts bard", "--help"])
def test_a_verb_escapes_what_an_ascii_stream_cannot_hold(bard: FabricatedRun, cairn_process: Cairn, line: str) -> None:
    done = cairn_process(*line.split(), **ASCII)
    assert done.code == 0, done.err
    assert done.out.isascii()


def test_json_on_an_ascii_stream_is_the_same_document(bard: FabricatedRun, cairn_process: Cairn) -> None:
    done = cairn_process("sql", "select chr(233) || chr(128512) || chr(8594) as word", "--json", **ASCII)
    assert json.loads(done.out) == [{"word": "é😀→"}], done.err
    assert done.out.isascii()


@pytest.mark.parametrize("verb", ["attempts", "status"])
def test_our_own_signs_have_plain_ones_beside_them(bard: FabricatedRun, cairn_process: Cairn, verb: str) -> None:
    done = cairn_process(verb, "bard", PYTHONIOENCODING="ascii", COLUMNS="80")
    assert done.code == 0, done.err
    assert done.out.isascii() and "\\u" not in done.out


def test_a_message_has_plain_signs_too(tmp_path: Path) -> None:
    script = "from cairn.cli.command import escape_unencodable_output, say; escape_unencodable_output(); say('0 → 1 é')"
    assert run_python(("-c", script), tmp_path, {"PYTHONIOENCODING": "ascii"}).err == "0 > 1 \\u00e9\n"
