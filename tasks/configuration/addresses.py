"""The meaning of a text of the command line: a file of `deployments` by its bare name, a URL to read, or a store."""

import os
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from cairn.storage.stores.redaction import redact
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.text.output import say

CONFIGURATIONS, SUITES = Path("deployments"), Path("deployments/suites")
_OWN = Path(__file__).parents[2]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")
READABLE = "a path, or a URL that begins with s3://, http://, https:// or file://"
_SCHEMES = frozenset({"s3", "s3a", "http", "https", "file", "memory"})  # the last one is of tests
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{0,3})")
DEFAULT_STORE = "./cairn-store"
_COMMAND = re.compile(r"`cairn (?!config|init|completion|-)[a-z-]+(?![^`]*--(?:help|store))[^`]*(?=`)")


def choose_store(given: str, environment: Mapping[str, str], configured: str | None = None) -> str:
    """Return the store's folder or URL: `--store`, else `CAIRN_STORE`, else the configuration's, else the default."""
    return given or environment.get("CAIRN_STORE", "") or configured or DEFAULT_STORE


def store_option(chosen: str, environment: Mapping[str, str]) -> str:
    """Return ` --store URL`, quoted for a shell, with which other commands find `chosen`; empty if it is not needed."""
    is_found_anyway = not chosen or _absolute(chosen) == _absolute(choose_store("", environment))
    return "" if is_found_anyway else f" --store {shlex.quote(chosen)}"


def name_store(text: str, store_url: str, environment: Mapping[str, str]) -> str:
    """Return text in which each `cairn …` in backquotes works when it is typed: it names the store where it must."""
    option = store_option(as_path(store_url), environment)
    return _COMMAND.sub(lambda command: command[0] + option, text)


def as_path(store: str) -> str:
    """Return the path that a `file://` URL means, and any other store as it is."""
    return unquote(store.removeprefix("file://")) if store.startswith("file://") else store


def _absolute(store: str) -> str:
    path = as_path(store)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def find_file(text: str, place: Path, *, folder: Path) -> Path:
    """Return the file that `text` means: a path, which starts at `folder`, or a bare name.

    That is one of Cairn's own files if it has the name, and it is said which one where the working folder has another;
    else the file at `folder` of exactly that name, else that of the working folder's `deployments`. A name that is
    nowhere is returned as the path it would be.
    """
    path = folder / expand_home("file", text)
    if not is_name(text):
        return path
    found = [file for file in _files(place) if file.stem == text]
    is_own = bool(found) and found[0].parent == _OWN / place
    others = [file for file in (path, place / f"{text}.toml") if file.is_file()] if is_own else []
    for other in others:
        if not other.samefile(found[0]):
            _say_once(f"{text}: Cairn's own {found[0]} is meant; name the other one by its path, {other.absolute()}")
    return found[0] if is_own or (found and not path.is_file()) else path


@cache
def _say_once(message: str) -> None:
    say(message)


def expand_home(key: str, path: str) -> Path:
    """Return the path of a key with its home folder; raises `InvalidConfiguration` where `~` stands for none."""
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as unknown:
        problem = f"no home folder is known for {path.partition('/')[0]!r}"
        raise InvalidConfiguration(f"{key} = {path!r}: {problem}; write the whole path") from unknown


def is_name(text: str) -> bool:
    """Whether `text` is a bare name, without folder and suffix."""
    return _NAME.match(text) is not None


def known_names(place: Path) -> list[str]:
    """Return the names there are."""
    return sorted({file.stem for file in _files(place)})


def _files(place: Path) -> list[Path]:
    return [file for folder in (_OWN / place, Path.cwd() / place) for file in sorted(folder.glob("*.toml"))]


def wrong_scheme(address: str) -> str:
    """Return the problem with the beginning of an address; empty for a path and for a URL that can be read."""
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
        if isinstance(cause, ConnectionError | TimeoutError):
            return f"no server answers there ({os.strerror(cause.errno) if cause.errno else type(cause).__name__})"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, FileNotFoundError):
        return "no such object"
    return f"cannot be read: {redact(str(error).replace(url, 'the URL')) or type(error).__name__}"
