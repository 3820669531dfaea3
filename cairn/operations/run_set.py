"""A set of runs, trained one after the other: its logs and its section `[set]` say which one is next, and how far."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cairn.flows.preparation.training_request import ResolvedRequest, configure_run
from cairn.storage.logs import log_entry, run_log
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.evaluator.evaluation_run import suite_of
from cairn.tasks.policy import early_stop, run_set
from cairn.tasks.text.format import format_list


def plan_rungs(members: Sequence[ResolvedRequest], environment: Mapping[str, str]) -> tuple[run_set.Rung, ...]:
    """Return the rungs of a set; raises `InvalidConfiguration` where they could not compare its runs."""
    configs = [_configure(member, environment) for member in members] if len(members) > 1 else []
    if not configs or (factor := configs[0].set.halving) is None:
        return ()
    steps, checkpoint, evaluation = configs[0].training.steps, configs[0].checkpoint, configs[0].evaluation
    interval, problem = checkpoint.every_steps * evaluation.every_commits, ""
    if any((one.training.steps, one.checkpoint, one.evaluation) != (steps, checkpoint, evaluation) for one in configs):
        problem = "a rung compares runs with the same training.steps, checkpoint and evaluation alone"
    elif interval >= steps:
        problem = f"no evaluation is due before step {steps}, the first is at {interval}; lower checkpoint.every_steps"
    if problem:
        raise InvalidConfiguration(f"set.halving = {factor}: {problem}")
    return run_set.plan_rungs(len(members), factor=factor, total_steps=steps, interval=interval)


def train_in_turn(
    members: Sequence[ResolvedRequest],
    rungs: Sequence[run_set.Rung],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[ResolvedRequest]:
    """Yield each run when it is to be trained, with its limit; the caller trains it before it asks for the next.

    Runs that lose at a rung are finished in between.
    """
    if len(members) == 1 or not (config := _configure(members[0], environment)).set.is_on:
        yield from members
        return
    logs, suite, before = [member.open_log() for member in members], suite_of(config.evaluation).sha256, None
    trials = [run_set.read_trial(log.refresh(), suite) for log in logs]
    while (move := run_set.next_move(trials, rungs, config.training.steps)) is not None:
        log, limit = logs[move.place], run_set.find_limit(move, trials, config.set)
        if (move.place, trials[move.place]) == before:
            say(f"the set stops at run {log.run_id}, which comes no further; the same command continues")
            return
        before = move.place, trials[move.place]
        if move.stop is not None:
            say(f"run {log.run_id}: {move.stop.why}")
            _drop(log, move.stop)
        elif limit is None:
            left = [log.run_id for log, trial in zip(logs, trials, strict=True) if not trial.is_over]
            say(f"the budget of the set is spent; not trained to the end: {format_list(left, 10)}")
            return
        else:
            yield replace(members[move.place], limit=limit)
        trials[move.place] = run_set.read_trial(log.refresh(), suite)


def _configure(member: ResolvedRequest, environment: Mapping[str, str]) -> RunConfig:
    return member.configuration or configure_run(member, member.open_log().refresh(), environment)


def _drop(log: run_log.RunLog, stop: early_stop.Stop) -> None:
    """Append run-finished with the run's last commit, unless another process trains it now."""
    state = log.refresh()
    if state.newest_committed is not None:
        body = early_stop.finish(state.newest_committed.committed, state.latest_attempt, stop)
        log.append(lambda now: None if now.finished or now.open_attempt else body, writer=log_entry.this_writer())
