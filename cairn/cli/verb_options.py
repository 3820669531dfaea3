"""What several verbs take: the store, JSON, an alias, a reference to a checkpoint, overrides.

Owns how these read in `--help`, and that a store is opened only when a verb runs.
"""

import os
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tasks.configuration.store_choice import choose_store

if TYPE_CHECKING:
    from storage.stores.object_store import ObjectStore

StoreOption = Annotated[str, Parameter(name="--store", help="folder or URL of the store [CAIRN_STORE, ./cairn-store]")]
JsonOption = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
AliasOption = Annotated[str, Parameter(name="--alias", help="the name that points at a checkpoint")]
WhyOption = Annotated[str, Parameter(name="--why", help="your reason, for the record")]
Reference = Annotated[str, Parameter(help="an alias such as champion, RUN, or RUN@STEP")]
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", help="section.key=value; may be repeated")]


def opened_store(given: str) -> "ObjectStore":
    """Return the store a command means, opened."""
    from storage.stores.open_store import open_store

    return open_store(choose_store(given, os.environ))
