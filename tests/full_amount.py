"""Whether a session tries everything (`make test-full`) or, of enumerations that take long, a fixed share."""

import os

FULL = "CAIRN_TEST_FULL" in os.environ


def share_of(one_in: int) -> int:
    """Return the step of an enumeration of which one case in so many is tried by default."""
    return 1 if FULL else one_in
