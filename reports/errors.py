"""The errors of `reports`: one root, a subclass only where the command leaves with another exit code."""


class ReportError(Exception):
    """A report could not be made."""


class RunNotFound(ReportError):
    """No run, checkpoint or alias of this name in the store."""


class InvalidQuery(ReportError):
    """The database refuses the query; the message is its own, with what can be asked."""
