"""Asks whether holes are known in the packages of this folder: exit code 0 none, 1 some, 3 where it could not ask."""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FOLDER = Path(__file__).parent
FOUND, NOT_ASKED = 1, 3


def verdict(report: str) -> tuple[int, str]:
    """Return the exit code and the words for a report of pip-audit as JSON; an empty one means that it has failed."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return NOT_ASKED, "could not ask: pip-audit made no report"
    skipped = [package["skip_reason"] for package in packages if "skip_reason" in package]
    holes = [f"{p['name']} {p['version']}: {hole['id']}" for p in packages for hole in p.get("vulns", ())]
    if holes:
        return FOUND, "\n".join([*holes, f"{len(holes)} holes are known in {len(packages)} packages"])
    if skipped or not packages:
        why = f", the first: {skipped[0]}" if skipped else ""
        return NOT_ASKED, f"could not ask about {len(skipped)} of {len(packages)} packages{why}"
    return 0, f"no hole is known in {len(packages)} packages"


def ask(files: list[Path], folder: Path) -> tuple[int, str]:
    """Install pip-audit into `folder` and let it read these files."""
    venv.create(folder, with_pip=True)
    python, report = folder / "bin" / "python", folder / "report.json"
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "install", "--require-hashes", "--no-deps"]
    if subprocess.run([*pip, "--requirement", FOLDER / "audit.txt"], check=False).returncode:
        return NOT_ASKED, "could not ask: no package index could be reached that has pip-audit; see above"
    chosen = [word for file in files for word in ("--requirement", file)]
    options = ["--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json", f"--output={report}"]
    subprocess.run([python, "-m", "pip_audit", *options, *chosen], check=False)
    return verdict(report.read_text(encoding="utf-8") if report.is_file() else "")


def main() -> None:
    """Ask about all roles, or about the files that are given."""
    with tempfile.TemporaryDirectory(prefix="cairn-audit-") as folder:
        given = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.txt"))
        code, words = ask(given, Path(folder))
    print(words, file=sys.stderr if code else sys.stdout)
    sys.exit(code)


if __name__ == "__main__":
    main()
