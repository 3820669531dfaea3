"""Tells receivers what is new, each from a thread of its own; a document beside the run keeps what each was told.

A notice is told at least once: again where a process died between telling and writing that down.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from reports.notices.notice import Notice
from reports.notices.receivers import Receiver
from storage.errors import IntegrityError, ObjectMissing
from storage.logs.run_log import run_prefix
from storage.stores.document import decode, encode
from storage.stores.object_store import ObjectStore
from tasks.machine.process_scopes import running_beside
from tasks.text.format import one_line

EVERY_SECONDS = 5.0
FINAL_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldNotices:
    """The keys of what one receiver was told of one run."""

    version: int = 1
    told: tuple[str, ...] = ()


class NoticeDelivery:
    """Tells one receiver what it was not told before, by this process or another."""

    def __init__(self, store: ObjectStore, receiver: Receiver) -> None:
        self._store, self._receiver = store, receiver
        self._told: dict[str, tuple[str, ...]] = {}

    def deliver(self, notices: Iterable[Notice]) -> None:
        """Tell what is new, in order; raises the receiver's error or the store's, and the next call goes on there."""
        for notice in notices:
            if notice.key in self._told.get(notice.run_id, ()):
                continue
            told = self._read(notice.run_id)
            if notice.key not in told:
                self._receiver.receive(notice)
                told = (*told, notice.key)
                self._store.write(self._document(notice.run_id), encode(ToldNotices(told=told)))
            self._told[notice.run_id] = told

    def _read(self, run_id: str) -> tuple[str, ...]:
        key = self._document(run_id)
        try:
            return decode(self._store.read(key), ToldNotices, where=key).told
        except (ObjectMissing, IntegrityError):  # told again rather than never
            return ()

    def _document(self, run_id: str) -> str:
        return f"{run_prefix(run_id)}/notices/{self._receiver.name}.json"


@contextmanager
def telling(
    store: ObjectStore,
    receivers: Sequence[Receiver],
    find: Callable[[], Iterable[Notice]],
    say: Callable[[str], None],
    *,
    every_seconds: float = EVERY_SECONDS,
    final_seconds: float = FINAL_SECONDS,
) -> Iterator[None]:
    """Tell every receiver what `find` returns while the block runs; at its end it has `final_seconds` for the rest."""
    with ExitStack() as threads:
        for receiver in receivers:
            body = partial(_tell, NoticeDelivery(store, receiver), receiver.name, find, say, every_seconds)
            threads.enter_context(running_beside(body, name=f"{receiver.name}-notices", join_seconds=final_seconds))
        yield


def _tell(
    delivery: NoticeDelivery,
    name: str,
    find: Callable[[], Iterable[Notice]],
    say: Callable[[str], None],
    every_seconds: float,
    stop: threading.Event,
) -> None:
    failures = 0
    while True:
        is_last = stop.is_set()
        try:
            delivery.deliver(find())
            failures = 0
        except Exception as error:  # whatever a receiver does, the run goes on
            failures += 1
            if failures == 1:
                why = one_line(f"{type(error).__name__}: {error}", 200)
                say(f"notify.{name} is told again later, training goes on: {why}")
        if is_last:
            return
        stop.wait(min(every_seconds * 2**failures, _LONGEST_PAUSE_SECONDS) if failures else every_seconds)
