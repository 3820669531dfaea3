"""Objects to and from a bucket beside bare requests: `python -m tests.programs.benchmarks.bench_store`.

Ways take turns within a round, so that whatever else the machine does meets them all; medians, and ratios within a
round. Bare requests are the least there is: unsigned bodies over one kept connection each, no client, no hash. Starts
Ceph where it is installed, else the emulator, which says little of a rate. `obstore` takes part where it is installed.
"""

import argparse
import http.client
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cairn.storage.stores.open_store import open_store
from tests.programs.benchmarks.bench_checkpoint import start_s3
from tests.s3.servers import BUCKET

OBJECT_BYTES, PIECE_BYTES = 64 << 20, 8 << 20
BODY = memoryview(bytearray(os.urandom(OBJECT_BYTES)))
Way = Callable[[int], object]
"""Moves the object of a number."""


def main() -> None:
    """Write and read in turns, and print what each way took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--objects", type=int, default=8, help=f"of {OBJECT_BYTES >> 20} MiB, in each turn")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        kind = start_s3(Path(folder))
        writes, reads = ways()
        print(f"{kind}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.rounds} rounds")
        report("written", writes, given)
        report("read", reads, given)


def report(what: str, ways_at_once: dict[str, tuple[Way, int]], given: argparse.Namespace) -> None:
    """Let all take turns; the first is what the others are held against."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways_at_once}
    for turn in range(given.rounds + 1):
        for name, (way, at_once) in ways_at_once.items():
            begun, core_begun = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(way, range(given.objects)))
            if turn:  # the first one connects
                found[name].append((time.perf_counter() - begun, time.process_time() - core_begun))
    size, bare = given.objects * OBJECT_BYTES / 1e6, next(iter(found.values()))
    print(f"\n{what:34}{'MB/s':>8}{'x bare':>8}{'core s/GB':>11}")
    for name, turns in found.items():
        rate = size / statistics.median(seconds for seconds, _ in turns)
        ratio = statistics.median(one[0] / other[0] for one, other in zip(bare, turns, strict=True))
        core = statistics.median(core for _, core in turns) / size * 1000
        print(f"{name:34}{rate:8.0f}{ratio:8.2f}{core:11.2f}")


def ways() -> tuple[dict[str, tuple[Way, int]], dict[str, tuple[Way, int]]]:
    """Return the ways to write and to read, each with how many objects it moves at once."""
    import boto3

    client: Any = boto3.client("s3")
    store, put, get = open_store(f"s3://{BUCKET}/cairn"), bare_put(client), bare_get(client)
    pieces = [BODY[start : start + PIECE_BYTES] for start in range(0, OBJECT_BYTES, PIECE_BYTES)]

    def write(number: int) -> None:
        store.write_stream(f"object-{number}", pieces)

    def read(number: int) -> None:
        into = memoryview(bytearray(PIECE_BYTES))
        for start in range(0, OBJECT_BYTES, PIECE_BYTES):
            assert store.read_range(f"object-{number}", start, into) == PIECE_BYTES

    writes: dict[str, tuple[Way, int]] = {
        "bare PUTs, one connection": (put, 1),
        "bare PUTs, three connections": (put, 3),
        "Cairn, one object at once": (write, 1),
        "Cairn, two": (write, 2),
        "Cairn, four": (write, 4),
        "boto3, one": (lambda number: client.put_object(Bucket=BUCKET, Key=f"boto-{number}", Body=bytes(BODY)), 1),
    }
    reads: dict[str, tuple[Way, int]] = {
        "bare GETs of 8 MiB, one connection": (get, 1),
        "bare GETs, four connections": (get, 4),
        "Cairn, one object at once": (read, 1),
        "Cairn, four": (read, 4),
    }
    if find_spec("obstore"):
        writes["obstore, one"] = (obstore_put(), 1)
    return writes, reads


def bare_put(client: Any) -> Way:
    """Return what PUTs an object by a signed URL, over a connection of its thread."""
    ask = bare_requests()

    def put(number: int) -> None:
        url = client.generate_presigned_url("put_object", {"Bucket": BUCKET, "Key": f"bare-{number}"})
        ask("PUT", url, {}, BODY).read()

    return put


def bare_get(client: Any) -> Way:
    """Return what GETs an object in pieces by a signed URL, over a connection of its thread."""
    ask = bare_requests()

    def get(number: int) -> None:
        url = client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": f"bare-{number}"})
        into = memoryview(bytearray(PIECE_BYTES))
        for start in range(0, OBJECT_BYTES, PIECE_BYTES):
            answer, filled = ask("GET", url, {"Range": f"bytes={start}-{start + PIECE_BYTES - 1}"}), 0
            while count := answer.readinto(into[filled:]):
                filled += count
            answer.read()

    return get


def bare_requests() -> Callable[..., http.client.HTTPResponse]:
    """Return what asks over a connection of its thread."""
    mine = threading.local()

    def ask(method: str, url: str, headers: dict[str, str], body: memoryview | None = None) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        if not hasattr(mine, "connection"):
            mine.connection = http.client.HTTPConnection(parts.netloc, timeout=60, blocksize=1 << 20)
        mine.connection.request(method, f"{parts.path}?{parts.query}", body=body, headers=headers)
        answer: http.client.HTTPResponse = mine.connection.getresponse()
        assert answer.status < 300, answer.read()
        return answer

    return ask


def obstore_put() -> Way:
    """Return what PUTs an object by obstore, unsigned."""
    from obstore.store import S3Store  # type: ignore[import-not-found]

    options: Any = {"client_options": {"allow_http": True}, "unsigned_payload": True}
    store = S3Store(BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], region="us-east-1", **options)
    return lambda number: store.put(f"obstore-{number}", BODY, use_multipart=False)


if __name__ == "__main__":
    main()
