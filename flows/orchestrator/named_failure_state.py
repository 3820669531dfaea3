"""Ends a deployed flow run in a state named after its error, with the error's one line.

A flow run of the `cairn` command raises instead: the command prints the error and exits with its code. Unexpected
errors keep their traceback in both.
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
    """Turn the expected errors of a deployed flow run into its end state."""

    @functools.wraps(body)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> State[None]:
        try:
            return body(*arguments, **keywords)
        except EXPECTED_ERRORS as error:
            if deployment.get_id() is None:  # not created from a deployment
                raise
            get_run_logger().error("%s", error)
            failed: State[Any] = Failed(name=type(error).__name__, message=str(error))
            return failed

    return wrapper
