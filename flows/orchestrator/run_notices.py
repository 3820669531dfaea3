"""The notices of a run and all their receivers: beside a command and a webhook a notification block of Prefect."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cairn.flows.orchestrator.prefect_settings import import_prefect
from cairn.reports.notices import notice
from cairn.reports.notices.notice import Notice, find_notices
from cairn.storage.logs import registry
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.configuration.addresses import name_store
from cairn.tasks.configuration.settings import NotifyConfig
from cairn.tasks.text import output


class BlockReceiver:
    """Notifies by a block of the Prefect server."""

    name = "block"

    def __init__(self, block: str) -> None:
        self._block = block

    def receive(self, notice: Notice) -> None:
        """Load the block and notify; raises what Prefect raises."""
        import_prefect(say=output.say)  # a watcher that names no block needs no Prefect
        from prefect.blocks.core import Block

        block: Any = Block.load(self._block)
        block.notify(notice.text, subject=f"cairn: {notice.run_id}: {notice.kind}")


def all_receivers(notify: NotifyConfig) -> Sequence[notice.Receiver]:
    """Return every receiver that the configuration of this machine names."""
    return [*notice.make_receivers(notify), *([BlockReceiver(notify.block)] if notify.block else [])]


def notices_of(log: RunLog) -> Iterator[Notice]:
    """Return the notices in the log as it was read; an alias is read where it has to be."""
    now, alias_of = datetime.now(UTC), lambda alias: registry.Registry(log.store, alias).refresh()
    for found in find_notices(log.run_id, log.state, alias_of, now=now):
        yield replace(found, text=name_store(found.text, log.store.url, {}))  # it is read on another machine


def delivering_notices(log: RunLog, notify: NotifyConfig, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Deliver the notices of one run, whose log others read, while the block runs."""
    return notice.delivering_notices(log.store, all_receivers(notify), partial(notices_of, log), say)
