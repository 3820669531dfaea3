"""An MLflow tracking server as far as the exporter asks it: the REST API 2.0 on the loopback, remembering in memory.

As MLflow does it keeps equal values (key, step, time, value) once, refuses to change a parameter, and knows its errors
by code.
"""

import json
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import serving


class Refused(Exception):
    """An answer that is no."""


class TrackingServer:
    """What was told: experiments by name, runs by id."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.url = ""

    def values(self, key: str, run: int = 0) -> list[tuple[int, Any]]:
        """Every value of a metric, in step order."""
        found = {item for item in list(self.runs.values())[run]["metrics"] if item[0] == key}
        return sorted((step, value) for _, step, _, value in found)

    def answer(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(path)
        method = path.replace("/", "_").replace("-", "_")
        result: dict[str, Any] = getattr(self, f"_{method}")(content)
        return result

    def _experiments_get_by_name(self, content: dict[str, Any]) -> dict[str, Any]:
        if content["experiment_name"] not in self.experiments:
            raise Refused("RESOURCE_DOES_NOT_EXIST")
        return {"experiment": {"experiment_id": self.experiments[content["experiment_name"]]}}

    def _experiments_create(self, content: dict[str, Any]) -> dict[str, Any]:
        if content["name"] in self.experiments:
            raise Refused("RESOURCE_ALREADY_EXISTS")
        self.experiments[content["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[content["name"]]}

    def _runs_search(self, content: dict[str, Any]) -> dict[str, Any]:
        matched = re.fullmatch(r"tags\.\"([\w.]+)\" = '([^']*)'", content["filter"])
        assert matched is not None
        found = [run for run in self.runs.values() if run["tags"].get(matched[1]) == matched[2]]
        return {"runs": [_shown(run) for run in found]} if found else {}

    def _runs_create(self, content: dict[str, Any]) -> dict[str, Any]:
        run = {"id": f"run{len(self.runs)}", "name": content["run_name"], "metrics": set(), "params": {}}
        run["tags"] = {tag["key"]: tag["value"] for tag in content["tags"]}
        self.runs[run["id"]] = run
        return {"run": _shown(run)}

    def _runs_update(self, content: dict[str, Any]) -> dict[str, Any]:
        self.runs[content["run_id"]]["status"] = content["status"]
        return {}

    def _runs_log_batch(self, content: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[content["run_id"]]
        assert len(content.get("metrics", [])) <= 1000 and len(content.get("params", [])) <= 100
        for item in content.get("params", []):
            if run["params"].setdefault(item["key"], item["value"]) != item["value"]:
                raise Refused("INVALID_PARAMETER_VALUE")
        run["tags"].update({tag["key"]: tag["value"] for tag in content.get("tags", [])})
        run["metrics"] |= {(m["key"], m["step"], m["timestamp"], m["value"]) for m in content.get("metrics", [])}
        return {}


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    tags = [{"key": key, "value": value} for key, value in run["tags"].items()]
    return {"info": {"run_id": run["id"]}, "data": {"tags": tags}}


@contextmanager
def tracking_server() -> Iterator[TrackingServer]:
    """Serve on a free port of the loopback while the block runs."""
    tracking = TrackingServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            self._answer(parts.path, dict(urllib.parse.parse_qsl(parts.query)))

        def do_POST(self) -> None:
            self._answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, path: str, content: dict[str, Any]) -> None:
            tracking.headers = dict(self.headers)
            try:
                status, answer = 200, tracking.answer(path.removeprefix("/api/2.0/mlflow/"), content)
            except Refused as refused:
                status, answer = 400, {"error_code": str(refused), "message": "no"}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as tracking.url:
        yield tracking
