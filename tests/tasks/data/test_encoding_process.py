"""The fast library encodes in a child process, which may be killed, grows within a bound and ends with its parent.

It is taken only where a probe and the text's own sample agree with the reference: ids are equal whichever encodes.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer
from cairn.model.data import tokenizer as tokenizer_module
from cairn.model.data.tokenizer import FlatIds, Tokenizer, choose_encoder
from cairn.tasks.data import encoding_process, snapshot_build
from cairn.tasks.data.encoding_process import EncodingProcess, FastEncoder
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.full_amount import FULL
from tests.memory_store import MemoryStore
from tests.tasks import killed_build
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import KINDS, TEXTS

BATCHES = ([*TEXTS], [], [""], ["", "漢字 \N{MOUNTAIN}", ""])


@pytest.fixture
def document() -> str:
    return Tokenizer.train_bpe(TEXTS, 300).json


@pytest.fixture
def child(document: str) -> Iterator[EncodingProcess]:
    made = EncodingProcess(document)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("growth", "batches"),
    [
        pytest.param(1 << 40, BATCHES, id="one child"),
        pytest.param(-(1 << 40), BATCHES[2:], id="a child replaced after each batch"),
    ],
)
def test_a_child_has_the_library_s_ids(
    child: EncodingProcess,
    document: str,
    growth: int,
    batches: Sequence[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding_process, "MOST_GROWTH_BYTES", growth)
    expected, started = FastEncoder(document), set[int]()
    start = encoding_process.start_child

    def count(*args: object, **named: object) -> "subprocess.Popen[bytes]":
        made = start(*args, **named)  # type: ignore[arg-type]
        started.add(made.pid)
        return made

    monkeypatch.setattr(encoding_process, "start_child", count)
    for texts in batches:
        assert all(map(np.array_equal, child.encode_flat(texts), expected.encode_flat(texts)))
    assert len(started) == (1 if growth > 0 else len(batches))


def test_each_of_several_threads_gets_its_own_answer(child: EncodingProcess, document: str) -> None:
    batches = [[f"{number} {text}" for text in TEXTS * 20] for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(child.encode_flat, batches))
    expected = FastEncoder(document)
    assert all(
        all(map(np.array_equal, one, expected.encode_flat(texts))) for one, texts in zip(found, batches, strict=True)
    )


def test_what_the_library_cannot_read_is_an_error_of_the_system(child: EncodingProcess) -> None:
    refused = EncodingProcess("{}")
    with pytest.raises(OSError):
        refused.encode_flat(["a"])
    refused.close()


def test_texts_that_end_the_child_are_encoded_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_every_character", lambda: iter(()))
    chosen, plain = Tokenizer.train_bpe(TEXTS, 300), Tokenizer.train_bpe(TEXTS, 300)
    assert chosen.accelerate(TEXTS, EncodingProcess)
    for _ in range(2):
        os.kill(chosen._fast._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert all(map(np.array_equal, chosen.encode_flat(TEXTS), plain.encode_flat(TEXTS)))
        assert all(map(np.array_equal, chosen.encode_flat(TEXTS), plain.encode_flat(TEXTS)))
    chosen.slow_down()


def test_little_text_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(snapshot_build, "EncodingProcess")
    (tmp_path / "a.jsonl").write_bytes(shaped(TEXTS, "jsonl"))
    build_snapshot(MemoryStore(), DataConfig(sources=("a.jsonl",), tokenizer="bytes"), tmp_path)


@pytest.mark.linux
def test_the_child_of_a_build_that_is_killed_ends_and_the_next_build_has_the_same_id(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(shaped(TEXTS * 3, "jsonl"))
    data = DataConfig(sources=("a.jsonl",), tokenizer="bytes")
    settings, root = json.dumps(data.model_dump(mode="json")), str(Path(killed_build.__file__).parents[2])
    command = [sys.executable, killed_build.__file__, str(tmp_path), "1", settings, "fast"]
    killed = subprocess.run(command, env={"PYTHONPATH": root}, stdout=subprocess.PIPE, check=False)
    children = [int(pid) for pid in killed.stdout.split()]
    assert killed.returncode == -signal.SIGKILL and children
    for pid in children:
        with suppress(ProcessLookupError):
            assert select.select([os.pidfd_open(pid)], [], [], 60)[0], "it runs on"
    again = build_snapshot(MemoryStore(), data, tmp_path, cache_dir=tmp_path / "cache")
    assert again.snapshot_id == build_snapshot(MemoryStore(), data, tmp_path).snapshot_id


FEW_CHARACTERS = ("é x", "漢字 漢1")


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_every_character", lambda: iter([FEW_CHARACTERS]))


@cache
def both(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer of a kind by the reference alone, and with what the probe chose."""
    document = json.dumps(KINDS[kind]())
    plain, chosen = (Tokenizer(LibraryTokenizer.from_str(document)) for _ in range(2))
    chosen.accelerate(TEXTS, FastEncoder)
    return plain, chosen


TEXT = st.text(max_size=60) | st.lists(st.sampled_from([*TEXTS, " ", "\n", "</s>", "<|endoftext|>", "7"])).map("".join)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=50 if FULL else 20)
@given(texts=st.lists(TEXT, max_size=4))
def test_every_accepted_kind_has_equal_ids_whichever_library_encodes(kind: str, texts: list[str]) -> None:
    plain, chosen = both(kind)
    expected, found = (_outcome(tokenizer, texts) for tokenizer in (plain, chosen))
    assert expected == found


def _outcome(tokenizer: Tokenizer, texts: Sequence[str]) -> object:
    try:
        ids, lengths = tokenizer.encode_flat(texts)
    except Exception as error:
        return type(error), str(error)
    return ids.tolist(), lengths.tolist()


def test_our_own_tokenizers_are_encoded_fast() -> None:
    assert Tokenizer.bytes().accelerate(TEXTS, FastEncoder) and Tokenizer.train_bpe(TEXTS, 300).accelerate(
        TEXTS, FastEncoder
    )


def reference(texts: Sequence[str]) -> FlatIds:
    return FastEncoder(Tokenizer.bytes().json).encode_flat(texts)


@pytest.mark.parametrize("differs", ["漢字 漢1", "of the sample"])
def test_one_other_id_anywhere_leaves_the_reference_in_its_place(differs: str) -> None:
    def other(texts: Sequence[str]) -> FlatIds:
        ids, lengths = reference(texts)
        return (ids + 1 if differs in texts else ids), lengths

    assert choose_encoder(Tokenizer.bytes().json, reference, ["of the sample"], FastEncoder) is not None
    assert choose_encoder(Tokenizer.bytes().json, other, ["of the sample"], FastEncoder) is None


def test_a_tokenizer_that_the_library_cannot_read_stays_with_the_reference() -> None:
    assert choose_encoder("{}", reference, [], FastEncoder) is None


def test_without_the_library_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert not Tokenizer.bytes().accelerate(TEXTS, FastEncoder)


@pytest.mark.slow
def test_every_assigned_character_has_equal_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind in KINDS:
        tokenizer = Tokenizer(LibraryTokenizer.from_str(json.dumps(KINDS[kind]())))
        print(kind, tokenizer.accelerate(TEXTS, FastEncoder))
    assert Tokenizer.train_bpe(TEXTS, 300).accelerate(TEXTS, FastEncoder)


def test_ids_are_one_flat_array() -> None:
    ids, lengths = reference(["ab", "", "c"])
    assert ids.dtype == np.uint32 and ids.tolist() == [97, 98, 99] and lengths.tolist() == [2, 0, 1]
