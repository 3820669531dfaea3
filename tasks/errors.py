"""The errors of `tasks`: one root, a subclass only where a caller acts differently."""


class TaskError(Exception):
    """A task could not do what it is for."""


class InvalidConfiguration(TaskError):
    """The configuration breaks a rule; the message names file, field, value and rule."""


class ConfigDrift(TaskError):
    """The run exists with another frozen configuration; the message is the difference."""


class LiveOwner(TaskError):
    """Another attempt owns the run and is alive: leave it alone."""


class BudgetExhausted(TaskError):
    """A retry budget is spent: a person decides."""


class TrainerGone(TaskError):
    """The trainer's process ended before it answered."""


class GateRefused(TaskError):
    """A promotion gate said no; the refusal is on record."""


class CheckpointGone(TaskError):
    """The checkpoint is no longer committed: retention or a quarantine took it before its turn came."""


class EvaluationInterrupted(TaskError):
    """The evaluator was told to stop because the run has to leave: nothing failed, nothing is on record."""
