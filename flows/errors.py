"""The errors of `flows`: one root, a subclass only where the command leaves with another exit code."""


class FlowError(Exception):
    """A flow could not do what it was asked."""


class InvalidConfiguration(FlowError):
    """The configuration breaks a rule; the message names file, field, value and rule."""


class ConfigDrift(FlowError):
    """The run exists with another frozen configuration; the message is the difference."""


class RunNotFound(FlowError):
    """No run, checkpoint or alias of this name in the store."""


class InvalidQuery(FlowError):
    """The database refuses the query; the message is its own, with what can be asked."""
