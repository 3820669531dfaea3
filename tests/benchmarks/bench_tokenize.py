"""How fast text becomes a snapshot, beside the tokenizer library alone on the same text and cores; and in what memory.

`make bench-data`, or `python tests/benchmarks/bench_tokenize.py --text FILE --speed-mb 16 --memory-mb 64 256`. Speed:
rounds of the library's `encode_batch` and of the whole build (check, survey, encode, assemble, publish), in turns.
Memory: the greatest resident set of a process of its own for each amount of text; `--quick-memory` splits words
instead of learning pairs, for amounts that would take hours. Below some 130 MB the fixed buffers are not yet full.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.corpus import open_corpus
from cairn.tasks.data.snapshot_build import build_snapshot

MEGABYTE = 1_000_000
DOCUMENT_CHARACTERS = 4000
LIBRARY_BATCH = 1000


def documents(text: str, size_bytes: int) -> Iterator[str]:
    """Real text over and over, each time with some of its words changed, in documents of about 4 kB."""
    lines, made, draw = text.splitlines(keepends=True), 0, random.Random(1)
    while made < size_bytes:
        start = draw.randrange(len(lines))
        part: list[str] = []
        held = 0
        while held < DOCUMENT_CHARACTERS:
            words = lines[(start + len(part)) % len(lines)].split(" ")
            words[draw.randrange(len(words))] += str(draw.randrange(1000))
            part.append(" ".join(words))
            held += len(part[-1]) + 1
        document = "".join(part)
        made += len(document.encode())
        yield document


def write_corpus(path: Path, text: str, size_bytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for document in documents(text, size_bytes):
            file.write(json.dumps({"text": document}) + "\n")


def config(folder: Path) -> DataConfig:
    return DataConfig(sources=(str(folder / "corpus.jsonl"),), tokenizer=str(folder / "tokenizer.json"))


class Stopwatch:
    """Seconds by the clock and of all cores since it was made; on a machine with other work the second is steadier."""

    def __init__(self) -> None:
        self.wall, self.cores = time.perf_counter(), time.process_time()

    def speed(self, megabytes: float) -> tuple[float, float]:
        """Return MB per second by the clock, and MB per second of one core."""
        return megabytes / (time.perf_counter() - self.wall), megabytes / (time.process_time() - self.cores)


def build_speed(folder: Path, number: int, megabytes: float) -> tuple[float, float]:
    store, watch = LocalStore(folder / f"store-{number}"), Stopwatch()
    build_snapshot(store, config(folder), folder, cache_dir=folder / f"cache-{number}")
    return watch.speed(megabytes)


def library_speed(folder: Path, texts: list[str], megabytes: float) -> tuple[float, float]:
    tokenizer, watch = LibraryTokenizer.from_file(str(folder / "tokenizer.json")), Stopwatch()
    for start in range(0, len(texts), LIBRARY_BATCH):
        tokenizer.encode_batch(texts[start : start + LIBRARY_BATCH], add_special_tokens=False)
    return watch.speed(megabytes)


def measure_speed(folder: Path, text: str, size_bytes: int, rounds: int) -> None:
    write_corpus(folder / "corpus.jsonl", text, size_bytes)
    (source,) = open_corpus(config(folder), folder)
    texts = [document.text for document in source.documents()]
    size = sum(len(item.encode()) for item in texts) / MEGABYTE
    alone, whole = [], []
    for number in range(rounds):
        alone.append(library_speed(folder, texts, size))
        whole.append(build_speed(folder, number, size))
        print(f"  round {number + 1}: alone {alone[-1][0]:.2f} MB/s, end to end {whole[-1][0]:.2f} MB/s", flush=True)
    for name, which in (("by the clock", 0), ("per second of one core", 1)):
        theirs, mine = [speed[which] for speed in alone], [speed[which] for speed in whole]
        ratio = statistics.median(one / other for one, other in zip(mine, theirs, strict=True))
        print(
            f"{size:.0f} MB {name}: encode_batch alone {statistics.median(theirs):.2f} MB/s, end to end "
            f"{statistics.median(mine):.2f} MB/s, medians of {rounds}; median ratio {ratio:.2f}"
        )


def measure_memory(folder: Path, text: str, sizes: list[int]) -> None:
    for size_bytes in sizes:
        write_corpus(folder / "corpus.jsonl", text, size_bytes)
        command = [sys.executable, __file__, "--build-once", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{size_bytes / MEGABYTE:.0f} MB of text: {done.stdout.strip()}", flush=True)


def build_once(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as here:
        before = time.perf_counter()
        build_snapshot(LocalStore(Path(here) / "store"), config(folder), folder, cache_dir=Path(here) / "cache")
        seconds = time.perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak resident set {peak:.0f} MiB, {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="real text to repeat; CPython's own documentation without it")
    parser.add_argument("--speed-mb", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--quick-memory", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help="where the text and the snapshots lie meanwhile")
    parser.add_argument("--build-once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build_once:
        build_once(options.build_once)
        return
    text = options.text.read_text(encoding="utf-8") if options.text else python_text()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        tokenizer = Tokenizer.train_bpe(text.split("\n\n"), options.vocabulary)
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        if options.rounds:
            measure_speed(folder, text, options.speed_mb * MEGABYTE, options.rounds)
        if options.quick_memory:
            (folder / "tokenizer.json").write_text(word_tokenizer(text), encoding="utf-8")
        measure_memory(folder, text, [size * MEGABYTE for size in options.memory_mb])


def word_tokenizer(text: str) -> str:
    """Return a tokenizer of whole words as JSON: as many tokens, and much less work for each."""
    words = {word: number for number, word in enumerate(["[UNK]", *sorted(set(text.split()))])}
    tokenizer = LibraryTokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return str(tokenizer.to_str())


def python_text() -> str:
    sources = open_corpus(DataConfig(sources=("python:topics", "python:docstrings")), Path())
    return "\n\n".join(document.text for source in sources for document in source.documents())


if __name__ == "__main__":
    main()
