"""Makes ready, while a temporary server starts, what the flow of a new run needs first: a small text, and numerics.

The flow's own steps then find both, the snapshot by its recipe and the measurement in the work folder. What fails here
fails there again, and is told there.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from flows.preparation.planned_data import preview_sources
from flows.preparation.training_request import ResolvedRequest
from model.estimates.numerics import MachineSpeed
from storage.stores.open_store import open_store
from tasks.configuration.run_configuration import RunConfig
from tasks.data.snapshot_build import build_snapshot
from tasks.machine.machine_speed import numerics_here
from tasks.machine.work_folder import work_folder

_MOST_BYTES = 16 * 1024 * 1024
"""Of sources: more text takes longer than a server's start, and the flow shows how far it is."""


def prepare_early(
    resolved: ResolvedRequest, config: RunConfig, environment: Mapping[str, str], ask: Callable[[], MachineSpeed | None]
) -> Callable[[], None]:
    """Begin in a thread that ends with the process; the function that is returned waits for it."""

    def prepare() -> None:
        folder = work_folder(environment)
        with suppress(Exception):
            if sum(source.bytes for source in preview_sources(config.data, resolved.base_dir)) > _MOST_BYTES:
                return
            build_snapshot(open_store(resolved.store_url), config.data, resolved.base_dir, cache_dir=folder)
            numerics_here(config.training, config.model, folder, ask=ask)

    thread = threading.Thread(target=prepare, name="early", daemon=True)
    thread.start()
    return thread.join
