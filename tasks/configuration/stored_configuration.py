"""The configuration a run log holds, made into a `RunConfig` again: or said to be none.

Owns that what lies in a store is never believed on its word, and that what a newer cairn wrote is told from damage.
Refuses to read logs and files.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from storage.errors import IntegrityError
from tasks.configuration.run_configuration import RunConfig

_SHOWN_CHARACTERS = 60


def parse_stored_configuration(document: Mapping[str, Any]) -> RunConfig:
    """Return the validated configuration; raises `IntegrityError` naming the first field that breaks a rule."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:_SHOWN_CHARACTERS] or "the whole of it"
        if first["type"] == "extra_forbidden":
            problem = "is a key this cairn does not know; update cairn, or the log was changed"
        else:
            problem = f"{first['msg']}, it is {repr(first['input'])[:_SHOWN_CHARACTERS]}; the log was changed"
        raise IntegrityError(f"the configuration in the run's log cannot be believed: {field}: {problem}") from error
