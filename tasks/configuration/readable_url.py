"""Which URLs text and configurations are read from, and in words why one could not be read."""

import os
import re

READABLE = "a path, or a URL that begins with s3://, http://, https:// or file://"
_SCHEMES = frozenset({"s3", "s3a", "http", "https", "file", "memory"})  # the last one is of tests
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{0,3})")
_REFUSED = (ConnectionError, TimeoutError)


def wrong_scheme(address: str) -> str:
    """Return what is wrong with the beginning of an address; empty for a path and for a URL that can be read."""
    if "::" in address or not (match := _URL.match(address)):
        return ""
    scheme, slashes = match[1].lower(), match[2]
    if len(slashes) >= 2:
        return "" if scheme in _SCHEMES else f"{scheme}:// is not read"
    return f"did you mean {scheme}://{address[match.end() :]}?" if slashes and scheme in _SCHEMES else ""


def why_unreadable(error: Exception, url: str) -> str:
    """Return the cause: an object that is not there, or a server that does not answer, which some libraries confuse."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _REFUSED):
            return f"nobody answers there ({os.strerror(cause.errno) if cause.errno else type(cause).__name__})"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, FileNotFoundError):
        return "no such object"
    return f"cannot be read: {str(error).replace(url, 'the URL') or type(error).__name__}"
