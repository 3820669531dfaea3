"""Prefect's settings in a command: the environment or a profile names the server, and says nothing else."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import prefect
import pytest
from prefect.utilities import importtools

from cairn.flows.orchestrator import prefect_settings
from cairn.flows.orchestrator.prefect_settings import connect_directly, import_prefect, prefect_home, settle_prefect

PROFILES = """
active = "work"
[profiles.work]
PREFECT_API_URL = "http://elsewhere/api"
PREFECT_API_KEY = "key"
PREFECT_SERVER_API_BASE_PATH = "/x"
PREFECT_LOGGING_SETTINGS_PATH = "evil.yml"
[profiles.other]
PREFECT_API_URL = "http://other/api"
"""
PROXY = "http://proxy:3128"


def settled(folder: Path, **variables: str) -> tuple[dict[str, str], list[str]]:
    environment, said = {"CAIRN_CACHE": str(folder), "PREFECT_HOME": str(folder / "home"), **variables}, list[str]()
    settle_prefect(environment, say=said.append)
    return environment, said


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "profiles.toml").write_text(PROFILES)
    return tmp_path


def test_the_active_profile_names_the_server_and_its_key_and_gives_no_other_setting(profiles: Path) -> None:
    environment, said = settled(profiles)
    assert (environment["PREFECT_API_URL"], environment["PREFECT_API_KEY"], said) == ("http://elsewhere/api", "key", [])
    assert not {"PREFECT_SERVER_API_BASE_PATH", "PREFECT_LOGGING_SETTINGS_PATH"} & environment.keys()


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"PREFECT_API_URL": "http://given/api"}, "http://given/api"),
        ({"PREFECT_API_URL": ""}, "http://elsewhere/api"),
        ({"PREFECT_PROFILE": "other"}, "http://other/api"),
        ({"PREFECT_PROFILE": "local"}, "http://127.0.0.1:4200/api"),
        ({"PREFECT_PROFILE": "no such profile"}, None),
        ({"PREFECT_PROFILES_PATH": "/nowhere/profiles.toml"}, None),
    ],
)
def test_the_environment_goes_before_the_profile_and_chooses_it(
    profiles: Path, variables: dict[str, str], url: str | None
) -> None:
    assert settled(profiles, **variables)[0].get("PREFECT_API_URL") == url


def test_profiles_that_cannot_be_read_are_said_in_one_line_and_left_out(profiles: Path) -> None:
    path = profiles / "home" / "profiles.toml"
    path.write_text("no TOML at all")
    environment, said = settled(profiles)
    assert len(said) == 1 and said[0].startswith(f"{path}: Prefect's profiles cannot be read and are left out: ")
    assert "PREFECT_API_URL" not in environment


def test_prefect_is_told_a_home_of_cairns_own_and_no_setting_of_a_server(tmp_path: Path) -> None:
    foreign = {"PREFECT_SERVER_API_PORT": "x", "PREFECT_API_DATABASE_CONNECTION_URL": "x", "PREFECT_TEST_MODE": "1"}
    foreign |= {"PREFECT_TASKS_DEFAULT_RETRIES": "3", "PREFECT_FLOWS_DEFAULT_RETRIES": "3"}
    environment, _ = settled(tmp_path, **foreign, PREFECT_CLIENT_MAX_RETRIES="7", PREFECT_LOGGING_LEVEL="INFO")
    assert not foreign.keys() & environment.keys()
    assert environment["PREFECT_HOME"] == str(prefect_home({"CAIRN_CACHE": str(tmp_path)}))
    assert Path(environment["PREFECT_HOME"]).is_relative_to(tmp_path)
    assert (environment["PREFECT_CLIENT_MAX_RETRIES"], environment["PREFECT_LOGGING_LEVEL"]) == ("7", "INFO")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", 'PREFECT_API_KEY="strangers"\n'),
        ("prefect.toml", '[api]\nkey = "strangers"\n'),
        ("pyproject.toml", '[tool.prefect.api]\nkey = "strangers"\n'),
    ],
)
def test_no_file_of_the_working_folder_says_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    said = list[str]()
    import_prefect(say=said.append, refresh=True)
    assert (prefect.settings.get_current_settings().api.key, said) == (None, [])


@pytest.fixture
def environment() -> Iterator[None]:
    """Put back the environment, and what Prefect reads of it, however the test changes them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    import_prefect(say=print, refresh=True)


@pytest.mark.usefixtures("environment")
def test_after_a_setting_that_prefect_refuses_the_others_are_left_out_and_the_server_is_asked_all_the_same() -> None:
    os.environ |= {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "many"}
    said = list[str]()
    import_prefect(say=said.append, refresh=True)
    assert len(said) == 1 and "which it refuses" in said[0] and os.environ["PREFECT_CLIENT_MAX_RETRIES"] != "many"
    assert prefect.settings.get_current_settings().api.url == "http://127.0.0.1:9/api"


def test_the_home_is_named_by_the_newest_revision_of_the_installed_prefects_database() -> None:
    from alembic.script import ScriptDirectory

    migrations = Path(prefect.__file__).parent / "server" / "database" / "_migrations"
    script = ScriptDirectory(str(migrations), version_locations=[str(migrations / "versions" / "sqlite")])
    assert prefect_home({"CAIRN_CACHE": "/c"}) == Path("/c/prefect") / str(script.get_current_head())


def test_to_this_machine_no_proxy_is_used_and_those_for_others_stay() -> None:
    environment = {"HTTP_PROXY": PROXY, "https_proxy": "socks5://x", "ALL_PROXY": PROXY, "no_proxy": "inner.example"}
    connect_directly(environment)
    kept = {name: value for name, value in environment.items() if name.lower().endswith("proxy")}
    loopback = "127.0.0.1,localhost,::1"
    assert kept == {"HTTP_PROXY": PROXY, "no_proxy": f"inner.example,{loopback}", "NO_PROXY": loopback}
    assert environment["PREFECT_API_SSL_CERT_FILE"] == ""


def test_what_is_no_proxy_and_no_host_is_left_out_since_httpx_fails_for_it() -> None:
    environment = {
        "http_proxy": "nonsense: //",
        "HTTPS_PROXY": "http://:80",
        "NO_PROXY": "a:b, x.com ,fe80::1,10.0.0.0/8",
    }
    connect_directly(environment)
    assert environment["NO_PROXY"] == "x.com,fe80::1,10.0.0.0/8,127.0.0.1,localhost,::1"
    assert not {"http_proxy", "HTTPS_PROXY"} & environment.keys()


def test_a_server_elsewhere_is_reached_by_the_users_proxy(tmp_path: Path) -> None:
    environment, _ = settled(tmp_path, PREFECT_API_URL="https://prefect.example.com/api", ALL_PROXY="socks5://x")
    assert environment["ALL_PROXY"] == "socks5://x" and "NO_PROXY" not in environment


@pytest.mark.parametrize(
    ("module", "done"),
    [("prefect", ["settled", "prefect.version"]), ("prefect.engine", ["a group of its own", "prefect.engine.version"])],
)
def test_a_flow_run_has_its_workers_environment_as_it_is_and_not_what_the_workers_terminal_sends(
    monkeypatch: pytest.MonkeyPatch, module: str, done: list[str]
) -> None:
    seen = list[str]()
    monkeypatch.setattr(prefect_settings.child_process, "hide_memory", lambda: None)
    monkeypatch.setattr(prefect_settings, "_read_settings", lambda: None)
    monkeypatch.setattr(prefect_settings, "settle_prefect", lambda environment, say: seen.append("settled"))
    monkeypatch.setattr(os, "setpgrp", lambda: seen.append("a group of its own"))
    monkeypatch.setattr(
        prefect_settings.runpy, "run_module", lambda name, **given: seen.append(".".join([name, *sys.argv[1:]]))
    )
    monkeypatch.setattr(importtools, "load_module", importtools.load_module)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(sys, "argv", ["prefect_settings", module, "version"])
    prefect_settings.main()
    assert seen == done
