"""All wiring mutants: the suite must notice every one."""

from tests.wiring.flow_mutants import FLOW_MUTANTS
from tests.wiring.report_mutants import REPORT_MUTANTS
from tests.wiring.training_mutants import TRAINING_MUTANTS

MUTANTS = (*TRAINING_MUTANTS, *FLOW_MUTANTS, *REPORT_MUTANTS)
LEAST = 40
