"""Starting states with a fork, a pin and a deleted parent, and what processes do there.

A fork is trained in a run of its own (`twin`), beside the run that all other scenarios are about.
"""

from dataclasses import replace
from functools import partial

from cairn.storage.checkpoints.checkpoint import checkpoint_target
from cairn.storage.checkpoints.resume_point import new_pin, open_fork, pin_checkpoint
from cairn.storage.logs.log_entry import ForkOrigin
from cairn.storage.logs.run_entries import CheckpointPinned, RunOpened
from tests import entries
from tests.entries import CONFIG
from tests.protocol import processes, scenarios
from tests.protocol.processes import Process
from tests.protocol.scenarios import Scenario
from tests.storage.builders import RUN

FORK = "twin"
KEEPS = CONFIG["checkpoint"]["keep_last"]


def as_fork(process: Process) -> Process:
    """Return the same process at work on the fork."""
    return replace(process, run=FORK)


def fork(process: Process, step: int = 1) -> None:
    """Fork the run at a step, as the verb does."""
    offered = _offer(process, step)
    if offered is not None:
        body, pin = offered
        state = open_fork(process.log(), body, pin, writer=process.writer())
        process.ledger.acknowledge(f"forked {step}" if state.opened == body else "another fork was first")


def _offer(process: Process, step: int) -> tuple[RunOpened, CheckpointPinned] | None:
    found = [item.committed for item in process.log().refresh().readable if item.committed.step == step]
    if not found:
        return None
    reference = found[0].reference
    origin = ForkOrigin(run_id=RUN, checkpoint=reference, state_sha256=found[0].state_sha256, config=CONFIG)
    return entries.opened(FORK, forked_from=origin), new_pin(reference, process.placement, fork=FORK)


def train_fork(process: Process, commits: int = 1) -> None:
    """Resume the fork, if there is one, commit so often, end."""
    own = as_fork(process)
    if own.log().refresh().opened is not None:
        processes.train(own, commits=commits)


def forked(process: Process) -> None:
    """The first of two checkpoints is the beginning of a fork that was never claimed; the attempt has ended."""
    scenarios.ended(process)
    fork(process)


def pinned_only(process: Process) -> None:
    """The first of two checkpoints is pinned for a fork by a process that has died since."""
    scenarios.ended(process)
    maker = Process(store=process.store, ledger=process.ledger)
    offered = _offer(maker, 1)
    assert offered is not None
    pin_checkpoint(maker.log(), offered[1], writer=maker.writer())
    process.ledger.dead.add(maker.pid)


def nearly_grown(process: Process) -> None:
    """The fork has all commits that it keeps but one."""
    forked(process)
    train_fork(process, KEEPS - 1)


def orphaned(process: Process) -> None:
    """The fork has grown, and its parent is deleted."""
    forked(process)
    train_fork(process, KEEPS)
    processes.delete(process)


def spoiled(process: Process) -> None:
    """The only commit of the fork has lost its manifest, and the sweep keeps its beginning."""
    forked(process)
    train_fork(process)
    prefix = checkpoint_target(FORK, step=2, attempt=1).prefix
    process.store.inner.delete(f"{prefix}/manifest.json")
    process.ledger.broken.add(prefix)


def act_start_over(process: Process) -> None:
    """Claim the fork with `--start-over` and commit."""
    own = as_fork(process)
    log = own.log()
    started = processes.claim(own, log, start_over=True)
    step = processes.load(own, started.resumed_from) + 1
    processes.commit(own, log, processes.stage(own, step=step, attempt=started.attempt))
    processes.end_attempt(own, log, started.attempt)


def act_grow_and_sweep(process: Process) -> None:
    """Make the last commit that the fork needs, and sweep the parent."""
    train_fork(process)
    processes.sweep(process)


def act_fork_beside_another(process: Process) -> None:
    """Fork a checkpoint while another process forks the other one under the same name."""
    offered = _offer(process, 1)
    if offered is not None:  # somebody may have deleted the run before
        fork(scenarios.beside(process), 2)
        state = open_fork(process.log(), *offered, writer=process.writer())
        process.ledger.acknowledge(f"lost to {state.resume_step}")


FORKS = (
    Scenario("fork", scenarios.ended, fork),
    Scenario("fork-beside-another", scenarios.ended, act_fork_beside_another),
    Scenario("sweep-of-a-forked-run", forked, processes.sweep),
    Scenario("sweep-after-a-dead-forker", pinned_only, processes.sweep),
    Scenario("fork-after-a-dead-forker", pinned_only, partial(fork, step=2)),
    Scenario("delete-after-a-dead-forker", pinned_only, processes.delete),
    Scenario("resume-a-fork", forked, train_fork),
    Scenario("grow-a-fork-and-sweep", nearly_grown, act_grow_and_sweep),
    Scenario("start-a-fork-over", spoiled, act_start_over),
    Scenario("resume-a-fork-of-a-deleted-run", orphaned, train_fork),
)
