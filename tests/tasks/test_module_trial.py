"""A module's trial in a child: what goes wrong there is said in a line with the file, never as a traceback."""

from pathlib import Path

import pytest

from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.machine_speed import try_module
from tests.networks.own_files import layers


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (layers("", "raise ValueError('not so')"), "net.py, line 22, in forward: ValueError: not so"),
        (layers(made="import os; os._exit(0)"), "it ended without a result"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # each takes a child with torch; quick witness: the two before
            for case in (
                (layers("self.lazy = nn.LazyLinear(3)"), "Attempted to use an uninitialized parameter"),
                (layers(made="raise SystemExit"), "net.py, line 28, in build: SystemExit"),
                (layers(made="import os; os.kill(os.getpid(), 9)"), "it ended with code -9; the system"),
                (layers(made="network = None"), "made a NoneType; rule: an nn.Module"),
            )
        ),
    ],
)
def test_a_module_that_fails_is_refused_in_a_line(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_bytes(files["net.py"])
    document = {"data": {"sources": ["a.txt"]}, "training": {"steps": 1}, "model": {"module": "net.py:build"}}
    config = parse_configuration(document, overrides=(), environment={}, name="run.toml", folder=tmp_path)
    with pytest.raises(InvalidConfiguration) as refused:
        try_module(config, 61, {"micro_batch": 1, "device": "cpu"})
    assert "one step of it was tried, and failed" in str(refused.value)
    assert said in str(refused.value) and "Traceback" not in str(refused.value)
