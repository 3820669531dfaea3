import json
from pathlib import Path

import pytest

from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun


@pytest.mark.parametrize("line", ["report bard", "note bard"])  # the others: test_narrow_terminal
def test_people_get_lines_they_can_read(bard: FabricatedRun, cairn: Cairn, line: str) -> None:
    ended = cairn(*line.split())
    assert ended.code == 0 and len(ended.out.splitlines()) >= 2


def test_the_log_is_printed_entry_by_entry_as_it_lies_in_the_store(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path
) -> None:
    entries = json.loads(cairn("log", "bard", "--json").out)
    newest_first = sorted((tmp_path / "store" / "runs" / "bard" / "log").iterdir(), reverse=True)
    assert entries == [json.loads(path.read_text()) for path in newest_first]


@pytest.mark.unsound_log
def test_a_changed_entry_is_an_integrity_error(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    entry = tmp_path / "store" / "runs" / "bard" / "log" / "9999999997.json"
    entry.write_text(entry.read_text().replace("here", "there"))
    assert cairn("status", "bard").code == 5


def test_an_error_shows_its_traceback_when_asked_to(cairn: Cairn) -> None:
    assert "Traceback" in cairn("status", "nobody", CAIRN_DEBUG="1").err
