"""A whole run in a bucket: killed and preempted it ends with the bits of a local run, and keeps its secrets."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_store import S3Store
from tests.clouds.servers import CLOUDS, cloud_server
from tests.crash.leaks import found_in
from tests.crash.training_command import Command
from tests.s3.servers import CEPH, s3_server
from tests.session_folder import session_folder

# Quick witness: tests/crash/test_store_refuses.py, a run on S3 that is refused and goes on.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run-in-a-bucket")]
CANARIES = {
    "AWS_ACCESS_KEY_ID": "CANARYKEYID0123456789",
    "AWS_SECRET_ACCESS_KEY": "canary-secret-0123456789",
    "AWS_SESSION_TOKEN": "canary-token-0123456789",
}
"""What the emulator is shown, which lets anybody in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbed:
    """A command whose trainer met a SIGKILL and whose run, later, a SIGTERM; and what must be found nowhere."""

    command: Command
    secrets: dict[str, str]


@pytest.fixture(scope="module", params=["quick", CEPH, *CLOUDS])
def disturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Disturbed:
    """The run, trained to its end in a bucket of a server that child processes reach too."""
    kind, base = request.param, tmp_path_factory.getbasetemp()
    if kind in CLOUDS:
        cloud = cloud_server(kind, base)
        store, environment, secrets = cloud.store(), dict(cloud.variables), {"its key": cloud.secret}
    else:
        server = s3_server(kind, base)
        store, secrets = S3Store(server.bucket(), "disturbed"), CANARIES if kind == "quick" else {}
        environment = {**server.environment(), **secrets}
    environment["CAIRN_FAULTS"] = "kill@23,preempt@41"
    command = Command(tmp_path_factory.mktemp("disturbed"), api_url, store=store, environment=environment)
    command.train(exit_code=75)
    command.train()
    return Disturbed(command=command, secrets=secrets)


def test_a_killed_and_preempted_run_in_a_bucket_ends_with_the_bits_of_a_local_one(
    disturbed: Disturbed, undisturbed_sha256: str
) -> None:
    assert disturbed.command.state_sha256() == undisturbed_sha256
    assert disturbed.command.reasons() == ["lost", "preempted", "completed"]
    assert disturbed.command.state().attempts[2].started.first_step == 41


def test_no_credential_is_in_anything_a_run_writes(disturbed: Disturbed) -> None:
    written = dict(everything_written(disturbed.command.folder, disturbed.command.store))
    assert any(name.endswith(".db") for name in written), "Prefect's database must be among what is searched"
    assert [name for name, data in written.items() if found_in(data, disturbed.secrets)] == []


def everything_written(folder: Path, store: ObjectStore) -> Iterator[tuple[str, bytes]]:
    """Yield every object of the run and every file: outputs, caches, and what the Prefect server keeps."""
    for room in ("runs", "data", "models"):
        for key in store.keys(room):
            yield f"{store.url}/{key}", store.read(key)
    for path in {*folder.rglob("*"), *(session_folder() / "prefect").rglob("*")}:
        if path.is_file():
            yield str(path), path.read_bytes()
