"""Opens a run, or joins an open one: the first of several processes decides data, weights and numerics, in the log."""

import os
from functools import partial
from pathlib import Path

from cairn.flows.operations.checkpoint_evaluation import plan_evaluation
from cairn.flows.orchestrator import cancellation, run_overview
from cairn.flows.preparation import preflight, training_request
from cairn.flows.run.active_run import ActiveRun, BackgroundSweep, Host
from cairn.flows.run.progress import Progress, TextProgress
from cairn.flows.run.steps import Steps
from cairn.model.estimates.numerics import choose_threads, thread_candidates
from cairn.reports.queries.run_lookup import configuration_document
from cairn.storage.logs import log_entry, run_log, run_state
from cairn.storage.logs.run_entries import RunOpened
from cairn.storage.snapshots.data_snapshot import TOKENIZER, SnapshotFiles, read_manifest
from cairn.storage.stores import object_store, store_probe
from cairn.tasks.attempt.attempt_end import DataOrigin
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import check_drift, keep_numerics, left_out
from cairn.tasks.data import document, snapshot_build
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan
from cairn.tasks.evaluator.evaluator_process import refuse_command
from cairn.tasks.machine.machine_speed import numerics_beside, trains_on_cuda
from cairn.tasks.machine.placement import code_version, resolve_threads, trainer_folder, usable_cores, work_folder
from cairn.tasks.tokenize_and_split import Text
from cairn.tasks.trainer import initial_weights, machines, trainer_group, trainer_protocol, warm_trainer


def open_run(resolved: training_request.ResolvedRequest, steps: Steps, host: Host) -> ActiveRun:
    """Return the run ready for its next attempt, opened first where the log does not know it; raises `ConfigDrift`."""
    log, folder = resolved.open_log(), work_folder(os.environ)
    opened = log.refresh().opened
    is_new = opened is None
    config = training_request.configure_run(resolved, log.state, os.environ)
    group, memory = trainer_group.trainer_group(config.training, os.environ), None
    if config.training.micro_batch == "auto" and not log.state.attempts:  # before a warm trainer takes its share
        memory = preflight.available_memory(config.training, group)
    if log.state.finished is None:
        host.warm.start(trainer_folder(os.environ, log.run_id))
    if opened is None:
        opened = _record_opening(log, config, resolved.base_dir, steps, host)
        config = keep_numerics(config, opened.config)  # another process may have been first
    check_drift(opened.config, config, run_id=log.run_id)
    manifest = read_manifest(log.store, opened.data_snapshot) if is_new or memory else None
    host.warm.set_command(group.command())
    threads, faults = resolve_threads(config.training.threads), os.environ.get("CAIRN_FAULTS", "")
    evaluation = plan_evaluation(config, opened.data_snapshot, folder, threads=max(1, threads // 2), faults=faults)
    progress = Progress(config.training.steps, echo=host.flow_run.echo)
    if is_new and manifest:
        train, val = manifest.split("train").tokens, manifest.split("val").tokens
        progress.say(document.describe_split(train, val, "tokens", manifest.val_fraction))
    if resolved.configuration is None and (ignored := _ignored_words(log.state, evaluation)):
        progress.say(ignored)
    sweep = partial(sweep_run, run_log.RunLog(log.store, log.run_id), config.checkpoint, evaluation.suite.sha256)
    return ActiveRun(
        log=log,
        config=config,
        host=host,
        start_over=resolved.request.start_over,
        micro_batch=preflight.choose_micro_batch(config, manifest.vocab_size, memory) if memory and manifest else None,
        evaluation=evaluation,  # on half of the threads, for training has priority
        origin=DataOrigin(
            snapshot_id=opened.data_snapshot,
            data=config.data if resolved.configuration or is_new else None,
            base_dir=resolved.base_dir,
            cache_dir=folder / "snapshots",
        ),
        group=group,
        work_dir=trainer_folder(os.environ, log.run_id),
        threads=threads,
        progress=progress,
        sweep=BackgroundSweep(sweep, progress.say),
        overview=run_overview.RunOverview(log, host.flow_run),
        cancellation=cancellation.CancellationWatch(host.flow_run, host.shutdown),
        machines=machines.Machines(group.nodes),
        retry=object_store.run_retry_policy(config.checkpoint.patience_seconds, progress.say),
    )


def _ignored_words(state: run_state.RunState, evaluation: EvaluationPlan) -> str:
    """Return a line that names what the log says and this machine does not do, and what to do; empty if nothing."""
    commands = (plan.suite.name for plan in evaluation.following if refuse_command(plan.suite, os.environ))
    ignored = (*left_out(configuration_document(state)), *(f"the command of evaluator {name}" for name in commands))
    how = "give the configuration file, --set section.key=value, or CAIRN_SECTION__KEY in the environment"
    return f"not taken from the run's log: {', '.join(ignored)}; {how}" if ignored else ""


def _choose_threads(config: RunConfig, run_id: str, warm: warm_trainer.WarmTrainer) -> tuple[int, str]:
    """Return the threads of each trainer process, and why; one process on a CPU measures steps with fewer."""
    training, group = config.training, trainer_group.trainer_group(config.training, os.environ)
    if training.threads != "auto":
        return training.threads, "as configured"
    cores = max(1, usable_cores() // group.processes)
    if cores == 1 or group.size > 1 or training.device == "mps" or trains_on_cuda(training.device):
        return choose_threads({}, cores)
    trial = trainer_protocol.ThreadTrial(model=config.model, training=training, candidates=thread_candidates(cores))
    return choose_threads(warm.time_threads(trial, trainer_folder(os.environ, run_id)), cores)


def _record_opening(log: run_log.RunLog, wanted: RunConfig, base_dir: Path, steps: Steps, host: Host) -> RunOpened:
    """Append run-opened with data, initial weights and this machine's fastest numerics; return the log's entry."""
    store_probe.probe_store(log.store)
    folder = work_folder(os.environ)
    ask = partial(host.warm.measure_speed, trainer_folder(os.environ, log.run_id))
    text = Text(data=wanted.data, base_dir=base_dir, cache_dir=folder)
    with numerics_beside(wanted.training, wanted.model, folder, ask) as mode, TextProgress().showing() as show:
        snapshot = steps.tokenize_and_split(text, log.store, show)
    snapshot_build.check_block_size(snapshot.manifest, wanted.model.block_size, wanted.data)
    initial = None
    if wanted.training.init_from is not None:
        files = SnapshotFiles(log.store, snapshot.snapshot_id, folder / "snapshots")
        initial = initial_weights.keep_initial_weights(
            log.store,
            initial_weights.InitialDirectory(wanted.training.init_from, base_dir),
            wanted.model,
            tokenizer_json=files.path(TOKENIZER).read_text(encoding="utf-8"),
            vocab_size=files.manifest.vocab_size,
        )
    chosen = wanted.with_mode(precision=mode().precision, kernels=mode().kernels)
    threads, threads_why = _choose_threads(chosen, log.run_id, host.warm)
    chosen = chosen.with_mode(precision=mode().precision, kernels=mode().kernels, threads=threads)
    body = RunOpened(
        run_id=log.run_id,
        model_family=chosen.model_family,
        config=chosen.frozen(),
        config_sha256=chosen.frozen_sha256(),
        data_snapshot=snapshot.snapshot_id,
        total_steps=chosen.training.steps,
        code_version=code_version(),
        initial_weights_sha256=initial,
        threads_why=threads_why,
        nodes_wanted=trainer_group.trainer_group(chosen.training, os.environ).nodes,
        continued_by=host.continued_by,
    )
    opened = log.append(lambda state: body if state.opened is None else None, writer=log_entry.this_writer()).opened
    assert opened is not None
    return opened
