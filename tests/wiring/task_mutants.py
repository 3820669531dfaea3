"""Wrong wires of the tasks: receipts, budgets, early stop, watchers, staging, evaluations, exit codes."""

from tests.wiring.mutant import key, mutant

RECEIPT = "tasks/attempt/attempt_entries.py"
CLAIM = "tasks/attempt/attempt_entries.py"
BUDGETS = "tasks/policy/budgets.py"
EARLY_STOP = "tasks/policy/early_stop.py"
WATCH = "tasks/policy/run_watch.py"
CURVE = "tasks/policy/curve_statistics.py"
VERDICTS = "tests/tasks/test_curve_verdict.py"
TESTS = "tests/wiring/test_flow.py"
BACK_OFF = f"{TESTS}::test_the_flow_waits_between_attempts_as_the_budget_says_until_it_is_spent"
COUNTED = f"{TESTS}::test_a_receipt_counts_what_the_trainer_did_and_what_of_it_was_lost"
COMMITTED = f"{TESTS}::test_a_commit_counts_tokens_and_device_time_up_to_its_step"
LOG = "tests/security/test_words_of_a_log.py"
VARIABLES = (
    "tests/security/test_evaluator_boundary.py::"
    "test_no_planted_variable_reaches_the_command_unless_the_operator_names_it"
)

TASK_MUTANTS = (
    mutant("back-off-never-doubles", BUDGETS, "* 2.0 ** min(retries, 6)", "* 1", BACK_OFF),
    mutant(
        "receipt-wastes-everything",
        RECEIPT,
        "        wasted_gpu_seconds=gpu_seconds - useful,\n        stderr_tail",
        "        wasted_gpu_seconds=gpu_seconds,\n        stderr_tail",
        COUNTED,
    ),
    mutant(
        "evaluators-of-a-run-have-no-limit",
        "tasks/evaluator/evaluation_run.py",
        "evaluator_budget(self.plan.budget, charged).retries",
        "self.plan.budget.retries",
        key("what_failing_evaluators_may_spend"),
    ),
    mutant(
        "commands-of-a-log-run",
        "tasks/evaluator/evaluation_run.py",
        "(allowed == ALLOWED and not suite.logged):",
        "allowed == ALLOWED:",
        f"{LOG}::test_a_command_that_only_the_log_names_is_not_run_and_the_record_says_why",
    ),
    mutant(
        "a-log-names-servers",
        "tasks/configuration/stored_configuration.py",
        'if f"{name}.{key}" not in run_configuration.MACHINE_KEYS',
        "if key",
        f"{LOG}::test_a_server_that_only_the_log_names_is_not_contacted",
    ),
    mutant(
        "sources-of-a-log-are-opened",
        "flows/run/run_start.py",
        "data=config.data if resolved.configuration or is_new else None,",
        "data=config.data,",
        f"{LOG}::test_a_damaged_shard_is_not_rebuilt_from_sources_that_only_the_log_names",
    ),
    mutant(
        "commands-get-every-variable",
        "tasks/evaluator/evaluator.py",
        "if name in passed}",
        "if name}",
        VARIABLES,
    ),
    mutant(
        "a-job-reads-commands",
        "cairn/cli/command.py",
        "    guard_log(os.environ)\n",
        "",
        "tests/security/test_log_commands.py::test_the_command_guards_its_output_in_a_job",
    ),
    mutant(
        "a-compressed-file-becomes-anything",
        "tasks/data/document_reader.py",
        "if codec and size_bytes > most:",
        "if False:",
        "tests/security/test_foreign_files.py::"
        "test_a_compressed_file_that_becomes_a_thousand_times_its_size_is_refused[a.jsonl.gz]",
    ),
    mutant(
        "end-marks-not-counted",
        "tasks/data/snapshot_writer.py",
        "writer.inner_ends += _count_inner_ends(batch, encoder.tokenizer.end_of_text_id)",
        "writer.inner_ends += 0",
        "tests/tasks/test_document_ends.py::test_a_part_with_a_mark_too_many_is_refused",
    ),
    mutant(
        "unknown-text-taken",
        "tasks/data/snapshot_build.py",
        "        self.unknown_bytes = _require_known(parts, data)\n",
        "",
        "tests/tasks/test_unknown_text.py::test_text_of_which_most_is_unknown_is_refused_with_its_place[unigram]",
    ),
    mutant(
        "the-end-of-text-guessed-again",
        "tasks/evaluator/checkpoint_model.py",
        "parse_tokenizer(snapshot.tokenizer_json, snapshot.manifest.end_of_text_id)",
        "parse_tokenizer(snapshot.tokenizer_json)",
        "tests/tasks/test_end_of_text.py::test_a_model_is_read_with_the_end_of_text_that_it_was_trained_with",
    ),
    mutant(
        "a-tokenizer-grows-text",
        "model/data/tokenizer_file.py",
        '        _check_growth(f"{part}.{kind}", kind, component)\n',
        "",
        "tests/security/test_foreign_tokenizers.py::test_a_hostile_tokenizer_is_refused_in_one_line_that_says_what_to_do"
        "[a decoder that makes a text longer once]",
    ),
    mutant(
        "evaluators-run-again-at-once",
        "tasks/evaluator/evaluation_run.py",
        "delay = budgets.backoff_seconds(asked.plan.budget, len(asked.failed(log.state)) - 1)",
        "delay = 0.0",
        key("what_failing_evaluators_may_spend"),
    ),
    mutant(
        "budget-sees-no-waste",
        RECEIPT,
        "        wasted_gpu_seconds=gpu_seconds - useful,\n        quarantined_samples",
        "        wasted_gpu_seconds=0.0,\n        quarantined_samples",
        f"{TESTS}::test_device_time_lost_over_the_run_is_a_budget_too",
    ),
    mutant(
        "commit-tokens-and-time-swapped",
        "tasks/commit_checkpoint.py",
        "tokens=done.tokens, gpu_seconds=done.gpu_seconds",
        "tokens=done.gpu_seconds, gpu_seconds=done.tokens",
        COMMITTED,
    ),
    mutant(
        "watchdog-share-times-ten",
        "tasks/attempt/watchdog.py",
        "_LATE_SHARE = 0.25",
        "_LATE_SHARE = 2.5",
        "tests/tasks/test_watchdog.py::test_a_poll_that_is_late_by_a_quarter_of_the_allowance_restarts_it",
    ),
    mutant(
        "exactly-the-ratio-does-not-overfit",
        EARLY_STOP,
        "loss >= policy.overfit_ratio * train",
        "loss > policy.overfit_ratio * train",
        "tests/tasks/test_early_stop.py::test_a_held_out_loss_of_exactly_the_ratio_overfits",
    ),
    mutant(
        "early-stop-of-defaults",
        EARLY_STOP,
        "return decide(terms.config.early_stop, [",
        "return decide(type(terms.config.early_stop)(), [",
        f"{TESTS}::test_a_run_that_stops_early_stops_where_its_policy_says",
    ),
    mutant(
        "claim-ignores-the-heartbeat",
        CLAIM,
        'if read() != seen:\n            raise _live_owner(log, owner, "still writes its heartbeat")\n        now',
        "if False:\n            pass\n        now",
        "tests/tasks/test_attempt_claim.py::test_an_owner_that_writes_its_heartbeat_is_left_alone",
    ),
    mutant(
        "watch-by-the-default-lease",
        WATCH,
        "return stored_configuration.parse_stored_configuration(state.attempts[-1].started.config).lease.seconds",
        "return LeaseConfig().seconds",
        "tests/tasks/test_run_watch.py::test_the_lease_is_the_one_of_the_attempt_itself",
    ),
    mutant(
        "watch-ignores-the-back-off",
        WATCH,
        "observed.unchanged_since + decision.delay_seconds + may_go_on",
        "observed.unchanged_since + may_go_on",
        "tests/tasks/test_run_watch.py::test_a_back_off_counts_from_when_this_watcher_first_saw_the_end",
    ),
    mutant(
        "staging-without-patience",
        "tasks/trainer/staging.py",
        "run_retry_policy(patience_seconds)",
        "run_retry_policy(0.0)",
        "tests/tasks/test_staging.py::test_a_store_that_is_away_for_a_while_costs_time_not_the_checkpoint",
    ),
    mutant(
        "fenced-exits-as-an-error",
        "tasks/policy/termination.py",
        "FlowOutcome.FENCED: ExitCode.LIVE_OWNER",
        "FlowOutcome.FENCED: ExitCode.ERROR",
        "tests/cairn/test_exit_code.py::test_an_outcome_of_the_flow_has_the_code_the_contract_gives_it",
    ),
    mutant(
        "every-commit-is-evaluated",
        EARLY_STOP,
        "(self.config.checkpoint.every_steps * self.config.evaluation.every_commits)",
        "self.config.checkpoint.every_steps",
        key("when_a_checkpoint_is_evaluated"),
    ),
    mutant(
        "verdict-on-the-gradients",
        CURVE,
        "(record.step, record.train_loss, record.grad_norm,",
        "(record.step, record.grad_norm or 0.0, record.grad_norm,",
        key("how_far_the_held_out_loss_may_lie_above"),
    ),
    mutant(
        "spikes-need-no-gradient",
        CURVE,
        "_spans(found[_loudness(curve, found) >= _LOUD], _SPIKE_WINDOW)",
        "_spans(found, _SPIKE_WINDOW)",
        f"{VERDICTS}::test_a_rise_of_the_loss_without_a_loud_gradient_is_no_spike",
    ),
    mutant(
        "every-spike-of-the-warm-up-is-forgotten",
        CURVE,
        "spikes[1:] if len(early) == 1 else spikes",
        "spikes[len(early) :]",
        f"{VERDICTS}::test_a_second_spike_in_the_warm_up_is_not_forgotten_and_neither_is_the_first",
    ),
    mutant(
        "no-spike-of-the-warm-up-is-forgotten",
        CURVE,
        "spikes[1:] if len(early) == 1 else spikes",
        "spikes",
        f"{VERDICTS}::test_one_spike_in_the_warm_up_is_forgotten",
    ),
    mutant(
        "usual-rises-are-spikes",
        CURVE,
        "if rise[spike - first].max() >= least]",
        "if len(spike)]",
        f"{VERDICTS}::test_a_loud_step_that_rises_no_more_than_several_quiet_ones_is_no_spike",
    ),
    mutant(
        "loud-jumps-are-harder-text",
        CURVE,
        "(loudness > 0) & (loudness < _LOUD)",
        "loudness > 0",
        "tests/tasks/test_curve_jumps.py::test_a_rise_is_diverging",
    ),
    mutant(
        "a-slow-rise-is-harder-text",
        CURVE,
        "if is_at_once and is_quiet and max(drift_before, drift_after) <= _JUMP_DRIFT * height:",
        "if is_quiet:",
        "tests/tasks/test_curve_jumps.py::test_a_rise_is_diverging",
    ),
    mutant(
        "a-fold-forgets-jumps",
        CURVE,
        "jump_step=jump_step(curve, np.asarray(curve.train_losses)),",
        "",
        "tests/tasks/test_curve_fold.py::test_a_long_curve_gets_the_verdict_of_all_its_steps",
    ),
    mutant(
        "cures-in-effect-are-named",
        "tasks/policy/curve_verdict.py",
        'if "unless" not in cure or not _IN_EFFECT[cure["unless"]](curve)',
        "if cure",
        "tests/tasks/test_curve_cures.py::test_a_cure_in_effect_is_not_named_and_others_are",
    ),
    mutant(
        "cures-go-by-how-the-run-was-opened",
        "tasks/evaluator/curve_reader.py",
        "newest = state.attempts[-1].started.config if state.attempts else {}",
        "newest = config",
        "tests/tasks/test_curve_cures.py::test_what_is_in_effect_is_read_from_the_run_and_its_newest_attempt",
    ),
    mutant(
        "a-little-clipping-is-a-symptom",
        "tasks/policy/curve_verdict.py",
        "median >= _CLIPPED_RATIO * curve.grad_clip:",
        "median >= curve.grad_clip:",
        "tests/tasks/test_run_symptoms.py::test_gradients_that_are_a_little_clipped_or_not_at_all_are_healthy",
    ),
    mutant(
        "strangers-fill-the-meeting-place",
        "tasks/trainer/signed_connection.py",
        "is_full = len(self._unproven) > MOST_UNPROVEN",
        "is_full = False",
        "tests/tasks/test_meeting_place.py::test_of_more_than_sixty_four_unproven_connections_the_oldest_is_closed",
    ),
    mutant(
        "a-claim-is-made-in-spite-of-a-notice",
        "flows/run/run_start.py",
        "    run.refuse_to_begin()\n    ends =",
        "    ends =",
        "tests/wiring/test_notices.py::test_a_notice_while_a_claim_is_prepared_claims_nothing",
    ),
    mutant(
        "an-attempt-given-up-is-charged",
        "tasks/policy/budgets.py",
        "if impact.given_up:",
        "if False:",
        "tests/wiring/test_notices.py::test_a_notice_right_after_the_claim_gives_the_attempt_up_with_a_receipt",
    ),
    mutant(
        "ranks-get-no-death-signal",
        "tasks/trainer/trainer_group.py",
        "with_thread=True",
        "with_thread=False",
        "tests/crash/test_parents.py::test_a_rank_that_is_stopped_while_it_imports_does_not_outlive_its_launcher",
    ),
    mutant(
        "shares-of-lost-ranks-added-up-as-equal-ones",
        "model/training/parallel.py",
        "tree.push([part], level=level)",
        "tree.push([part])",
        "tests/model/test_membership.py::test_ranks_of_unequal_shares_exchange_the_sum_that_one_would_have",
    ),
    mutant(
        "rank-that-joins-keeps-the-weights-it-began-with",
        "model/training/parallel.py",
        "                dist.recv(flat, 0)\n",
        "                dist.recv(flat.clone(), 0)\n",
        "tests/tasks/test_lost_rank.py::test_a_rank_that_is_started_in_the_place_of_a_lost_one_takes_over_the_state_of_the_first",
    ),
    mutant(
        "state-that-was-handed-over-is-not-compared",
        "model/training/parallel.py",
        "if is_known and len(found := set(every.tolist())) > 1:",
        "if is_known and len(found := set(every.tolist())) > 9:",
        "tests/model/test_membership.py::test_a_state_that_is_not_the_others_after_it_was_handed_over_ends_the_ranks",
    ),
    mutant(
        "dropout-of-the-rank-and-not-of-the-micro-batch",
        "model/training/training_step.py",
        "part.start // inputs.micro_batch if not ranks.is_sharded else ",
        "",
        "tests/tasks/test_lost_rank.py::test_three_of_four_ranks_go_on_with_the_bits_of_a_run_that_nobody_touched",
    ),
    mutant(
        "no-death-signal",
        "storage/stores/child_process.py",
        "prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)",
        "prctl(_SET_DEATH_SIGNAL, 0, 0, 0, 0)",
        "tests/storage/test_child_process.py::test_a_child_that_is_stopped_dies_with_the_thread_that_started_it",
    ),
    mutant(
        "nothing-is-waited-for-before-the-broadcast",
        "tasks/trainer/training_setup.py",
        "            ranks.any(False)  # a rank that could not read ends the others here and not within an exchange\n",
        "",
        "tests/tasks/test_rank_resume.py::test_no_tensor_is_exchanged_before_every_rank_has_read_its_own",
    ),
    mutant(
        "every-sharded-rank-has-the-first-rows",
        "model/training/sharded_tensors.py",
        "return local, min(mesh.get_local_rank() * rows, tensor.shape[0])",
        "return local, 0",
        "tests/model/test_parallel.py::test_the_rows_of_a_sharded_rank_are_where_torch_cuts_them",
        "tests/tasks/test_rank_resume.py::"
        "test_a_sharded_rank_that_copies_its_share_of_a_checkpoint_receives_no_more_than_it_keeps",
    ),
    mutant(
        "one-work-folder-for-every-store",
        "tasks/machine/placement.py",
        'f"{log.store.url} {log.run_id} {log.state.opening}"',
        'f"{log.run_id} {log.state.opening}"',
        "tests/tasks/test_work_folder.py::test_runs_of_one_name_and_moment_in_two_stores_share_no_work_folder",
    ),
    mutant(
        "one-work-folder-for-every-opening",
        "tasks/machine/placement.py",
        'f"{log.store.url} {log.run_id} {log.state.opening}"',
        'f"{log.store.url} {log.run_id}"',
        "tests/tasks/test_work_folder.py::test_a_run_that_is_opened_anew_in_an_emptied_store_shares_no_work_folder",
    ),
)
