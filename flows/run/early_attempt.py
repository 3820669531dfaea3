"""An attempt that a command begins before it starts its temporary Prefect server; the flow then goes on with it.

Training needs the log, not Prefect: claim, heartbeats and receipt are the same without a flow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cairn.flows.preparation.training_request import HandedOver
from cairn.flows.run import active_run, run_opening
from cairn.flows.run.attempt import Attempt
from cairn.tasks.attempt.shutdown_signal import Terminated
from cairn.tasks.trainer.warm_trainer import WarmTrainer

_BEGUN: ContextVar[Attempt | None] = ContextVar("begun", default=None)


def begun_early() -> Attempt | None:
    """Return the attempt that the command of this process has begun and no flow has taken, if there is one."""
    attempt = _BEGUN.get()
    return None if attempt is None or attempt.is_taken else attempt


@contextmanager
def early_attempt(handed: HandedOver, warm: WarmTrainer, start_server: Callable[[], None]) -> Iterator[None]:
    """Begin a run's next attempt, and the server after its first step; what no flow takes over ends with the block.

    Raises as `open_run` and `claim_next_attempt` do.
    """
    run = run_opening.open_run(handed.resolved, handed.shutdown, warm)
    if not _may_begin(run):
        start_server()
        yield
        return
    attempt = Attempt(run, active_run.claim_next_attempt(run))
    token = _BEGUN.set(attempt)
    name, why = "SIGTERM", "no flow took it over"
    try:
        with run.progress.showing():
            attempt.begin()
            start_server()  # not before: it would take a core from the first step for three seconds
            yield
    except BaseException as error:
        name = "SIGINT" if isinstance(error, KeyboardInterrupt) else name
        why = "" if isinstance(error, KeyboardInterrupt | Terminated) else f"{why}: {error}"
        raise
    finally:
        _BEGUN.reset(token)
        if not attempt.is_taken:
            attempt.give_up(name, why)


def _may_begin(run: active_run.ActiveRun) -> bool:
    """Whether nothing is due before the next step but one trainer of this machine."""
    state, config = run.log.state, run.config
    has_steps = state.finished is None and state.resume_step < config.training.steps
    return has_steps and run.group.nodes == 1 and not (config.early_stop.is_on and state.commits)
