"""What a person may name as the configuration of a run, and what is said where nothing is there."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cairn.tasks.configuration.configuration_source import (
    MOST_BYTES,
    configuration_folder,
    configuration_name,
    read_configuration,
)
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import keep_numerics
from cairn.tasks.errors import InvalidConfiguration

TEXT = """
model_family = "far-away"
[data]
sources = ["text.txt"]
[training]
steps = 4
"""


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server that serves a folder with one configuration."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "bard.toml").write_text(TEXT)
    handler = partial(_Silent, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def family(named: str) -> str:
    return read_configuration(named, overrides=(), environment={}).model_family


@pytest.mark.usefixtures("here")
def test_a_bare_name_is_a_file_of_deployments_wherever_one_stands() -> None:
    assert family("quickstart") == "quickstart"
    assert configuration_folder("quickstart").name == "deployments"


@pytest.mark.parametrize("planted", ["quickstart", "deployments/quickstart.toml"])
def test_no_file_of_the_working_folder_stands_in_for_cairns_own_and_the_one_that_was_meant_is_said_once(
    here: Path, capsys: pytest.CaptureFixture[str], planted: str
) -> None:
    (here / planted).parent.mkdir(exist_ok=True)
    (here / planted).write_text(TEXT)
    assert (family("quickstart"), configuration_folder("quickstart").parent != here) == ("quickstart", True)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith(f"its path, {here / planted}")
    assert family(f"./{planted}") == "far-away"


@pytest.mark.parametrize("place", ["deployments/mine.toml", "mine"])
def test_a_name_that_is_none_of_cairns_is_found_in_the_working_folder(
    here: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (here / place).parent.mkdir(exist_ok=True)
    (here / place).write_text(TEXT)
    assert (family("mine"), capsys.readouterr().err) == ("far-away", "")


def test_a_folder_of_that_name_hides_no_configuration(here: Path) -> None:
    (here / "quickstart").mkdir()
    assert family("quickstart") == "quickstart"


@pytest.mark.usefixtures("here")
def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    names = "fast-shakespeare, quickstart, shakespeare, tiny-shakespeare, wide-shakespeare"
    with pytest.raises(InvalidConfiguration, match=rf"'quickstar': .* {names}"):
        family("quickstar")


def test_a_file_url_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "a run.toml").write_text(TEXT)
    url = (tmp_path / "a run.toml").as_uri()
    assert (family(url), configuration_folder(url)) == ("far-away", tmp_path)


def test_a_configuration_is_read_from_the_web(web: str) -> None:
    assert family(f"{web}/bard.toml?signature=abc") == "far-away"


def test_a_configuration_is_read_from_any_fsspec_url() -> None:
    with fsspec.open("memory://bucket/bard.toml", "w") as file:
        file.write(TEXT)
    assert family("memory://bucket/bard.toml") == "far-away"


def test_relative_paths_of_a_configuration_from_a_url_start_at_the_working_directory(here: Path) -> None:
    assert configuration_folder("s3://bucket/runs/bard.toml") == here


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ("quickstart", "quickstart"),
        ("deployments/bard.toml", "bard"),
        ("s3://bucket/runs/bard.v2.toml", "bard.v2"),
        ("https://example.org/bard.toml?signature=a/b.c", "bard"),
    ],
)
def test_the_name_of_the_file_is_the_name_of_the_run(named: str, name: str) -> None:
    assert configuration_name(named) == name


def test_a_url_where_nothing_is_says_so_without_its_signature(web: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"gone.toml: no such object") as refused:
        family(f"{web}/gone.toml?signature=abc")
    assert "abc" not in str(refused.value)


def test_a_url_with_a_password_is_refused_without_printing_it() -> None:
    with pytest.raises(InvalidConfiguration, match=r"credentials") as refused:
        family("https://ann:secret@example.org/bard.toml")
    assert "secret" not in str(refused.value)


def test_a_scheme_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match=r"gopher:// is not read"):
        family("gopher://here/bard.toml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(TEXT.replace("= 4", "= 0"), ": training.steps = 0", id="a rule is broken"),
        pytest.param("#" * (MOST_BYTES + 1), ".*more than", id="too long to be a configuration, not read to its end"),
    ],
)
def test_a_remote_file_that_is_no_configuration_is_refused_with_its_url(content: str, said: str) -> None:
    with fsspec.open("memory://bucket/bad.toml", "w") as file:
        file.write(content)
    with pytest.raises(InvalidConfiguration, match=f"memory://bucket/bad.toml{said}"):
        family("memory://bucket/bad.toml")


@pytest.mark.parametrize(("given", "opened", "kept"), [(None, "gpt2-tiny", "gpt2-tiny"), ("new", "old", "new")])
def test_a_family_that_a_command_does_not_name_is_the_opened_runs(given: str | None, opened: str, kept: str) -> None:
    document = {"data": {"sources": ["a"]}, "training": {"steps": 1}}
    before = RunConfig.model_validate({**document, "model_family": opened}).frozen()
    assert keep_numerics(RunConfig.model_validate({**document, "model_family": given}), before).model_family == kept
