"""Tags of a flow run: added beside those that a person has given it."""

from collections.abc import Set
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient


def add_tags(client: SyncPrefectClient, flow_run_id: UUID, tags: Set[str]) -> None:
    """Add what is missing; raises the API's errors. Prefect's own update replaces all tags."""
    present = set(client.read_flow_run(flow_run_id).tags)
    if not tags <= present:
        client.update_flow_run(flow_run_id, tags=sorted(present | tags))
