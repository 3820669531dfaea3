"""What it takes to install Cairn: packages, download, disk and seconds, in an environment that was empty.

Builds the wheel, downloads it with what it needs at the versions of constraints.txt, and installs it from those files.
Which build of torch that is, the package index decides. `--train` then trains the quickstart there, in an empty folder.
`python -m tests.programs.benchmarks.bench_install [--extra dev] [--train]`
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
PARTS = ("cairn", "deployments", "flows", "model", "reports", "storage", "tasks")


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the tree, for a build leaves folders beside its sources; returns its path."""
    source, built = folder / "source", folder / "built"
    source.mkdir()
    built.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD, built], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = built.iterdir()
    return wheel


def bytes_in(folder: Path) -> int:
    """Return the sizes of all files together, each file once however many names it has."""
    found = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum({(file.st_dev, file.st_ino): file.st_size for file in found}.values())


def seconds(*command: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> float:
    """Run a command to its end and return how long it took."""
    start = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return time.monotonic() - start


def measure(folder: Path, extra: str, *, train: bool) -> None:
    """Install into an environment below `folder` and print the numbers."""
    wheel, files, place = build_wheel(folder), folder / "files", folder / "environment"
    venv.create(place, with_pip=True)
    before, wanted = bytes_in(place), f"{wheel}[{extra}]" if extra else str(wheel)
    pip = (place / "bin" / "python", "-m", "pip", "--no-input", "-qq", "--no-cache-dir")
    exact = ("--only-binary", ":all:", "--constraint", "constraints.txt")
    fetched = seconds(*pip, "download", *exact, "--dest", files, wanted)
    installed = seconds(*pip, "install", *exact, "--no-index", "--find-links", files, wanted)
    torch = next(path.name.split("-")[1] for path in files.glob("torch-*"))
    print(f"{'cairn-train' + (f'[{extra}]' if extra else '')}, Python {sys.version.split()[0]}, torch {torch}")
    print(f"  packages  {len(list(files.iterdir()))}")
    print(f"  download  {bytes_in(files) / 1e6:,.0f} MB in {fetched:.0f} s")
    print(f"  on disk   {(bytes_in(place) - before) / 1e6:,.0f} MB, installed in {installed:.0f} s")
    if train:
        (folder / "empty").mkdir()
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        took = seconds(place / "bin" / "cairn", "train", "quickstart", folder=folder / "empty", environment=plain)
        print(f"  cairn train quickstart: {took:.0f} s")


def main() -> None:
    """Measure the plain installation, or one with an extra."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", default="", help="an extra of pyproject.toml, such as dev")
    parser.add_argument("--train", action="store_true", help="train the quickstart in the environment")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-install-") as folder:
        measure(Path(folder), given.extra, train=given.train)


if __name__ == "__main__":
    main()
