"""A whole run on an S3 server: killed and preempted it ends with the bits of a local run, and keeps its secrets."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_store import S3Store
from tests.clouds.servers import CLOUDS, cloud_server
from tests.crash.training_command import Command
from tests.s3.servers import CEPH, S3Server, s3_server
from tests.session_folder import session_folder

CANARIES = {
    "AWS_ACCESS_KEY_ID": "CANARYKEYID0123456789",
    "AWS_SECRET_ACCESS_KEY": "canary-secret-0123456789",
    "AWS_SESSION_TOKEN": "canary-token-0123456789",
}
FAULTS = "kill@23,preempt@41"


@pytest.fixture(params=["quick", CEPH])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """An S3 server that child processes reach too."""
    return s3_server(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture
def store(server: S3Server) -> ObjectStore:
    """A prefix of its own."""
    return S3Store(server.bucket(), uuid.uuid4().hex)


def train_with_faults(tmp_path: Path, api_url: str, store: ObjectStore, environment: dict[str, str]) -> Command:
    """Train to the end through a SIGKILL of the trainer and a SIGTERM; returns the command."""
    command = Command(tmp_path, api_url, store=store, environment={**environment, "CAIRN_FAULTS": FAULTS})
    command.train(exit_code=75)
    command.train()
    return command


@pytest.mark.slow  # quick witness: tests/crash/test_store_refuses.py, a run on S3 that is refused and goes on
def test_a_killed_and_preempted_run_on_s3_ends_with_the_bits_of_a_local_one(
    tmp_path: Path, api_url: str, server: S3Server, store: ObjectStore, undisturbed_sha256: str
) -> None:
    command = train_with_faults(tmp_path, api_url, store, server.environment())
    state = command.state()
    assert command.state_sha256() == undisturbed_sha256
    assert [attempt.ended.reason for attempt in state.attempts if attempt.ended] == ["lost", "preempted", "completed"]
    assert state.attempts[2].started.resumed_from is not None
    assert state.attempts[2].started.resumed_from.step == 41


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_killed_and_preempted_run_in_a_cloud_ends_with_the_bits_of_a_local_one_and_keeps_its_key(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, api_url: str, cloud: str, undisturbed_sha256: str
) -> None:
    server = cloud_server(cloud, tmp_path_factory.getbasetemp())
    store = server.store()
    command = train_with_faults(tmp_path, api_url, store, dict(server.variables))
    ends = [attempt.ended.reason for attempt in command.state().attempts if attempt.ended]
    assert (command.state_sha256(), ends) == (undisturbed_sha256, ["lost", "preempted", "completed"])
    secret = server.secret.encode()
    assert [name for name, data in everything_written(tmp_path, session_folder(), store) if secret in data] == []


@pytest.mark.slow
def test_no_credential_is_in_anything_a_run_writes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, api_url: str
) -> None:
    server = s3_server("quick", tmp_path_factory.getbasetemp())  # the emulator lets anybody in
    store = S3Store(server.bucket(), uuid.uuid4().hex)
    train_with_faults(tmp_path, api_url, store, {**server.environment(), **CANARIES})
    written = dict(everything_written(tmp_path, session_folder() / "prefect", store))
    assert any(name.endswith(".db") for name in written), "Prefect's database must be among what is searched"
    secrets = [value.encode() for value in CANARIES.values()]
    assert [name for name, data in written.items() if any(secret in data for secret in secrets)] == []


def everything_written(folder: Path, session: Path, store: ObjectStore) -> Iterator[tuple[str, bytes]]:
    """Yield every object of the run and every file: outputs, caches, and what the Prefect server keeps."""
    for room in ("runs", "data", "models"):
        for key in store.keys(room):
            yield f"{store.url}/{key}", store.read(key)
    for path in {*folder.rglob("*"), *session.rglob("*")}:
        if path.is_file():
            yield str(path), path.read_bytes()
