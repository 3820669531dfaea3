"""Prefect's settings in this process and its children: the environment and the user's active profile name the server.

Nothing else of the user's reaches Prefect: no file of the working folder (`prefect.toml`, `.env`, `pyproject.toml`), no
setting of a server, no home. `python -P -m cairn.flows.orchestrator.prefect_settings prefect worker start …` does the
same for a command of Prefect's. Prefect is imported by `import_prefect` and there alone.
"""

import base64
import os
import re
import runpy
import ssl
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from http.client import HTTPException
from importlib import import_module, metadata, util
from pathlib import Path
from urllib.parse import urlsplit

from cairn.storage.stores import child_process, redaction, regular_file
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine import http_request, placement
from cairn.tasks.text.format import one_line

_NAMES = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")
_CLIENT = re.compile(
    r"PREFECT_(API_(URL|KEY|AUTH_STRING|SSL_CERT_FILE|TLS_INSECURE_SKIP_VERIFY|ENABLE_HTTP2|REQUEST_TIMEOUT)"
    r"|(CLIENT|CLOUD)_\w+)"
)
"""The settings that a profile may give: which server is asked, and how."""
_PROCESS = re.compile(
    r"PREFECT_(FLOWS_HEARTBEAT_FREQUENCY|(RUNNER|WORKER)_\w+|LOGGING_(LEVEL|ROOT_LEVEL|TO_API_\w+)|INTERNAL_LOGGING_LEVEL)"
)
"""The settings that the environment may give beside those: none that would run a flow or a task differently."""
# A person sees our own progress; Prefect's log would show it twice, and every refusal as a traceback.
_QUIET = {
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def prefect_home(environment: Mapping[str, str]) -> Path:
    """Return the home and database of Cairn's own server, a folder for each revision of Prefect's database.

    Two versions of Prefect never migrate each other's database, and none of them the user's.
    """
    found = util.find_spec("prefect")
    package = Path(next(iter((found and found.submodule_search_locations) or ["."])))
    migrations = sorted((package / "server" / "database" / "_migrations" / "versions" / "sqlite").glob("20*_*.py"))
    named = re.fullmatch(r"\d+_\d+_\d+_\d+_([0-9a-f]+)_.*", migrations[-1].stem) if migrations else None
    return placement.work_folder(environment) / "prefect" / (named[1] if named else metadata.version("prefect"))


def settle_prefect(environment: MutableMapping[str, str], *, say: Callable[[str], None]) -> None:
    """Leave in the environment the settings that Prefect may have, and add the server of the user's active profile."""
    home = prefect_home(environment)
    for name, value in _read_profile(environment, say).items():
        if _CLIENT.fullmatch(name) and not environment.get(name):
            environment[name] = str(value)
    for name in [name for name in environment if name.startswith("PREFECT_")]:
        if not (_CLIENT.fullmatch(name) or _PROCESS.fullmatch(name)):
            del environment[name]
    environment.update(
        PREFECT_HOME=str(home),
        PREFECT_PROFILES_PATH=str(home / "profiles.toml"),  # there is none: it names a file that is not read
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        PREFECT_SERVER_EPHEMERAL_ENABLED="false",  # Prefect's own temporary server outlives a killed command
        DO_NOT_TRACK="1",
    )
    with suppress(OSError):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)  # Prefect makes one folder alone, and warns
    if os.path.expanduser("~") == "~":
        environment["HOME"] = str(home)  # a user without a home: Prefect could not be imported
    if http_request.is_loopback(environment.get("PREFECT_API_URL", "")):
        connect_directly(environment)


def quieten_prefect(environment: MutableMapping[str, str], *, retries: int = 4) -> None:
    """Silence Prefect's log and give a request up after so many retries, except for settings that a person has made."""
    for name, value in {**_QUIET, "PREFECT_CLIENT_MAX_RETRIES": str(retries)}.items():
        environment.setdefault(name, value)


def forget_server(environment: MutableMapping[str, str]) -> None:
    """Name no server in the environment, and keep no setting that was made for one."""
    for name in [name for name in environment if _CLIENT.fullmatch(name)]:
        del environment[name]


def connect_directly(environment: MutableMapping[str, str]) -> None:
    """Let Prefect's clients reach a server of this machine whatever proxies and certificates the environment names.

    httpx makes a transport for every proxy before it reads NO_PROXY, and fails for SOCKS, which nothing of Cairn's
    speaks, and for what is no address; proxies for other addresses stay.
    """
    for name in [name for name in environment if name.lower().endswith("_proxy") and name.lower() != "no_proxy"]:
        if name.lower() == "all_proxy" or not _is_http_address(environment[name]):
            del environment[name]
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host.strip() for host in environment.get(name, "").split(",")]
        kept = [host for host in hosts if host.count(":") > 1 or _is_http_address(host)]  # IPv6 has several
        environment[name] = ",".join([*(host for host in kept if host not in _LOOPBACK), *_LOOPBACK])
    environment["PREFECT_API_SSL_CERT_FILE"] = ""  # else SSL_CERT_FILE's, though no certificate is asked for


def _is_http_address(words: str) -> bool:
    """Whether httpx can read this as a proxy or a host, with or without a scheme."""
    try:
        parts = urlsplit(words if "://" in words else f"http://{words}")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in words
    except ValueError:
        return False


def import_prefect(*, say: Callable[[str], None], refresh: bool = False) -> None:
    """Import Prefect, which reads no file of the working folder; settings that it refuses are said and left out.

    `refresh` reads the environment again where it was imported before.
    """
    if "prefect.context" in sys.modules and not refresh:
        return
    try:
        _read_settings()
    except Exception as error:  # whatever validates a setting raises
        say(f"Prefect is used without the environment's settings, which it refuses: {one_line(str(error), 160)}")
        for name in [name for name in os.environ if name.startswith("PREFECT_") and name not in _NAMES]:
            del os.environ[name]
        settle_prefect(os.environ, say=say)
        quieten_prefect(os.environ)
        _read_settings()


def _read_settings() -> None:
    from pydantic_settings import DotEnvSettingsSource
    from pydantic_settings.sources import ConfigFileSourceMixin

    # Prefect has no setting for it, and reads its settings while it is imported; nothing else here uses this library.
    DotEnvSettingsSource._read_env_files = lambda self: {}  # type: ignore[method-assign]
    ConfigFileSourceMixin._read_files = lambda self, files, deep_merge=False: {}  # type: ignore[method-assign]
    certificates = os.environ.get("SSL_CERT_FILE")
    try:
        if certificates:
            ssl.create_default_context(cafile=certificates)
        certificates = None
    except OSError:  # one that cannot be read is hidden: Prefect makes an HTTPS client while it is imported
        del os.environ["SSL_CERT_FILE"]
    try:
        import prefect.main  # noqa: F401 (sets its log up)
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    finally:
        if certificates:
            os.environ["SSL_CERT_FILE"] = certificates


def server_address(environment: Mapping[str, str]) -> str:
    """Return PREFECT_API_URL or ""; `InvalidConfiguration` for a wrong one, or a password in it: logs would show it."""
    address = environment.get("PREFECT_API_URL", "")
    if not address:
        return ""
    if problem := redaction.find_http_problem(address, instead="PREFECT_API_AUTH_STRING as user:password"):
        raise InvalidConfiguration(f"PREFECT_API_URL: the address {problem}; rule: http(s)://host:port/api")
    return address


def ask_server(environment: Mapping[str, str], *, timeout_seconds: float) -> str:
    """Return which version the named server says it has, asked with the client's credentials; Prefect Cloud says none.

    Raises OSError if no Prefect server answers there, and `InvalidConfiguration` if it refuses the credentials.
    """
    url = server_address(environment)
    request = urllib.request.Request(f"{url.rstrip('/')}/admin/version", headers=authorization(environment))
    try:
        with http_request.open_directly(request, timeout_seconds=timeout_seconds) as answer:
            version = str(answer.read(100), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InvalidConfiguration(
                f"the Prefect server {url} refuses, {error.code}: set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to "
                "the server's, or unset PREFECT_API_URL for a temporary server"
            ) from error
        if "/workspaces/" in url and error.code == 404:
            return ""
        raise
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):  # of a certificate that Prefect's client may know
            return ""
        raise
    except HTTPException:  # what answers speaks another protocol
        version = ""
    if not re.fullmatch(r'"\d+\.[\w.+-]+"', version):
        raise OSError(f"{url} is no Prefect server's address: something else answers there")
    return version.strip('"')


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that Prefect's client would send."""
    if password := environment.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
    if key := environment.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    return {}


def _read_profile(environment: Mapping[str, str], say: Callable[[str], None]) -> Mapping[str, object]:
    """Return the active profile's settings, none where no file can be read; Prefect's own profile `local` is known."""
    home = environment.get("PREFECT_HOME") or "~/.prefect"
    path = Path(os.path.expanduser(environment.get("PREFECT_PROFILES_PATH") or f"{home}/profiles.toml"))
    try:
        read = tomllib.loads(regular_file.read_file(path).decode()) if path.exists() else {}
        profiles = {"local": {"PREFECT_API_URL": "http://127.0.0.1:4200/api"}, **read.get("profiles", {})}
        return dict(profiles.get(environment.get("PREFECT_PROFILE") or read.get("active", ""), {}))
    except (OSError, ValueError, AttributeError, RuntimeError) as error:
        say(f"{path}: Prefect's profiles cannot be read and are left out: {one_line(str(error), 160)}")
        return {}


def main() -> None:
    """Run the module that the first argument names, `prefect` for its command, settled as Cairn's own commands are."""
    child_process.hide_memory()
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if sys.argv[1] == "prefect.engine":  # a flow run: it has the environment that its worker was given
        os.setpgrp()  # what its worker's terminal sends is the worker's
    else:
        settle_prefect(os.environ, say=lambda words: print(words, file=sys.stderr))
    _read_settings()
    from prefect.utilities import importtools

    # Its own looks for a flow in the working folder first.
    importtools.load_module = lambda module_name: import_module(module_name)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
