"""The errors a person is meant to read: the root of every package below."""

from model.errors import ModelError
from reports.errors import ReportError
from storage.errors import StorageError
from tasks.errors import TaskError

EXPECTED_ERRORS = (ReportError, StorageError, TaskError, ModelError)
"""Errors whose message is written for people: one line says it all, a traceback would only hide it."""
