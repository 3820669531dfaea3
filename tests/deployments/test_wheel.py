"""The wheel as a machine without the checkout has it: what is in it, and that it trains."""

import email
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.environment_allow_list import restrict
from tests.programs.benchmarks.bench_install import PARTS, build_wheel

ROOT = Path(__file__).parents[2]
READ = """
from pathlib import Path
from cairn.tasks.configuration.configuration_source import configuration_folder, read_configuration
config = read_configuration("quickstart", overrides=["evaluation.suite=repetition"], environment={})
print(config.training.steps, config.evaluation.evaluators[0].name, configuration_folder("quickstart"))
"""
COPIED = (".py", ".js", ".svg", ".toml", ".typed", ".css", ".j2", ".jsonl", ".yaml", ".bash", ".zsh", ".fish")
pytestmark = pytest.mark.xdist_group("wheel")


def quietly(*command: str | Path, folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder of packages that is the unpacked wheel; what Cairn needs is this environment's."""
    folder = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_is_called_cairn_train_and_runs_on_any_system(wheel: Path) -> None:
    assert wheel.name.startswith("cairn_train-") and wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_every_module_page_configuration_and_suite(names: frozenset[str]) -> None:
    here = {
        str(path.relative_to(ROOT) if part == "cairn" else Path("cairn") / path.relative_to(ROOT))
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.suffix in COPIED and "__pycache__" not in path.parts
    }
    assert {name for name in here - names if not name.startswith("cairn/deployments/kubernetes/")} == set()


def test_the_wheel_installs_one_name(names: frozenset[str]) -> None:
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"cairn"}


def test_what_developers_need_is_asked_for_by_extras_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        needed = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    plain = {line.split(";")[0].strip() for line in needed if "extra ==" not in line}
    assert plain == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def test_the_installed_quickstart_is_found_by_its_name_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = {**restrict(os.environ), "PYTHONPATH": str(installed)}
    printed = quietly(sys.executable, "-P", "-c", READ, folder=tmp_path / "empty", environment=environment)
    assert printed.split() == ["500", "repetition", str(installed / "cairn" / "deployments")]


def test_an_installed_cairn_does_not_take_a_commit_of_somebody_elses_checkout_for_its_own(
    installed: Path, tmp_path: Path
) -> None:
    quietly("git", "init", "--quiet", folder=tmp_path)
    author = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    quietly("git", *author, "commit", "--quiet", "--allow-empty", "--message", "something else", folder=tmp_path)
    code = "from cairn.tasks.machine.placement import code_version; print(code_version())"
    environment = {**restrict(os.environ), "PYTHONPATH": str(installed)}
    printed = quietly(sys.executable, "-P", "-c", code, folder=tmp_path, environment=environment)
    assert printed.endswith("+unknown\n")


# Quicker: test_the_installed_quickstart_is_found_by_its_name_in_an_empty_folder.
@pytest.mark.slow
def test_the_command_of_an_installed_wheel_trains_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    place, home = tmp_path / "environment", tmp_path / "home"
    home.mkdir()
    venv.create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")  # its own .pth files are not followed
    install = ("install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel)
    quietly(sys.executable, "-m", "pip", "--python", place / "bin" / "python", *install, folder=home)
    environment = {**restrict(os.environ), "HOME": str(home)}
    environment.pop("PYTHONPATH", None)
    command = (place / "bin" / "cairn", "train", "quickstart", "--set", "training.steps=60")
    printed = quietly(*command, folder=home, environment=environment)
    assert "run quickstart: trained" in printed
    assert (home / "cairn-store").is_dir()
