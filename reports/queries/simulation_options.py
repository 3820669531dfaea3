"""The options of `cairn simulate`. Every command loads this module, so it imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """Policy, trace and times of a simulation; None leaves it to the run's log, or to Llama 3 405B's published run.

    Args:
        config: run configuration (TOML) whose budgets and checkpoint interval are tried [the run's, or the defaults].
        trace: failure rates, TOML or JSON: [per_device_day] with reason = rate; replacement_seconds; [aftershocks] with
            share and rate_factor [the run's receipts, or Llama 3 405B].
        devices: how many devices work together [the run's, or 16384].
        days: how long training would take if nothing ever failed or stopped [the run's steps, or 54].
        step_seconds: time of one step [measured in the run, or 6].
        checkpoint_seconds: how long training stands still for a commit [the newest commit's bytes at 1 GB/s and no
            less than one step, or 10].
        restart_seconds: from a failure to the next attempt's first step [the run's median, or 300].
        replacement_seconds: mean wait for another machine after preempted and lost [the trace's, or 0].
        seed: equal seeds give equal failures.
        seeds: how many seeds from this one on are tried; intervals hold the middle 80 % of them.
    """

    config: str = ""
    trace: str = ""
    devices: int | None = None
    days: float | None = None
    step_seconds: float | None = None
    checkpoint_seconds: float | None = None
    restart_seconds: float | None = None
    replacement_seconds: float | None = None
    seed: int = 0
    seeds: int = 10
