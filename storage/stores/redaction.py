"""Keeps secrets out of all output: an address with credentials is refused unrepeated, an error is shown without.

Nothing else needs hiding: secrets stay in the environment or in a client's own file, `[notify]` is part of no log, and
processes that run foreign code or text get the variables of an allow-list.
"""

import re
from urllib.parse import urlsplit

_USER_INFO = re.compile(r"(//)[^/@\s]*@")
_SIGNED_QUERY = re.compile(r"(?i)((?:x-amz-[a-z-]+|awsaccesskeyid|signature)=)[^&\s\"']+")


def find_credentials(address: str, *, instead: str) -> str:
    """Return why an address may not be written, with where its credentials belong `instead`; empty if it may."""
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        return "is no address"
    return f"carries credentials: put them into {instead}" if "@" in parts.netloc else ""


def redact(text: str) -> str:
    """Return text in which addresses have neither user information nor the values of a signed query."""
    return _SIGNED_QUERY.sub(r"\1…", _USER_INFO.sub(r"\1", text))


def without_query(address: str) -> str:
    """Return the address without its query, which can be a signature, and without its fragment."""
    return urlsplit(address)._replace(query="", fragment="").geturl()
