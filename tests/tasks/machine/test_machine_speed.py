"""What is measured of a machine, kept for the next run, and never allowed to stop one."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import cairn.tasks.machine.machine_speed as machine
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.numerics import MachineSpeed
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.machine_speed import (
    cpu_facts,
    device_name,
    machine_speed,
    may_have_cuda,
    may_have_half,
    numerics_beside,
    numerics_here,
)

FOUND = MachineSpeed(cpu_half_gain=2.5)
WIDE, NARROW = ModelConfig(n_embd=512), ModelConfig(n_embd=32)
HALF_CPU = {"model name": "one", "flags": "fpu avx512f avx512_bf16"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MachineSpeed]:
    """Every measurement made: of a machine whose CPU has half precision and that has no card."""
    made: list[MachineSpeed] = []

    def measure() -> MachineSpeed:
        made.append(FOUND)
        return FOUND

    monkeypatch.setattr(machine, "_measure", measure)
    monkeypatch.setattr(machine, "cpu_facts", lambda: HALF_CPU)
    monkeypatch.setattr(machine, "may_have_cuda", lambda: False)
    return made


def training(**said: Any) -> TrainingConfig:
    return TrainingConfig(steps=1, **said)


def kept(folder: Path) -> Path:
    (path,) = (folder / "machine").iterdir()
    return path


def test_a_machine_is_measured_once(measured: list[MachineSpeed], tmp_path: Path) -> None:
    assert [machine_speed(tmp_path), machine_speed(tmp_path)] == [FOUND, FOUND] and len(measured) == 1


def test_a_process_that_knows_is_asked_before_one_is_started(measured: list[MachineSpeed], tmp_path: Path) -> None:
    found = machine_speed(tmp_path, ask=lambda: MachineSpeed(cpu_half_gain=1.5))
    assert found.cpu_half_gain == 1.5 and measured == [] and machine_speed(tmp_path) == found


def test_two_runs_of_one_configuration_resolve_alike_though_a_second_measurement_would_not(
    measured: list[MachineSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = numerics_here(training(), WIDE, tmp_path)
    monkeypatch.setattr(machine, "_measure", lambda: MachineSpeed(cpu_half_gain=0.9))
    assert numerics_here(training(), WIDE, tmp_path) == first and first.precision == "bf16"


@pytest.mark.parametrize("damage", [b"", b"{", b'{"cpu_half_gain": -3}', b'{"cpu_half_gain": "fast"}', b"\xff" * 40])
def test_a_damaged_answer_is_measured_anew(measured: list[MachineSpeed], tmp_path: Path, damage: bytes) -> None:
    machine_speed(tmp_path)
    kept(tmp_path).write_bytes(damage)
    assert machine_speed(tmp_path) == FOUND and len(measured) == 2
    assert json.loads(kept(tmp_path).read_text())["cpu_half_gain"] == 2.5


def test_a_folder_that_cannot_be_written_stops_nothing(measured: list[MachineSpeed], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert machine_speed(tmp_path / "file") == FOUND


def test_nothing_is_written_where_nothing_may_be(measured: list[MachineSpeed], tmp_path: Path) -> None:
    assert machine_speed(tmp_path, keep=False) == FOUND and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(machine, "cpu_facts", lambda: {**HALF_CPU, "model name": "another"}),
        lambda patch: patch.setattr(machine, "version", lambda name: "99.0"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ],
    ids=["CPU", "torch", "what oneDNN may use"],
)
def test_another_machine_is_measured_for_itself(
    measured: list[MachineSpeed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    machine_speed(tmp_path)
    change(monkeypatch)
    machine_speed(tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("error", [OSError("no memory"), subprocess.TimeoutExpired("probe", 60.0)])
def test_a_measurement_that_fails_promises_nothing_and_is_not_kept(
    measured: list[MachineSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> MachineSpeed:
        raise error

    monkeypatch.setattr(machine, "_measure", fail)
    assert numerics_here(training(), WIDE, tmp_path).precision == "fp32" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "model"),
    [
        ({}, NARROW),
        ({"precision": "fp32"}, WIDE),
        ({"precision": "bf16", "kernels": "stock"}, WIDE),
        ({"kernels": "stock"}, NARROW),
    ],
)
def test_what_no_measurement_decides_is_not_measured(
    measured: list[MachineSpeed], tmp_path: Path, said: dict[str, Any], model: ModelConfig
) -> None:
    assert numerics_here(training(**said), model, tmp_path).precision != "auto" and measured == []


def test_a_cpu_without_half_precision_is_not_measured(
    measured: list[MachineSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_facts", lambda: {"flags": "fpu avx2 avx512f"})
    assert numerics_here(training(), WIDE, tmp_path).precision == "fp32" and measured == []


def test_where_a_card_could_be_torch_is_asked_whatever_the_width(
    measured: list[MachineSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "may_have_cuda", lambda: True)
    numerics_here(training(), NARROW, tmp_path)
    assert len(measured) == 1
    numerics_here(training(device="cpu"), NARROW, tmp_path / "another")
    assert len(measured) == 1


def test_the_mode_is_found_out_while_something_else_is_done(measured: list[MachineSpeed], tmp_path: Path) -> None:
    with numerics_beside(training(), WIDE, tmp_path) as mode:
        assert mode().precision == "bf16"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("processor\t: 0\nmodel name\t: x\nflags\t\t: fpu amx_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n", True),
        ("processor\t: 0\nhart\t: 0\n", True),  # says nothing: it is measured
    ],
)
def test_what_a_cpu_says_of_itself_is_understood(tmp_path: Path, text: str, half: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert may_have_half(cpu_facts(tmp_path / "cpuinfo")) is half


def test_a_system_without_that_file_is_known_by_its_platform(tmp_path: Path) -> None:
    assert cpu_facts(tmp_path / "absent")["model name"] and may_have_half(cpu_facts(tmp_path / "absent"))


def test_a_driver_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CUDA_TRACES", (str(tmp_path / "gpus"), str(tmp_path / "nvidiactl")))
    assert not may_have_cuda()
    (tmp_path / "gpus").mkdir()
    assert may_have_cuda()


@pytest.fixture(scope="module")
def really(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MachineSpeed, Path]]:
    """What the real measurement, in its own process, finds here."""
    folder = tmp_path_factory.mktemp("machine")
    yield machine_speed(folder), folder


@pytest.mark.slow  # seconds where half precision is emulated; quick witness: tests/model/estimates/test_numerics.py
def test_the_real_measurement_is_made_kept_and_read_again(really: tuple[MachineSpeed, Path]) -> None:
    speed, folder = really
    assert speed.cpu_half_gain > 0 and kept(folder).stat().st_size > 0
    assert machine_speed(folder) == speed


@pytest.mark.slow
def test_who_asks_imports_no_torch(really: tuple[MachineSpeed, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from cairn.tasks.machine.machine_speed import machine_speed;"
        "print(machine_speed(Path(sys.argv[1])).cpu_half_gain, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(really[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == [str(really[0].cpu_half_gain), "False"]


def test_an_accelerator_has_the_name_of_its_driver_and_a_cpu_that_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   11\n")
    assert device_name("cuda:0", cards=tmp_path) == "NVIDIA H200"
    assert device_name("cuda:0", cards=tmp_path / "none") == ""
    assert device_name("cpu").partition(" (")[0] in cpu_facts().values()


def test_processors_of_one_name_have_their_generation_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"model name": "AMD EPYC", "cpu family": "26", "model": "2"}
    monkeypatch.setattr(machine, "cpu_facts", lambda names: facts)
    assert device_name("cpu") == "AMD EPYC (cpu family 26, model 2)"


@pytest.mark.parametrize(
    ("system", "is_refused"),
    [
        (("Linux", "x86_64"), True),
        (("Linux", "aarch64"), True),
        (("Darwin", "x86_64"), True),
        (("Darwin", "arm64"), False),
    ],
)
def test_mps_is_accepted_only_on_a_mac_with_apples_chips(
    system: tuple[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: system[0])
    monkeypatch.setattr(machine.platform, "machine", lambda: system[1])
    said = r"training\.device = 'mps': this machine is no Mac with Apple's chips"
    with pytest.raises(InvalidConfiguration, match=said) if is_refused else nullcontext():
        machine.require_device("mps")
