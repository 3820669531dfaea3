"""The errors whose message is written for people: the root of every package below."""

from cairn.model.errors import ModelError
from cairn.reports.errors import ReportError
from cairn.storage.errors import StorageError
from cairn.tasks.errors import TaskError

EXPECTED_ERRORS = (ReportError, StorageError, TaskError, ModelError)
"""One line says everything; a traceback would only hide it."""
