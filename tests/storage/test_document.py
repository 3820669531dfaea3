"""Records made of other records."""

import pytest

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.stores.document import project
from tests.storage.builders import committed


def test_a_projected_record_has_the_equally_named_fields_and_those_that_are_given() -> None:
    found = project(committed(20, 1), CheckpointReference, attempt=7)
    assert found == CheckpointReference(step=20, attempt=7, prefix=found.prefix, manifest_sha256=f"{20:064x}")


def test_a_field_that_neither_the_record_nor_the_caller_has_is_named() -> None:
    with pytest.raises(TypeError, match="'prefix'"):
        project(object(), CheckpointReference, step=1, attempt=1, manifest_sha256="m")
