"""Runs a part of the suite in foreign environments: `python -m tests.matrix [--only WORD] [PYTEST ARGUMENTS]`.

Prints one line for each environment and exits with 1 if a test failed in one of them. The environments: versions of
Python, each of which has its packages in `.venv-3.12` or the like (`make VENV=.venv-3.12 PYTHON=python3.12 .venv`), the
oldest and the newest Prefect of pyproject.toml's range (each with the tests that touch it, in front of this
environment's packages), the user nobody (as root only), a checkout path with spaces, and variables of a caller. The
argument `tests` runs the whole default suite in each of them: twelve runs in a row.
"""

import argparse
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK_PART = ("tests/house", "tests/cairn", "tests/flows", "tests/tasks", "tests/reports")
OF_PREFECT = re.compile(
    r"tests/(?:flows|deployments)/test_|tests/crash/test_(?:approval|chain_graph|continued|deploy|ephemeral|evaluate_dep"
    r"|last_states|notify|pause|prefect|stale|store_credentials|tokenize_part|train_set|watch_deployed|both_executors)"
    r"|tests/security/test_(?:foreign_folder|guarded_server|up_password|cancelled_from_outside)"
)
VERSIONS = ("3.11", "3.12", "3.13")
DEAD = "http://127.0.0.1:9"
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "FORCE_COLOR=1": {"FORCE_COLOR": "1"},
    "TERM=dumb": {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "20"},
    "a dead proxy": dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD),
    "LC_ALL=C PYTHONUTF8=0": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "foreign settings": {
        "AWS_ENDPOINT_URL": DEAD,
        "CAIRN_STORE": "s3://nowhere/at-all",
        "PREFECT_API_URL": f"{DEAD}/api",
        "TZ": "Asia/Kathmandu",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Where and how pytest is started; `absent` says why this cannot be tried here."""

    name: str
    tree: Path = ROOT
    variables: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    python: Path = Path(sys.executable)
    absent: str = ""
    prefect: Sequence[str] = ()


def all_surroundings(folder: Path) -> Iterator[Surroundings]:
    """Yield every environment; copies of the tree are made in `folder` when their turn comes."""
    for version in VERSIONS:
        own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
        python = Path(sys.executable) if own else ROOT / f".venv-{version}" / "bin" / "python"
        absent = "" if python.exists() else f"make VENV=.venv-{version} PYTHON=python{version} .venv"
        yield Surroundings(name=f"Python {version}", python=python, absent=absent)
    for name, prefect in prefect_range().items():
        home = folder / name.replace(" ", "-")  # the first line of a program can name no path with a space
        yield Surroundings(name=name, python=home / "bin" / "python", prefect=prefect)
    yield as_nobody(folder / "of-nobody")
    spaced = folder / "a path with spaces"
    yield Surroundings(name="a path with spaces", tree=spaced, python=spaced / ".venv" / "bin" / "python")
    for name, variables in VARIABLES.items():
        yield Surroundings(name=name, variables=variables)


def prefect_range() -> Mapping[str, Sequence[str]]:
    """Return the oldest and the newest Prefect that pyproject.toml allows, as pip is asked for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (allowed,) = [name for name in project["dependencies"] if name.startswith("prefect<")]
    oldest, beneath = f"prefect=={allowed.partition('>=')[2]}", ("sqlalchemy", "fastapi")  # 3.8.8 bounds neither
    return {"oldest Prefect": (oldest,), "newest Prefect": (allowed, *beneath)}


def install_prefect(around: Surroundings, log: Path) -> bool:
    """Make an environment in which this Prefect, and what it needs, lie in front of this environment's packages."""
    home = around.python.parents[1]
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "these.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    cairn = around.python.with_name("cairn")
    cairn.write_text(f"#!{around.python}\nfrom cairn.cli.command import main\n\nmain()\n")
    cairn.chmod(0o755)
    pip = [str(around.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--upgrade"]
    with log.open("wb") as output:  # the program `prefect` too, also where this environment has the same version
        commands = ([*pip, "--force-reinstall", "--no-deps", around.prefect[0]], [*pip, *around.prefect])
        return all(subprocess.run(command, stdout=output, stderr=output).returncode == 0 for command in commands)


def as_nobody(tree: Path) -> Surroundings:
    """Return the surroundings of an unprivileged user, which only root can take on."""
    name = "the user nobody"
    if os.geteuid() != 0:
        return Surroundings(name=name, absent="this user is not root, so every run is one without privileges")
    command = ["setpriv", "--reuid=nobody", "--clear-groups", "--"]
    closed = [path for path in Path(sys.base_prefix).parents if not path.stat().st_mode & 0o001]
    if closed:  # the interpreter lies in a home: this run sees only that part of the home, and may read it
        script = " && ".join(
            [
                f"mkdir {shlex.quote(str(tree))}-python",
                f"mount --bind {shlex.quote(sys.base_prefix)} {shlex.quote(str(tree))}-python",
                f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed[-1]))}",
                f"mkdir -p {shlex.quote(sys.base_prefix)}",
                f"mount --move {shlex.quote(str(tree))}-python {shlex.quote(sys.base_prefix)}",
                'exec "$@"',
            ]
        )
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    return Surroundings(
        name=name,
        tree=tree,
        variables={"HOME": str(tree), "USER": "nobody", "LOGNAME": "nobody"},
        before=command,
        python=tree / ".venv" / "bin" / "python",
    )


def copy_tree(target: Path, *, owner: str | None) -> None:
    """Copy what git tracks, and what it would, beside a link to this environment's packages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(".venv"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    if owner is not None:
        target.parent.chmod(0o755)
        subprocess.run(["chown", "-Rh", str(pwd.getpwnam(owner).pw_uid), str(target)], check=True)


def run_in(around: Surroundings, arguments: Sequence[str], log: Path) -> bool:
    """Run pytest there, print the line, and return whether all passed; a failure's output stays in `log`."""
    print(f"{around.name:24}", end="", flush=True)
    if around.absent:
        print(f"absent ({around.absent})", flush=True)
        return True
    if around.prefect and not install_prefect(around, log):
        print(f"absent (pip could not install it: {log})", flush=True)
        return True
    if around.tree != ROOT:
        copy_tree(around.tree, owner="nobody" if around.before else None)
    command = [*around.before, str(around.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(around.tree), **around.variables}
    with log.open("wb") as output:
        code = subprocess.run(command, cwd=around.tree, env=environment, stdout=output, stderr=output).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(f"{'passed' if code == 0 else 'FAILED'}  {lines[-1] if lines else 'no output'}", flush=True)
    if code:
        print(*(f"    {line}" for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n")
        print(f"    the whole output: {log}", flush=True)
    return code == 0


def main() -> None:
    """Run all, or those whose name contains the given word."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only the environments whose name contains it")
    given, arguments = parser.parse_known_args()
    is_named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    of_prefect = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if OF_PREFECT.match(str(path))]
    folder = Path(tempfile.mkdtemp(prefix="cairn-matrix-"))
    chosen = [around for around in all_surroundings(folder) if given.only in around.name]
    parts = [[] if is_named else of_prefect if around.prefect else QUICK_PART for around in chosen]
    passed = [
        run_in(around, [*arguments, *part], folder / f"{number}.txt")
        for number, (around, part) in enumerate(zip(chosen, parts, strict=True))
    ]
    if not all(passed) or not chosen:
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
