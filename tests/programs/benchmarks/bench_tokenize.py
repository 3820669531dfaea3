"""How fast text becomes a snapshot, beside the tokenizer library alone on the same text and cores; and in what memory.

`make bench-data` makes text and takes turns: the library's `encode_batch_fast`, with its own threads, of a part of the
text, and the whole build (check, encode, assemble, publish) of all of it from `.jsonl.zst`, in a process of its own.
The memory is the greatest sum over all processes of a build, what they share counted once. With `--corpus FOLDER
--tokenizer FILE` the text of a folder is built instead; a tokenizer `bpe:N` is learned, with nothing beside it.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.tasks.data.corpus import open_corpus
from tests.tasks import measured_build

MEGABYTE = 1_000_000
DOCUMENT_CHARACTERS = 4000
LIBRARY_BATCH = 1000
ROOT = Path(__file__).parents[3]


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
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        for document in documents(text, size_bytes):
            file.write(json.dumps({"text": document}).encode() + b"\n")


def library_speed(folder: Path, data: DataConfig, megabytes: int) -> float:
    """Return MB of text a second of the library alone."""
    tokenizer, texts, size_bytes = LibraryTokenizer.from_file(data.tokenizer), list[str](), 0
    for document in (found for source in open_corpus(data, folder) for found in source.documents()):
        texts.append(document.text)
        size_bytes += document.bytes
        if size_bytes >= megabytes * MEGABYTE:
            break
    before = time.perf_counter()
    for start in range(0, len(texts), LIBRARY_BATCH):
        tokenizer.encode_batch_fast(texts[start : start + LIBRARY_BATCH], add_special_tokens=False)
    return size_bytes / MEGABYTE / (time.perf_counter() - before)


def build_speed(folder: Path, data: DataConfig, cores: int) -> tuple[float, float]:
    """Return MB of text a second of a whole build, and its peak of memory in MB."""
    settings = json.dumps(data.model_dump(mode="json"))
    with tempfile.TemporaryDirectory(dir=folder) as here:
        command = [sys.executable, measured_build.__file__, here, settings, str(cores), str(32 << 20)]
        done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True)
    snapshot_id, peak_bytes, seconds, text_bytes = json.loads(done.stdout)
    print(f"  {snapshot_id[:12]}: {text_bytes / MEGABYTE:,.0f} MB in {seconds:.1f} s, {peak_bytes / MEGABYTE:.0f} MB")
    return text_bytes / MEGABYTE / seconds, peak_bytes / MEGABYTE


def measure(folder: Path, data: DataConfig, options: argparse.Namespace) -> None:
    alone, whole, peaks = [], [], []
    for number in range(options.rounds):
        alone.append(library_speed(folder, data, options.library_mb))
        speed, peak = build_speed(folder, data, options.cores)
        whole.append(speed)
        peaks.append(peak)
        print(f"  round {number + 1}: encode_batch_fast {alone[-1]:.2f} MB/s, build {speed:.1f} MB/s", flush=True)
    alone.append(library_speed(folder, data, options.library_mb))
    ratio = statistics.median(
        build / statistics.mean(pair) for build, *pair in zip(whole, alone, alone[1:], strict=False)
    )
    print(
        f"medians of {options.rounds}: encode_batch_fast {statistics.median(alone):.2f} MB/s, build "
        f"{statistics.median(whole):.1f} MB/s, ratio {ratio:.1f}, peak of all processes {max(peaks):.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="real text to repeat; CPython's own documentation without it")
    parser.add_argument("--speed-mb", type=int, default=300)
    parser.add_argument("--library-mb", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokenizer", default="", help="a tokenizer.json, or bpe:<size> with --corpus")
    parser.add_argument("--corpus", type=Path, help="a folder of .jsonl.zst files to build from")
    parser.add_argument("--folder", type=Path, help="where the text and the snapshots lie meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        if options.corpus:
            data = DataConfig(sources=(f"{options.corpus.absolute()}/*.jsonl.zst",), tokenizer=options.tokenizer)
        else:
            text = options.text.read_text(encoding="utf-8") if options.text else python_text()
            tokenizer = Tokenizer.train_bpe(text.split("\n\n"), options.vocabulary)
            (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
            write_corpus(folder / "corpus.jsonl.zst", text, options.speed_mb * MEGABYTE)
            sources = (str(folder / "corpus.jsonl.zst"),)
            data = DataConfig(sources=sources, tokenizer=str(folder / "tokenizer.json"))
        if data.bpe_vocab_size is None:
            measure(folder, data, options)
        else:
            build_speed(folder, data, options.cores)


def python_text() -> str:
    sources = open_corpus(DataConfig(sources=("python:topics", "python:docstrings")), Path())
    return "\n\n".join(document.text for source in sources for document in source.documents())


if __name__ == "__main__":
    main()
