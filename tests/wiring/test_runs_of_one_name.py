"""Two runs of one name, one after the other on the same machine, in two stores that are no folders."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.reports.plots.run_curves import gather_curves
from cairn.reports.queries.evaluations import diagnose_run
from cairn.reports.queries.post_mortem import gather_post_mortem
from cairn.reports.queries.run_query import answer_query
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.open_store import open_store
from tests.s3.servers import aws_environment, s3_server
from tests.wiring.flow_in_process import RUN, FlowWorld, NotedWarmTrainer, answer_for_evaluators
from tests.wiring.tensorless_trainer import loss_of

STUCK, LEARNED = 5.6, 3.0
LAST = loss_of(20, LEARNED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Second:
    """The second run, which learned, where the first one's curve was stuck."""

    store: ObjectStore
    log: RunLog
    folder: Path


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    """Train `bard` into one prefix of a bucket, then into another one."""
    server = s3_server("quick", tmp_path_factory.getbasetemp())
    world, bucket = FlowWorld(tmp_path_factory.mktemp("twins")), f"s3://cairn/{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch, aws_environment(server.environment()):
        answer_for_evaluators(patch, world)
        for place, loss in (("one", STUCK), ("two", LEARNED)):
            url = f"{bucket}/{place}"
            warm = NotedWarmTrainer("--first-loss", f"{loss}", modules=())  # that server has a client of buckets
            world.train('promotion.alias="champion"', store=url, warm=warm)
        log = RunLog(store := open_store(url), RUN)
        log.refresh()
        yield Second(store=store, log=log, folder=world.folder)


def test_its_curve_is_its_own(second: Second) -> None:
    assert [point.record.train_loss for point in gather_curves(second.log).points] == [
        loss_of(step, LEARNED) for step in range(1, 21)
    ]


def test_sql_has_its_own_steps(second: Second) -> None:
    with answer_query(second.store, "select step, train_loss from steps order by step", work=second.folder) as found:
        assert [*found.rows][-1] == (20, LAST)


def test_the_post_mortem_tells_its_own_last_step(second: Second) -> None:
    attempt = gather_post_mortem(second.log).attempt
    assert attempt is not None and attempt.last_record is not None and attempt.last_record.train_loss == LAST


def test_its_verdict_is_of_its_own_curve(second: Second) -> None:
    assert diagnose_run(second.log).verdict.kind == "healthy"
    assert [item.verdict.kind for item in second.log.state.evaluations if item.verdict] == ["healthy"] * 2


def test_it_is_promoted(second: Second) -> None:
    promoted = Registry(second.store, "champion").refresh().champion
    assert promoted is not None and promoted.run_id == RUN
