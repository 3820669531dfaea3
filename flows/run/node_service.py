"""Several machines of a run: the first gathers them for each attempt, the others serve it until the run ends.

The first machine decides, records, and says when ranks start and when the run ends; it leaves with the same code.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

import msgspec

from cairn.storage.errors import StoreUnavailable
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.child_process import DEVNULL, end_child, start_child
from cairn.tasks.attempt.preemption_notice import notice_sources, polling_notices
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.machine import placement
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.trainer import machines
from cairn.tasks.trainer.signed_connection import ConnectionEnded, NotAdmitted, SignedConnection
from cairn.tasks.trainer.trainer_group import RENDEZVOUS, TrainerGroup, rendezvous_secret

if TYPE_CHECKING:
    from cairn.flows.run.active_run import ActiveRun

_OPENING_SECONDS = 900.0
"""The first machine may read and tokenize text for as long before it opens a run."""


def is_other_node(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several machines, and not the first."""
    return environment.get("CAIRN_NODE_RANK", "0") not in ("", "0")


def gather_machines(run: "ActiveRun") -> None:
    """Wait for the machines of the next attempt; raises `ShutdownRequested` at a notice. See `gathering_seconds`."""
    rules, wanted = run.config.machines, run.machines.nodes
    run.refuse_to_begin()
    if wanted == 1:
        return
    here = 1
    run.gathering_seconds = 0.0
    if not (failed := placement.check_machine(rules)):
        began = time.monotonic()
        if run.machines.gather(0.0, is_stopping=run.is_shutting_down) < wanted:
            run.say(f"waits for {wanted} machines, with this one, at {run.group.rendezvous} …")
        here = run.machines.gather(rules.wait_seconds, is_stopping=run.is_shutting_down)
        run.gathering_seconds = seconds = time.monotonic() - began
        run.refuse_to_begin()
        if here < min(rules.at_least or wanted, wanted):
            failed = f"{here} of {wanted} machines were here after {seconds:.0f} s"
        elif here < wanted:
            run.say(f"goes on with {here} of {wanted} machines: no more have come within {seconds:.0f} s")
    # Too few are claimed by the first machine alone: of several, not every number can share the micro-batches.
    run.group, run.too_few_machines = replace(run.group, nodes=1 if failed else here), failed
    if not failed:
        run.host.warm.set_command(run.group.command())


class NodeService:
    """The ranks of this machine in attempt after attempt."""

    def __init__(
        self, log: RunLog, config: RunConfig, group: TrainerGroup, folder: Path, *, say: Callable[[str], None]
    ) -> None:
        self._log, self._config, self._group, self._folder, self._say = log, config, group, folder, say
        self._shutdown = ShutdownSignal()
        self._notified_at: float | None = None
        self._ranks: Popen[bytes] | None = None
        self._order = machines.StartRanks(attempt=0, nodes=1, node_rank=0, rendezvous="")

    def run(self) -> ExitCode:
        """Serve until the run ends, a shutdown is requested, or the first machine is away for too long."""
        if failed := placement.check_machine(self._config.machines):
            self._say(f"{failed}; it does not join the run")
            return ExitCode.PREEMPTED
        rules, group, heard_at = self._config.preemption, self._group, time.monotonic()
        sources = notice_sources(rules, os.environ)
        with (
            self._shutdown.listening(rules.signal),
            polling_notices(self._shutdown, sources, poll_seconds=rules.poll_seconds, on_problem=self._say),
            self._shutdown.on_shutdown(self._pass_on),
        ):
            self._say(f"waits for the first machine at {group.rendezvous} …")
            while self._notified_at is None:
                first = machines.connect(group.rendezvous, rendezvous_secret(os.environ), group.node_rank)
                if first is not None:
                    if (code := self._serve(first)) is not None:
                        return code
                    heard_at = time.monotonic()
                elif self._is_finished():
                    return ExitCode.DONE
                elif time.monotonic() - heard_at > max(
                    self._config.machines.wait_seconds, 0.0 if self._log.state.opened else _OPENING_SECONDS
                ):
                    where = f"{group.rendezvous}, or has another CAIRN_RENDEZVOUS_SECRET"
                    self._say(f"the first machine is not at {where}; the same command waits again")
                    return ExitCode.PREEMPTED
                time.sleep(0.5 if self._notified_at is None else 0)
        return ExitCode.INTERRUPTED if self._shutdown.signal == "SIGINT" else ExitCode.PREEMPTED

    def _serve(self, first: SignedConnection) -> ExitCode | None:
        """Obey the first machine; None once it is gone, or once this one got a notice and its ranks have ended."""
        try:
            while self._notified_at is None or self._ranks is not None:
                if select.select([first], [], [], 0.2)[0]:
                    match machines.receive(first):
                        case machines.StartRanks() as order:
                            self._start(order)
                        case machines.RunEnded(exit_code=code):
                            return ExitCode(code)
                told, grace = self._notified_at, self._config.checkpoint.grace_seconds
                if told is not None and time.monotonic() - told > grace:
                    self._kill_ranks()
                elif self._ranks is not None and (ended := self._ranks.poll()) is not None:
                    self._ranks = None
                    attempt, place = self._order.attempt, self._order.node_rank
                    said = machines.RanksEnded(attempt=attempt, node_rank=place, exit_code=ended)
                    first.send(msgspec.msgpack.encode(said))
        except (ConnectionEnded, NotAdmitted, OSError, msgspec.MsgspecError) as error:
            self._say(f"the first machine is gone: {error}")
        finally:
            self._kill_ranks()
            first.close()
        return None

    def _start(self, order: machines.StartRanks) -> None:
        self._kill_ranks()
        self._order = order
        group = replace(
            self._group,
            nodes=order.nodes,
            node_rank=order.node_rank,
            rendezvous=order.rendezvous,
            joins=order.joins,
        )
        told = {**os.environ, RENDEZVOUS: order.rendezvous, "CAIRN_NODE_FOLDER": str(self._folder)}
        self._ranks = start_child(group.command(), stdin=DEVNULL, stdout=DEVNULL, stderr=None, environment=told)

    def _kill_ranks(self) -> None:
        """Kill what is left of the ranks: without the first machine they have nothing to save."""
        if self._ranks is not None:
            end_child(self._ranks)
            self._ranks = None

    def _pass_on(self) -> None:
        """Have the ranks end after their step, and so all others."""
        self._notified_at = self._notified_at or time.monotonic()
        if self._ranks is not None:
            self._ranks.send_signal(signal.SIGTERM)

    def _is_finished(self) -> bool:
        with suppress(StoreUnavailable):  # the first machine needs the store as well, and reports it
            self._log.refresh()
        return self._log.state.finished is not None
