"""The environment of the tests and of every process they start: an allow-list, so that no caller's variable changes a
result: not a proxy, a locale, a terminal, a time zone, credentials, nor a setting of Cairn or Prefect.
"""

import locale
import os
import time
from collections.abc import Mapping
from contextlib import suppress

KEPT = frozenset(
    {
        "HOME",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PLAYWRIGHT_BROWSERS_PATH",
        "PYTHONPATH",
        "TMPDIR",
        "USER",
        "VIRTUAL_ENV",
    }
)
KEPT_PREFIXES = ("CAIRN_SIMULATOR_", "CAIRN_TEST_", "CUDA_", "NVIDIA_", "PYTEST_")
FIXED = {
    "DO_NOT_TRACK": "1",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TERM": "xterm",
    "TZ": "UTC",
}


def restrict(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what tests may see of a caller's environment, with the fixed values."""
    kept = {name: value for name, value in environment.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    return {**kept, **FIXED}


def restrict_this_process() -> None:
    """Replace this process's own environment, which its children inherit; comes before the imports that read it."""
    restricted = restrict(os.environ)
    os.environ.clear()
    os.environ.update(restricted)
    time.tzset()
    with suppress(locale.Error):  # a system without C.UTF-8
        locale.setlocale(locale.LC_ALL, "")  # what this interpreter opens without an encoding is UTF-8 from here on
