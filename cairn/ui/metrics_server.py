"""The numbers of all runs for monitoring systems that ask, beside a watcher."""

from threading import Thread

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.reports.queries.run_metrics import CONTENT_TYPE, RunMetrics
from cairn.storage.stores.object_store import ObjectStore
from cairn.ui.local_server import METRICS, LocalServer, listen, read_access


def serve_metrics(store: ObjectStore, port: int, token_file: str = "") -> str:
    """Answer scrapes on this port of 127.0.0.1 from a thread of this process; returns the address, with its token."""
    metrics, access = RunMetrics(store), read_access(token_file)

    def answer(request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    app = Starlette(routes=[Route(METRICS, answer)])
    server = LocalServer(app=app, listening=listen(port, "--metrics-port"), access=access)
    Thread(target=server.run, name="metrics", daemon=True).start()
    return server.address(METRICS)
