"""Which Prefect server is named, and whether it answers; imports no Prefect."""

import base64
import ssl
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tasks.errors import InvalidConfiguration
from tasks.machine.http_request import open_directly

_PROFILE_VARIABLES = ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY")


def server_address(environment: Mapping[str, str]) -> str:
    """Return PREFECT_API_URL or ""; `InvalidConfiguration` for a wrong one, or a password in it: logs would show it."""
    address = environment.get("PREFECT_API_URL", "")
    if not address:
        return ""
    try:
        parts = urlsplit(address)
        host, secret = parts.hostname, parts.username or parts.password
        _ = parts.port
    except ValueError as error:
        raise InvalidConfiguration("PREFECT_API_URL: is no address; rule: http(s)://host:port/api") from error
    if secret is not None or "@" in parts.netloc:
        raise InvalidConfiguration(
            "PREFECT_API_URL carries a password; put it into PREFECT_API_AUTH_STRING as user:password"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidConfiguration(f"PREFECT_API_URL = {address!r}: rule: http(s)://host:port/api")
    return address


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that Prefect's client would send."""
    if key := environment.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if password := environment.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
    return {}


def is_server_answering(api_url: str, *, timeout_seconds: float, proxies: bool) -> bool:
    """Whether a server answers at all; an error status and a bad certificate are answers too."""
    request = urllib.request.Request(f"{api_url.rstrip('/')}/health")
    try:
        with open_directly(request, timeout_seconds=timeout_seconds, proxies=proxies):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def is_server_named(environment: Mapping[str, str], folder: Path, *, ask_prefect: Callable[[], str | None]) -> bool:
    """Whether the environment, a profile or a file of `folder` names a server; `ask_prefect` is slow and asked last."""
    if environment.get("PREFECT_API_URL"):
        return True
    home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    may_be_named = (
        any(environment.get(name) for name in _PROFILE_VARIABLES)
        or (home / "profiles.toml").exists()
        or (folder / "prefect.toml").exists()
        or "prefect" in _read_text(folder / ".env").lower()
        or _has_prefect_table(folder / "pyproject.toml")
    )
    return may_be_named and bool(ask_prefect())


def _has_prefect_table(path: Path) -> bool:
    try:
        return "prefect" in tomllib.loads(_read_text(path)).get("tool", {})
    except tomllib.TOMLDecodeError:
        return True


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
