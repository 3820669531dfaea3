"""All wiring mutants: the suite must notice every one."""

from tests.wiring.flow_mutants import FLOW_MUTANTS
from tests.wiring.own_network_mutants import OWN_NETWORK_MUTANTS
from tests.wiring.prefect_mutants import PREFECT_MUTANTS
from tests.wiring.replay_mutants import REPLAY_MUTANTS
from tests.wiring.report_mutants import REPORT_MUTANTS
from tests.wiring.storage_mutants import STORAGE_MUTANTS
from tests.wiring.task_mutants import TASK_MUTANTS
from tests.wiring.training_mutants import TRAINING_MUTANTS
from tests.wiring.weights_mutants import WEIGHTS_MUTANTS

MUTANTS = (
    *(*TRAINING_MUTANTS, *FLOW_MUTANTS, *TASK_MUTANTS, *STORAGE_MUTANTS),
    *(*REPLAY_MUTANTS, *REPORT_MUTANTS, *PREFECT_MUTANTS, *WEIGHTS_MUTANTS, *OWN_NETWORK_MUTANTS),
)
LEAST = 40
