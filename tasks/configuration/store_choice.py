"""Which store a command means: `--store`, else `CAIRN_STORE`, else the configuration, else the default."""

from collections.abc import Mapping

DEFAULT_STORE = "./cairn-store"


def choose_store(given: str, environment: Mapping[str, str], configured: str | None = None) -> str:
    """Return the store's folder or URL."""
    return given or environment.get("CAIRN_STORE", "") or configured or DEFAULT_STORE
