"""Writes why the namespace's pods ended, a line `HOST REASON` each, oldest first: what an init container runs.

Only the API knows that a whole pod was killed for memory, and the trainer may not ask it: this container alone has a
token. An API that does not answer costs the reason, never the start.

    python deployments/kubernetes/ended_pods.py /run/cairn/ended-pods
"""

import json
import os
import ssl
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ACCOUNT = Path(os.environ.get("CAIRN_SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
MOST_HOST_CHARACTERS = 63
SAYS_NOTHING = ("", "Error", "Completed", "ContainerStatusUnknown")


def main(path: Path) -> None:
    """Ask, and write the file whatever comes of it."""
    lines = list[str]()
    try:
        lines = [f"{host} {reason}\n" for _, host, reason in sorted(list_ends(failed_pods()))]
    except (OSError, ValueError) as error:
        print(f"why other pods ended is not known: {error}", file=sys.stderr)
    path.write_text("".join(lines), encoding="utf-8")


def failed_pods() -> list[Mapping[str, Any]]:
    """Return the pods of this namespace that have failed."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    namespace, token = ((ACCOUNT / name).read_text(encoding="utf-8").strip() for name in ("namespace", "token"))
    url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods?fieldSelector=status.phase%3DFailed"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=10) as answer:
        found: list[Mapping[str, Any]] = json.load(answer)["items"]
        return found


def list_ends(found: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield when, where and why pods ended, where Kubernetes gives a reason."""
    for pod in found:
        status = pod["status"]
        host = pod["spec"].get("hostname") or pod["metadata"]["name"][:MOST_HOST_CHARACTERS]
        ends = [
            item["state"]["terminated"]
            for item in status.get("containerStatuses", ())
            if "terminated" in item.get("state", {})
        ]
        disruptions = [item for item in status.get("conditions", ()) if item["type"] == "DisruptionTarget"]
        reasons = [item.get("reason", "") for item in (*ends, status, *disruptions)]
        at = max((item.get("finishedAt") or "" for item in ends), default="") or status.get("startTime", "")
        if given := [reason for reason in reasons if reason not in SAYS_NOTHING]:
            yield at, host, given[0]


if __name__ == "__main__":
    with suppress(IndexError):
        main(Path(sys.argv[1]))
