"""The commands of README and of the pages in docs/how-to, run by the real programs in one folder, page after page.

The quicker witness is `tests/house/test_documented_commands.py`, which parses the same lines. Not run are `make` and
`prefect`, which have tests of their own (`tests/crash/test_deployment_steps.py`), and a watcher, which never ends.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.clouds.servers import cloud_server
from tests.commands import ROOT, run_process
from tests.documented_commands import (
    DocumentedCommand,
    documented_commands,
    documented_configurations,
    documented_module,
)
from tests.s3.servers import s3_server
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("how-to")]
HOW_TO = ROOT / "docs" / "how-to"
FIRST = ("text", "look-at-runs", "evaluator", "approve", "roll-back", "fork", "operate", "fine-tune")
"""Pages of which a later one may need what an earlier one has made."""
PAGES = [
    *(HOW_TO / f"{name}.md" for name in FIRST),
    *sorted(path for path in HOW_TO.glob("*.md") if path.stem not in FIRST),
    ROOT / "README.md",
]
BUCKETS = ("bucket", "your-bucket")
TINY = """
[data]
sources = ["texts/*.txt"]
tokenizer = "bytes"
[model]
n_layer = 1
n_head = 1
n_embd = 16
block_size = 32
[training]
steps = {steps}
global_batch = 4
micro_batch = 2
warmup_steps = 2
threads = 1
[checkpoint]
every_steps = 400
keep_every = 400
[evaluation]
batches = 1
"""
OWN = documented_module((HOW_TO / "own-network.md").read_text(encoding="utf-8"))
TAKEN_FOR_GRANTED = {
    "own-network": {"CAIRN_TRAINING__STEPS": "4", "CAIRN_CODE__ALLOW": sha256(OWN.encode()).hexdigest()},
    "fine-tune": {"CAIRN_TRAINING__STEPS": "4"},
    "laptop": {"CAIRN_DATA__END_OF_TEXT": '""', "CAIRN_MODEL__BLOCK_SIZE": "32"},  # the same for a tiny network
    "five-minutes": {  # its steps, of a smaller network
        "CAIRN_MODEL__N_LAYER": "1",
        "CAIRN_MODEL__N_HEAD": "1",
        "CAIRN_MODEL__N_EMBD": "16",
        "CAIRN_MODEL__BLOCK_SIZE": "32",
        "CAIRN_TRAINING__GLOBAL_BATCH": "4",
        "CAIRN_EVALUATION__BATCHES": "1",
    },
    "s3": {"CAIRN_STORE": "s3://bucket/cairn"},
    "README": {"CAIRN_STORE": "new-store"},
}
"""Variables that a page has its reader set, or that stand for what a reader has."""
ANSWERS = {"promote": 3, "--overfit-one-batch": 1}
"""Words of commands that may also leave with this: gates decide, and this network is too small to learn by heart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readers:
    """A folder with what the pages take for granted, and the commands in it."""

    folder: Path
    environment: dict[str, str]

    def run(self, words: list[str], **variables: str) -> tuple[int, str]:
        """Run the `cairn` command; returns exit code and output."""
        ended = run_process(tuple(words), self.folder, {**self.environment, **variables})
        return ended.code, ended.out + ended.err

    def prepare(self, *words: str, **variables: str) -> None:
        """Run a command that the pages have behind them."""
        code, out = self.run(list(words), **variables)
        assert code == 0, out


@pytest.fixture(scope="module")
def readers(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    """The run `first-try` of three attempts, which is the second champion; a text, tokens, a model, two buckets."""
    folder, emulator = tmp_path_factory.mktemp("how-to"), s3_server("quick", tmp_path_factory.getbasetemp())
    (folder / "texts").mkdir()
    shutil.copy(TINY_SHAKESPEARE, folder / "texts")
    for name in ("my.txt", "input.txt"):
        shutil.copy(TINY_SHAKESPEARE, folder / name)
    for name, steps in {"older": 4, "my": 12, "run": 12, "first": 1600}.items():
        (folder / f"{name}.toml").write_text(TINY.format(steps=steps), encoding="utf-8")
    answers = (json.dumps({"text": f"Question: {number}? Answer: Ahoy, matey!"}) for number in range(100))
    (folder / "answers.jsonl").write_text("\n".join(answers), encoding="utf-8")
    for first, split in enumerate(("train", "val")):
        np.arange(first, 2000, dtype=np.uint16).tofile(folder / f"{split}.bin")
    (folder / "my_net.py").write_text(OWN, encoding="utf-8")
    pages = {"tune": "fine-tune", "bard": "five-minutes", "pirate": "laptop", "own": "own-network"}
    for name, page in pages.items():
        shown_first, *_ = documented_configurations((HOW_TO / f"{page}.md").read_text(encoding="utf-8"))
        (folder / f"{name}.toml").write_text(shown_first, encoding="utf-8")
    _, offers, _ = re.split(r"```text\n|```\n", (HOW_TO / "skypilot.md").read_text(encoding="utf-8"))[-3:]
    (folder / "offers.toml").write_text(offers, encoding="utf-8")
    clouds = [cloud_server(cloud, tmp_path_factory.getbasetemp()) for cloud in ("gs", "az")]
    for cloud, path in zip(clouds, ("bucket", "devstoreaccount1/container?restype=container"), strict=True):
        urlopen(Request(f"{cloud.endpoint}/{path}", method="PUT", headers={"Authorization": "Bearer any"})).close()
    for name in BUCKETS:
        urlopen(Request(f"{emulator.endpoint}/{name}", method="PUT")).close()
    plain = {"Content-Type": "text/plain"}
    configuration = Request(f"{emulator.endpoint}/your-bucket/runs/bard.toml", method="PUT", headers=plain)
    text = TINY.format(steps=4).replace('"texts/*.txt"', f'"{TINY_SHAKESPEARE}"')
    urlopen(configuration, data=text.encode()).close()
    found = Readers(
        folder=folder,
        environment={
            "HOME": str(folder),
            "SHELL": "/bin/bash",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PREFECT_API_URL": api_url,
            "PREFECT_HOME": str(folder / "prefect"),
            "CAIRN_STORE": "",
            **emulator.environment(),
            **{name: value for cloud in clouds for name, value in cloud.variables.items()},
        },
    )
    found.prepare("train", "older.toml")
    found.prepare("train", "first.toml", "--run-id", "first-try", CAIRN_FAULTS="kill@100,kill@500")
    for name in ("gpt2", "smollm2"):
        found.prepare("export", "champion", name)
    return found


@pytest.fixture(scope="module")
def ended(readers: Readers) -> dict[Path, list[tuple[str, int, str]]]:
    """How each command of each page ended; after one that fails the next ones are run too."""
    return {path: [(line.text, *follow(readers, path, line)) for line in shown(path)] for path in PAGES}


def shown(path: Path) -> list[DocumentedCommand]:
    """The commands of a page that can be run here."""
    found = documented_commands(path.read_text(encoding="utf-8"))
    own = [line for line in found if not line.is_in_sentence and line.words[0] == "cairn"]
    return [line for line in own if line.words[1] != "watch" and "quickstart" not in line.words]


def follow(readers: Readers, path: Path, line: DocumentedCommand) -> tuple[int, str]:
    return readers.run(line.words[1:], **{**TAKEN_FOR_GRANTED.get(path.stem, {}), **line.variables})


@pytest.mark.parametrize("path", [path for path in PAGES if shown(path)], ids=lambda path: path.stem)
def test_every_command_of_a_page_leaves_as_it_says(ended: dict[Path, list[tuple[str, int, str]]], path: Path) -> None:
    answers = {
        line.text: {line.exit_code, *(ANSWERS[word] for word in line.words if word in ANSWERS)} for line in shown(path)
    }
    assert [(text, code, out) for text, code, out in ended[path] if code not in answers[text]] == []
