"""The command that trains a run again from nothing, and the digest that its end must have."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from storage.logs.run_state import RunState

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_:/-]*\Z")
_NOT_WORDS = frozenset({"true", "false", "inf", "nan"})
_CAN_CHANGE_BITS = ("micro_batch", "device", "activation_checkpointing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """The command, the step and digest of its end, and what else must be the same."""

    command: str
    step: int | None
    state_sha256: str | None
    same: tuple[str, ...]


def reproduce(state: RunState, run_id: str) -> Reproduction:
    """Return how to train the run again under another id; relative paths of sources need the same working folder."""
    settings = [f"--set {shlex.quote(f'{key}={value}')}" for key, value in _settings(state)]
    newest, finished = state.newest_committed, state.finished
    digest = finished.state_sha256 if finished else (newest.committed.state_sha256 if newest else None)
    step = finished.step if finished else (newest.committed.step if newest else None)
    return Reproduction(
        command=" \\\n  ".join([f"cairn train --run-id {shlex.quote(f'{run_id}-again')}", *settings]),
        step=step,
        state_sha256=digest,
        same=tuple(_same(state)),
    )


def _settings(state: RunState) -> Iterator[tuple[str, str]]:
    from tasks.configuration.run_configuration import FROZEN_SECTIONS
    from tasks.configuration.stored_configuration import parse_stored_configuration

    if state.opened is None:
        return
    stored = parse_stored_configuration(state.opened.config)
    config = stored.model_dump(mode="json", exclude_defaults=True)
    newest = state.attempts[-1].started.config.get("training") if state.attempts else {}
    newest = newest if isinstance(newest, Mapping) else {}
    training = dict(config.get("training", {}))
    training |= {key: newest[key] for key in _CAN_CHANGE_BITS if newest.get(key) is not None}
    for section in FROZEN_SECTIONS:
        value = training if section == "training" else config.get(section, {})
        if isinstance(value, Mapping):
            yield from ((f"{section}.{key}", _toml(item)) for key, item in value.items() if item is not None)
        else:
            yield section, _toml(value)


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it: a plain word, or TOML."""
    match value:
        case str() if _BARE.match(value) and value not in _NOT_WORDS:
            return value
        case Mapping():
            return "{" + ", ".join(f"{json.dumps(key)} = {_quoted(item)}" for key, item in value.items()) + "}"
        case _:
            return _quoted(value)


def _quoted(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _same(state: RunState) -> Iterator[str]:
    """Yield the conditions of equal bits that the command cannot express."""
    yield "the same versions of Cairn and its libraries, on the same kind of device"
    sizes = list(dict.fromkeys(str(item.started.micro_batch) for item in state.attempts))
    if len(sizes) > 1:
        yield f"the micro-batch changed on the way ({' → '.join(sizes)}), which can change the last bits"
    if state.quarantined_windows:
        yield f"{len(state.quarantined_windows):,} quarantined windows of the data were left out on the way"
