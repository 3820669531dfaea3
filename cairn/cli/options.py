"""Options that several commands take, and the store they open."""

import os
from typing import Annotated

from cyclopts import Parameter

from reports.queries.run_lookup import find_run
from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store
from tasks.configuration.addresses import choose_store

StoreOption = Annotated[str, Parameter(name="--store", help="folder or URL of the store [CAIRN_STORE, ./cairn-store]")]
JsonOption = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
AliasOption = Annotated[str, Parameter(name="--alias", help="the name that points at a checkpoint")]
WhyOption = Annotated[str, Parameter(name="--why", help="your reason, for the record")]
Reference = Annotated[str, Parameter(help="an alias such as champion, RUN, or RUN@STEP")]
SnapshotReference = Annotated[str, Parameter(help="a snapshot's id, at least 8 characters of it, or RUN")]
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", help="section.key=value; may be repeated")]
Flag = Annotated[bool, Parameter(negative="")]


def open_chosen_store(given: str) -> ObjectStore:
    """Return the store that a command means."""
    return open_store(choose_store(given, os.environ))


def open_run_log(given_store: str, run: str) -> RunLog:
    """Return the log of a run, read to its end; raises `RunNotFound`."""
    return find_run(open_chosen_store(given_store), run)
