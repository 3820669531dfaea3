"""How many functions the resolved configuration is handed through, from the request to the run's end."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from cairn.flows.preparation.training_request import ResolvedRequest
from cairn.tasks.configuration.run_configuration import RunConfig
from tests.wiring.flow_in_process import FlowWorld

ROOT = Path(__file__).parents[2]
MOST_FUNCTIONS = 25


class Route:
    """The functions of ours that are called with a resolved request or the configuration of a run."""

    def __init__(self) -> None:
        self.functions: set[str] = set()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the function of a call, as `sys.setprofile` reports it."""
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] in (".venv", "tests"):
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "self" not in given[:1] and any(
            isinstance(frame.f_locals.get(name), ResolvedRequest | RunConfig) for name in given
        ):
            self.functions.add(f"{path.relative_to(ROOT)}:{code.co_name}")


def test_the_resolved_configuration_is_handed_through_few_functions(flow: FlowWorld) -> None:
    route = Route()
    threading.setprofile(route.note)
    sys.setprofile(route.note)
    try:
        flow.check()
        flow.train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(route.functions) <= MOST_FUNCTIONS, sorted(route.functions)
