"""What a person reads when a run has completed: promotion, losses, a sample, commands to try next."""

import os
import shlex
from collections.abc import Iterator, Mapping

from reports.queries.run_status import bits_differ
from storage.logs.registry import Promoted, Refused, Registry
from storage.logs.run_log import RunLog
from tasks.checkpoints.promotion import Gate
from tasks.configuration.addresses import DEFAULT_STORE

_DECIDED_BY_ALIAS = (Gate.COMPARABLE, Gate.BETTER)


def describe_finished_run(log: RunLog, alias: str, store_url: str, ending: str) -> Iterator[str]:
    """Yield the lines; the commands find the store, and can be pasted into a shell."""
    yield f"run {log.run_id}: {ending}"
    if differ := bits_differ(log.state):
        yield f"bits: {differ}"
    registry = Registry(log.store, alias).refresh()
    own = registry.champion if registry.champion and registry.champion.run_id == log.run_id else None
    if own is not None:
        losses = ", ".join(f"{name} {value:.4g}" for name, value in sorted(own.metrics.items()) if name != "samples")
        yield f"promoted: {alias} → {log.run_id}@{own.step} ({losses})"
    sampled = [e for e in log.state.evaluations if e.samples and (not own or e.manifest_sha256 == own.manifest_sha256)]
    if sampled and sampled[-1].samples[0]:
        yield "it writes:"
        yield from (f"  | {line}" for line in sampled[-1].samples[0].splitlines())
    option = store_option(store_url, os.environ)
    yield "try:"
    yield f'  cairn sample {alias if own else log.run_id} --prompt "The "{option}'
    decisions = (body for _, body in reversed(registry.history) if isinstance(body, Promoted | Refused))
    last = next((body for body in decisions if body.run_id == log.run_id), None)
    if isinstance(last, Refused) and last.gate in _DECIDED_BY_ALIAS:
        yield f"  cairn promote {log.run_id}@{last.step} --alias {log.run_id}-best{option}"
    yield f"  cairn status {log.run_id}{option}"
    yield f"  cairn attempts {log.run_id}{option}"
    if log.state.opened is not None:
        yield f"  cairn fork {log.run_id} NEW --set training.steps={2 * log.state.opened.total_steps}{option}"


def store_option(chosen: str, environment: Mapping[str, str]) -> str:
    """Return ` --store URL`, quoted for a shell, with which other commands find `chosen`; empty if it is not needed."""
    found = ("", DEFAULT_STORE, environment.get("CAIRN_STORE"))
    return "" if chosen in found else f" --store {shlex.quote(chosen)}"
