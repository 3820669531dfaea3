"""Does anybody name a Prefect server? Answered without importing Prefect wherever its own files cannot say.

Owns where Prefect looks: the environment, a profile, `.env`, `prefect.toml` and `pyproject.toml` of the folder it is
started in. Refuses to interpret them: where one may speak of Prefect, Prefect is asked.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

_NAMING = ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY")


def is_server_named(environment: Mapping[str, str], folder: Path, *, ask_prefect: Callable[[], str | None]) -> bool:
    """Whether a server is named; `ask_prefect` is called only where its files may name one, and takes a second."""
    if environment.get("PREFECT_API_URL"):
        return True
    return _may_be_named(environment, folder) and bool(ask_prefect())


def _may_be_named(environment: Mapping[str, str], folder: Path) -> bool:
    home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    return (
        any(environment.get(name) for name in _NAMING)
        or (home / "profiles.toml").exists()
        or (folder / "prefect.toml").exists()
        or "prefect" in _text(folder / ".env").lower()
        or _has_prefect_table(folder / "pyproject.toml")
    )


def _has_prefect_table(path: Path) -> bool:
    try:
        return "prefect" in tomllib.loads(_text(path)).get("tool", {})
    except tomllib.TOMLDecodeError:
        return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
