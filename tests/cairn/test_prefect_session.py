"""How a run ends that loses its Prefect server, or that somebody ends in Prefect."""

import sys
from pathlib import Path

import httpx
import pytest
from prefect import State
from prefect.states import Completed, Failed

import cairn.flows.train_gpt  # noqa: F401
from cairn.flows.orchestrator.session_server import SessionServer
from cairn.flows.preparation.training_request import HandedOver, ResolvedRequest, TrainingRequest, hand_over
from cairn.operations import prefect_session
from cairn.operations.prefect_session import explain_outside_state
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from tests.fabricated_run import FabricatedRun


def test_an_end_that_somebody_else_set_in_prefect_is_told_with_what_the_log_says(fresh: FabricatedRun) -> None:
    set_outside = "this flow run was set to Cancelling in Prefect from outside; by the run log"
    assert explain_outside_state("Cancelling", fresh.log).startswith(f"{set_outside} no attempt ended")
    fresh.start()
    fresh.finish(fresh.commit(40))
    fresh.end("completed", action="finish")
    ended = f"{set_outside} attempt 1 ended completed at step 12"
    assert explain_outside_state("Cancelling", fresh.log) == f"{ended}; the same command continues"


class LosingServer:
    """Stands for the flow: attempts begin, end and are to go on, and each time Prefect has gone meanwhile."""

    def __init__(self, run: FabricatedRun, handed: HandedOver, *, attempts: int) -> None:
        self.run, self.handed, self.attempts = run, handed, attempts

    def __call__(self, **parameters: object) -> State[None]:
        if self.run.log.refresh().latest_attempt == self.attempts:
            self.handed.end = FlowEnd(reason=FlowOutcome.COMPLETED, message="it went on")
            return Completed()
        self.run.start()
        self.run.end("lost", action="resume", charged="lost")
        return Failed(data=httpx.ConnectError("All connection attempts failed"))


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_run_that_loses_its_server_between_two_attempts_goes_on_with_another(
    attempts: int, fresh: FabricatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, chosen = SessionServer({}, say=lambda words: None), list[int]()
    monkeypatch.setattr(server, "wait_ready", lambda: True)
    monkeypatch.setattr(server, "choose", lambda: chosen.append(1))
    resolved = ResolvedRequest(
        request=TrainingRequest(),
        run_id=fresh.log.run_id,
        store_url=fresh.log.store.url,
        configuration=None,
        base_dir=Path(),
    )
    with hand_over(resolved) as handed:
        monkeypatch.setattr(
            sys.modules["cairn.flows.train_gpt"], "train_gpt", LosingServer(fresh, handed, attempts=attempts)
        )
        end = prefect_session._run_flow(handed, fresh.log, server, before=0)
    assert (end.message, len(chosen)) == ("it went on", attempts)
