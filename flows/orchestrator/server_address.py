"""The address of the Prefect server that the environment names, and what a client of it says of itself.

Owns that an address carries no password, which would stand in every message, log and page that names the server.
Imports no Prefect; refuses to ask anybody.
"""

import base64
from collections.abc import Mapping
from urllib.parse import urlsplit

from tasks.errors import InvalidConfiguration


def server_address(environment: Mapping[str, str]) -> str:
    """Return PREFECT_API_URL, empty where it is not set; raises `InvalidConfiguration` where it cannot be one."""
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
    """Return the headers with which Prefect's own client would ask."""
    if key := environment.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if password := environment.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
    return {}
