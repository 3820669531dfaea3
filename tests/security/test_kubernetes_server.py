"""The Prefect server in Kubernetes as its manifest asks for it: password, CORS, CSRF, nothing outside the cluster."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings.legacy import _get_settings_fields
from prefect.settings.models.root import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "kubernetes"
MANIFESTS = {
    item["kind"]: item for item in yaml.safe_load_all((FOLDER / "server.yaml").read_text(encoding="utf-8")) if item
}
# The key that encrypts blocks is read from the environment and is no setting (prefect.server.utilities.encryption).
KNOWN = {*_get_settings_fields(Settings), "PREFECT_SERVER_ENCRYPTION_KEY"}
DEFENCES = {
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "http://127.0.0.1:4200",
}


def server() -> dict[str, Any]:
    (container,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment() -> dict[str, str]:
    return {item["name"]: item["value"] for item in server()["env"]}


@pytest.mark.parametrize("name", DEFENCES)
def test_no_other_origin_reads_an_answer_and_a_change_needs_a_token(name: str) -> None:
    assert environment().get(name) == DEFENCES[name]


def test_its_password_comes_from_the_secret_that_the_readme_makes() -> None:
    assert server()["envFrom"] == [{"secretRef": {"name": "prefect-server"}}]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    made = re.search(r"create secret generic prefect-server \\\n((?:.*\\\n)*.*)", readme)
    assert made is not None and '--from-literal=PREFECT_SERVER_API_AUTH_STRING="$AUTH"' in made[1]


def test_nothing_outside_the_cluster_reaches_it() -> None:
    assert MANIFESTS["Service"]["spec"].get("type", "ClusterIP") == "ClusterIP"
    pod = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    assert "hostNetwork" not in pod and not [port for port in server()["ports"] if "hostPort" in port]


@pytest.mark.parametrize("document", ["deployments/kubernetes/server.yaml", "deployments/up.sh", "SECURITY.md"])
def test_every_setting_that_is_named_is_one_that_prefect_knows(document: str) -> None:
    named = set(re.findall(r"\bPREFECT_[A-Z_]+\b", (ROOT / document).read_text(encoding="utf-8")))
    assert named and named - KNOWN == set()
