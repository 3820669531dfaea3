"""Why a pod ended, from the API to the receipt: the init container's program as a process, and the claim after it."""

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cairn.tasks.attempt.preemption_notice import kubernetes_reason
from cairn.tasks.policy.failures import Evidence, classify
from cairn.tasks.policy.termination import TerminationReason

PROGRAM = Path(__file__).parents[2] / "deployments" / "kubernetes" / "ended_pods.py"


def failed(name: str, at: str, of_container: str, *, hostname: str = "", **status: Any) -> dict[str, Any]:
    """A pod as the API answers it, with the reason of its container's end if it had one."""
    ends = [{"name": "cairn", "state": {"terminated": {"exitCode": 137, "reason": of_container, "finishedAt": at}}}]
    return {
        "metadata": {"name": name},
        "spec": {"hostname": hostname} if hostname else {},
        "status": {"phase": "Failed", "startTime": at, "containerStatuses": ends if of_container else [], **status},
    }


DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]}
PODS = [
    failed("cairn-bard-0-qqq", "2026-03-01T12:00:00Z", "OOMKilled", hostname="cairn-bard-0"),
    failed("cairn-bard-0-aaa", "2026-03-01T10:00:00Z", "Error", hostname="cairn-bard-0"),
    failed("cairn-bard-1-zzz", "2026-03-01T11:00:00Z", "Error", hostname="cairn-bard-1", **DISRUPTED),
    failed("bard-attempt-2-x7", "2026-03-01T09:00:00Z", "", reason="Evicted"),
]


class Api(BaseHTTPRequestHandler):
    """Kubernetes' API as far as the program asks it."""

    asked: ClassVar[list[tuple[str, str]]] = []
    pods: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        body = json.dumps({"kind": "PodList", "items": self.pods}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Kubernetes mounts for a service account, and the server's key."""
    folder, key = tmp_path_factory.mktemp("account"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = partial(key.private_bytes, serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (folder / "key.pem").write_bytes(plain(serialization.NoEncryption()))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "token").write_text("the pod's token\n", encoding="utf-8")
    (folder / "namespace").write_text("cairn", encoding="utf-8")
    return folder


@contextmanager
def serving(account: Path, pods: list[dict[str, Any]]) -> Iterator[int]:
    """Serve the API with these pods; yields the port."""
    api = type("Answers", (Api,), {"pods": pods})
    server = HTTPServer(("127.0.0.1", 0), api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "ca.crt", account / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def port(account: Path) -> Iterator[int]:
    with serving(account, PODS) as found:
        yield found


def write(path: Path, account: Path, port: int) -> str:
    """Run the program as the init container does; returns what it says."""
    environment = {
        "CAIRN_SERVICE_ACCOUNT": str(account),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT_HTTPS": str(port),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(path)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_the_trainer_learns_why_kubernetes_ended_the_pod_of_a_host(account: Path, port: int, tmp_path: Path) -> None:
    path = tmp_path / "ended-pods"
    assert write(path, account, port) == ""
    assert Api.asked[-1] == (
        "/api/v1/namespaces/cairn/pods?fieldSelector=status.phase%3DFailed",
        "Bearer the pod's token",
    )
    reason = partial(kubernetes_reason, {"CAIRN_ENDED_PODS": str(path)})
    hosts = ("cairn-bard-0", "cairn-bard-1", "bard-attempt-2-x7", "another")
    assert [reason(host) for host in hosts] == ["OOMKilled", "DeletionByTaintManager", "Evicted", ""]


def disrupted(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


NEVER_STARTED = {
    "initContainerStatuses": [{"name": "why", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]
}
WAITS = {"containerStatuses": [{"name": "cairn", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
ENDS: dict[str, tuple[list[dict[str, Any]], TerminationReason]] = {
    "killed for memory": ([failed("p", "1", "OOMKilled")], TerminationReason.OOM),
    "evicted": ([failed("p", "1", "", reason="Evicted")], TerminationReason.PREEMPTED),
    "evicted, and its container said so too": (
        [failed("p", "1", "Error", reason="Evicted")],
        TerminationReason.PREEMPTED,
    ),
    "drained": ([failed("p", "1", "Error", **disrupted("EvictionByEvictionAPI"))], TerminationReason.PREEMPTED),
    "pushed out by another pod": (
        [failed("p", "1", "", **disrupted("PreemptionByScheduler"))],
        TerminationReason.PREEMPTED,
    ),
    "its node is gone": ([failed("p", "1", "", **disrupted("DeletionByPodGC"))], TerminationReason.PREEMPTED),
    "its node was shut down": ([failed("p", "1", "", reason="NodeShutdown")], TerminationReason.PREEMPTED),
    "its node has no room": (
        [failed("p", "1", "Error", **disrupted("TerminationByKubelet"))],
        TerminationReason.PREEMPTED,
    ),
    "too long": ([failed("p", "1", "", reason="DeadlineExceeded")], TerminationReason.PREEMPTED),
    "deleted by a person": ([], TerminationReason.LOST),
    "restarted by its JobSet": ([failed("p-other", "2", "OOMKilled")], TerminationReason.LOST),
    "its container failed": ([failed("p", "1", "Error")], TerminationReason.LOST),
    "a later pod of its name never started": (
        [failed("p", "1", "OOMKilled"), failed("p", "2", "", **NEVER_STARTED)],
        TerminationReason.OOM,
    ),
    "a later pod of its name waits for its image": (
        [failed("p", "1", "OOMKilled"), failed("p", "2", "") | {"status": WAITS}],
        TerminationReason.OOM,
    ),
    "twice, the last time by a drain": (
        [failed("p", "2", "Error", **disrupted("EvictionByEvictionAPI")), failed("p", "1", "OOMKilled")],
        TerminationReason.PREEMPTED,
    ),
}


def hosted(pods: list[dict[str, Any]], host: str) -> list[dict[str, Any]]:
    """The pods of an end, of this host where they are those of `p`."""
    names = (pod["metadata"]["name"].replace("p", host, 1) for pod in pods)
    return [pod | {"metadata": {"name": name}} for pod, name in zip(pods, names, strict=True)]


@pytest.fixture(scope="module")
def ended(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program has written of an API that knows all these ends at once."""
    path = tmp_path_factory.mktemp("ended") / "pods"
    every = [pod for number, (pods, _) in enumerate(ENDS.values()) for pod in hosted(pods, f"host-{number}-")]
    with serving(account, every) as port:
        assert write(path, account, port) == ""
    return path


@pytest.mark.parametrize("end", ENDS)
def test_an_attempt_that_left_nothing_else_ended_for_the_reason_of_its_pod(end: str, ended: Path) -> None:
    reason = kubernetes_reason({"CAIRN_ENDED_PODS": str(ended)}, f"host-{list(ENDS).index(end)}-")
    assert classify(Evidence(kubernetes_reason=reason)).reason == ENDS[end][1]


def test_an_api_that_does_not_answer_costs_the_reason_and_not_the_start(account: Path, tmp_path: Path) -> None:
    said = write(tmp_path / "ended-pods", account, 1)
    assert "is not known" in said and (tmp_path / "ended-pods").read_text(encoding="utf-8") == ""
