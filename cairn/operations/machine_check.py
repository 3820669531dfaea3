"""The checks of `cairn doctor`: is this machine fit to train? A check never raises: an error is its finding."""

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cairn.flows.orchestrator import prefect_settings, session_server
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.store_probe import probe_store
from cairn.tasks.machine.placement import CAIRN_VERSION, usable_cores, work_folder

_PACKAGES = ("torch", "prefect", "fastapi", "fsspec", "pydantic", "pyarrow", "tokenizers", "safetensors")
PROBE_CREATORS, PROBE_ROUNDS = 32, 20
ENOUGH_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check: its name, whether the machine is good enough, and the details."""

    name: str
    ok: bool
    detail: str


def check_machine(store_url: str) -> tuple[Check, ...]:
    """Return every finding; the store is checked by a real race of creators, whose objects are deleted again."""
    python = f"{platform.python_version()} on {platform.platform(terse=True)}, {usable_cores()} cores"
    return (
        Check(name="python", ok=True, detail=python),
        _check("packages", _packages),
        _check("device", _device),
        _check("mode", _numerics),
        _check("store", _store, store_url),
        _check("prefect", _prefect),
        _check("disk", _disk, store_url),
    )


def _check(name: str, question: Callable[..., str], *arguments: str) -> Check:
    try:
        return Check(name=name, ok=True, detail=question(*arguments))
    except Exception as error:  # every kind of error is a finding
        return Check(name=name, ok=False, detail=f"{error}" or type(error).__name__)


def _packages() -> str:
    try:
        return ", ".join([f"cairn {CAIRN_VERSION}", *(f"{name} {version(name)}" for name in _PACKAGES)])
    except PackageNotFoundError as missing:
        raise RuntimeError(f"{missing.name} is not installed; `pip install cairn-train` installs it") from missing


def _device() -> str:
    import torch

    from cairn.model.estimates.utilization import peak_flops_of_device
    from cairn.model.kernels.head_loss import can_compile

    if not torch.cuda.is_available():
        return f"cpu ({torch.get_num_threads()} threads); no CUDA device"
    devices = []
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        flops = peak_flops_of_device(name, "bf16")
        rate = f"{flops / 1e12:,.0f} TFLOP/s by its data sheet" if flops else "not in the table of data sheets"
        if not can_compile(torch.device("cuda", number)):
            rate += "; slower than it could be: Triton or a C compiler is missing"
        devices.append(f"{name} ({rate})")
    return f"cuda: {', '.join(devices)}"


def _numerics() -> str:
    from cairn.model.estimates.numerics import describe_machine
    from cairn.tasks.machine.machine_speed import machine_speed

    return describe_machine(machine_speed(work_folder(os.environ)))


def _store(url: str) -> str:
    store = open_store(url)
    probe_store(store, creators=PROBE_CREATORS, rounds=PROBE_ROUNDS)
    race = f"{PROBE_ROUNDS} races of {PROBE_CREATORS} creators, one winner each"
    return f"{store.url}: writable, create-if-absent excludes ({race})"


def _prefect() -> str:
    environment, notes = dict(os.environ), list[str]()
    session_server.settle_client(environment, say=notes.append)
    if not (url := prefect_settings.server_address(environment)):
        none = "PREFECT_API_URL is not set: `cairn train` starts a temporary Prefect server while it runs"
        return "; ".join([none, *notes])
    version = prefect_settings.ask_server(environment, timeout_seconds=3.0)
    return f"{url} answers{version and f': Prefect {version}'}"


def _disk(store_url: str) -> str:
    found, local_path = [], store_url.removeprefix("file://")
    for folder in (*([] if "://" in local_path else [Path(local_path)]), work_folder(os.environ)):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(there).free
        if free < ENOUGH_BYTES:
            raise RuntimeError(f"{folder}: {free / 1e9:.1f} GB free, at least {ENOUGH_BYTES / 1e9:.1f} GB are needed")
        found.append(f"{folder}: {free / 1e9:.1f} GB free")
    return "; ".join(found)
