"""A flow run's name, its tags, and the event of its end: by these a person finds it in Prefect's lists."""

from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import coolname
from coolname.loader import load_config
from prefect import events, get_client, runtime
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from cairn.tasks.policy.termination import FlowEnd, FlowOutcome

FLOW_ENDED = "cairn.flow.ended"
"""The event of a flow run that did not complete; its label `cairn.reason` says why."""


def introduce(name: str, *tags: str) -> bool:
    """Name this flow run, unless a person has, and tag it; return whether a person has. An API that fails costs it."""
    if (own_id := runtime.flow_run.get_id()) is None:
        return False  # the plain function, without Prefect
    with suppress(Exception), get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(own_id))
        set_tags(client, own, tags)
        is_ours = own.name.removeprefix(name)[:10] in ("", ", attempt ")
        if not is_ours and not is_made_up(own.name):
            return True
        if not is_ours:
            client.update_flow_run(own.id, name=name)
    return False


def is_made_up(name: str) -> bool:
    """Whether Prefect has made up this name, of two words of the library that it takes them from."""
    lists: Any = load_config(Path(coolname.__file__).parent / "data").values()
    words = {word for found in lists for word in found.get("words", ())}
    return name.count("-") == 1 and words.issuperset(name.split("-"))


def without_reasons(tags: Iterable[str]) -> Set[str]:
    """Return the tags without those that say why a flow run ended: one has those of its own end alone."""
    return {tag for tag in tags if not tag.startswith("reason:")}


def set_tags(client: SyncPrefectClient, found: FlowRun, tags: Iterable[str]) -> None:
    """Add tags to those a person has given, in place of an earlier reason; Prefect's update replaces all. Raises."""
    if (wanted := without_reasons(found.tags) | set(tags)) != set(found.tags):
        client.update_flow_run(found.id, tags=sorted(wanted))


def emit_end(end: FlowEnd, flow_run_id: str, name: str) -> None:
    """Emit the event of a flow run that did not complete; an API that fails costs it."""
    if end.reason == FlowOutcome.COMPLETED:
        return
    with suppress(Exception):
        named = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.name": name}
        payload = {"reason": end.reason, "message": end.message}
        events.emit_event(FLOW_ENDED, resource={**named, "cairn.reason": end.reason}, payload=payload)
