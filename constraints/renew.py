"""Writes the files of this folder from pyproject.toml and constraints.txt: every package of a role with its hashes.

The hashes are those of all files that the package index has of a version, for every system. Needs the program `uv`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
SERVE = ("prefect", "prefect-kubernetes", "fastapi", "sqlalchemy")
# The build for machines without a GPU stands in no common index: its file for CPython 3.11 on x86-64 Linux.
TORCH_FOR_CPUS = ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)
CUDA = re.compile(r"(nvidia-|cuda-|triton)")
COMPILE = ("uv", "pip", "compile", "--no-config", "--universal", "--generate-hashes", "--python-version", "3.11")
QUIET = ("--no-header", "--no-annotate", "--quiet", "--only-binary", ":all:")


def packages(*arguments: str, stdin: str = "") -> dict[str, str]:
    """Return the lines of each package that these arguments of the compiler lead to."""
    command = [*COMPILE, *QUIET, "--constraint", "constraints.txt", *arguments]
    found = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"{found.stderr.strip()}\nrule: a package index is reachable, and constraints.txt fits pyproject.toml")
    blocks = re.findall(r"^\S.*(?:\n .*)*", found.stdout, re.MULTILINE)
    return {block.partition("=")[0]: block for block in blocks}


def write(role: str, use: str, blocks: dict[str, str], before: str = "") -> None:
    """Write the file of a role."""
    head = f"# {use} Written by `make lock` from constraints.txt.\n{before}"
    (FOLDER / f"{role}.txt").write_text(head + "".join(f"{block}\n" for _, block in sorted(blocks.items())))


def main() -> None:
    """Write all roles."""
    if shutil.which("uv") is None:
        sys.exit("`uv` is not installed; rule: the program is on the PATH, as docs.astral.sh/uv says")
    run, develop = packages("pyproject.toml"), packages("pyproject.toml", "--extra", "dev")
    run["torch"] += "".join(f" \\\n    --hash=sha256:{digest}" for digest in TORCH_FOR_CPUS)
    cuda = {name: block for name, block in develop.items() if CUDA.match(name)}
    write("torch", "The one package of which there are several builds.", {"torch": run.pop("torch")})
    needed = {name: run[name] for name in run.keys() - cuda.keys()}
    write("run", "To train, and to look at runs.", needed, before="--requirement torch.txt\n")
    more = {name: develop[name] for name in develop.keys() - run.keys() - cuda.keys() - {"torch"}}
    write("develop", "To work on Cairn.", more, before="--requirement run.txt\n")
    write("cuda", "What torch's build for GPUs needs on Linux.", cuda)
    write("serve", "For a machine with Prefect's server or worker alone.", packages("-", stdin="\n".join(SERVE)))
    write("audit", "To ask for known holes.", packages("-", stdin="pip-audit"))


if __name__ == "__main__":
    main()
