"""The requests of MLflow's REST API 2.0 that the exporter needs, with the standard library alone.

Source: mlflow.org, "REST API": experiments/get-by-name and create, runs/search, create, log-batch and update.
"""

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from reports.errors import ReportError
from tasks.machine.http_request import open_directly

_TIMEOUT_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
_MOST_BYTES = 8 * 1024 * 1024


class MlflowRefused(ReportError):
    """The tracking server refused a request; `code` is its error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class MlflowClient:
    """Sends requests to one tracking server, and follows no redirect to another; each ends after ten seconds."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        """Send nothing yet; credentials come from MLflow's environment variables."""
        self._root = f"{address.rstrip('/')}/api/2.0/mlflow/"
        self._headers = {"Content-Type": "application/json", **_authorization(environment)}

    def get(self, path: str, **parameters: str) -> Any:
        """Send a GET request and return the answer."""
        return self._send(urllib.request.Request(f"{self._root}{path}?{urllib.parse.urlencode(parameters)}"))

    def post(self, path: str, **content: object) -> Any:
        """Send a POST request and return the answer."""
        data = json.dumps(content, allow_nan=False).encode()
        return self._send(urllib.request.Request(f"{self._root}{path}", data=data, method="POST"))

    def _send(self, request: urllib.request.Request) -> Any:
        for name, value in self._headers.items():
            request.add_header(name, value)
        try:
            with open_directly(request, timeout_seconds=_TIMEOUT_SECONDS) as answer:
                data = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(_MOST_BYTES).decode(errors="replace")) from error
        if len(data) > _MOST_BYTES:
            raise ReportError(f"{self._root} answered more than {_MOST_BYTES:,} bytes")
        return json.loads(data or b"{}")


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := environment.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _refusal(status: int, body: str) -> MlflowRefused:
    try:
        answer = json.loads(body)
        return MlflowRefused(str(answer["error_code"]), str(answer.get("message", ""))[:_SHOWN_CHARACTERS])
    except (ValueError, KeyError, TypeError):
        return MlflowRefused(f"HTTP {status}", body[:_SHOWN_CHARACTERS])
