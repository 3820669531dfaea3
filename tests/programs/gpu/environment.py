"""Makes an environment of wheels over the packages of the Python it is run with: for a machine without a network.

    python3 -m tests.programs.gpu.environment WHEELS ENVIRONMENT
    ENVIRONMENT/bin/python -m tests.programs.gpu.check --output OUTPUT

What is in the wheels comes first, then what that Python has: PyTorch and its friends. Nothing of it is changed. This
checkout is installed there as `cairn`, where it lies.
"""

import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main() -> None:
    """Make it."""
    wheels, environment = (Path(word).resolve() for word in sys.argv[1:3])
    venv.create(environment, clear=True)
    own = environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    quick = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quick, "--target", str(own), *found], check=True)
    (own / "packages-below.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    there = ["--python", str(environment / "bin/python"), "install", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", *there, *quick, "--editable", str(ROOT)], check=True)


if __name__ == "__main__":
    main()
