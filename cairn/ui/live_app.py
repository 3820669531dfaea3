"""The addresses of the live page, and what each answers. An answer has an ETag, so that asking again costs little.

The store is read again at most so often that reading takes a two-hundredth of the time.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Annotated, Any
from uuid import uuid4

from fastapi import FastAPI, Query, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.reports.errors import ReportError, RunNotFound
from cairn.reports.explain.post_mortem import gather_post_mortem
from cairn.reports.pages import live_pages, run_report
from cairn.reports.pages.live_pages import SORTS, FollowedRun, Frame, RunsQuery, read_overview, render_page, select_rows
from cairn.reports.plots.plot_axis import TRACE_COLUMNS, view_curves
from cairn.reports.queries.alias_history import list_decisions, list_promotions
from cairn.reports.queries.run_comparison import compare_runs, expand_names
from cairn.reports.queries.run_lookup import find_run
from cairn.reports.queries.run_metrics import CONTENT_TYPE, RunMetrics
from cairn.storage.errors import StorageError, StoreUnavailable
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.stores.document import encode, sha256
from cairn.storage.stores.object_store import ObjectStore

MOST_COMPARED = 8  # runs on one page
_Runs = Annotated[list[str], Query(alias="run")]
LEAST_SECONDS = 1.0  # nothing is read again sooner
_REST, _MOST_VIEWS = 200, 24
_EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="  # a style element that Plotly fills through the CSSOM
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_EMPTY}'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", _POLICY),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)
METRICS = "/metrics"
"""What any user may read, because a monitoring system is often one of its own; the numbers of runs by their names."""
_TYPES = {"js": "text/javascript", "svg": "image/svg+xml", "css": "text/css"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What was read, None where it never could be; the error if it cannot be now; a version that both change."""

    value: Any
    error: StorageError | ReportError | None
    version: str


@dataclass(kw_only=True, slots=True)
class _Entry:
    read: Callable[[], Any] | None = None
    look: Look | None = None
    due: float = 0.0
    lock: Lock = field(default_factory=Lock)


class ViewCache:
    """Views by name, the least recently used dropped; while one thread reads a view, others get the one before."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    def look(self, name: str, open_view: Callable[[], Callable[[], Any]], check: Callable[[], None]) -> Look:
        """Return a view; `open_view` returns what reads it, and is called again after an error, `check` each time."""
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
            while len(self._entries) > _MOST_VIEWS:
                self._entries.popitem(last=False)
        if entry.lock.acquire(blocking=entry.look is None):
            try:
                if entry.look is None or self._clock() >= entry.due:
                    self._read(entry, open_view, check)
            finally:
                entry.lock.release()
        assert entry.look is not None
        return entry.look

    def _read(self, entry: _Entry, open_view: Callable[[], Callable[[], Any]], check: Callable[[], None]) -> None:
        began, before = self._clock(), entry.look
        value, error = before.value if before else None, None
        try:
            check()
            entry.read = entry.read or open_view()
            value = entry.read()
        except (StorageError, ReportError) as problem:
            entry.read, error = None, problem
        ended = self._clock()
        entry.due = ended + max(LEAST_SECONDS, _REST * (ended - began))
        if before is None or before.value != value or str(before.error) != str(error):
            entry.look = Look(value=value, error=error, version=uuid4().hex)


def make_app(store: ObjectStore, *, environment: Mapping[str, str], work: Path, cache: ViewCache) -> FastAPI:
    """Return the application; `work` is this machine's folder for packed tables."""
    pages = _LivePages(store, environment, work, cache)
    app = FastAPI(title="Cairn", docs_url=None, redoc_url=None, openapi_url=None)
    for path, answer in (
        ("/", pages.runs),
        ("/runs/{run_id}", pages.run),
        ("/runs/{run_id}/attempts/{number}", pages.attempt),
        ("/curves", pages.curves),
        ("/compare", pages.compare),
        ("/models", pages.models),
        (METRICS, pages.metrics),
        ("/assets/{name}", answer_asset),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None)
    app.add_middleware(Guard)
    return app


def look_at_overview(store: ObjectStore, work: Path, cache: ViewCache) -> Look:
    """Return every run as the list shows it."""
    return cache.look("runs", lambda: partial(read_overview, store, work=work), partial(check_root, store))


def check_root(store: ObjectStore) -> None:
    """Raise `StoreUnavailable` where a local store's folder is gone, which else reads as a store without runs."""
    runs = store.local_path("runs")
    if runs is not None and not runs.parent.is_dir():
        raise StoreUnavailable(f"{store.url}: there is no such folder; the first run makes it")


class _LivePages:
    """Answers one store's requests, each in a thread of its own."""

    def __init__(self, store: ObjectStore, environment: Mapping[str, str], work: Path, cache: ViewCache) -> None:
        self._store, self._environment, self._work, self._cache = store, environment, work, cache
        self._look = partial(cache.look, check=partial(check_root, store))
        self._metrics = RunMetrics(store)

    def runs(self, request: Request, q: str = "", sort: str = SORTS[0], down: bool = True) -> Response:
        """All runs, searched and sorted."""
        query = RunsQuery(search=q, sort=sort if sort in SORTS else SORTS[0], descending=down)
        look = look_at_overview(self._store, self._work, self._cache)
        hourly = None  # the price of a device hour
        with suppress(KeyError, ValueError):
            hourly = float(self._environment[run_report.PRICE])

        def render(frame: Frame) -> str:
            rows = select_rows(look.value, search=query.search, sort=query.sort, descending=query.descending)
            shown = {"rows": rows, "query": query, "of": len(look.value), "hourly": hourly}
            return render_page("runs", frame, headings=live_pages.HEADINGS, **shown)

        return self._page(request, look, render)

    def run(self, request: Request, run_id: str) -> Response:
        """One run."""
        look = self._look_at_run(run_id)
        return self._page(request, look, lambda frame: live_pages.run_page(frame, look.value))

    def attempt(self, request: Request, run_id: str, number: int) -> Response:
        """The post-mortem of one attempt."""

        def open_attempt() -> Callable[[], Any]:
            log = find_run(self._store, run_id)

            def read() -> Any:
                log.refresh()
                return gather_post_mortem(log, number)

            return read

        look = self._look(f"attempt/{run_id}/{number}", open_attempt)
        return self._page(request, look, lambda frame: live_pages.attempt_page(frame, look.value))

    def compare(self, request: Request, run: _Runs = []) -> Response:  # noqa: B006 (only read)
        """Several runs over each other."""
        run_ids = self._expand(run)
        looks = self._look_at_runs(run_ids)
        views = tuple(look.value for look in looks if look.value is not None)
        missing = [str(look.error) for look in looks if look.value is None]
        if len(run_ids) > MOST_COMPARED:
            missing.append(f"only the first {MOST_COMPARED} of {len(run_ids)} runs are shown")
        error = next((look.error for look in looks if look.value is not None and look.error), None)
        look = Look(value=views, error=error, version=_joined(looks))

        def render(frame: Frame) -> str:
            return render_page("compare", frame, comparison=compare_runs([view.log for view in views]), missing=missing)

        return self._page(request, look, render)

    def curves(self, request: Request, run: _Runs = []) -> Response:  # noqa: B006 (only read)
        """The curves of runs as JSON."""
        looks = self._look_at_runs(self._expand(run))
        columns = max(TRACE_COLUMNS // max(len(looks), 1), TRACE_COLUMNS // 4)
        curves = (view_curves(look.value.curves, columns=columns) for look in looks if look.value is not None)
        return _answer(request, _joined(looks), lambda: encode(list(curves)), "application/json")

    def models(self, request: Request) -> Response:
        """What aliases point at."""

        def read() -> Mapping[str, Any]:
            return {"promotions": list_promotions(self._store), "decisions": list_decisions(self._store)}

        look = self._look("models", lambda: read)
        return self._page(request, look, lambda frame: render_page("models", frame, **look.value))

    def metrics(self) -> Response:
        """The numbers of all runs for monitoring systems."""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _look_at_run(self, run_id: str) -> Look:
        return self._look(f"run/{run_id}", lambda: FollowedRun(self._store, run_id, self._environment).look)

    def _look_at_runs(self, run_ids: Sequence[str]) -> list[Look]:
        return [self._look_at_run(run_id) for run_id in run_ids[:MOST_COMPARED]]

    def _expand(self, names: Sequence[str]) -> Sequence[str]:
        """Return the runs that are named, by themselves or by their set; several that are runs need no list of all."""
        if len(names) > 1 and all(look.value is not None for look in self._look_at_runs(names)):
            return tuple(dict.fromkeys(names))
        listed = self._look("names", lambda: partial(list_run_ids, self._store)).value or ()
        return expand_names(listed, names)

    def _page(self, request: Request, look: Look, render: Callable[[Frame], str]) -> Response:
        """Return a page, or one that only says what the problem is."""
        frame = Frame(store=self._store.url, problem=str(look.error) if look.error else "")
        if look.value is None:
            status = 404 if isinstance(look.error, RunNotFound) else 503
            return Response(render_page("problem", frame), status_code=status, media_type="text/html")
        return _answer(request, look.version, lambda: render(frame).encode(), "text/html")


def answer_asset(request: Request, name: str) -> Response:
    """A script, style or picture."""
    content = _asset(name)
    if content is None:
        return Response("there is no such file\n", status_code=404, media_type="text/plain")
    return _answer(request, sha256(content), lambda: content, _TYPES[name.rpartition(".")[2]])


@cache
def _asset(name: str) -> bytes | None:
    match name:
        case "live.css":
            return live_pages.style_sheet()
        case "plotly.min.js":
            return (files("plotly") / "package_data" / name).read_bytes()
        case "live.js" | "live_plot.js" | "icon.svg":
            return (files("cairn.ui") / "assets" / name).read_bytes()
        case _:
            return None


def _answer(request: Request, version: str, make: Callable[[], bytes], media_type: str) -> Response:
    """Return what `make` returns, or 304 where the browser has this version of it already."""
    tag = f'"{sha256(f"{version} {request.url.path}?{request.url.query}".encode())[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(make(), media_type=media_type, headers=headers)


def _joined(looks: Sequence[Look]) -> str:
    return " ".join(look.version for look in looks)


class Guard:
    """ASGI middleware before everything else: who may ask, and what a browser may do with the answers.

    Only this machine's own names are served (against DNS rebinding), only reading, and, where the system says whose a
    connection is, only this user and root.
    """

    def __init__(self, app: ASGIApp, *, connections: Path = Path("/proc/net/tcp")) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        headers = [(name.encode(), value.encode()) for name, value in HEADERS]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
            return
        status, why = refusal
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        await send_guarded({"type": "http.response.start", "status": status, "headers": plain})
        await send_guarded({"type": "http.response.body", "body": why.encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason if the request is not answered."""
        own, asking = scope["server"], scope["client"]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].decode("latin-1") not in (f"127.0.0.1:{own[1]}", f"localhost:{own[1]}"):
            return 400, f"ask for http://127.0.0.1:{own[1]}/: no other name of this machine is answered\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page only reads\n"
        user = find_user(self._connections, client_port=asking[1], server_port=own[1])
        if scope["path"] != METRICS and user is not None and user not in (0, os.getuid()):
            return 403, "this page is for the user who started it\n"
        return None


def find_user(connections: Path, *, client_port: int, server_port: int) -> int | None:
    """Return the user of the client's end of a connection on the loopback; None if the system does not say."""
    try:
        rows = connections.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for row in rows:
        _, local, remote, _, _, _, _, user, *_ = row.split()
        if local.endswith(f":{client_port:04X}") and remote.endswith(f":{server_port:04X}"):
            return int(user)
    return None
