"""A folder as a newcomer has it: texts, configurations right and wrong, and a store with the run `bard`."""

import json
from pathlib import Path

from cairn.storage.stores.local_store import LocalStore
from tests.fabricated_run import store_bard

TEXT = "".join(f"line {number} of a text\n\n" for number in range(200))
CONFIGURATION = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 1
n_head = 2
n_embd = 8
block_size = 8
[training]
steps = 4
global_batch = 2
precision = "fp32"
kernels = "stock"
"""


def furnish(folder: Path) -> None:
    """Write the files that the command lines name, and the store."""
    texts = {
        "run.toml": CONFIGURATION,
        "text.txt": TEXT,
        "my run.toml": CONFIGURATION,
        "broken.toml": "a = = 1",
        "typo.toml": CONFIGURATION.replace("n_layer", "n_leyer"),
        "section.toml": CONFIGURATION.replace("[training]", "[trainig]"),
        "empty.toml": "",
        "no-data.toml": "[training]\nsteps = 4\n",
        "flat.toml": 'model = 4\n[data]\nsources = ["text.txt"]\n[training]\nsteps = 4\n',
        "empty.txt": "",
        "fields.jsonl": "".join(json.dumps({"words": "abc"}) + "\n" for _ in range(3)),
        "words.jsonl": "no JSON at all\n",
        "list.jsonl": "[1, 2]\n",
        "text.csv": "a,b\n1,2\n",
        "false.parquet": "no parquet",
        "false.gz": "no gzip",
        "tokenizer.json": "{}",
        "suite.toml": "batches = 'many'\n",
        "file": "not a store",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"abc \xff def")
    (folder / "folder").mkdir()
    store_bard(LocalStore(folder / "store"))
