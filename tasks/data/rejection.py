"""The reasons for which a document is left out, by the names under which a snapshot counts them."""

from enum import StrEnum


class RejectionKind(StrEnum):
    """Why a document was rejected."""

    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    MISSING_FIELD = "missing-field"
    NOT_A_STRING = "not-a-string"
    NOT_A_CONVERSATION = "not-a-conversation"
    NO_ANSWER = "no-answer"
    TEMPLATE = "template"
    EMPTY = "empty"
    EMPTY_FILE = "empty-file"
    TOO_LONG = "too-long"
    DUPLICATE = "duplicate"


LEFT_OUT = frozenset({RejectionKind.DUPLICATE, RejectionKind.EMPTY_FILE})
"""Left out without being a fault of the data."""
