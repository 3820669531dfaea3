"""What the gates of a promotion are given: a candidate with evaluations, and the registry with its champion."""

from dataclasses import replace
from typing import Any

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.registry import DatedDecision, Promoted, Refused, RegistryState, SuiteReference
from cairn.storage.logs.run_entries import EvaluationRecorded
from cairn.tasks.checkpoints.promotion import Candidate
from tests.entries import NOON, evaluated

PRIMARY = SuiteReference(name="held-out", sha256="s")


def evaluation(step: int = 20, val_loss: float = 2.0, **other: Any) -> EvaluationRecorded:
    return replace(evaluated(step, val_loss), **other)


def candidate(*evaluations: EvaluationRecorded, **other: Any) -> Candidate:
    reference = CheckpointReference(step=20, attempt=1, prefix="p20", manifest_sha256=f"{20:064x}")
    return Candidate(**{"run_id": "r1", "reference": reference, "evaluations": evaluations, "by": "run r1", **other})


def promoted(step: int = 10, val_loss: float = 3.0, **other: Any) -> Promoted:
    fields: dict[str, Any] = {
        "alias": "champion",
        "run_id": "r0",
        "step": step,
        "prefix": f"p{step}",
        "manifest_sha256": f"{step:064x}",
        "suite_sha256": "s",
        "data_snapshot": "d",
        "metrics": {"val_loss": val_loss},
        "by": "somebody",
        "why": "",
        "previous": None,
    }
    return Promoted(**{**fields, **other})


def holding(*bodies: Promoted) -> RegistryState:
    champions = tuple((NOON, body) for body in bodies)
    return RegistryState(
        champions=History(champions), history=History(DatedDecision(at=at, promoted=body) for at, body in champions)
    )


def gate(decision: Promoted | Refused | None) -> str:
    return decision.gate if isinstance(decision, Refused) else type(decision).__name__
