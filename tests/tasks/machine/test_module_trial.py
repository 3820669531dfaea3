"""A module's trial in a child: what goes wrong there is said in a line with the file, never as a traceback."""

from pathlib import Path

import pytest

from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine import machine_speed
from cairn.tasks.machine.machine_speed import try_module
from tests.networks.own_files import layers


def refusal(files: dict[str, bytes], folder: Path) -> str:
    (folder / "net.py").write_bytes(files["net.py"])
    document = {"data": {"sources": ["a.txt"]}, "training": {"steps": 1}, "model": {"module": "net.py:build"}}
    config = parse_configuration(document, overrides=(), environment={}, name="run.toml", folder=folder)
    with pytest.raises(InvalidConfiguration) as refused:
        try_module(config, 61, {"micro_batch": 1, "device": "cpu"})
    assert "one step of it was tried, and failed" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (layers("", "raise ValueError('not so')"), "net.py, line 22, in forward: ValueError: not so"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # each takes a child with torch; quick witness: the one before
            for case in (
                (layers(made="import os; os._exit(0)"), "it ended without a result"),  # and the test below
                (layers("self.lazy = nn.LazyLinear(3)"), "Attempted to use an uninitialized parameter"),
                (layers(made="raise SystemExit"), "net.py, line 28, in build: SystemExit"),
                (layers(made="import os; os.kill(os.getpid(), 9)"), "it ended with code -9; the system"),
                (layers(made="network = None"), "made a NoneType; rule: an nn.Module"),
            )
        ),
    ],
)
def test_a_module_that_fails_is_refused_in_a_line(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    found = refusal(files, tmp_path)
    assert said in found and "Traceback" not in found


def test_a_trial_that_prints_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed.child_process, "call_child", lambda *given, **named: b"")
    assert "it ended without a result" in refusal(layers(made="import os; os._exit(1)"), tmp_path)
