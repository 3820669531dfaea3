"""The page docs/reference/json.md names the record that each command prints: here for those that read a run."""

import json
from dataclasses import fields

import pytest

from cairn.cli.app import find_record
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

OF_A_RUN = ("status", "explain", "report", "attempts", "checkpoints", "evaluations", "log", "note", "diagnose", "sweep")
LINES = {line: line.split() for line in ("runs", "models", "models --history", "config")}
LINES["simulate"] = ["simulate", "--days", "1", "--devices", "64"]


@pytest.mark.parametrize("line", [*LINES, *OF_A_RUN])
def test_a_command_prints_the_fields_of_the_record_that_the_page_names(
    bard: FabricatedRun, cairn: Cairn, line: str
) -> None:
    record, is_list = find_record(line)
    ended = cairn(*LINES.get(line, [line, "bard"]), "--json")
    printed = json.loads(ended.out)
    assert (ended.code, ended.err, isinstance(printed, list)) == (0, "", is_list)
    assert set(printed[0] if is_list else printed) == {field.name for field in fields(record)}
