"""Whether anybody names a Prefect server: Prefect itself is asked only where one of its files may."""

from pathlib import Path

import pytest

from cairn.flows.orchestrator.prefect_server import is_server_named


def never() -> str | None:
    raise AssertionError("Prefect was imported to be asked")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"PREFECT_HOME": str(tmp_path / "home")}


def test_an_address_in_the_environment_is_a_name(home: dict[str, str], tmp_path: Path) -> None:
    assert is_server_named({**home, "PREFECT_API_URL": "http://127.0.0.1:4200/api"}, tmp_path, ask_prefect=never)


def test_where_nothing_is_said_anywhere_prefect_is_not_asked(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    (tmp_path / ".env").write_text("CAIRN_STORE=elsewhere\n")
    assert not is_server_named(home, tmp_path, ask_prefect=never)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("home/profiles.toml", 'active = "work"\n'),
        ("prefect.toml", "[api]\n"),
        (".env", "PREFECT_API_URL=http://elsewhere/api\n"),
        ("pyproject.toml", "[tool.prefect.api]\n"),
        ("pyproject.toml", "no TOML at all"),
    ],
)
@pytest.mark.parametrize("answer", ["http://elsewhere/api", None])
def test_where_a_file_may_name_one_prefect_says(
    home: dict[str, str], tmp_path: Path, name: str, text: str, answer: str | None
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / name).write_text(text)
    assert is_server_named(home, tmp_path, ask_prefect=lambda: answer) is (answer is not None)


@pytest.mark.parametrize("variable", ["PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY"])
def test_where_the_environment_chooses_a_profile_prefect_says(
    home: dict[str, str], tmp_path: Path, variable: str
) -> None:
    assert is_server_named({**home, variable: "work"}, tmp_path, ask_prefect=lambda: "http://elsewhere/api")
