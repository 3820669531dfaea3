"""Requests of a person on the live page that do more than read: a note on a run, and text from its checkpoints.

Each text is drawn by a child with bounded time and memory, one at a time, which ends with the connection that waits.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from stat import S_IWGRP, S_IWOTH
from subprocess import DEVNULL, Popen
from typing import Annotated, TypeVar

import msgspec
from starlette import concurrency, requests, responses
from uvicorn import Server

from cairn.model.errors import ModelError
from cairn.operations import run_notes, trained_models
from cairn.reports.errors import ReportError, RunNotFound
from cairn.reports.queries.run_lookup import find_in_run, find_run
from cairn.storage.errors import IntegrityError, StorageError, StoreUnavailable
from cairn.storage.stores import child_process, codec, open_store
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.machine.process_memory import available_memory_bytes
from cairn.tasks.text.format import one_line

MOST_SECONDS, MOST_TOKENS, MOST_CHARACTERS = 60.0, 1_000, 4_000
"""Of one text: time to draw it, tokens, and characters of its prompt."""
MOST_BODY_BYTES = 32 * 1024
_LEAST_MEMORY_BYTES, _MEMORY_SHARE, _CORE_SECONDS, _POLL_SECONDS = 2 << 30, 4, 600, 0.2
_VARIABLES = ("CAIRN_CACHE", "XDG_CACHE_HOME")
_BUCKET_VARIABLES = (*_VARIABLES, "AWS_", "HTTPS_PROXY", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""How the variables begin that the child of a folder gets, and that of a bucket."""
_OFF = (
    "no text is drawn from this store, because others can write to it and their checkpoints decide what is computed "
    "here; rule: a folder of yours that nobody else may write to, or `cairn ui --prompts`"
)
_EXPECTED = (requests.ClientDisconnect, ModelError, OSError, ReportError, StorageError, TaskError)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoteOrder:
    """A note, tags, or both."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip() and not self.tags:
            raise InvalidConfiguration("a note: is empty; write a text or a tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOrder:
    """A text to draw, as `cairn sample` draws it: from the checkpoint of a step, None for the newest."""

    prompt: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] = ""
    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 200
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.8
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a text; the last one says what ended it, or what went wrong."""

    text: str = ""
    ended: str = ""


class PersonRequests:
    """Answers what a person asks of the runs of one store."""

    def __init__(
        self, store: ObjectStore, environment: Mapping[str, str], *, prompts: bool, on_note: Callable[[str], None]
    ) -> None:
        """Draw texts from a store of this user's own, from others where `prompts` allows it."""
        self._store, self._environment, self._prompts, self._on_note = store, environment, prompts, on_note
        self._drawn: PromptOrder | None = None

    def draws_texts(self) -> bool:
        """Whether prompts are answered from this store."""
        return self._prompts or is_own_folder(self._store)

    async def note(self, request: requests.Request, run_id: str) -> responses.Response:
        """Record a note on a run as `cairn note` does."""
        try:
            order = await _read_order(request, NoteOrder)
            log = await concurrency.run_in_threadpool(find_run, self._store, run_id)
            await concurrency.run_in_threadpool(run_notes.note_run, log, order.text, order.tags, ())
        except _EXPECTED as error:
            return _refuse(error)
        self._on_note(run_id)
        return responses.Response(status_code=204)

    async def prompt(self, request: requests.Request, run_id: str) -> responses.Response:
        """Draw a text and send each piece as it is drawn, a line of JSON each."""
        if not self.draws_texts():
            return responses.PlainTextResponse(_OFF, status_code=403)
        child = None
        try:
            order = await _read_order(request, PromptOrder)
            if self._drawn is not None:
                return responses.PlainTextResponse("busy: another text is drawn; one at a time", status_code=429)
            self._drawn = order
            try:
                child = await concurrency.run_in_threadpool(self._start, run_id, order)
            finally:
                self._drawn = order if child is not None else None
        except _EXPECTED as error:
            return _refuse(error)
        self._watch(order, child, asyncio.get_running_loop().time() + MOST_SECONDS, request.app.state.server)
        pieces, headers = _read_pieces(child, partial(self._end, order, child)), {"cache-control": "no-store"}
        return responses.StreamingResponse(pieces, media_type="application/x-ndjson", headers=headers)

    def _start(self, run_id: str, order: PromptOrder) -> "Popen[bytes]":
        log = find_run(self._store, run_id)
        reference = find_in_run(log, order.step)
        record = log.state.find(reference.prefix)
        memory_bytes = _LEAST_MEMORY_BYTES + _MEMORY_SHARE * (record.committed.bytes if record else 0)
        if (room := available_memory_bytes(os.getpid())) is not None:
            memory_bytes = min(memory_bytes, room // 2)  # training on this machine comes first
        command = child_process.bounded_command(memory_bytes, _CORE_SECONDS, __name__, self._store.url, run_id)
        names = _BUCKET_VARIABLES if self._store.local_path("runs") is None else _VARIABLES
        given = {name: value for name, value in self._environment.items() if name.startswith(names)}
        environment = child_process.without_credentials() | given
        child = child_process.start_child(command, stderr=DEVNULL, environment=environment)
        assert child.stdin is not None
        with child.stdin:  # a pipe holds it
            child.stdin.write(msgspec.json.encode(replace(order, step=reference.step)))
        return child

    def _watch(self, order: PromptOrder, child: "Popen[bytes]", deadline: float, server: Server) -> None:
        """End a child in time, also where nobody reads, and before the server waits for its text in vain."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline or server.should_exit:
            self._end(order, child)
        elif self._drawn is order:
            loop.call_later(_POLL_SECONDS, self._watch, order, child, deadline, server)

    def _end(self, order: PromptOrder, child: "Popen[bytes]") -> None:
        child_process.end_child(child)
        if self._drawn is order:
            self._drawn = None


def is_own_folder(store: ObjectStore) -> bool:
    """Whether a store is a folder of this user's that nobody else may write to."""
    if (runs := store.local_path("runs")) is None:
        return False
    try:
        found = runs.parent.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (S_IWGRP | S_IWOTH)


def run(url: str, run_id: str) -> None:
    """Draw the text of the order on stdin and print its pieces: the child's part."""
    order = codec.decode(sys.stdin.buffer.read(), PromptOrder, where="the order")
    try:
        log = find_run(open_store.open_store(url), run_id)
        wanted = trained_models.SampleRequest(prompt=order.prompt, tokens=order.tokens, temperature=order.temperature)
        sampler = trained_models.RunSampler(log, wanted)
        sampler.load(find_in_run(log, order.step))
        written = sampler.write(order.seed, lambda text: _print(Piece(text=text)))
        _print(Piece(ended=written.ended))
    except _EXPECTED as error:
        _print(Piece(ended=one_line(str(error))))
    os._exit(0)  # libraries take a while to be taken down, and the page waits


def _print(piece: Piece) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(piece) + b"\n")
    sys.stdout.flush()


async def _read_pieces(child: "Popen[bytes]", end: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield what a child prints, and what ended it where that was no order of its own; the child ends with this."""
    reader = asyncio.StreamReader()
    protocol = partial(asyncio.StreamReaderProtocol, reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(protocol, child.stdout)
    try:
        while pieces := await reader.read(1 << 16):
            yield pieces
        if code := await concurrency.run_in_threadpool(child.wait):
            why = f"its process ended with {code}: a text has at most {MOST_SECONDS:g} s, and half of the free memory"
            yield msgspec.json.encode(Piece(ended=f"{why}; `cairn sample` has no such limits")) + b"\n"
    finally:
        transport.close()
        end()


async def _read_order(request: requests.Request, kind: type[T]) -> T:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY_BYTES:
            raise IntegrityError(f"the request: at most {MOST_BODY_BYTES:,} bytes are read")
    return codec.decode(bytes(body), kind, where="the request")


def _refuse(error: Exception) -> responses.Response:
    unavailable = isinstance(error, (OSError, StoreUnavailable))
    status = 404 if isinstance(error, RunNotFound) else 503 if unavailable else 400
    return responses.PlainTextResponse(one_line(str(error)), status_code=status)
