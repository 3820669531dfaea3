"""What a person reads when a run has ended well: what was promoted, how good it is, what it writes, what to try next.

Owns the words. Reads the log and the registry; refuses torch and the orchestrator.
"""

from collections.abc import Iterator

from storage.logs.registry import Registry
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.configuration.run_configuration import RunConfig


def summarize(log: RunLog, config: RunConfig, *, ending: str, store_option: str) -> Iterator[str]:
    """Yield the lines; `ending` is the flow's own last sentence, `store_option` is repeated in the commands."""
    alias, state = config.promotion.alias, log.refresh()
    yield f"run {log.run_id}: {ending}"
    champion = Registry(log.store, alias).refresh().champion
    own = champion is not None and champion.run_id == log.run_id
    if champion is not None and own:
        losses = ", ".join(
            f"{name} {value:.4g}" for name, value in sorted(champion.metrics.items()) if name != "samples"
        )
        yield f"promoted: {alias} → {log.run_id}@{champion.step} ({losses})"
    if sample := _sample(state, champion.manifest_sha256 if champion and own else None):
        yield "it writes:"
        yield from (f"  | {line}" for line in sample.splitlines())
    again = f" --store {store_option}" if store_option else ""
    yield "try:"
    yield f'  cairn sample {alias if champion else log.run_id} --prompt "The "{again}'
    yield f"  cairn status {log.run_id}{again}"
    yield f"  cairn attempts {log.run_id}{again}"


def _sample(state: RunState, manifest_sha256: str | None) -> str:
    fitting = [e for e in state.evaluations if manifest_sha256 in (None, e.manifest_sha256) and e.samples]
    return fitting[-1].samples[0] if fitting else ""
