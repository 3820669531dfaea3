"""How a run and its next attempt start: the run is opened or joined, and each attempt's entry is claimed.

The first of several processes decides data, weights and numerics, in the log; the others join.
"""

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cairn.flows.preparation.training_request import ResolvedRequest, configure_run
from cairn.flows.run import active_run
from cairn.flows.run.steps import Steps
from cairn.reports.queries.run_lookup import configuration_document
from cairn.reports.text.progress import TextProgress
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.snapshots.data_snapshot import TOKENIZER, SnapshotFiles
from cairn.storage.stores import store_probe
from cairn.tasks.attempt import attempt_entries, preemption_notice
from cairn.tasks.configuration import network_module, run_configuration, stored_configuration
from cairn.tasks.data import snapshot_lookup
from cairn.tasks.errors import BudgetExhausted
from cairn.tasks.evaluator.evaluation_run import refuse_command
from cairn.tasks.machine import machine_speed, placement
from cairn.tasks.policy import attempt_sizes, budgets
from cairn.tasks.text.format import describe_schedule, describe_split, one_line
from cairn.tasks.tokenize_and_split import Text
from cairn.tasks.trainer import trainer_group
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights


def starter(environment: Mapping[str, str], default: str = "person") -> str:
    """Return who starts this run again: as the batch script or manifest says, else the default."""
    return environment.get("CAIRN_CONTINUED_BY", "").strip() or default


def open_run(resolved: ResolvedRequest, steps: Steps, host: active_run.Host) -> active_run.ActiveRun:
    """Return the run ready for its next attempt, opened first where the log does not know it; raises `ConfigDrift`."""
    log = resolved.open_log()
    opened = log.refresh().opened
    is_new, notes = opened is None, tuple[str, ...]()
    config = configure_run(resolved, log.state, os.environ)
    group = trainer_group.trainer_group(config.training, os.environ, spares=config.machines.spares)
    if log.state.finished is None:
        host.warm.start(placement.trainer_folder(os.environ, log))
    if opened is None:
        opened, notes = _record_opening(log, config, resolved.base_dir, steps, host)
        config = stored_configuration.keep_numerics(config, opened.config)  # another process may have been first
    stored_configuration.check_drift(opened.config, config, run_id=log.run_id)
    host.warm.set_command(group.command())
    origin = attempt_entries.DataOrigin(
        snapshot_id=opened.data_snapshot,
        data=config.data if resolved.configuration or is_new else None,
        base_dir=resolved.base_dir,
        cache_dir=placement.work_folder(os.environ) / "snapshots",
        work_dir=placement.trainer_folder(os.environ, log),
    )
    run = active_run.ActiveRun(log, config, host, origin, resolved)
    for line in notes:
        run.say(line)
    if resolved.configuration is None:  # what the log says and this machine does not do
        names = (plan.suite.name for plan in run.evaluation.following if refuse_command(plan.suite, os.environ))
        commands = [f"the command of evaluator {name}" for name in names]
        not_taken = [*stored_configuration.left_out(configuration_document(log.state)), *commands]
        how = "give the configuration file, --set section.key=value, or CAIRN_SECTION__KEY in the environment"
        if not_taken:
            run.say(f"not taken from the run's log: {', '.join(not_taken)}; {how}")
    return run


def _record_opening(
    log: run_log.RunLog, wanted: run_configuration.RunConfig, base_dir: Path, steps: Steps, host: active_run.Host
) -> tuple[run_entries.RunOpened, tuple[str, ...]]:
    """Append run-opened with data, weights and this machine's fastest numerics; return the log's, and what to say."""
    store_probe.probe_store(log.store)
    folder, work_dir = placement.work_folder(os.environ), placement.trainer_folder(os.environ, log)
    text, ask = Text(data=wanted.data, base_dir=base_dir, cache_dir=folder), partial(host.warm.measure_speed, work_dir)
    choosing = machine_speed.numerics_beside(wanted.training, wanted.model, folder, ask)
    show = TextProgress()
    with choosing as mode, show.showing():
        snapshot = steps.tokenize_and_split(text, log.store, show)
    snapshot_lookup.check_block_size(snapshot.manifest, wanted.model, wanted.data, wanted.training)
    network_module.keep_files(log.store, wanted.model, wanted.code.files)
    initial = None
    if wanted.training.init_from is not None:
        files = SnapshotFiles(log.store, snapshot.snapshot_id, folder / "snapshots")
        given = InitialDirectory(wanted.training.init_from, base_dir)
        tokenizer, vocab_size = files.path(TOKENIZER).read_text(encoding="utf-8"), files.manifest.vocab_size
        initial = keep_initial_weights(log.store, given, wanted.model, tokenizer_json=tokenizer, vocab_size=vocab_size)
    chosen = wanted.with_mode(precision=mode().precision, kernels=mode().kernels)
    body = run_entries.RunOpened(
        run_id=log.run_id,
        model_family=chosen.model_family or log.run_id,
        config=chosen.frozen(),
        config_sha256=chosen.frozen_sha256(),
        data_snapshot=snapshot.snapshot_id,
        total_steps=chosen.training.steps,
        code_version=placement.code_version(),
        initial_weights_sha256=initial.weights_sha256 if initial else None,
        initial_source_sha256=initial.source_sha256 if initial else None,
        nodes_wanted=trainer_group.trainer_group(chosen.training, os.environ, spares=chosen.machines.spares).nodes,
        continued_by=host.continued_by,
    )
    opened = log.append(lambda state: body if state.opened is None else None, writer=log_entry.this_writer()).opened
    assert opened is not None
    train, val = (snapshot.manifest.split(name).tokens for name in ("train", "val"))
    split = describe_split(train, val, "tokens", None if wanted.data.val_sources else snapshot.manifest.val_fraction)
    return opened, (split, *snapshot.notes, *describe_schedule(chosen.training.wastes_last_step))


def claim_next_attempt(run: active_run.ActiveRun) -> run_entries.AttemptStarted:
    """Append attempt-started, say how the attempt begins, and return it.

    Raises as `claim_attempt` does, BudgetExhausted where `cost.limit` is spent, and `ShutdownRequested` at a notice
    before the entry is written.
    """
    _refuse_if_too_dear(run)
    run.log.store.reserve()
    config, writer, why = run.config, run.writer(), partial(preemption_notice.kubernetes_reason, os.environ)
    claimant = attempt_entries.Claimant(
        lease=config.lease,
        budgets=config.budgets,
        writer=writer,
        sleep=run.refuse_to_begin,
        start_over=run.start_over,
        kubernetes_reason=why,
    )
    claims = list[str]()

    def start(*given: Any) -> run_entries.AttemptStarted:
        made = _claim(run, *given)
        claims.append(made.claim_id)
        return made

    def claim() -> run_entries.AttemptStarted:
        owner = run.log.refresh().open_attempt if claims else None
        if owner is not None and owner.started.claim_id in claims:  # a claim of unknown outcome was written
            return owner.started
        return attempt_entries.claim_attempt(run.log, claimant, start)

    # Once an entry may be written, no notice leaves it without a receipt.
    retry = replace(run.retry, sleep=lambda seconds: time.sleep(seconds) if claims else run.refuse_to_begin(seconds))
    started = retry.call(claim)
    place = started.placement
    origin = f"resumes from step {started.resumed_from.step}" if started.resumed_from else "starts at step 0"
    run.say(f"attempt {started.attempt} {origin} of {run.config.training.steps}")
    for record in run.log.state.checkpoints:
        if record.state == run_state.CheckpointState.QUARANTINED and record.committed.step > started.first_step:
            run.say(f"  not from step {record.committed.step}, which is quarantined: {one_line(record.detail, 200)}")
    if place.threads > place.cores:
        run.say(f"  {place.threads} threads, frozen with the run, share {place.cores} cores: equal bits, slower")
    return started


def _refuse_if_too_dear(run: active_run.ActiveRun) -> None:
    state, checkpoint, spent = run.log.state, run.config.checkpoint, budgets.read_spent(run.log.state)
    step, seconds = state.resume_step, spent.seconds_per_step / run.group.size or None
    until = attempt_sizes.segment_end(step, checkpoint, total_steps=run.last_step, step_seconds=seconds)
    if step < run.last_step and (why := budgets.limit_problem(run.config.cost, spent, next_steps=until - step)):
        raise BudgetExhausted(f"run {run.log.run_id}: {why}; the same command with a higher cost.limit continues")


def _claim(
    run: active_run.ActiveRun, number: int, reference: log_entry.CheckpointReference | None, state: run_state.RunState
) -> run_entries.AttemptStarted:
    run.refuse_to_begin()
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, nodes, processes = run.config.training, run.group.nodes, run.group.size
    on_cuda, block_size = machine_speed.trains_on_cuda(training.device), run.config.model.block_size
    sizes = attempt_sizes.next_sizes(state, training, block_size, processes=processes, on_cpu=not on_cuda)
    device = placement.resolved_device(training.device, on_cuda=on_cuda, processes=processes)
    place = placement.this_placement(device=device, threads=training.threads, world_size=processes)
    return run_entries.AttemptStarted(
        attempt=number,
        micro_batch=sizes.micro_batch,
        activation_checkpointing=sizes.activation_checkpointing,
        placement=replace(
            place,
            device_name=machine_speed.device_name(device),
            cores=placement.usable_cores(),
            nodes=nodes,
            nodes_wanted=run.machines.nodes,
            hosts=(place.host, *run.machines.hosts(nodes)) if nodes > 1 else (),
            continued_by=run.host.continued_by,
        ),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=placement.code_version(),
        resumed_from=reference,
        quarantined_samples=len(state.quarantined_windows),
        versions=placement.library_versions() | network_module.module_versions(run.config.model),
        faults=run.evaluation.faults,
        gathering_seconds=run.gathering_seconds,
        claim_id=uuid.uuid4().hex[:12],
        changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else "",
    )
