"""The stores of deployed runs: each start writes its own on its flow run and into a Prefect variable.

Flows that look after all runs visit these stores. `prefect variable ls` lists them; `prefect variable unset NAME`
forgets one until a run of it is started again.
"""

import os
from collections.abc import Callable, Iterable
from typing import TypeVar
from uuid import UUID

from prefect import exceptions, get_client, runtime
from prefect.client.schemas.actions import VariableCreate, VariableUpdate

from cairn.flows.errors import EXPECTED_ERRORS
from cairn.flows.orchestrator.server_setup import take_credentials
from cairn.storage.stores import codec, open_store
from cairn.tasks.configuration.addresses import choose_store

T = TypeVar("T")
_PREFIX = "cairn_store_"


def record_store(url: str, run_id: str, credentials: str, say: Callable[[str], None]) -> None:
    """Write run and store of a deployed flow run where continuations find them; an API that fails costs the record."""
    try:
        if runtime.deployment.get_id() is None:
            return
        own_id, name = UUID(runtime.flow_run.get_id()), _PREFIX + codec.sha256(url.encode())[:12]
        with get_client(sync_client=True) as client:
            given = client.read_flow_run(own_id).parameters
            client.update_flow_run(own_id, parameters={**given, "run_id": run_id, "store": url})
            kept = {"store": url, "store_credentials": credentials}
            try:
                client.create_variable(VariableCreate(name=name, value=kept))
            except exceptions.ObjectAlreadyExists:
                client.update_variable(VariableUpdate(name=name, value=kept))
    except Exception as error:  # whatever the API does, the run is trained
        say(f"store {url} is not on record in Prefect, where watch-runs and sweep-checkpoints look for it: {error}")


def visit_stores(given: str, credentials: str, do: Callable[[str], Iterable[T]], say: Callable[[str], None]) -> list[T]:
    """Act on the given store, or without one on this worker's own and all on record; raises the first error at the end.

    The environment has the credentials of the store that is visited.
    """
    stores, results = {open_store.open_store(choose_store(given, os.environ)).url: ("", credentials)}, list[T]()
    if not given:
        with get_client(sync_client=True) as client:
            for variable in client.read_variables():
                if variable.name.startswith(_PREFIX) and isinstance(variable.value, dict):
                    kept = variable.value
                    stores.setdefault(str(kept["store"]), (variable.name, str(kept["store_credentials"])))
    first, before = None, {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    for url, (name, named) in stores.items():
        try:
            take_credentials(named, os.environ)
            results.extend(do(url))
        except EXPECTED_ERRORS as error:
            first = first or error
            if name:
                say(f"store {url}: {error}; `prefect variable unset {name}` forgets this store")
        finally:
            for changed in [key for key in os.environ if key.startswith("AWS_")]:
                del os.environ[changed]
            os.environ.update(before)
    if first is not None:
        raise first
    return results
