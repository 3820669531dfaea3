"""The event `cairn.attempt.ended`: one for each receipt, for automations and for people who watch Prefect's events."""

from uuid import NAMESPACE_URL, uuid5

from prefect.events import emit_event

from storage.logs.run_entries import AttemptEnded

ATTEMPT_ENDED = "cairn.attempt.ended"


def emit_attempt_ended(run_id: str, store_url: str, flow_run_id: str | None, ended: AttemptEnded) -> None:
    """Send the event; the same receipt always has the same event id, so that Prefect keeps one of several."""
    emit_event(
        ATTEMPT_ENDED,
        id=uuid5(NAMESPACE_URL, f"{store_url} {run_id} {ended.attempt}"),
        resource={
            "prefect.resource.id": f"cairn.run.{run_id}",
            "prefect.resource.name": run_id,
            "cairn.reason": ended.reason,
            "cairn.decision": ended.decision.action,
        },
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"}]
        if flow_run_id
        else [],
        payload={
            "run": run_id,
            "attempt": ended.attempt,
            "reason": ended.reason,
            "detail": ended.detail,
            "last_step": ended.last_step,
            "decision": {
                "action": ended.decision.action,
                "reason": ended.decision.reason,
                "charged": ended.decision.charged,
                "left": dict(ended.decision.left),
                "delay_seconds": ended.decision.delay_seconds,
            },
            "device_seconds": {"all": ended.gpu_seconds, "wasted": ended.wasted_gpu_seconds},
        },
    )
