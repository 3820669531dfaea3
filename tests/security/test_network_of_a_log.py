"""A run whose network is somebody's own code: a machine that has not allowed it runs none of it, whatever it is asked.

The store's run was trained where it was allowed; its file leaves a trace each time that it runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.network_module import keep_files, read_files
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import InvalidConfiguration
from tests.cairn.trained_run import RUN, TrainedRun
from tests.commands import Cairn
from tests.memory_store import MemoryStore
from tests.networks.own_files import layers

pytestmark = pytest.mark.usefixtures("forked_parsers")
ALLOW = "CAIRN_CODE__ALLOW"


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A replay takes the threads of the attempt, for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def traced(folder: Path) -> dict[str, bytes]:
    """Return a file that leaves a trace in the folder when it runs."""
    first = f"from pathlib import Path\nPath({str(folder / 'trace')!r}).touch()\n"
    return {"net.py": first.encode() + layers()["net.py"]}


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    """A run of such a network with two commits."""
    run = TrainedRun(tmp_path, files=traced(tmp_path))
    run.attempt(2, 4)
    (tmp_path / "trace").unlink()
    return run


@pytest.mark.parametrize(
    "words",
    [
        ("sample", RUN),
        ("export", RUN, "exported"),
        ("evaluate", RUN),
        ("replay", RUN),
        ("train", "--run-id", RUN),
        ("train", "--run-id", RUN, "--dry-run"),
        ("train", "--run-id", RUN, "--overfit-one-batch"),
        ("sample", RUN, "--follow"),
    ],
    ids=" ".join,
)
def test_nothing_of_it_runs_and_the_refusal_says_how_it_would(
    run: TrainedRun, cairn: Cairn, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = cairn(*words)
    assert ended.code == 2, ended.err
    digest = sha256(traced(tmp_path)["net.py"])
    assert f"{ALLOW}={digest}" in ended.err and f"code/{digest}.py" in ended.err
    assert not (tmp_path / "trace").exists() and not (tmp_path / "exported").exists()


def test_a_machine_that_allows_it_samples_exports_and_replays(run: TrainedRun, cairn: Cairn, tmp_path: Path) -> None:
    allowed = {ALLOW: sha256(traced(tmp_path)["net.py"])}
    assert cairn("sample", RUN, "--tokens", "3", **allowed).code == 0
    assert cairn("export", RUN, "exported", **allowed).code == 0
    replayed = cairn("replay", RUN, "--json", **allowed)
    assert [segment["outcome"] for segment in json.loads(replayed.out)["segments"]] == ["equal", "equal"]
    assert (tmp_path / "exported" / "net.py").read_bytes() == traced(tmp_path)["net.py"]
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["module"] == "net.py:build"


def test_a_digest_that_is_allowed_allows_no_other_file(run: TrainedRun, cairn: Cairn, tmp_path: Path) -> None:
    assert cairn("sample", RUN, **{ALLOW: sha256(b"another")}).code == 2
    refused = cairn("sample", RUN, **{ALLOW: "net.py"})
    assert refused.code == 2 and "64 hexadecimal digits" in refused.err
    assert not (tmp_path / "trace").exists()


def test_a_store_whose_bytes_were_replaced_is_refused_by_their_digest(
    run: TrainedRun, cairn: Cairn, tmp_path: Path
) -> None:
    digest = sha256(traced(tmp_path)["net.py"])
    (tmp_path / "store" / "code" / f"{digest}.py").write_bytes(traced(tmp_path)["net.py"] + b"# another")
    ended = cairn("sample", RUN, **{ALLOW: digest})
    assert ended.code == 5 and f"code/{digest}.py" in ended.err
    assert not (tmp_path / "trace").exists()
    assert cairn("verify", RUN).code == 5


def test_the_reading_verbs_need_no_allowance(run: TrainedRun, cairn: Cairn, tmp_path: Path) -> None:
    for words in (("status", RUN), ("attempts", RUN), ("checkpoints", RUN), ("verify", RUN), ("report", RUN)):
        assert cairn(*words).code == 0, words
    assert not (tmp_path / "trace").exists()


def logged(**model: Any) -> dict[str, Any]:
    return {"data": {"sources": ["a"]}, "training": {"steps": 1}, "model": {"module": "net.py:build", **model}}


@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        {"../net.py": "0" * 64},
        {"a/b.py": "0" * 64},
        {"net.txt": "0" * 64},
        {"other.py": "0" * 64},
        {"net.py": "../../x"},
    ],
)
def test_a_log_names_its_module_by_digests_and_no_file_of_a_machine(files: dict[str, str] | None) -> None:
    with pytest.raises(IntegrityError, match="the log was changed"):
        parse_stored_configuration(logged(files=files))


def test_a_log_allows_nothing(tmp_path: Path) -> None:
    document = logged(files={"net.py": "0" * 64}) | {"code": {"allow": ["0" * 64], "files": {"net.py": "x"}}}
    config = parse_stored_configuration(document)
    assert config.code.allow == () and config.code.files == {}
    with pytest.raises(InvalidConfiguration, match=ALLOW):
        read_files(MemoryStore(), config.model, config.code.allow)


def test_no_more_bytes_than_a_file_may_have_are_read() -> None:
    store, model = MemoryStore(), parse_stored_configuration(logged(files={"net.py": "0" * 64})).model
    store.write(f"code/{'0' * 64}.py", bytes(1 << 21))
    with pytest.raises(IntegrityError, match="2,097,152 bytes"):
        read_files(store, model, ["0" * 64])


def test_a_file_is_stored_only_under_its_own_digest() -> None:
    store, model = MemoryStore(), parse_stored_configuration(logged(files={"net.py": "0" * 64})).model
    keep_files(store, model, {"net.py": b"another"})
    assert list(store.keys("code")) == []
