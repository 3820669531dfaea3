"""What is installed has the bytes that were chosen: every package of every role by hash, for more systems than one."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "constraints"
UNBUILT = "--no-deps --only-binary :all:"
ROLES = sorted(path.stem for path in FOLDER.glob("*.txt"))
BLOCK = re.compile(
    r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$"
)


def blocks(role: str) -> list[str]:
    text = (FOLDER / f"{role}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("#", "--requirement "))]
    return re.findall(r"^\S.*(?:\n .*)*", "\n".join(lines), re.MULTILINE)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(role: str) -> dict[str, str]:
    return {normalized(found[1]): found[2] for block in blocks(role) if (found := BLOCK.match(block))}


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", FOLDER / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("role", ROLES)
def test_every_package_of_a_role_is_one_version_with_hashes(role: str) -> None:
    assert blocks(role) and [block for block in blocks(role) if not BLOCK.match(block)] == []


def test_the_roles_have_the_versions_that_are_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {normalized(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    locked = {name: version for role in ROLES for name, version in versions(role).items()}
    assert {name: locked.get(name) for name in tested} == tested


def test_the_hashes_are_of_files_for_several_systems_and_pythons() -> None:
    (torch,) = blocks("torch")
    assert torch.count("--hash=") >= 10


@pytest.mark.parametrize("name", ["Makefile", "deployments/Containerfile"])
def test_nothing_but_cairn_is_installed_without_a_hash(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").replace("$(HASHED)", "--require-hashes")
    installs = re.findall(r"(?:pip|\$\(PIP\)) install[^&;\n]*", text)
    bare = [line for line in installs if "--require-hashes" not in line]
    assert len(installs) >= 2 and len(bare) == 1
    assert "--no-deps --no-build-isolation" in bare[0]


def test_what_is_installed_by_its_hash_is_neither_resolved_nor_built() -> None:
    makefile, image = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "deployments/Containerfile"))
    assert re.findall(r"^HASHED := (.*)$", makefile, re.MULTILINE) == [f"{UNBUILT} --require-hashes"]
    hashed = [line for line in image.splitlines() if "--require-hashes" in line]
    assert hashed and all(f"{UNBUILT} --require-hashes" in line for line in hashed)


def test_the_image_installs_the_files_that_make_train_installs() -> None:
    makefile, image = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "deployments/Containerfile"))
    trainer = makefile[makefile.index("\n$(TRAINER):") : makefile.index("\n$(DEVELOPER):")]
    files = [re.findall(r"--requirement (constraints/\w+\.txt)", text) for text in (trainer, image)]
    assert files[0] == files[1] == [f"constraints/{name}.txt" for name in ("torch", "run", "cuda")]


@pytest.mark.parametrize(("target", "roles"), [("train", ["run"]), ("up", ["run"]), ("test", ["run", "develop"])])
def test_only_who_works_on_cairn_installs_what_that_needs(target: str, roles: list[str], tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path / 'none'}", f"PYTHON={sys.executable}", target]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"install .*--requirement constraints/(run|develop)\.txt", printed) == roles


def test_training_needs_none_of_the_developers_packages() -> None:
    assert versions("run").keys() & {"playwright", "mypy", "moto", "transformers", "pytest", "ruff"} == set()


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "no hole is known in 1 packages"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}]}, 1, "a 1: X-1"),
        (
            {"dependencies": [{"name": "a", "skip_reason": "not found"}]},
            3,
            "could not ask about 1 of 1 packages, the first: not found",
        ),
        ({"dependencies": []}, 3, "could not ask about 0 of 0 packages"),
        (None, 3, "could not ask"),
    ],
)
def test_an_audit_tells_a_hole_from_an_answer_that_it_did_not_get(report: object, code: int, words: str) -> None:
    found = audit().verdict("" if report is None else json.dumps(report))
    assert found[0] == code and words in found[1]


def test_the_images_that_are_not_prefects_or_ours_are_named_by_digest() -> None:
    text = (ROOT / "deployments" / "Containerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (\S+)$", text, re.MULTILINE) == ["${PYTHON_IMAGE}"]
    named = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    for manifest in (ROOT / "deployments" / "kubernetes").glob("*.yaml"):
        named += re.findall(r"^\s+image: (\S+)", manifest.read_text(encoding="utf-8"), re.MULTILINE)
    others = [image for image in named if not image.startswith(("cairn:", "prefecthq/prefect:3.8.8-"))]
    assert len(others) == 2 and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in others)
    packages = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ")}
    assert {"cairn", "flows", "reports", "tasks", "model", "storage"} <= packages
