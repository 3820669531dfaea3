"""The errors whose message is written for people: the root of every package below."""

from model.errors import ModelError
from reports.errors import ReportError
from storage.errors import StorageError
from tasks.errors import TaskError

EXPECTED_ERRORS = (ReportError, StorageError, TaskError, ModelError)
"""One line says everything; a traceback would only hide it."""
