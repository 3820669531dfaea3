"""TensorBoard and MLflow show one unbroken curve, and nothing that happens to them reaches training."""

import errno
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.exporters.curve_follower import CurveUpdate, Point
from cairn.reports.exporters.exporters import Exporter, check_exporters, export_beside, run_exporters
from cairn.reports.exporters.tracking_tools import MlflowExporter, MlflowRefused, TensorBoardExporter
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import ExportersConfig
from cairn.tasks.errors import InvalidConfiguration
from tests.entries import NOON
from tests.fabricated_run import DOCUMENT, fabricate
from tests.reports.exported_run import ExportedRun, following, interrupted_run
from tests.reports.tracking_server import TrackingServer, tracking_server


def curve(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """What TensorBoard itself shows of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]  # type: ignore[misc]


Board = Callable[..., TensorBoardExporter]


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """Makes exporters of a run, one for each process that trains it; their files are closed in the end."""
    made: list[TensorBoardExporter] = []

    def make(run: ExportedRun, store_url: str = "") -> TensorBoardExporter:
        made.append(TensorBoardExporter(tmp_path, run.run.log.run_id, store_url or run.run.log.store.url))
        return made[-1]

    yield make
    for exporter in made:
        exporter.end(RunState())


def test_tensorboard_shows_the_surviving_line_and_the_evaluations(
    store: LocalStore, tmp_path: Path, board: Board
) -> None:
    run, folder = interrupted_run(store), tmp_path / "bard"
    following(run, board(run))()
    assert run.curve() == curve(folder) and len(run.curve()) == 20
    assert curve(folder, "held-out/val_loss") == [(10, 3.0), (20, 2.0)]
    assert curve(folder, "probe/loss") == [(10, 2.0), (20, 2.0)]


def test_tensorboard_forgets_what_an_attempt_trains_again(store: LocalStore, tmp_path: Path, board: Board) -> None:
    run = ExportedRun(run=fabricate(store, "bard"))
    follow = following(run, board(run))
    run.start()
    run.train(1, 10)
    run.run.commit(10)
    run.train(11, 14)
    follow()
    assert len(curve(tmp_path / "bard")) == 14
    run.die()
    run.start()
    run.train(11, 12)
    follow()
    assert run.curve() == curve(tmp_path / "bard") and len(run.curve()) == 12


def test_a_process_that_goes_on_leaves_one_file_and_no_step_twice(
    store: LocalStore, tmp_path: Path, board: Board
) -> None:
    run = interrupted_run(store)
    following(run, board(run))()  # and dies without a word
    run.train(21, 22)
    following(run, board(run))()
    assert run.curve() == curve(tmp_path / "bard") and len(run.curve()) == 22
    assert len(list((tmp_path / "bard").iterdir())) == 1


def test_files_of_others_in_the_folder_are_left_alone(store: LocalStore, tmp_path: Path, board: Board) -> None:
    (tmp_path / "bard").mkdir()
    (tmp_path / "bard" / "events.out.tfevents.1.somebody").write_bytes(b"")
    run = interrupted_run(store)
    following(run, board(run))()
    assert len(list((tmp_path / "bard").iterdir())) == 2


def test_a_run_of_the_same_name_in_another_store_has_a_curve_of_its_own(
    store: LocalStore, tmp_path: Path, board: Board
) -> None:
    run = interrupted_run(store)
    for _ in range(2):
        following(run, board(run))()
        following(run, board(run, "another store"))()
    folders = sorted(path for path in tmp_path.iterdir() if path.name.startswith("bard"))
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]
    assert [curve(folder) for folder in folders] == [run.curve()] * 2


@pytest.fixture
def server() -> Iterator[TrackingServer]:
    with tracking_server() as serving:
        yield serving


def mlflow(run: ExportedRun, server: TrackingServer) -> MlflowExporter:
    return MlflowExporter(server.url, {}, run.run.log.run_id)


def test_mlflow_has_one_run_with_parameters_curve_evaluations_and_reasons(
    store: LocalStore, server: TrackingServer
) -> None:
    run = interrupted_run(store)
    following(run, mlflow(run, server))()
    [told] = server.runs.values()
    assert server.values("train.loss") == run.curve()
    assert server.values("held-out.val_loss") == [(10, 3.0), (20, 2.0)]
    assert told["name"] == "bard" and told["params"]["model.n_embd"] == "8" and told["status"] == "RUNNING"
    assert told["tags"]["cairn.attempt.0001"] == "preempted at step 12: preempted it was"


def test_mlflow_is_told_a_step_only_once_it_is_committed(store: LocalStore, server: TrackingServer) -> None:
    run = ExportedRun(run=fabricate(store, "bard"))
    run.start()
    follow = following(run, mlflow(run, server))
    run.train(1, 14)
    follow()
    assert server.values("train.loss") == []
    run.run.commit(10)
    follow()
    assert [step for step, _ in server.values("train.loss")] == list(range(1, 11))
    run.die()
    run.start()
    run.train(11, 12)
    run.run.commit(12)
    follow()
    assert server.values("train.loss") == run.curve(), "no step twice, none of what was lost"


def test_a_process_that_goes_on_continues_the_same_mlflow_run(store: LocalStore, server: TrackingServer) -> None:
    run = interrupted_run(store)
    following(run, mlflow(run, server))()
    run.train(21, 30)
    run.run.commit(30)
    server.requests.clear()
    follow = following(run, mlflow(run, server))
    follow()
    assert len(server.runs) == 1 and server.values("train.loss") == run.curve() and len(run.curve()) == 30
    assert len([item for item in server.runs["run0"]["metrics"] if item[0] == "train.loss"]) == 30
    follow()
    assert server.requests.count("runs/log-batch") <= 5, "what is known is not sent again"


def test_mlflow_sends_again_what_was_trained_again_while_nobody_told(store: LocalStore, server: TrackingServer) -> None:
    run = interrupted_run(store)
    following(run, mlflow(run, server))()
    server.runs["run0"]["tags"]["cairn.exported"] = "14:1"  # of the first attempt, whose steps after 10 were lost
    following(run, mlflow(run, server))()
    assert server.runs["run0"]["tags"]["cairn.exported"] == "20:2"


def test_a_number_that_is_none_is_told_by_its_name(store: LocalStore, server: TrackingServer) -> None:
    run = interrupted_run(store)
    exporter = mlflow(run, server)
    exporter.begin(run.state)
    lines = (
        Point(step=21, attempt=2, at_seconds=1.0, values={"train/loss": math.inf}),
        Point(step=22, attempt=2, at_seconds=2.0, values={"train/loss": math.nan}),
    )
    exporter.write(CurveUpdate(settled=lines))
    assert server.values("train.loss") == [(21, "Infinity"), (22, "NaN")]


@pytest.mark.parametrize(("last", "status"), [("finish", "FINISHED"), ("resume", "KILLED"), ("stop", "FAILED")])
def test_mlflow_is_told_how_it_ended(store: LocalStore, server: TrackingServer, last: str, status: str) -> None:
    run = ExportedRun(run=fabricate(store, "bard"))
    run.start()
    if last == "finish":
        run.run.finish(run.run.commit(40))
    run.run.end("completed" if last == "finish" else "error", action=last)
    exporter = mlflow(run, server)
    exporter.begin(run.state)
    exporter.end(run.state)
    assert server.runs["run0"]["status"] == status


def test_a_run_of_the_same_name_in_another_store_is_another_mlflow_run(
    store: LocalStore, tmp_path: Path, server: TrackingServer
) -> None:
    first = ExportedRun(run=fabricate(store, "bard"))
    second = ExportedRun(run=fabricate(LocalStore(tmp_path / "other"), "bard", opened_at=NOON + timedelta(days=1)))
    for run in (first, second):
        mlflow(run, server).begin(run.state)
    assert len(server.runs) == 2


def test_the_servers_words_are_in_the_error_and_credentials_only_in_the_header(server: TrackingServer) -> None:
    exporter = MlflowExporter(f"{server.url}/", {"MLFLOW_TRACKING_TOKEN": "hidden"}, "bard")
    with pytest.raises(MlflowRefused, match="RESOURCE_DOES_NOT_EXIST: no"):
        exporter.ask("experiments/get-by-name", {"experiment_name": "nobody's"})
    assert server.headers["Authorization"] == "Bearer hidden"
    MlflowExporter(server.url, {"MLFLOW_TRACKING_USERNAME": "ada"}, "bard").ask("experiments/create", name="x")
    assert server.headers["Authorization"] == "Basic YWRhOg=="


class Faulty:
    """A exporter that does what it is told to, and counts."""

    name = "Faulty"

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self._act = act
        self.begun = 0
        self.steps: list[int] = []
        self.ended = threading.Event()
        self.written = threading.Event()
        self.is_whole = threading.Event()

    def begin(self, state: RunState) -> None:
        self.begun += 1
        self.steps.clear()

    def write(self, update: CurveUpdate) -> None:
        self.written.set()
        self._act()
        self.steps += [point.step for point in update.steps]
        self.is_whole.set()

    def end(self, state: RunState) -> None:
        self.ended.set()


def kept(run: ExportedRun, exporter: Exporter, said: list[str], **options: Any) -> Any:
    return export_beside(run.run.log, exporter, said.append, **{"every_seconds": 0.01, **options})


def test_the_exporter_is_whole_when_the_block_ends(store: LocalStore) -> None:
    run, exporter, said = interrupted_run(store), Faulty(), list[str]()
    with kept(run, exporter, said, every_seconds=60.0):
        assert exporter.written.wait(120)
        run.train(21, 23)
    assert exporter.ended.is_set() and exporter.steps == list(range(1, 24)) and said == []


def fails(times: int, error: Exception) -> Callable[[], None]:
    left = [times]

    def act() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return act


@pytest.mark.parametrize(
    "error",
    [ValueError("a\nbug"), OSError(errno.ENOSPC, "No space left on device"), TimeoutError("timed out")],
    ids=type,
)
def test_a_exporter_that_raises_is_said_once_and_made_whole_later(store: LocalStore, error: Exception) -> None:
    run, said = interrupted_run(store), list[str]()
    exporter = Faulty(fails(3, error))
    with kept(run, exporter, said):
        assert exporter.is_whole.wait(120)
    assert exporter.steps == list(range(1, 21)) and exporter.begun == 4, "told from the first step each time"
    assert len(said) == 1 and said[0].startswith("Faulty cannot be kept up to date, training goes on: ")
    assert "\n" not in said[0]


def test_an_exporter_that_hangs_holds_up_neither_training_nor_its_end(store: LocalStore) -> None:
    run, said, let_go = interrupted_run(store), list[str](), threading.Event()
    exporter = Faulty(lambda: print(let_go.wait()))
    with kept(run, exporter, said, final_seconds=0.2):
        assert exporter.written.wait(120)
    assert not exporter.ended.is_set()  # the block has ended while the exporter still hangs
    assert said == ["Faulty has not received the last steps; the next process that trains this run sends them"]
    let_go.set()


def test_a_block_that_raises_raises_its_own(store: LocalStore) -> None:
    run, said = interrupted_run(store), list[str]()
    with pytest.raises(ZeroDivisionError), kept(run, Faulty(fails(99, ValueError("no"))), said):
        raise ZeroDivisionError


@pytest.mark.linux  # writes to /dev/full
def test_a_full_disk_is_met_by_a_new_file_that_is_whole(store: LocalStore, tmp_path: Path, board: Board) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    run = interrupted_run(store)
    exporter = board(run)
    follow = following(run, exporter)
    with open("/dev/full", "wb", buffering=0) as full:
        exporter._records = RecordWriter(full)
        with pytest.raises(OSError, match="No space left"):
            follow()
    following(run, exporter)()
    assert run.curve() == curve(tmp_path / "bard")


@pytest.mark.parametrize(("tool", "key", "where"), [("TensorBoard", "tensorboard", "file"), ("MLflow", "mlflow", "")])
def test_a_folder_that_cannot_be_made_or_a_server_that_is_away_is_said_once_and_training_goes_on(
    store: LocalStore, tmp_path: Path, tool: str, key: str, where: str
) -> None:
    run, said = interrupted_run(store), list[str]()
    (tmp_path / "file").write_text("in the way")
    wanted = ExportersConfig.model_validate({key: str(tmp_path / where) if where else "http://127.0.0.1:9"})
    with run_exporters(run.run.log, wanted, {}, said.append):
        pass
    assert len(said) == 1 and said[0].startswith(f"{tool} cannot be kept up to date, training goes on: ")


def test_both_exporters_of_a_configuration_are_kept(store: LocalStore, tmp_path: Path, server: TrackingServer) -> None:
    run, said = interrupted_run(store), list[str]()
    wanted = ExportersConfig(tensorboard=str(tmp_path / "board"), mlflow=server.url)
    with run_exporters(run.run.log, wanted, {"MLFLOW_EXPERIMENT_NAME": "poems"}, said.append):
        pass
    assert said == [] and list(server.experiments) == ["poems"]
    assert run.curve() == curve(tmp_path / "board" / "bard") and server.values("train.loss") == run.curve()


def configured(overrides: Sequence[str], folder: Path | None = None) -> ExportersConfig:
    return parse_configuration(DOCUMENT, overrides=overrides, environment={}, name="run.toml", folder=folder).exporters


def test_a_relative_folder_starts_at_the_configuration(tmp_path: Path) -> None:
    assert configured(["exporters.tensorboard=board"], tmp_path).tensorboard == str(tmp_path / "board")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("exporters.tensorboard=gs://bucket/board", "must be a folder of this machine"),
        ("exporters.mlflow=sqlite:///x.db", "is not the http"),
        ("exporters.mlflow=http://ada:secret@host", "MLFLOW_TRACKING_USERNAME"),
        ("exporters.neptune=x", "unknown key"),
    ],
)
def test_what_cannot_be_a_exporter_is_refused(override: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words) as refused:
        configured([override])
    assert "secret" not in str(refused.value)


def test_a_missing_library_is_refused_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.reports.exporters.exporters.find_spec", lambda name: None)
    with pytest.raises(InvalidConfiguration, match=r"pip install '.\[tensorboard\]'"):
        check_exporters(ExportersConfig(tensorboard="board"))
    check_exporters(ExportersConfig(mlflow="http://127.0.0.1:9"))


def test_where_a_run_is_shown_is_no_part_of_which_run_it_is(tmp_path: Path) -> None:
    def frozen(*overrides: str) -> str:
        return parse_configuration(DOCUMENT, overrides=overrides, environment={}, name="x").frozen_sha256()

    assert frozen() == frozen(f"exporters.tensorboard={tmp_path}")
