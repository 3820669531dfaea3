"""What a fork's origin says of the data before it reaches its trainer."""

from cairn.model.configuration.data import TrainedBefore
from cairn.operations.person_decisions import fork_run
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.tasks.trainer.trainer_protocol import TrainerSpec
from tests.wiring.flow_in_process import RUN, FlowWorld, NotedWarmTrainer

TWIN = "twin"


def test_the_trainer_of_a_fork_is_sent_what_lies_before_it(flow: FlowWorld) -> None:
    flow.train("training.micro_batch=2", "budgets.lost.retries=0", warm=NotedWarmTrainer("--die-at", "13"))
    found = find_checkpoint(flow.store, f"{RUN}@10")
    fork_run(found, TWIN, ("training.global_batch=2",), {}, flow.folder)
    flow.train(text="", run_id=TWIN)
    heard = [path.read_bytes().splitlines()[0] for path in (flow.folder / "cache").rglob("*.heard")]
    (spec,) = (spec for spec in map(TrainerSpec.model_validate_json, heard) if spec.run_id == TWIN)
    assert spec.before == TrainedBefore(step=10, draws=40, tokens=320, component_draws=(40,))
