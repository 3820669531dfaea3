"""The SQL tables: one record for the rows of each, whose fields are the table's columns.

Columns have the names of the JSON documents' fields, with nested fields flattened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, NewType, get_args, get_type_hints

from storage.logs.fold_cache import FOLD_VERSION
from storage.logs.registry import MODEL_KINDS, ModelDecision, Promoted, Refused, Registry, RolledBack, list_aliases
from storage.stores.document import sha256
from storage.stores.object_store import ObjectStore

JsonText = NewType("JsonText", str)
"""A JSON document as text."""

TABLES_VERSION = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingAttemptRow:
    """A receipt; `termination_reason` is null while the attempt is open."""

    run_id: str
    model_family: str | None
    attempt: int
    started_at: datetime
    ended_at: datetime | None
    termination_reason: str | None
    detail: str | None
    fingerprint: str | None
    config_sha256: str
    data_snapshot: str
    code_version: str
    versions: Mapping[str, str]
    placement_host: str
    placement_pid: int
    placement_device: str
    placement_device_name: str
    placement_world_size: int
    placement_nodes: int
    placement_cores: int
    placement_threads: int
    flow_run_id: str | None
    resumed_from_step: int | None
    resumed_from_manifest: str | None
    first_step: int
    last_step: int
    last_committed_step: int | None
    total_steps: int | None
    tokens: int
    gpu_seconds: float
    useful_gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    waiting_seconds: float
    starting_seconds: float | None
    peak_flops: float | None
    peak_source: str | None
    practised: tuple[str, ...]
    micro_batch: int
    activation_checkpointing: bool
    quarantined_samples: int
    changed: str
    made_progress: bool
    decision_action: str | None
    decision_reason: str | None
    decision_charged: str | None
    decision_left: Mapping[str, int | None] | None
    decision_delay_seconds: float | None
    config: JsonText


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """A committed checkpoint, in whatever state it is now; one that is still being written has no row."""

    run_id: str
    model_family: str | None
    attempt: int
    step: int
    state: str
    prefix: str
    manifest_sha256: str
    state_sha256: str
    bytes: int
    tokens: int
    gpu_seconds: float
    committed_at: datetime
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRow:
    """One evaluation, recorded or failed, and the verdict on the loss curve up to its checkpoint."""

    run_id: str
    model_family: str | None
    attempt: int | None
    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    status: str
    val_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str | None
    boundary: str | None
    verdict_kind: str | None
    verdict_why: str | None
    detail: str | None
    started_at: datetime
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionRow:
    """A decision on an alias: `kind` is promoted, refused or rolled-back; the alias points at the `current` row.

    Run, step and weights of a roll-back are those the alias went back to. Queries take the family from the run.
    """

    alias: str
    kind: str
    decided_at: datetime
    promoted_at: datetime | None
    run_id: str | None
    model_family: str | None
    step: int | None
    manifest_sha256: str | None
    previous: str | None
    current: bool
    by: str
    why: str | None
    gate: str | None
    detail: str | None
    suite_sha256: str | None
    val_loss: float | None
    metrics: Mapping[str, float]
    verdict: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One surviving step; `replays` counts earlier attempts that trained it, `tokens` all tokens up to it."""

    run_id: str
    model_family: str | None
    step: int
    attempt: int
    replays: int
    tokens: int | None
    train_loss: float
    probe_loss: float | None
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    mfu: float
    memory_bytes: int
    seconds: float
    data_seconds: float
    epoch: float | None
    loss_scale: float | None
    world_size: int
    weights_digest: str | None
    at: datetime | None
    sample: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run; `finished_at` is when its last step was committed.

    An unreadable run has only a state, and a detail that says why.
    """

    run_id: str
    model_family: str | None
    state: str
    step: int | None
    total_steps: int | None
    newest_committed_step: int | None
    attempts: int | None
    tokens: int | None
    gpu_seconds: float | None
    useful_gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    waiting_seconds: float | None
    starting_seconds: float | None
    practised_attempts: int | None
    opened_at: datetime | None
    finished_at: datetime | None
    stopped: str | None
    state_sha256: str | None
    val_loss: float | None
    quarantined_windows: int | None
    refused_entries: int | None
    data_snapshot: str | None
    config_sha256: str | None
    code_version: str | None
    lr: float | None
    global_batch: int | None
    forked_from_run: str | None
    forked_from_step: int | None
    seed: int | None
    precision: str | None
    n_layer: int | None
    n_head: int | None
    n_embd: int | None
    block_size: int | None
    dropout: float | None
    tokenizer: str | None
    detail: str | None
    config: JsonText | None


ROWS: Mapping[str, type] = {
    "training_attempts": TrainingAttemptRow,
    "checkpoints": CheckpointRow,
    "evaluations": EvaluationRow,
    "promotions": PromotionRow,
    "steps": StepRow,
    "runs": RunRow,
}
LOG_TABLES = ("runs", "training_attempts", "checkpoints", "evaluations")
"""Tables made from a run's log alone, except for the progress of an open attempt."""
STEP_TABLES = ("steps",)

_TYPES: Mapping[Any, str] = {
    str: "VARCHAR",
    int: "BIGINT",
    float: "DOUBLE",
    bool: "BOOLEAN",
    datetime: "TIMESTAMP WITH TIME ZONE",
    JsonText: "JSON",
    tuple[str, ...]: "VARCHAR[]",
    Mapping[str, float]: "MAP(VARCHAR, DOUBLE)",
    Mapping[str, str]: "MAP(VARCHAR, VARCHAR)",
    Mapping[str, int | None]: "MAP(VARCHAR, BIGINT)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column and its SQL type."""

    name: str
    type: str


_DECISIONS = {record: kind for kind, record in MODEL_KINDS.items()}
_PROMOTION_COLUMNS = tuple(PromotionRow.__slots__)


def read_promotions(store: ObjectStore) -> list[PromotionRow]:
    """Return the rows of all aliases of the store, each alias oldest first; read from the registry at each query."""
    histories = ((alias, Registry(store, alias).refresh().history) for alias in list_aliases(store))
    return [row for alias, history in histories for row in promotion_rows(alias, [(at, body) for at, body in history])]


def promotion_rows(alias: str, decisions: Sequence[tuple[datetime, ModelDecision]]) -> list[PromotionRow]:
    """Return a row for every decision on an alias, oldest first."""
    rows: list[PromotionRow] = []
    points_at: str | None = None
    promoted: dict[str | None, Promoted] = {}
    for decided_at, body in decisions:
        values = _values(body, _PROMOTION_COLUMNS)
        values |= {"alias": alias, "kind": _DECISIONS[type(body)], "decided_at": decided_at}
        match body:
            case Promoted():
                values["promoted_at"] = decided_at
                promoted[body.manifest_sha256] = body
            case Refused():
                values["why"] = body.why or None
            case RolledBack():
                values |= {"previous": points_at, "metrics": {}}
                if target := promoted.get(body.manifest_sha256):
                    values |= _values(target, ("run_id", "step", "suite_sha256", "metrics"))
        values |= {"val_loss": values["metrics"].get("val_loss"), "current": False}
        rows.append(PromotionRow(**{**dict.fromkeys(_PROMOTION_COLUMNS), **values}))
        points_at = points_at if isinstance(body, Refused) else body.manifest_sha256
    newest = max((n for n, row in enumerate(rows) if row.kind != "refused"), default=None)
    return [replace(row, current=n == newest) for n, row in enumerate(rows)]


def _values(record: ModelDecision, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


@cache
def columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table in order."""
    found = []
    for name, hint in get_type_hints(ROWS[table]).items():
        (plain,) = [hint] if hint in _TYPES else [part for part in get_args(hint) if part is not NoneType]
        found.append(Column(name=name, type=_TYPES[plain]))
    return tuple(found)


@cache
def schema_digest() -> str:
    """Return the digest of versions and columns; packs with another digest are not used."""
    listed = [f"{table}.{column.name} {column.type}" for table in ROWS for column in columns(table)]
    return sha256("\n".join([str(TABLES_VERSION), str(FOLD_VERSION), *listed]).encode())
