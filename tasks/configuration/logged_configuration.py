"""A configuration as a log has it, with what the absence of a key meant when it was written.

Owns the keys whose default became another one: a run opened before goes on as what it was opened as. Refuses pydantic,
for who only reads.
"""

from collections.abc import Mapping
from typing import Any

_ABSENT_MEANS = {"precision": "fp32", "kernels": "stock"}


def logged_configuration(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document of a run's log with nothing left to today's defaults that is part of which run it is."""
    training = document.get("training")
    if not isinstance(training, Mapping):
        return document
    return {**document, "training": {**_ABSENT_MEANS, **training}}
