"""A Prefect server for Cairn: work pool, queues, deployments, the alert, places for accelerators, credentials.

    python -m cairn.flows.orchestrator.server_setup [--alert-block slack-webhook/mine] [--accelerators 2]

makes what is missing and writes what the code changed; a person's settings stay. `make up` calls it. A flow run takes a
place among those that use accelerators as politeness: it waits at most an hour and then goes on all the same, since
its log keeps a run safe. A place is a lease, so a killed flow run gives it back within two minutes.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect import exceptions, runtime
from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from pydantic import Field, SecretStr

from cairn.flows.orchestrator import deployments
from cairn.flows.orchestrator.flow_run_tags import FLOW_ENDED
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.process_scopes import running_beside
from cairn.tasks.policy.termination import GIVEN_UP, FlowOutcome, TerminationReason

if __name__ == "__main__":  # by its own name, which the flows know too: else its block type is registered twice
    from cairn.flows.orchestrator import server_setup

    server_setup.main()
    sys.exit()
ACCELERATORS = "cairn-accelerators"
_ANSWER_SECONDS, _RELEASE_SECONDS = 10.0, 2.0
_LEASE_SECONDS, _POLL_SECONDS, _LOOK_SECONDS = 60.0, 1.0, 0.2
QUEUES: Mapping[str, int] = {"default": 1, "evaluate": 2, "train": 3}
"""Short work first: a poll and a sweep take seconds, an evaluation minutes, and each would wait behind training for
hours. Training waits for what is short at most as long as that takes. It matters only where a limit is set."""
ALERT = "cairn: a budget is exhausted, or stored data is damaged"
_DAMAGE = ("integrity", "snapshot-damaged", "object-damaged", "nothing-readable")
ALARMING = (FlowOutcome.BUDGET_EXHAUSTED, *sorted(GIVEN_UP - {TerminationReason.STORAGE}), *_DAMAGE)
"""The reasons of `cairn.flow.ended` after which nothing goes on before a person has acted."""
_BODY = """{{ flow_run.name }} ended: {{ event.payload.reason }}

{{ event.payload.message }}

{{ flow_run|ui_url }}"""


class StoreCredentials(Block):
    """The form under Blocks; each field is the variable of its name after `AWS_`."""

    _block_type_name = "Cairn store credentials"
    _block_type_slug = "cairn-store-credentials"
    _description = "Key, secret and endpoint of an S3 store, for the deployments' parameter `store_credentials`."

    access_key_id: SecretStr
    secret_access_key: SecretStr
    session_token: SecretStr = Field(default=SecretStr(""), description="for temporary keys")
    endpoint_url: str = Field(default="", description="empty: the worker's, else Amazon's")
    region: str = Field(default="", description="empty: the worker's")


def take_credentials(name: str, environment: MutableMapping[str, str]) -> None:
    """Put this block into the environment in place of other credentials, if named; raises `InvalidConfiguration`."""
    if not name:
        return
    try:
        block = StoreCredentials.load(name)
    except ValueError as error:
        raise InvalidConfiguration(
            f"store_credentials {name}: Prefect has no block `Cairn store credentials` of this name; make it under "
            "Blocks, after `prefect block register -m cairn.flows.orchestrator.server_setup`"
        ) from error
    for variable in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN"):
        environment.pop(variable, None)
    for field in StoreCredentials.model_fields:
        value = getattr(block, field)
        if text := value.get_secret_value() if isinstance(value, SecretStr) else value:
            environment[f"AWS_{field.upper()}"] = text


@contextmanager
def accelerator_slot(
    say: Callable[[str], None], *, is_stopping: Callable[[], bool] = lambda: False, most_seconds: float = 3600.0
) -> Iterator[None]:
    """Hold a place while the block runs; a flow run that no deployment has asks for none.

    A thread of its own asks for the place, renews it and gives it back, so that no slow API delays the flow.
    """
    if not runtime.flow_run.get_id():
        yield
        return
    taken, ready, context = threading.Event(), threading.Event(), copy_context()

    def hold(left: threading.Event) -> None:
        with suppress(Exception), get_client(sync_client=True) as client:  # an API that fails costs the place
            lease = _acquire(client, left, taken) if runtime.deployment.get_id() is not None else None
            ready.set()
            while lease is not None and not left.wait(_LEASE_SECONDS / 3):
                client.renew_concurrency_lease(lease, _LEASE_SECONDS)
            if lease is not None:
                client.release_concurrency_slots_with_lease(lease)
        ready.set()

    # A thread's own context would not know this server.
    with running_beside(lambda left: context.run(hold, left), name="accelerator-slot", join_seconds=_RELEASE_SECONDS):
        until, is_told = time.monotonic() + _ANSWER_SECONDS, False
        while not ready.wait(_LOOK_SECONDS) and time.monotonic() < until and not is_stopping():
            if taken.is_set() and not is_told:
                until, is_told = time.monotonic() + most_seconds, True
                say(f"all places of {ACCELERATORS} are taken: waits for one, at most {most_seconds:.0f} s")
        if is_told and not ready.is_set() and not is_stopping():
            say(f"no place of {ACCELERATORS} became free: goes on all the same")
        yield


def _acquire(client: SyncPrefectClient, left: threading.Event, taken: threading.Event) -> UUID | None:
    """Return the lease, or None where there is no such limit or it is switched off."""
    while not left.is_set():
        try:
            ask = client.increment_concurrency_slots_with_lease
            given = ask([ACCELERATORS], 1, "concurrency", _LEASE_SECONDS).json()
            return UUID(given["lease_id"]) if given["limits"] else None
        except exceptions.PrefectHTTPStatusError as error:
            if error.response.status_code != 423:  # locked
                raise
        taken.set()
        left.wait(_POLL_SECONDS)
    return None


def alert_automation(block_document_id: Any) -> AutomationCore:
    """Return the automation that notifies by this block."""
    why: dict[str, str | list[str]] = {"cairn.reason": list(ALARMING)}
    trigger = EventTrigger(expect={FLOW_ENDED}, match=why, for_each={"prefect.resource.id"}, posture=Posture.Reactive)
    subject = "Cairn: {{ flow_run.name }}: {{ event.payload.reason }}"
    action = SendNotification(block_document_id=block_document_id, subject=subject, body=_BODY)
    return AutomationCore(name=ALERT, trigger=trigger, actions=[action])


async def set_up(
    pool: WorkPoolCreate, prefect_file: Path | None = None, *, accelerators: int | None, alert_block: str
) -> Sequence[str]:
    """Make what is missing; return what was changed, and what stays as a person has set it.

    Raises `InvalidConfiguration` for a block that is not there.
    """
    async with get_client() as client:
        try:
            await StoreCredentials.aregister_type_and_schema(client=client)
        except exceptions.ObjectAlreadyExists:  # somebody else set the server up between its check and its request
            await StoreCredentials.aregister_type_and_schema(client=client)
        changed, limit = [*(await _set_up_pool(client, pool))], None
        found = {queue.name for queue in await client.read_work_queues(work_pool_name=pool.name)}
        for name, priority in QUEUES.items():
            if name not in found:
                await client.create_work_queue(name, work_pool_name=pool.name, priority=priority)
                changed.append(f"work queue {name}: made with priority {priority}")
        with suppress(exceptions.ObjectNotFound):
            limit = (await client.read_global_concurrency_limit_by_name(ACCELERATORS)).limit if accelerators else None
        if accelerators and limit != accelerators:
            await client.upsert_global_concurrency_limit_by_name(ACCELERATORS, accelerators)
            changed.append(f"limit {ACCELERATORS}: {accelerators}")
        if prefect_file:
            for item in yaml.safe_load(prefect_file.read_text(encoding="utf-8"))["deployments"]:
                changed += await deployments.deploy(client, item)
        return [*changed, *(await _alert(client, alert_block) if alert_block else ())]


async def _set_up_pool(client: PrefectClient, pool: WorkPoolCreate) -> Sequence[str]:
    wanted, said = {"job template": pool.base_job_template}, list[str]()
    try:
        found = await client.read_work_pool(pool.name)
    except exceptions.ObjectNotFound:
        found = await client.create_work_pool(pool)
        said.append(f"work pool {pool.name}: made")
    now, variable = {"job template": found.base_job_template}, f"cairn_deployed_{found.id.hex}"
    # Without the template a flow run may not begin: one of which nothing is known is replaced.
    deployed = await deployments.read_deployed(client, variable)
    changes = deployments.compare(deployed or deployments.digests(now), now, wanted)
    if changes.written:
        await client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=pool.base_job_template))
        said.append(f"work pool {pool.name}: has this job template")
    if changes.kept:
        said.append(f"work pool {pool.name}: stays as a person has set it: job template")
    await deployments.remember_deployed(client, variable, wanted)
    return said


async def _alert(client: PrefectClient, block: str) -> Sequence[str]:
    kind, _, name = block.partition("/")
    rule = "rule: TYPE/NAME of a notification block, as `prefect block ls` shows it, such as slack-webhook/mine"
    try:
        document = await client.read_block_document_by_name(name, kind)
    except exceptions.ObjectNotFound as error:
        raise InvalidConfiguration(f"alert block {block!r}: Prefect does not know it; {rule}") from error
    schema = document.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise InvalidConfiguration(f"alert block {block!r}: it notifies nobody; {rule}")
    wanted = alert_automation(document.id)
    found = await client.read_automations_by_name(ALERT)
    if any(getattr(action, "block_document_id", None) == document.id for one in found for action in one.actions):
        return []
    for one in found:
        await client.update_automation(one.id, wanted.model_copy(update={"enabled": one.enabled}))
    if not found:
        await client.create_automation(wanted)
    return [f"alert: sent by {block}"]


def main() -> None:
    """Set the named server up and print what was changed."""
    parser = argparse.ArgumentParser(prog="python -m cairn.flows.orchestrator.server_setup", description=__doc__)
    parser.add_argument("--pool", default="cairn", help="work pool of the deployments")
    parser.add_argument("--type", default="process", help="type of the work pool, if it is created")
    parser.add_argument("--job-template", default="deployments/job-template.json", help="its base job template")
    parser.add_argument("--deployments", type=Path, default=Path("prefect.yaml"), help="file of the deployments")
    parser.add_argument("--accelerators", type=int, help="how many flow runs may use accelerators at once")
    parser.add_argument("--alert-block", default="", help="notification block that alerts use, TYPE/NAME")
    options = parser.parse_args()
    template = json.loads(Path(options.job_template).read_text(encoding="utf-8"))
    pool = WorkPoolCreate(name=options.pool, type=options.type, base_job_template=template)
    try:
        asked = set_up(pool, options.deployments, accelerators=options.accelerators, alert_block=options.alert_block)
        print("\n".join(asyncio.run(asked)) or "nothing to change")
    except InvalidConfiguration as error:
        sys.exit(str(error))
