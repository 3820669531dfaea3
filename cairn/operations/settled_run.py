"""Answers `cairn train` for a run with nothing left to do, from log and registry alone, before Prefect is imported."""

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from flows.operations.checkpoint_offer import end_on_record
from flows.orchestrator.run_notices import all_receivers, notices_of
from reports.exporters.exporters import run_exporters
from reports.notices.notice_delivery import telling
from storage.errors import StorageError
from storage.logs.run_log import RunLog
from tasks.attempt.attempt_claim import refuse_live_owner
from tasks.checkpoints.checkpoint_sweep import sweep_run
from tasks.configuration.run_configuration import RunConfig
from tasks.evaluator.evaluation_suite import suite_of
from tasks.policy.termination import FlowEnd, FlowOutcome
from tasks.text.output import say


def end_without_flow(log: RunLog, config: RunConfig, environment: Mapping[str, str]) -> FlowEnd | None:
    """Return the end of a run that is finished in every respect, None for any other; raises `LiveOwner`.

    As at a flow's end, its mirrors are brought up to date and what retention gives up is deleted.
    """
    is_asked_by_person = not environment.get("CAIRN_CONTINUED_BY", "").strip()
    refuse_live_owner(
        log, config.lease, monotonic=time.monotonic, sleep=time.sleep, is_asked_by_person=is_asked_by_person
    )
    ended = end_on_record(log, config)
    if not ended:
        return None
    with (
        run_exporters(log, config.mirrors, environment, say),
        telling(log.store, all_receivers(config.notify), partial(notices_of, log), say),
        suppress(StorageError),
    ):
        sweep_run(log, config.checkpoint, suite_of(config.evaluation).sha256)
    step = log.state.high_water_step
    return FlowEnd(reason=FlowOutcome.COMPLETED, message=f"it is finished, at step {step}; nothing to do: {ended}")
