"""A commit's requests through obstore and through adlfs, each in its own process, against one server of Azure's API.

`python -m tests.programs.benchmarks.bench_clouds [--rounds 5]`; adlfs has to be installed for its column.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clouds.servers import cloud_server
from tests.commands import ROOT

_CLIENT = """
import resource, sys, time
began = time.perf_counter()
name, entries, shard = sys.argv[1], 50, bytes(64 << 20)
import uuid; prefix = uuid.uuid4().hex
if name == "obstore":
    import obstore
    from obstore.store import AzureStore
    client = AzureStore("cairn", client_options={"allow_http": True}, retry_config={"max_retries": 0})
    put = lambda key, data: obstore.put(client, f"{prefix}/{key}", data, mode="create", use_multipart=False)
    send = lambda key, data: obstore.put(client, f"{prefix}/{key}", data, chunk_size=16 << 20, max_concurrency=3)
    read = lambda key: bytes(obstore.get(client, f"{prefix}/{key}").bytes())
else:
    import os
    from adlfs import AzureBlobFileSystem
    key, account = os.environ["AZURE_STORAGE_ACCOUNT_KEY"], os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
    words = f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
    client = AzureBlobFileSystem(connection_string=f"{words}BlobEndpoint={os.environ['AZURE_STORAGE_ENDPOINT']};")
    put = lambda key, data: client.pipe_file(f"cairn/{prefix}/{key}", data, mode="create")
    send = lambda key, data: client.pipe_file(f"cairn/{prefix}/{key}", data)
    read = lambda key: client.cat_file(f"cairn/{prefix}/{key}")
put("first", b"1")
started = time.perf_counter() - began
times = []
for number in range(entries):
    begin = time.perf_counter(); put(f"entry-{number}", bytes(2000)); times.append(time.perf_counter() - begin)
begin = time.perf_counter(); send("shard", shard); sent = time.perf_counter() - begin
begin = time.perf_counter(); assert read("shard") == shard; got = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_SELF)
print(started, sorted(times)[entries // 2], sent, got, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
_COLUMNS = ("first create s", "create ms", "64 MB out s", "64 MB in s", "CPU s", "peak MB")


def main() -> None:
    """Print the medians of each client and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    server = cloud_server("az", Path(tempfile.mkdtemp()))
    environment, rows = {**os.environ, **server.variables}, dict[str, list[list[float]]]()
    for _ in range(given.rounds):
        for name in ("obstore", "adlfs"):
            words = [sys.executable, "-c", _CLIENT, name]
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            rows.setdefault(name, []).append([float(word) for word in done.stdout.split()])
    print(f"{'':8}" + "".join(f"{column:>16}" for column in _COLUMNS))
    for name, values in rows.items():
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        medians[1] *= 1000
        print(f"{name:8}" + "".join(f"{median:16.3f}" for median in medians))


if __name__ == "__main__":
    main()
