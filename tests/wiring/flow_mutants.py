"""Wrong wires of the flows: what a trainer is sent, claims, receipts, heartbeats, commits, promotions, checks."""

from tests.wiring.mutant import key, mutant

TRAINER = "flows/run/attempt_trainer.py"
EVALUATIONS = "flows/run/run_decisions.py"
ACTIVE, MACHINES = "flows/run/active_run.py", "flows/run/node_service.py"
OPENING = CLAIM = "flows/run/run_start.py"
FLOW = "flows/train_gpt.py"
TESTS = "tests/wiring/test_flow.py"
SPEC = f"{TESTS}::test_the_spec_that_a_trainer_is_sent_says_what_configuration_and_log_say"
STARTED = f"{TESTS}::test_an_attempt_records_what_it_was_started_with"
BACK_OFF = f"{TESTS}::test_the_flow_waits_between_attempts_as_the_budget_says_until_it_is_spent"
COUNTED = f"{TESTS}::test_a_receipt_counts_what_the_trainer_did_and_what_of_it_was_lost"
HEARTBEAT = f"{TESTS}::test_the_last_heartbeat_says_how_far_the_trainer_got"
SEGMENTS = f"{TESTS}::test_segments_end_where_the_configuration_commits"
CLAIMED = f"{TESTS}::test_a_claim_charges_the_lost_attempt_to_the_budget_of_the_configuration"
PROMOTION = "flows/run/run_decisions.py"
RULES = "flows/operations/checkpoint_operations.py"
ALIAS = key("an_alias_and_how_much_better_it_must_become")
ASKED = key("a_person_is_asked")
STAY = key("which_checkpoints_stay")
ROOM = "tests/wiring/test_short_room.py"
GATHERED = key("how_long_other_machines_are_waited_for_and_how_many_are_enough")
LIVE = key("how_a_live_attempt_is_recognized")

FLOW_MUTANTS = (
    mutant(
        "limit-of-cost-asked-of-no-segment",
        "flows/run/attempt_trainer.py",
        "if self._is_too_dear(step, until, before):",
        "if False:",
        "tests/wiring/test_configuration_keys.py::test_the_key_acts[how_much_a_run_may_cost]",
    ),
    mutant(
        "set-lets-every-run-go-on",
        ACTIVE,
        "min(config.training.steps, self.limit.until_step)",
        "min(config.training.steps, 1e9)",
        key("how_many_runs_of_a_set_go_on"),
        key("how_many_steps_a_set_may_take"),
    ),
    mutant(
        "set-has-all-device-hours",
        TRAINER,
        "< run.limit.device_seconds:",
        "< 1e9:",
        key("how_much_device_time_a_set_may_use"),
    ),
    mutant("back-off-ignored", FLOW, "run.wait(ended.decision.delay_seconds)", "run.wait(0.0)", BACK_OFF),
    mutant(
        "spec-divergence-dropped",
        TRAINER,
        "divergence=config.divergence,",
        "divergence=type(config.divergence)(),",
        SPEC,
    ),
    mutant(
        "last-commit-of-a-run-told-to-end-left-out",
        TRAINER,
        "while self._behind or (received.segments",
        "while not self._is_ending() and (self._behind or received.segments",
        "tests/wiring/test_flow.py::"
        "test_a_run_told_to_end_after_a_segment_without_a_checkpoint_commits_it_all_the_same",
    ),
    mutant(
        "heartbeat-keeps-silent-about-a-step-without-a-checkpoint",
        TRAINER,
        "symptom=self._symptom or self._behind",
        "symptom=self._symptom",
        "tests/wiring/test_flow.py::test_the_heartbeat_says_that_a_step_has_no_checkpoint_until_one_is_staged_again",
    ),
    mutant(
        "heartbeat-has-no-speed",
        TRAINER,
        "tokens_per_second=last.record.tokens_per_second if last",
        "tokens_per_second=last.record.mfu if last",
        "tests/wiring/test_flow.py::test_the_last_heartbeat_says_how_far_the_trainer_got",
    ),
    mutant(
        "spec-patience-is-the-grace",
        TRAINER,
        "patience_seconds=config.checkpoint.patience_seconds",
        "patience_seconds=config.checkpoint.grace_seconds",
        SPEC,
    ),
    mutant(
        "spec-quarantine-dropped",
        TRAINER,
        "quarantined=tuple(sorted(state.quarantined_windows))",
        "quarantined=()",
        SPEC,
    ),
    mutant("spec-resume-dropped", TRAINER, "resume=started.resumed_from,", "resume=None,", SPEC),
    mutant(
        "spec-whole-batch-at-once",
        TRAINER,
        "micro_batch=started.micro_batch",
        "micro_batch=config.training.global_batch",
        SPEC,
    ),
    mutant(
        "spec-keeps-activations",
        TRAINER,
        "activation_checkpointing=started.activation_checkpointing",
        "activation_checkpointing=False",
        SPEC,
    ),
    mutant(
        "spec-one-thread",
        TRAINER,
        "threads=started.placement.threads,",
        "threads=1,",
        SPEC,
    ),
    mutant("spec-last-prompt", TRAINER, "config.evaluation.prompts[0]", "config.evaluation.prompts[-1]", SPEC),
    mutant("spec-faults-dropped", TRAINER, '"",\n        faults=run.evaluation.faults', '"",\n        faults=""', SPEC),
    mutant(
        "attempt-forgets-the-quarantine",
        CLAIM,
        "quarantined_samples=len(state.quarantined_windows)",
        "quarantined_samples=0",
        STARTED,
    ),
    mutant(
        "attempt-forgets-what-changed",
        CLAIM,
        'changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else ""',
        'changed=""',
        STARTED,
    ),
    mutant(
        "attempt-records-the-first-configuration",
        CLAIM,
        "config=run.config.document()",
        "config=state.attempts[0].started.config if state.attempts else run.config.document()",
        STARTED,
    ),
    mutant(
        "segments-of-the-whole-run",
        TRAINER,
        "segment_end(step, run.config.checkpoint, total_steps=steps, step_seconds=self._step_seconds())",
        "steps",
        SEGMENTS,
    ),
    mutant(
        "speed-of-a-step-unknown",
        TRAINER,
        "return tokens / last.record.tokens_per_second if last else None",
        "return None",
        f"{TESTS}::test_a_limit_in_seconds_ends_segments_by_the_speed_of_the_last_step",
    ),
    mutant("receipt-without-tokens", TRAINER, "tokens=last.tokens if last else 0", "tokens=0", COUNTED),
    mutant(
        "remedy-without-room",
        TRAINER,
        "room = _room(run) if",
        "room = None if",
        f"{TESTS}::test_after_out_of_memory_sizes_that_cannot_fit_are_passed_over",
    ),
    mutant(
        "receipt-by-default-budgets",
        TRAINER,
        "end_attempt, run.log, over, limits=run.config.budgets,",
        "end_attempt, run.log, over, limits=type(run.config.budgets)(),",
        BACK_OFF,
    ),
    mutant(
        "claim-by-default-budgets",
        CLAIM,
        "budgets=config.budgets,",
        "budgets=type(config.budgets)(),",
        CLAIMED,
    ),
    mutant("evidence-without-exit-code", TRAINER, "exit_code=code", "exit_code=None", COUNTED),
    mutant(
        "evidence-without-heartbeat",
        TRAINER,
        "heartbeat_step=last.record.step if last else None",
        "heartbeat_step=None",
        COUNTED,
    ),
    mutant(
        "heartbeat-loss-is-the-rate",
        TRAINER,
        "train_loss=last.record.train_loss",
        "train_loss=last.record.lr",
        HEARTBEAT,
    ),
    mutant(
        "start-without-faults",
        CLAIM,
        "module_versions(run.config.model),\n        faults=run.evaluation.faults",
        'module_versions(run.config.model),\n        faults=""',
        f"{TESTS}::test_a_receipt_names_the_device_and_counts_cores_and_the_faults_to_inject",
    ),
    mutant(
        "receipt-without-the-peak",
        TRAINER,
        "peak=ready.peak if ready else None",
        "peak=None",
        f"{TESTS}::test_the_end_of_an_attempt_has_the_peak_and_how_long_its_trainer_started",
    ),
    mutant(
        "heartbeat-without-device-time",
        TRAINER,
        "gpu_seconds=self._gpu_seconds() + silent_seconds * self._started.placement.devices",
        "gpu_seconds=silent_seconds * self._started.placement.devices",
        HEARTBEAT,
    ),
    mutant(
        "silence-of-a-hanging-trainer-costs-nothing",
        "flows/run/attempt_trainer.py",
        "gpu_seconds=self._gpu_seconds() + silent_seconds * self._started.placement.devices",
        "gpu_seconds=self._gpu_seconds()",
        f"{TESTS}::test_a_trainer_that_is_silent_for_too_long_is_killed_as_hung_and_its_silence_is_wasted",
    ),
    mutant(
        "finished-with-the-digest-of-the-manifest",
        "tasks/policy/early_stop.py",
        "state_sha256=last.state_sha256",
        "state_sha256=last.manifest_sha256",
        f"{TESTS}::test_the_run_ends_with_the_digest_of_its_last_checkpoint",
    ),
    mutant(
        "grace-times-ten",
        TRAINER,
        "_after(self._run.config.checkpoint.grace_seconds, end_grace)",
        "_after(10 * self._run.config.checkpoint.grace_seconds, end_grace)",
        f"{TESTS}::test_the_grace_of_a_trainer_is_that_of_the_configuration",
    ),
    mutant(
        "watchdog-of-defaults",
        TRAINER,
        "HangDetector(run.config.watchdog)",
        "HangDetector(type(run.config.watchdog)(startup_seconds=5.0))",
        f"{TESTS}::test_a_trainer_that_is_silent_for_too_long_is_killed_as_hung_and_its_silence_is_wasted",
    ),
    mutant(
        "opened-with-another-length",
        OPENING,
        "total_steps=chosen.training.steps",
        "total_steps=chosen.training.global_batch",
        f"{TESTS}::test_a_run_is_opened_with_the_frozen_part_of_its_configuration",
    ),
    mutant(
        "server-outlives-its-commands",
        "flows/orchestrator/prefect_server.py",
        "while home.lock_unused() is None and",
        "while home.lock_unused() is not None and",
        "tests/flows/test_session_server.py::test_a_server_ends_with_the_last_command_that_uses_it",
    ),
    mutant("always-the-champion", PROMOTION, "run.config.promotion.alias", '"champion"', ALIAS),
    mutant(
        "any-improvement-promotes",
        RULES,
        "min_improvement=config.promotion.min_improvement",
        "min_improvement=0.0",
        ALIAS,
    ),
    mutant(
        "no-verdict-refuses",
        RULES,
        "refuse_verdicts=config.promotion.refuse_verdicts",
        "refuse_verdicts=()",
        key("verdicts_that_refuse"),
    ),
    mutant(
        "approval-never-needed",
        RULES,
        "needs_approval=config.promotion.require_approval",
        "needs_approval=False",
        ASKED,
    ),
    mutant("approval-waits-a-day", PROMOTION, "run.config.promotion.approval_timeout_seconds", "86_400.0", ASKED),
    mutant(
        "sweep-beside-training-of-defaults",
        ACTIVE,
        "partial(sweep_run, reader, config.checkpoint,",
        "partial(sweep_run, reader, type(config.checkpoint)(),",
        STAY,
    ),
    mutant(
        "no-sweep-while-a-store-is-full",
        "flows/run/attempt_trainer.py",
        "            self._run.sweep.start()  # the store may be full\n",
        "",
        f"{ROOM}::test_a_checkpoint_that_waits_for_its_store_starts_a_sweep",
    ),
    mutant(
        "room-never-looked-for",
        "flows/run/attempt_trainer.py",
        "        make_room(self._run)\n",
        "",
        f"{ROOM}::test_room_is_looked_for_before_each_segment",
    ),
    mutant(
        "nothing-set-aside",
        CLAIM,
        "    run.log.store.reserve()\n",
        "",
        f"{ROOM}::test_an_attempt_sets_room_aside_for_entries",
    ),
    mutant(
        "refused-deletes-unsaid",
        "flows/train_gpt.py",
        "end = run.finish_sweep(end)",
        "run.finish_sweep(end)",
        "tests/wiring/test_refusing_store.py::"
        "test_a_run_that_may_not_delete_what_nothing_needs_ends_as_an_error_that_says_so",
    ),
    mutant(
        "no-sweep-after-an-evaluation",
        "flows/run/run_decisions.py",
        "            self._run.sweep.start()  # an evaluation's end is the end of its pin\n",
        "",
        "tests/wiring/test_slow_evaluator.py::"
        "test_a_checkpoint_is_swept_when_its_evaluation_ends_and_not_when_the_last_one_does",
    ),
    mutant(
        "sweep-knows-no-losses",
        ACTIVE,
        "config.checkpoint, self.evaluation.suite.sha256",
        'config.checkpoint, ""',
        STAY,
    ),
    mutant(
        "flow-of-default-patience",
        ACTIVE,
        "run_retry_policy(config.checkpoint.patience_seconds, self.say)",
        "run_retry_policy(600.0, self.say)",
        key("how_long_the_store_is_waited_for"),
    ),
    mutant(
        "any-number-of-machines-is-enough",
        MACHINES,
        "here < min(rules.at_least or wanted, wanted)",
        "here < min(rules.at_least or 1, wanted)",
        GATHERED,
    ),
    mutant(
        "no-machine-is-checked",
        MACHINES,
        "failed := placement.check_machine(rules)",
        'failed := ""',
        key("what_a_machine_passes_before_it_joins"),
    ),
    mutant("machines-waited-for-are-not-booked", CLAIM, "gathering_seconds=run.gathering_seconds,", "", GATHERED),
    mutant("heartbeat-of-defaults", TRAINER, "self._run.config.lease.heartbeat_seconds", "3.0", LIVE),
    mutant("lease-of-defaults", CLAIM, "lease=config.lease", "lease=type(config.lease)()", LIVE),
    mutant(
        "notices-polled-by-default",
        ACTIVE,
        "poll_seconds=rules.poll_seconds",
        "poll_seconds=5.0",
        key("notices_besides_signals"),
    ),
    mutant(
        "schedulers-signal-unheard",
        ACTIVE,
        " shutdown.listening(rules.signal)",
        " shutdown.listening()",
        key("a_signal_of_the_scheduler"),
    ),
    mutant(
        "memory-never-checked",
        "flows/preparation/preflight.py",
        "if wanted.training.memory_check and not is_known_to_fit:",
        "if not wanted.training.memory_check and not is_known_to_fit:",
        key("whether_a_size_that_cannot_fit_is_refused"),
    ),
    mutant(
        "exporters-of-defaults",
        ACTIVE,
        "run_exporters(self.log, self.config.exporters,",
        "run_exporters(self.log, type(self.config.exporters)(),",
        key("a_folder_that_tensorboard_reads"),
    ),
    mutant(
        "trainer-without-its-claim",
        TRAINER,
        "claim_id=started.claim_id,\n        store_url",
        "store_url",
        "tests/wiring/test_runs_of_one_name.py::test_its_curve_is_its_own",
    ),
    mutant(
        "each-verdict-reads-anew",
        EVALUATIONS,
        "during_attempt=self._attempt, reader=reader)",
        "during_attempt=self._attempt)",
        f"{TESTS}::test_all_verdicts_of_a_run_read_on_in_one_curve",
    ),
)
