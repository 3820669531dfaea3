"""From what a person names to a run configuration: a path, a name such as `quickstart`, or a URL.

Owns what a name means (`deployments/NAME.toml`, of the working directory, else of this checkout) and where relative
paths in the file start: at its folder, for a URL at the working directory. A URL is read anew each time, through fsspec
with its own credential chain. Refuses to know what is in the file.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.configuration.run_configuration import RunConfig, load_configuration, parse_configuration
from tasks.errors import InvalidConfiguration

MOST_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")


def read_configuration(named: str, *, overrides: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """Read, overlay and validate what `named` names, or the overlays alone; raises `InvalidConfiguration`."""
    if _is_remote(named):
        shown = _without_query(named)
        document = _parsed(_fetched(named, shown), shown)
        return parse_configuration(document, overrides=overrides, environment=environment, name=shown)
    return load_configuration(_path(named) if named else None, overrides=overrides, environment=environment)


def configuration_folder(named: str) -> Path:
    """Return where relative paths in the configuration start."""
    return Path.cwd() if not named or _is_remote(named) else _path(named).absolute().parent


def configuration_name(named: str) -> str:
    """Return the name of the file without its suffix, whatever it lies in."""
    return PurePosixPath(urlsplit(named).path if "://" in named else named).stem


def _path(named: str) -> Path:
    """Return the file a path, a `file://` URL or a bare name means; a file of that very name wins."""
    if named.startswith("file://"):
        return Path(unquote(urlsplit(named).path))
    path = Path(named)
    if not _NAME.match(named) or path.exists():
        return path
    folders = [folder / "deployments" for folder in (Path.cwd(), Path(__file__).parents[2])]
    for folder in folders:
        if (folder / f"{named}.toml").is_file():
            return folder / f"{named}.toml"
    known = sorted({file.stem for folder in folders for file in folder.glob("*.toml")})
    raise InvalidConfiguration(
        f"config {named!r}: no such file, and no {named}.toml in deployments; rule: a path, a URL or one of "
        f"{', '.join(known) or '(there are none here)'}"
    )


def _is_remote(named: str) -> bool:
    return "://" in named and not named.startswith("file://")


def _without_query(url: str) -> str:
    """Return the URL as it may be printed: a signature stands behind the question mark, a password before the host."""
    parts = urlsplit(url)
    if parts.password or parts.username:
        raise InvalidConfiguration("config: the URL carries credentials: put them into the environment")
    return parts._replace(query="", fragment="").geturl()


def _fetched(url: str, shown: str) -> bytes:
    import fsspec  # only who names a URL pays for it

    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise InvalidConfiguration(f"{shown}: no such configuration file") from error
    except Exception as error:  # every file system has errors of its own
        reason = str(error).replace(url, shown) or type(error).__name__
        raise InvalidConfiguration(f"{shown}: cannot be read: {reason}") from error
    if len(data) > MOST_BYTES:
        raise InvalidConfiguration(f"{shown}: more than {MOST_BYTES:,} bytes; rule: a TOML file written by people")
    return data


def _parsed(data: bytes, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfiguration(f"{shown}: not readable as TOML: {error}") from error
