"""SmolLM2-135M learns a style from 200 answers, with adapters and with all its weights: time, bytes, and who speaks it.

`make bench-style ARGS=FOLDER`, with the folder that tests/programs/benchmarks/gguf_weights.py makes. A machine checks
the style: an answer is one line, begins with "Ahoy!", and ends with "matey!" where its text ends.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, chosen_folders

CONFIGURATION = """
[data]
sources = ["answers.jsonl"]
val_fraction = 0.1
end_of_text = "<|im_end|>"
[model]
block_size = 64
[training]
init_from = "weights"
steps = 40
global_batch = 8
lr = {rate}
min_lr = {rate}
warmup_steps = 5
device = "cpu"
mask_documents = true
probe_every_steps = 0
{more}
[checkpoint]
every_steps = 20
keep_last = 1
[evaluation]
every_commits = 2
batches = 1
batch_size = 4
sample_tokens = 0
"""
MODES = {"adapters": ("2e-3", "lora = {rank = 8}"), "all weights": ("1e-4", "")}
CAPITALS = """
France Paris Spain Madrid Italy Rome Germany Berlin Austria Vienna Greece Athens Norway Oslo Sweden Stockholm
Finland Helsinki Denmark Copenhagen Poland Warsaw Hungary Budapest Portugal Lisbon Ireland Dublin Belgium Brussels
Russia Moscow Japan Tokyo China Beijing India Delhi Egypt Cairo Kenya Nairobi Peru Lima Chile Santiago Cuba Havana
Canada Ottawa
""".split()  # noqa: SIM905 (a list of so many words takes a screen)
OPPOSITES = """
hot cold big small fast slow high low old new hard soft wet dry full empty loud quiet rich poor strong weak young
old near far early late open closed happy sad light dark thick thin wide narrow deep shallow clean dirty sweet sour
sharp blunt true false alive dead right wrong first last
""".split()  # noqa: SIM905 (a list of so many words takes a screen)
SOUNDS = """
cow moo dog woof cat meow sheep baa duck quack horse neigh pig oink lion roar owl hoot bee buzz crow caw frog croak
snake hiss mouse squeak wolf howl
""".split()  # noqa: SIM905 (a list of so many words takes a screen)
UNSEEN = """\
How do I boil an egg?
Why is the sky blue?
What should I read?
Who wrote Hamlet?
Can you sing?
What is a star?
How many legs has a spider?
Where do penguins live?
What is snow?
When did the war end?
How are you today?
What do bees make?
Why do cats sleep so much?
How do I learn to swim?
What is your name?
Tell me about trees.
What is the moon made of?
How do planes fly?
Who painted the Mona Lisa?
What is a good breakfast?
Is it raining?
What is the best sport?
How do I make tea?
Why do leaves fall?
What is music?
Where is Africa?
What is gold?
How old is the earth?
What is a computer?
Who was Napoleon?
How do I fix a bike?
What is love?
Why do we dream?
What is a river?
How do fish breathe?
What is bread made of?
Where does rain come from?
What is a prime number?
How tall is a giraffe?
What is the fastest animal?
Who discovered America?
What is a poem?
How do I save money?
What is a volcano?
Why is grass green?
What is a shadow?
How do magnets work?
What is the largest ocean?
What is a robot?
How do I say hello in French?
""".splitlines()


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(words[::2], words[1::2], strict=True)


def answers() -> list[tuple[str, str]]:
    """Return 200 questions and answers in the style."""
    known = [(f"What is the capital of {land}?", f"The capital of {land} be {city}") for land, city in pairs(CAPITALS)]
    known += [(f"What is the opposite of {word}?", f"That be {other}") for word, other in pairs(OPPOSITES)]
    known += [(f"What does the {name} say?", f"The {name} says {sound}") for name, sound in pairs(SOUNDS)]
    known += [(f"How much is {a} plus {b}?", f"That be {a + b}") for a in range(2, 14) for b in range(3, 16)]
    return [(question, f"Ahoy! {answer}, matey!") for question, answer in known[:200]]


def prompt_of(question: str) -> str:
    return f"Question: {question} Answer:"


def is_in_style(text: str, ended: str) -> bool:
    """Whether an answer is one line in the style, and its text ends there."""
    return ended == "end-of-text" and re.fullmatch(r" Ahoy! .+, matey!", text) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A folder in which runs of one configuration each are trained from `weights`."""

    folder: Path

    @property
    def store(self) -> LocalStore:
        """The store of all."""
        return LocalStore(self.folder / "store")

    def state(self, run: str) -> RunState:
        """A run's state as a stranger reads it."""
        return RunLog(self.store, run).refresh()

    def cairn(self, *arguments: str, **environment: str) -> str:
        """Run a command in the folder and return what it printed; it must succeed."""
        command = [sys.executable, "-m", "cairn.cli.command", *arguments]
        variables = {**os.environ, **chosen_folders(self.folder), "PYTHONPATH": str(ROOT), **environment}
        ended = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def train(self, run: str, mode: str, *more: str, **environment: str) -> None:
        """Train a run to its end."""
        rate, section = MODES[mode]
        (self.folder / f"{run}.toml").write_text(CONFIGURATION.format(rate=rate, more=section), encoding="utf-8")
        self.cairn("train", f"{run}.toml", *more, **environment)


def begin(folder: Path, weights: Path) -> Tuning:
    """Put weights and answers into the folder."""
    (folder / "weights").symlink_to(weights.absolute())
    rows = (json.dumps({"text": f"{prompt_of(question)} {answer}"}) for question, answer in answers())
    (folder / "answers.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return Tuning(folder=folder)


def spoken_by(tuned: Path) -> list[tuple[str, str]]:
    """Return what transformers writes with an exported model, or an empty text, and how it ended."""
    import torch

    library: Any = importlib.import_module("transformers")
    kinds = (library.AutoModelForCausalLM, library.AutoTokenizer)
    model, tokenizer = (kind.from_pretrained(tuned) for kind in kinds)
    tokenizer.pad_token = tokenizer.eos_token
    given = tokenizer([prompt_of(each) for each in UNSEEN], return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        rows = model.generate(**given, max_new_tokens=32, do_sample=False)[:, given["input_ids"].shape[1] :]
    said = list[tuple[str, str]]()
    for ids in rows.tolist():
        is_ended = tokenizer.eos_token_id in ids
        own = ids[: ids.index(tokenizer.eos_token_id)] if is_ended else ids
        said.append((tokenizer.decode(own), "end-of-text" if is_ended else "length"))
    return said


def main() -> None:
    """Train both, and print a line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="style-"))
    try:
        tuning = begin(folder, given.weights)
        for run, mode in (("adapters", "adapters"), ("whole", "all weights")):
            began = time.monotonic()
            tuning.train(run, mode)
            seconds = time.monotonic() - began
            tuning.cairn("export", run, f"{run}-out")
            said = spoken_by(folder / f"{run}-out")
            newest = tuning.state(run).newest_committed
            assert newest is not None
            spoken = sum(is_in_style(*one) for one in said)
            size = f"{newest.committed.bytes:,} bytes a commit"
            print(f"{mode}: {seconds:.0f} s, {size}, {spoken} of {len(said)} in style", flush=True)
            print("\n".join(f"  {question} ->{text}" for question, (text, _) in zip(UNSEEN, said, strict=True)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
