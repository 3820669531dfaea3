"""A finished run whose end is missing: its best checkpoint was never offered to the alias of its configuration.

Owns how that is known from the two logs: a flow killed between `run-finished` and its offer leaves no decision in the
registry. Refuses to offer. A run that asks a person first is left to people: silence there is no sign of a death.
"""

from collections.abc import Callable

from storage.logs.registry import RegistryState
from storage.logs.registry_entries import Promoted, Refused
from storage.logs.run_state import RunState
from tasks.configuration.settings import PromotionConfig


def pending_offer(state: RunState, registry_of: Callable[[str], RegistryState]) -> str:
    """Return the alias that a finished run's best checkpoint was not offered to, or nothing where none is missing.

    `registry_of` is asked at most once, and only where there is something to offer: a run of which no evaluation
    succeeded has nothing.
    """
    if state.opened is None or state.finished is None or not state.attempts:
        return ""
    section = state.attempts[-1].started.config.get("promotion", {})
    if section.get("require_approval") or (state.failed_evaluations and not state.evaluations):
        return ""
    alias = str(section.get("alias", PromotionConfig().alias))
    history = registry_of(alias).history
    offered = {body.run_id for _, body in history if isinstance(body, Promoted | Refused)}
    return "" if state.opened.run_id in offered else alias
