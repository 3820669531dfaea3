"""Looks for secrets in what was written and in what Prefect's API tells."""

import base64
import urllib.parse
from collections.abc import Iterator, Mapping

from tests.crash.prefect_api import ask


def told_by(api_url: str) -> bytes:
    """Everything Prefect's API tells of what it was told."""
    paths = ("flow_runs", "task_runs", "artifacts", "logs", "deployments", "events")
    answers = [str(ask(api_url, f"{path}/filter", {})) for path in paths]
    return "\n".join(answers).encode()


def forms(secret: str) -> Iterator[bytes]:
    yield from (secret.encode(), base64.b64encode(secret.encode()), urllib.parse.quote(secret, safe="").encode())
    if ":" in secret:
        yield secret.split(":")[-1].encode()


def found_in(data: bytes, secrets: Mapping[str, str]) -> list[str]:
    return sorted(name for name, secret in secrets.items() if any(form in data for form in forms(secret)))
