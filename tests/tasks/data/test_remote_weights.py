"""Weights at a URL begin a run as those of a folder do, and their bytes do not stay on the machine."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data import foreign_tokenizer
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import copy_files, find_template
from cairn.tasks.data.snapshot_build import given_tokenizer
from cairn.tasks.evaluator.checkpoint_model import write_model_directory
from cairn.tasks.trainer.initial_weights import (
    InitialDirectory,
    adopt_network,
    check_directory,
    keep_initial_weights,
    read_source,
)
from tests.memory_store import MemoryStore
from tests.tasks.committed_model import CommittedModel, commit_model, small_configuration

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder without a word, and nothing below `away`."""

    def do_GET(self) -> None:
        if "/away/" in self.path:
            self.send_error(503)
            return
        super().do_GET()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[CommittedModel, Path, str]:
    """A model, and its folder with documents and a licence, and the tokenizer of its run."""
    folder = tmp_path_factory.mktemp("weights")
    model = commit_model(MemoryStore(), folder, small_configuration())
    opened = model.open(folder)
    write_model_directory(folder / "out", opened, card="---\nlicense: apache-2.0\n---\n")
    (folder / "out" / "chat_template.jinja").write_text(TEMPLATE)
    return model, folder, opened.snapshot.tokenizer_json


@pytest.fixture
def url(made: tuple[CommittedModel, Path, str]) -> Iterator[str]:
    """The address of the folder, served by HTTP."""
    foreign_tokenizer._folder_of.cache_clear()
    handler = partial(QuietHandler, directory=str(made[1]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/out"
        server.shutdown()
        thread.join()


def test_weights_at_a_url_are_those_of_the_folder(made: tuple[CommittedModel, Path, str], url: str) -> None:
    _, folder, tokenizer = made
    store, there, here = MemoryStore(), InitialDirectory(f"{url}/", folder), InitialDirectory("out", folder)
    config = adopt_network(there, ModelConfig())
    assert config == adopt_network(here, ModelConfig())
    check_directory(there, config, 301)
    copies = foreign_tokenizer._folder_of(url)
    assert not list(copies.glob("*.safetensors")), "nothing of the weights, before they are read"
    given: dict[str, Any] = {"tokenizer_json": tokenizer, "vocab_size": 301}
    remote, local = (keep_initial_weights(store, one, config, **given) for one in (there, here))
    assert remote.weights_sha256 == local.weights_sha256 and not list(copies.glob("*.safetensors"))
    theirs, ours = (read_source(store, one.source_sha256) for one in (remote, local))
    assert (theirs.name, theirs.licence, ours.name) == (url, "apache-2.0", "out")
    assert (theirs.files, theirs.documents) == (ours.files, ours.documents)


def test_tokenizer_and_template_come_from_the_url_of_the_weights(
    made: tuple[CommittedModel, Path, str], url: str
) -> None:
    data = {"sources": ["a.jsonl"], "loss_on": "answers"}
    config = RunConfig.model_validate({"data": data, "training": {"init_from": f"{url}/", "steps": 1}})
    assert config.data.tokenizer == f"{url}/tokenizer.json"
    given = given_tokenizer(config.data, made[1])
    assert given is not None and given.json == made[2]
    found = find_template(config.data, made[1])
    assert found is not None and (found.text, found.tokens["eos_token"]) == (TEMPLATE, "<|endoftext|>")


def test_a_url_without_weights_is_refused_by_key_and_file(made: tuple[CommittedModel, Path, str], url: str) -> None:
    with pytest.raises(InvalidInput, match=rf"training.init_from = '{url}/gone': config.json cannot be read"):
        adopt_network(InitialDirectory(f"{url}/gone", made[1]), ModelConfig())
    with pytest.raises(InvalidCorpus, match="No such file"):
        given_tokenizer(DataConfig(sources=("a",), tokenizer=f"{url}/gone/tokenizer.json"), made[1])


def test_a_server_that_fails_is_not_taken_for_a_file_that_is_not_there(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json cannot be read: 503"):
        copy_files(f"{url}/away", ["config.json"])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://me:secret@host/model", "carries credentials"),
        ("gs://bucket/model", "gs:// is not read"),
        ("http://127.0.0.1:9/model", "no server answers there"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_repeating_a_secret(
    tmp_path: Path, address: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        copy_files(address, ["config.json"])
    assert "secret" not in str(refused.value)


def test_a_document_that_is_far_too_long_is_not_copied_whole(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"model\.safetensors has more than 100 bytes"):
        copy_files(url, ["model.safetensors"], 100)
    assert not (foreign_tokenizer._folder_of(url) / "model.safetensors").exists()
