"""The live page: its addresses and what each answers, with an ETag.

The store is read again at most so often that reading takes one second in 200.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from threading import Lock, Thread
from typing import Annotated, Any
from uuid import uuid4

from fastapi import FastAPI, Query, Request, Response

from cairn.reports.errors import ReportError, RunNotFound
from cairn.reports.pages import report_pages, run_report
from cairn.reports.pages.report_pages import LAST_SEEN, Frame, RunsQuery, render_page, select_rows
from cairn.reports.plots import plot_axis
from cairn.reports.queries import post_mortem, run_lookup, run_metrics
from cairn.reports.queries.alias_history import list_decisions, list_promotions
from cairn.reports.queries.run_comparison import compare_runs, expand_names
from cairn.storage.errors import StorageError, StoreUnavailable
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.settings import CostConfig
from cairn.tasks.machine.placement import work_folder
from cairn.ui.local_server import METRICS, Access, address_of, guarded_server, listen
from cairn.ui.person_requests import PersonRequests

MOST_COMPARED = 8  # runs on one page
_Runs = Annotated[list[str], Query(alias="run")]
Clock = Callable[[], float]
LEAST_SECONDS, _REST, _MOST_VIEWS = 1.0, 200, 24  # nothing is read again sooner than after a second
_MOST_MADE = 16  # answers that are kept
_MOST_READING_SECONDS = 2.0  # the logs of 1,000 runs take less where they were never folded
_TYPES = {"js": "text/javascript", "svg": "image/svg+xml", "css": "text/css"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAddress:
    """Where the live page is, and the store that it shows."""

    address: str
    store: str


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The value last read, None without one; the error of the last reading, if any; a version that both change."""

    value: Any
    error: StorageError | ReportError | None
    version: str


@dataclass(kw_only=True, slots=True)
class _Entry:
    read: Callable[[], Any] | None = None
    view: View | None = None
    due: float = 0.0
    lock: Lock = field(default_factory=Lock)


class ViewCache:
    """Views of a store by name, the least recently used dropped; while one thread reads one, others get the last."""

    def __init__(self, store: ObjectStore, *, clock: Clock) -> None:
        self._clock, self._runs = clock, store.local_path("runs")
        self._away = f"{store.url}: there is no such folder; the first run makes it"
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    def read(self, name: str, open_view: Callable[[], Callable[[], Any]]) -> View:
        """Return a view; `open_view` returns the function that reads it, and is called again after an error."""
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
            while len(self._entries) > _MOST_VIEWS:
                self._entries.popitem(last=False)
        if entry.lock.acquire(blocking=entry.view is None):
            try:
                if entry.view is None or self._clock() >= entry.due:
                    self._refresh(entry, open_view)
            finally:
                entry.lock.release()
        assert entry.view is not None
        return entry.view

    def expire(self, *names: str) -> None:
        """Let the next one who asks for one of these views read it again."""
        with self._lock:
            for entry in filter(None, map(self._entries.get, names)):
                entry.due = 0.0

    def _refresh(self, entry: _Entry, open_view: Callable[[], Callable[[], Any]]) -> None:
        began, before = self._clock(), entry.view
        value, error = before.value if before else None, None
        try:
            if self._runs is not None and not self._runs.parent.is_dir():
                raise StoreUnavailable(self._away)  # a local store without its folder else reads as one without runs
            entry.read = entry.read or open_view()
            value = entry.read()
        except (StorageError, ReportError) as problem:
            entry.read, error = None, problem
        ended = self._clock()
        entry.due = ended + max(LEAST_SECONDS, _REST * (ended - began))
        if before is None or before.value != value or str(before.error) != str(error):
            entry.view = View(value=value, error=error, version=uuid4().hex)


class LivePages:
    """Answers one store's requests, each in a thread of its own."""

    def __init__(
        self, store: ObjectStore, environment: Mapping[str, str], *, prompts: bool, clock: Clock = time.monotonic
    ) -> None:
        """Read the assets; views are read when they are asked for. `prompts`: draw texts from a store of others too."""
        self._store, self._environment = store, environment
        self._views, self._metrics = ViewCache(store, clock=clock), run_metrics.RunMetrics(store)
        self._persons = PersonRequests(store, environment, prompts=prompts, on_note=self._expire_run)
        self._made, self._making = dict[str, bytes](), Lock()
        own, styles = files("cairn.ui") / "assets", files("cairn.reports.pages") / "templates"
        self._assets = {name: (own / name).read_bytes() for name in ("live.js", "live_plot.js", "icon.svg")}
        self._assets["plotly.min.js"] = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
        self._assets["live.css"] = b"".join((styles / name).read_bytes() for name in ("report.css", "live.css"))

    def make_app(self) -> FastAPI:
        """Return the application that answers."""
        app = FastAPI(title="Cairn", docs_url=None, redoc_url=None, openapi_url=None)
        for path, answer in (
            ("/", self.runs),
            ("/runs/{run_id}", self.run),
            ("/runs/{run_id}/attempts/{number}", self.attempt),
            ("/curves", self.curves),
            ("/compare", self.compare),
            ("/models", self.models),
            (METRICS, self.metrics),
            ("/assets/{name}", self.asset),
        ):
            app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None)
        for path, act in (("/runs/{run_id}/note", self._persons.note), ("/runs/{run_id}/prompt", self._persons.prompt)):
            app.add_api_route(path, act, methods=["POST"], response_model=None)
        return app

    def overview(self) -> View:
        """Return every run as the list shows it."""
        work = work_folder(self._environment)  # for packed tables
        return self._views.read("runs", lambda: partial(report_pages.read_overview, self._store, work=work))

    def runs(self, request: Request, q: str = "", sort: str = LAST_SEEN, down: bool = True, page: int = 1) -> Response:
        """All runs, searched and sorted, a page of them."""
        field = sort if sort in report_pages.OverviewRow._fields else LAST_SEEN
        query = RunsQuery(search=q, sort=field, descending=down, page=max(page, 1))
        view, price = self.overview(), CostConfig()
        with suppress(ValueError):
            price = run_report.find_price(self._environment)

        def render(frame: Frame) -> str:
            found = select_rows(view.value, search=query.search, sort=query.sort, descending=query.descending)
            return render_page("runs", frame, found=found, of=len(view.value), query=query, price=price)

        return self._page(request, view, render)

    def run(self, request: Request, run_id: str) -> Response:
        """One run."""
        (view,) = self._read_runs([run_id])
        draws = self._persons.draws_texts()
        return self._page(request, view, lambda frame: render_page("run", frame, view=view.value, draws_texts=draws))

    def attempt(self, request: Request, run_id: str, number: int) -> Response:
        """The post-mortem of one attempt."""

        def read() -> Any:
            return post_mortem.gather_post_mortem(run_lookup.find_run(self._store, run_id), number)

        view = self._views.read(f"attempt/{run_id}/{number}", lambda: read)
        return self._page(request, view, lambda frame: render_page("attempt", frame, facts=view.value))

    def compare(self, request: Request, run: _Runs = []) -> Response:  # noqa: B006 (only read)
        """Several runs over each other."""
        run_ids = self._expand(run)
        views = self._read_runs(run_ids)
        there = [view for view in views if view.value is not None]
        missing = [str(view.error) for view in views if view.value is None]
        if len(run_ids) > MOST_COMPARED:
            missing.append(f"only the first {MOST_COMPARED} of {len(run_ids)} runs are shown")
        error = next((view.error for view in there if view.error), None)

        def render(frame: Frame) -> str:
            comparison = compare_runs([view.value.log for view in there])
            shown = {"comparison": comparison, "views": [view.value for view in there]}
            return render_page("compare", frame, missing=missing, **shown)

        version = " ".join(view.version for view in views)
        return self._page(request, View(value=there, error=error, version=version), render)

    def curves(self, request: Request, run: _Runs = []) -> Response:  # noqa: B006 (only read)
        """The curves of runs as JSON."""
        views = self._read_runs(self._expand(run))
        columns = max(plot_axis.TRACE_COLUMNS // max(len(views), 1), plot_axis.TRACE_COLUMNS // 4)
        found = [view.value.curves for view in views if view.value is not None]
        planned = max((one.total_steps for one in found), default=0)
        draw = partial(plot_axis.view_curves, columns=columns, planned=planned)
        curves = (draw(one, place=place) for place, one in enumerate(found))
        version = " ".join(view.version for view in views)
        return self._answer(request, version, lambda: encode(list(curves)), "application/json")

    def models(self, request: Request) -> Response:
        """The checkpoint of each alias, and the decisions on it."""

        def read() -> Mapping[str, Any]:
            return {"promotions": list_promotions(self._store), "decisions": list_decisions(self._store)}

        view = self._views.read("models", lambda: read)
        return self._page(request, view, lambda frame: render_page("models", frame, **view.value))

    def metrics(self) -> Response:
        """The numbers of all runs for monitoring systems."""
        return Response(self._metrics.text(), headers={"content-type": run_metrics.CONTENT_TYPE})

    def asset(self, request: Request, name: str) -> Response:
        """A script, style or picture."""
        content = self._assets.get(name)
        if content is None:
            return Response("there is no such file\n", status_code=404, media_type="text/plain")
        return self._answer(request, sha256(content), lambda: content, _TYPES[name.rpartition(".")[2]])

    def _read_runs(self, run_ids: Sequence[str]) -> list[View]:
        def follow(run_id: str) -> Callable[[], Any]:
            return report_pages.FollowedRun(self._store, run_id, self._environment).read

        return [self._views.read(f"run/{run_id}", partial(follow, run_id)) for run_id in run_ids[:MOST_COMPARED]]

    def _expire_run(self, run_id: str) -> None:
        self._views.expire("runs", f"run/{run_id}")

    def _expand(self, names: Sequence[str]) -> Sequence[str]:
        """Return the runs that are named, by themselves or by their set; several that are runs need no list of all."""
        if len(names) > 1 and all(view.value is not None for view in self._read_runs(names)):
            return tuple(dict.fromkeys(names))
        return expand_names(self._views.read("names", lambda: partial(list_run_ids, self._store)).value or (), names)

    def _answer(self, request: Request, version: str, make: Callable[[], bytes], media_type: str) -> Response:
        """Return the bytes that `make` returns, once for all who ask, or 304 where the browser has this version."""
        tag = f'"{sha256(f"{version} {request.url.path}?{request.url.query}".encode())[:32]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        made = self._made.get(tag) or make()
        with self._making:
            self._made[tag] = made
            while len(self._made) > _MOST_MADE:
                del self._made[next(iter(self._made))]
        return Response(made, media_type=media_type, headers=headers)

    def _page(self, request: Request, view: View, render: Callable[[Frame], str]) -> Response:
        """Return a page, or one with the error alone where nothing was ever read."""
        is_missing, why = isinstance(view.error, RunNotFound), str(view.error) if view.error else ""
        frame = Frame(store=self._store.url, problem="" if is_missing else why)
        if view.value is None:
            page = render_page("problem", frame, why=why)
            return Response(page, status_code=404 if is_missing else 503, media_type="text/html")
        return self._answer(request, view.version, lambda: render(frame).encode(), "text/html")


def serve(
    store: ObjectStore, *, port: int, access: Access, prompts: bool, announce: Callable[[LiveAddress], None]
) -> None:
    """Listen on 127.0.0.1, any free port for 0, announce the address once the runs were read, answer until Ctrl-C.

    Raises `InvalidConfiguration` where the port is taken. Training on this machine comes first: this process has a
    lower priority.
    """
    with listen(port, "--port") as listening:
        os.nice(10)
        pages = LivePages(store, os.environ, prompts=prompts)
        server = guarded_server(pages.make_app(), access)
        reading = Thread(target=pages.overview, daemon=True)
        with suppress(KeyboardInterrupt):
            reading.start()
            reading.join(_MOST_READING_SECONDS)
            announce(LiveAddress(address=address_of(listening, access), store=store.url))
            server.run([listening])
