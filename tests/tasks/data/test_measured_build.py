"""A build has the same bits on any number of cores and in any locale, in memory that its text does not decide."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.memory_store import MemoryStore
from tests.tasks import measured_build
from tests.tasks.corpus_files import packed, shaped
from tests.tasks.tokenizer_kinds import TEXTS

ROOT = Path(measured_build.__file__).parents[2]
DATA = DataConfig(sources=("*.jsonl*",), tokenizer="bytes")
NEVER = 1 << 60


def measure(folder: Path, data: DataConfig, *, cores: int, fast_from: int = 0, **variables: str) -> tuple[str, int]:
    """Return the snapshot id and the peak of memory in bytes of a build in a process of its own."""
    settings = json.dumps(data.model_dump(mode="json"))
    command = [sys.executable, measured_build.__file__, str(folder), settings, str(cores), str(fast_from)]
    environment = {"PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/"), **variables}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    snapshot_id, peak_bytes, *_ = json.loads(done.stdout)
    return snapshot_id, peak_bytes


@pytest.mark.linux
def test_the_id_depends_on_neither_cores_nor_listing_order_nor_locale(tmp_path: Path) -> None:
    for number, name in enumerate(("I.jsonl", "i.jsonl.gz", "Z.jsonl", "ä.jsonl.zst")):
        suffix = name.partition(".jsonl")[2]
        (tmp_path / name).write_bytes(packed(shaped([f"{text} {number}" for text in TEXTS], "jsonl"), suffix))
    expected = build_snapshot(MemoryStore(), DATA, tmp_path).snapshot_id
    assert measure(tmp_path, DATA, cores=1, fast_from=NEVER, LC_ALL="tr_TR.UTF-8", TZ="Asia/Tokyo")[0] == expected


def test_a_vocabulary_is_listed_once_for_all_batches() -> None:
    tokenizer = Tokenizer.train_bpe(TEXTS, 300)
    tokenizer._inner = listing = _Listing(tokenizer._inner)  # type: ignore[assignment]
    assert [tokenizer.vocab_size for _ in range(3)] == [300] * 3 and listing.times == 1


class _Listing:
    """Counts how often the whole vocabulary is asked for."""

    def __init__(self, inner: object) -> None:
        self._inner, self.times = inner, 0

    def __getattr__(self, name: str) -> object:
        self.times += name == "get_vocab"
        return getattr(self._inner, name)


def great_vocabulary(size: int) -> str:
    """Return GPT-2's kind of BPE with so many ids: the bytes, pairs of them, and pairs followed by a byte."""
    document = json.loads(Tokenizer.train_bpe(TEXTS, 300).json)
    letters = sorted(json.loads(Tokenizer.bytes().json)["model"]["vocab"])
    pairs = list(itertools.product(letters, repeat=2))
    longer = (("".join(pair), letter) for pair in pairs for letter in letters)
    merges = list(itertools.islice(itertools.chain(pairs, longer), size - len(letters) - 1))
    tokens = [document["added_tokens"][0]["content"], *letters, *map("".join, merges)]
    document["model"] |= {"vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
    return json.dumps(document)


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize("kind", ["of 128,000 ids", "without words"])
def test_a_build_takes_at_most_400_mb_however_much_text_there_is(tmp_path: Path, kind: str) -> None:
    made = great_vocabulary(128_000) if kind == "of 128,000 ids" else Tokenizer.bytes().json
    (tmp_path / "tokenizer.json").write_text(made)
    data, peaks = DataConfig(sources=("*.jsonl.gz",), tokenizer="tokenizer.json"), list[int]()
    for megabytes in (20, 100):
        lines = (f"stone{number * number % 999_983} lies on {number}\n" for number in itertools.count())
        texts = ["".join(itertools.islice(lines, 200)) for _ in range(megabytes * 200)]
        (tmp_path / f"{megabytes}.jsonl.gz").write_bytes(packed(shaped(texts, "jsonl"), ".gz"))
        peaks.append(measure(tmp_path, data, cores=2)[1])
    print(f"peaks: {[round(peak / 1e6) for peak in peaks]} MB")
    assert max(peaks) <= 400e6
