"""Keeps secrets out of all output: an address with credentials is refused unrepeated, an error is shown without.

Nothing else needs hiding: secrets stay in the environment or in a client's own file, `[notify]` is part of no log, and
processes that run foreign code or text get the variables of an allow-list.
"""

import re
from urllib.parse import urlsplit

_USER_INFO = re.compile(r"(//)[^/@\s]*@")
_FEW_SLASHES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/[^/@]+:[^/@]*@")
_PLAIN = re.compile(r"[!-~]+")
_SIGNED_QUERY = re.compile(r"(?i)(\b(?:x-(?:amz|goog)-[a-z-]+|awsaccesskeyid|googleaccessid|signature|sig)=)[^&\s\"']+")


def find_credentials(address: str, *, instead: str) -> str:
    """Return why an address may not be written, with where its credentials belong `instead`; empty if it may."""
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        return "is no address"
    has_some = "@" in parts.netloc or _FEW_SLASHES.match(address)
    return f"carries credentials: put them into {instead}" if has_some else ""


def find_http_problem(address: str, *, instead: str) -> str:
    """Return why an address is none of an HTTP server, or may not be written; empty if it may."""
    problem = find_credentials(address, instead=instead)
    parts = None if problem else urlsplit(address)
    if parts and (parts.scheme not in ("http", "https") or not parts.hostname or not _PLAIN.fullmatch(address)):
        return "is not the http(s) address of a server"
    return problem


def redact(text: str) -> str:
    """Return text in which addresses have neither user information nor the values of a signed query."""
    return _SIGNED_QUERY.sub(r"\1…", _USER_INFO.sub(r"\1", text))


def without_query(address: str) -> str:
    """Return the address without its query, which can be a signature, and without its fragment."""
    return urlsplit(address)._replace(query="", fragment="").geturl()
