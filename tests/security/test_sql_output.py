"""What `cairn sql` prints of a hostile store: only CSV that goes into a pipe or a file is as it is in the store."""

import io
import re
from contextlib import redirect_stdout

import pytest

from cairn.cli.command import run_command
from tests.cairn.hostile_store import HostileStore

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    store = HostileStore(tmp_path_factory.mktemp("hostile"))
    store.change_all_words(ESCAPES)
    return store


def printed(hostile: HostileStore, stream: io.StringIO, *options: str) -> str:
    with redirect_stdout(stream):
        code = run_command(["sql", "select detail from training_attempts", *options, "--store", str(hostile.root)])
    assert code == 0
    return stream.getvalue()


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
def test_no_word_of_a_store_steers_the_terminal(hostile: HostileStore, options: tuple[str, ...]) -> None:
    shown = printed(hostile, Screen(), *options)
    own = re.compile(r"\x1b\[\d?m")  # a heading is bold
    assert "detail" in shown and STEERING.findall(own.sub("", shown)) == []
