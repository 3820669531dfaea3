"""Downloads what a machine with PyTorch lacks to run the GPU check, as wheels (`make gpu-wheels`).

For a machine that reaches no network, where `tests.programs.gpu.environment` puts them to use. Versions are those of
constraints/; what PyTorch and transformers bring is left out, and so is what only S3 and SQL need.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[3] / "constraints"
THERE = frozenset(
    ("torch", "numpy", "pyarrow", "sympy", "mpmath", "networkx", "pillow", "matplotlib", "contourpy",
     "cycler", "fonttools", "kiwisolver", "pyparsing", "tokenizers", "huggingface-hub", "hf-xet", "safetensors",
     "regex", "tqdm")
)  # fmt: skip
"""On every machine with PyTorch, transformers, matplotlib and pyarrow."""
NOT_NEEDED = frozenset(("botocore", "aiobotocore", "s3fs", "duckdb", "pywin32", "async-timeout", "colorama", "plotly"))
"""By S3, SQL, pictures in a notebook, and other systems or Pythons."""
TESTS = {"pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "hypothesis", "sortedcontainers"}
NEWEST_GLIBC = 39


def main() -> None:
    """Download them and say how much they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--python", default="3.12")
    given = parser.parse_args()
    subprocess.run([*download_words(given.python, given.into), *needed()], check=True)
    size = sum(path.stat().st_size for path in given.into.glob("*.whl"))
    print(f"{given.into}: {size / 2**20:.1f} MiB")


def needed() -> list[str]:
    """Return the packages to bring, each with its version."""
    run, develop = (pins(name) for name in ("run.txt", "develop.txt"))
    brought = {name: version for name, version in run.items() if name not in THERE | NOT_NEEDED}
    brought |= {name: version for name, version in develop.items() if name in TESTS}
    return [f"{name}=={version}" for name, version in sorted(brought.items())]


def pins(name: str) -> dict[str, str]:
    """Return each package of a list of constraints with its version."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", (CONSTRAINTS / name).read_text(), flags=re.MULTILINE))


def download_words(python: str, into: Path) -> list[str]:
    """Return the command that downloads wheels for this Python on Linux, x86-64."""
    platforms = ["manylinux1_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    platforms += [f"manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC + 1)]
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(into),
    ]
    words += ["--python-version", python, "--implementation", "cp"]
    return words + [word for platform in platforms for word in ("--platform", platform)]


if __name__ == "__main__":
    main()
