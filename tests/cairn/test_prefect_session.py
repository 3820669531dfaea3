"""Which Prefect server a command uses when the named one is not there: a real temporary one, started by it."""

import socket

import pytest

from cairn.operations import prefect_session
from cairn.operations.prefect_session import PrefectServer, explain_outside_state
from tests.fabricated_run import FabricatedRun


@pytest.fixture
def nobody_listens() -> str:
    """The address of a server that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def test_a_named_server_that_is_gone_is_replaced_by_a_temporary_one(
    nobody_listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_session, "_ABSENT_SECONDS", 0.0)
    environment, said = {"PREFECT_API_URL": nobody_listens}, list[str]()
    server = PrefectServer(environment, say=said.append)
    server.replace_lost()
    try:
        assert environment["PREFECT_API_URL"] not in ("", nobody_listens)
        assert said[0] == f"{nobody_listens} does not answer: this run is not shown there"
    finally:
        assert server._ephemeral is not None
        server._ephemeral.stop()


def test_an_end_that_somebody_else_set_in_prefect_is_told_with_what_the_log_says(fresh: FabricatedRun) -> None:
    set_outside = "this flow run was set to Cancelling in Prefect from outside; by the run log"
    assert explain_outside_state("Cancelling", fresh.log).startswith(f"{set_outside} no attempt ended")
    fresh.start()
    fresh.finish(fresh.commit(40))
    fresh.end("completed", action="finish")
    ended = f"{set_outside} attempt 1 ended completed at step 12"
    assert explain_outside_state("Cancelling", fresh.log) == f"{ended}; the same command continues"
