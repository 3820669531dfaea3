"""Makes what the deployments need on a Prefect server: work pool, queues, a limit of accelerators, the alert, a block.

    python -m cairn.flows.orchestrator.server_setup [--alert-block slack-webhook/mine] [--accelerators 2]

A second call changes nothing. `make up` calls it; on a server of one's own it comes before `prefect deploy --all`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from cairn.flows.orchestrator.accelerator_slot import ACCELERATORS
from cairn.flows.orchestrator.flow_end import FLOW_ENDED
from cairn.flows.orchestrator.store_credentials import StoreCredentials
from cairn.tasks.errors import InvalidConfiguration

QUEUES: Mapping[str, int] = {"default": 1, "evaluate": 2, "train": 3}
"""Short work first: a look and a sweep take seconds, an evaluation minutes, and each would wait behind training for
hours. Training waits for what is short at most as long as that takes. It matters only where a limit is set."""
ALERT = "cairn: a budget is exhausted, or stored data is damaged"
ALARMING = ("budget-exhausted", "integrity", "snapshot-damaged", "object-damaged", "nothing-readable")
"""The reasons of `cairn.flow.ended` after which nothing goes on before a person has looked."""
_BODY = """{{ flow_run.name }} ended: {{ event.payload.reason }}

{{ event.payload.message }}

{{ flow_run|ui_url }}"""


def alert_automation(block_document_id: Any) -> AutomationCore:
    """Return the automation that notifies by this block."""
    trigger = EventTrigger(
        expect={FLOW_ENDED},
        match={"cairn.reason": list(ALARMING)},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
    )
    subject = "Cairn: {{ flow_run.name }}: {{ event.payload.reason }}"
    action = SendNotification(block_document_id=block_document_id, subject=subject, body=_BODY)
    return AutomationCore(name=ALERT, trigger=trigger, actions=[action])


async def set_up(pool: WorkPoolCreate, *, accelerators: int | None, alert_block: str) -> Sequence[str]:
    """Make what is missing and return what was changed; raises `InvalidConfiguration` for a block that is not there."""
    async with get_client() as client:
        try:
            await StoreCredentials.aregister_type_and_schema(client=client)
        except ObjectAlreadyExists:  # somebody else set the server up between its look and its request
            await StoreCredentials.aregister_type_and_schema(client=client)
        changed, template, limit = [], None, None
        with suppress(ObjectNotFound):
            template = (await client.read_work_pool(pool.name)).base_job_template
        if template != pool.base_job_template:
            await client.create_work_pool(pool, overwrite=True)
            changed.append(f"work pool {pool.name}: made with this job template")
        for name, priority in QUEUES.items():
            found = {
                one.name: one for one in await client.read_work_queues(work_pool_name=pool.name)
            }  # others may move
            if name not in found:
                await client.create_work_queue(name, work_pool_name=pool.name, priority=priority)
            elif found[name].priority != priority:
                await client.update_work_queue(found[name].id, priority=priority)
            else:
                continue
            changed.append(f"work queue {name}: priority {priority}")
        with suppress(ObjectNotFound):
            limit = (await client.read_global_concurrency_limit_by_name(ACCELERATORS)).limit if accelerators else None
        if accelerators and limit != accelerators:
            await client.upsert_global_concurrency_limit_by_name(ACCELERATORS, accelerators)
            changed.append(f"limit {ACCELERATORS}: {accelerators}")
        return [*changed, *(await _alert(client, alert_block) if alert_block else ())]


async def _alert(client: PrefectClient, block: str) -> Sequence[str]:
    kind, _, name = block.partition("/")
    rule = "rule: TYPE/NAME of a notification block, as `prefect block ls` shows it, such as slack-webhook/mine"
    try:
        document = await client.read_block_document_by_name(name, kind)
    except ObjectNotFound as error:
        raise InvalidConfiguration(f"alert block {block!r}: Prefect does not know it; {rule}") from error
    schema = document.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise InvalidConfiguration(f"alert block {block!r}: it notifies nobody; {rule}")
    wanted = alert_automation(document.id)
    found = await client.read_automations_by_name(ALERT)
    if any(one.actions == wanted.actions for one in found):
        return []
    for one in found:
        await client.delete_automation(one.id)
    await client.create_automation(wanted)
    return [f"alert: sent by {block}"]


def main() -> None:
    """Set the named server up and print what was changed."""
    parser = argparse.ArgumentParser(prog="python -m cairn.flows.orchestrator.server_setup", description=__doc__)
    parser.add_argument("--pool", default="cairn", help="work pool of the deployments")
    parser.add_argument("--type", default="process", help="type of the work pool, if it is created")
    parser.add_argument("--job-template", default="deployments/job-template.json", help="its base job template")
    parser.add_argument("--accelerators", type=int, help="how many flow runs may use accelerators at once")
    parser.add_argument("--alert-block", default="", help="notification block that alerts use, TYPE/NAME")
    options = parser.parse_args()
    template = json.loads(Path(options.job_template).read_text(encoding="utf-8"))
    pool = WorkPoolCreate(name=options.pool, type=options.type, base_job_template=template)
    try:
        done = asyncio.run(set_up(pool, accelerators=options.accelerators, alert_block=options.alert_block))
    except InvalidConfiguration as error:
        sys.exit(str(error))
    print("\n".join(done) or "nothing to change")


if __name__ == "__main__":
    main()
