"""The errors of `tasks`: one root, and a subclass only where a caller reacts differently."""


class TaskError(Exception):
    """Root of the errors of this package."""


class InvalidConfiguration(TaskError):
    """A configuration value breaks a rule; the message names file, field, value and rule."""


class ConfigDrift(TaskError):
    """The run has another frozen configuration; the message is the difference."""


class LiveOwner(TaskError):
    """Another attempt owns the run and is alive."""


class BudgetExhausted(TaskError):
    """A retry budget is spent; a person decides what follows."""


class TrainerGone(TaskError):
    """The trainer's process ended before it answered."""


class CheckpointLost(TaskError):
    """A checkpoint will not be staged, because a rank was lost that had a part of it; the next one is."""


class GateRefused(TaskError):
    """A promotion gate refused, which is recorded; or an alias or a fork needs what was to be deleted."""


class CheckpointGone(TaskError):
    """The checkpoint is no longer committed, because of retention or a quarantine."""


class ShutdownRequested(TaskError):
    """A shutdown was requested before an attempt was claimed; nothing is recorded."""


class EvaluationInterrupted(TaskError):
    """The evaluator was stopped by a shutdown request; nothing failed and nothing is recorded."""
