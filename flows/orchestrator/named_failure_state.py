"""What a deployed flow run cannot do is its end state: named after the error, with the one line that says what to do.

Owns that a person in the UI reads `ConfigDrift` and the difference, not `Failed` and a traceback. A flow run that a
command of this project started raises instead: the command explains it and leaves with the error's exit code. What
nobody foresaw keeps its traceback in both.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import deployment
from prefect.states import Failed

from flows.errors import EXPECTED_ERRORS

P = ParamSpec("P")


def named_failure_state(body: Callable[P, State[None]]) -> Callable[P, State[None]]:
    """Turn the expected errors of a flow's body into its end state, where a deployment's flow run is at work."""

    @functools.wraps(body)
    def named(*arguments: P.args, **keywords: P.kwargs) -> State[None]:
        try:
            return body(*arguments, **keywords)
        except EXPECTED_ERRORS as error:
            if not is_deployed():
                raise
            get_run_logger().error("%s", error)
            failed: State[Any] = Failed(name=type(error).__name__, message=str(error))
            return failed

    return named


def is_deployed() -> bool:
    """Whether the flow run at work was created from a deployment."""
    return deployment.get_id() is not None
