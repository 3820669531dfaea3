"""`tokenize-part` as deployed: three workers, two killed in the middle and started again; one machine's snapshot."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import load_configuration
from cairn.tasks.data import snapshot_writer
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.crash.prefect_api import Prefect, ask, environment_of, flow_runs, start_beside
from tests.crash.training_command import Command
from tests.crash.victims import kill
from tests.processes.waiting import patience_seconds, wait_until
from tests.tasks.corpus_files import COMPRESSIONS, packed, shaped
from tests.tasks.tokenizer_kinds import learned
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MACHINES, FILES = 3, 15
CONFIGURATION = """
[data]
sources = ["texts/*"]
tokenizer = "tokenizer.json"
deduplicate = true
[training]
steps = 10
"""


@pytest.fixture
def text(command: Command) -> Path:
    """A configuration and its text, half of which is in all of its files."""
    (folder := command.folder / "texts").mkdir()
    speeches = TINY_SHAKESPEARE.read_text(encoding="utf-8").split("\n\n") * 12
    for number in range(FILES):
        own = [speech if place % 2 else f"{speech} ({number}, {place})" for place, speech in enumerate(speeches)]
        suffix = COMPRESSIONS[number % len(COMPRESSIONS)]
        (folder / f"{number:02}.jsonl{suffix}").write_bytes(packed(shaped(own, "jsonl"), suffix))
    (command.folder / "tokenizer.json").write_text(json.dumps(learned()), encoding="utf-8")
    (path := command.folder / "parts.toml").write_text(CONFIGURATION, encoding="utf-8")
    return path


class Machine:
    """A worker with a queue and a cache of its own, which takes one flow run; killed, nothing of it is left."""

    def __init__(self, command: Command, api_url: str, part: int) -> None:
        self.part, self._command, self._api_url = part, command, api_url
        self._cache = command.folder / self.queue
        self._begun = set[str]()

    def start(self) -> None:
        """Start the worker."""
        own = {"PREFECT_HOME": str(self._cache), "CAIRN_CACHE": str(self._cache)}
        environment = environment_of(self._command, self._api_url, **own)
        words = ("prefect", "worker", "start", "--pool", "cairn", "--work-queue", self.queue, "--run-once")
        self.process = start_beside(self._command, environment, self.queue, *words)

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return f"machine-{self.part}"

    def is_at_its_second_range(self) -> bool:
        """Whether it has begun a second range, after it has published the first."""
        self._begun |= {path.name for path in self._cache.glob("snapshots-in-work/*/*/") if len(path.name) == 64}
        return len(self._begun) > 1

    def is_killed_in_the_middle(self) -> bool:
        """Send SIGKILL to the worker and its flow run at the second range, as when a machine is taken away."""
        if self.is_at_its_second_range() and self.process.poll() is None:
            self.end()
        code = self.process.poll()
        assert code in (None, -signal.SIGKILL), f"it left with {code} before its second range\n{self.output()}"
        return code is not None

    def wait(self) -> None:
        """Wait until its flow run has ended."""
        assert self.process.wait(timeout=patience_seconds()) == 0, self.output()

    def end(self) -> None:
        """Kill everything; a flow run has a process group of its own."""
        if hasattr(self, "process"):
            with suppress(psutil.NoSuchProcess):
                worker = psutil.Process(self.process.pid)
                for process in (worker, *worker.children(recursive=True)):
                    kill(process.pid)
            self.process.wait(timeout=patience_seconds())

    def output(self) -> str:
        """Return what the worker printed."""
        return self._cache.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def machines(command: Command, api_url: str, prefect: Prefect, deployed: None) -> Iterator[list[Machine]]:
    """A machine for each part, none of them started."""
    found = [Machine(command, api_url, part) for part in range(1, MACHINES + 1)]
    for machine in found:
        ask(api_url, "work_pools/cairn/queues", {"name": machine.queue})
    yield found
    for machine in found:
        machine.end()


def test_of_three_workers_two_are_killed_and_started_again_and_the_snapshot_is_that_of_one_machine(
    command: Command, api_url: str, text: Path, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ask(api_url, "deployments/filter", {"deployments": {"name": {"any_": ["tokenize-part"]}}})[0]["id"]

    def start(machine: Machine) -> None:
        given = {"config": str(text), "part": machine.part, "of": MACHINES, "store": command.store.url}
        flow_run = {"parameters": given, "work_queue_name": machine.queue, "state": {"type": "SCHEDULED"}}
        started.append(ask(api_url, f"deployments/{deployment}/create_flow_run", flow_run)["id"])
        machine.start()

    started, victims = list[str](), machines[:2]
    for machine in machines:
        start(machine)
    wait_until(lambda: all([machine.is_killed_in_the_middle() for machine in victims]), "the middle of two parts")
    whole = [key for key in command.store.keys("data/parts") if key.endswith("parts.json")]
    assert 2 <= len(whole) < FILES
    for machine in victims:
        start(machine)
    for machine in machines:
        machine.wait()
    states = {item["id"]: item["state"] for item in flow_runs(api_url, "tokenize-part") if item["id"] in started}
    ended = [(states[flow_run]["name"], states[flow_run]["message"]) for flow_run in started[2:]]
    assert [name for name, _ in ended] == ["Completed"] * 3, ended
    counted = [list(map(int, re.findall(r"\d+", words))) for _, words in ended[1:]]
    assert all(0 < found < ranges for *_, ranges, found in counted), ended
    data = load_configuration(text, overrides=(), environment={}).data
    alone = build_snapshot(LocalStore(command.folder / "alone"), data, command.folder)
    monkeypatch.delattr(snapshot_writer.PartEncoder, "encode")
    assert build_snapshot(command.store, data, command.folder) == alone
