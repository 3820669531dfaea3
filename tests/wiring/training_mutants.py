"""Wrong wires between spec, trainer, training loop and network, and in what an evaluator measures."""

from tests.wiring.mutant import key, mutant

STEP, SETUP = "model/training/training_step.py", "tasks/trainer/training_setup.py"
ORDER, FORK_DATA = "tasks/data/snapshot_lookup.py", "tests/cairn/test_fork_data.py"
OPTIMIZER, TRAINER = "model/training/optimizer.py", "tasks/trainer/trainer.py"
EVALUATOR, RUN = "tasks/evaluator/evaluator.py", "tasks/evaluator/evaluation_run.py"
PLAN, HELD_OUT = "flows/operations/checkpoint_operations.py", "model/inference/prediction.py"
TESTS, EVALUATIONS = "tests/wiring/test_trainer.py", "tests/wiring/test_evaluator.py"
CLIPPED = f"{TESTS}::test_a_gradient_is_cut_to_its_greatest_norm"
SPIKE = f"{TESTS}::test_a_diverged_run_blames_exactly_the_windows_of_the_spike"
PROBE = f"{TESTS}::test_the_probe_measures_held_out_text_and_not_the_train_split"
COUNTED = f"{TESTS}::test_tokens_and_device_time_count_from_the_start_of_the_attempt"
SENT = f"{EVALUATIONS}::test_an_evaluator_is_sent_what_plan_and_log_say"
WINDOWS = f"{EVALUATIONS}::test_the_loss_is_of_the_held_out_windows_that_the_suite_asks_for"
SAMPLES = f"{EVALUATIONS}::test_samples_follow_from_prompts_length_and_seed"

LOOP = "model/training/training_loop.py"
SCHEDULE = key("the_schedule_of_the_learning_rate")

ANSWERS = "tests/wiring/test_answers.py"
ANSWERED = f"{ANSWERS}::test_a_trainer_s_loss_and_probe_are_over_the_answers"

TRAINING_MUTANTS = (
    mutant(
        "a-trainer-learns-prompts-too",
        SETUP,
        "snapshot.train, *sizes, snapshot.train_answers",
        "snapshot.train, *sizes",
        ANSWERED,
    ),
    mutant(
        "a-probe-measures-prompts-too",
        SETUP,
        "snapshot.val, *sizes, snapshot.val_answers",
        "snapshot.val, *sizes",
        ANSWERED,
    ),
    mutant(
        "an-evaluator-measures-prompts-too",
        EVALUATOR,
        "opened.snapshot.val, *sizes, opened.snapshot.val_answers",
        "opened.snapshot.val, *sizes",
        f"{ANSWERS}::test_an_evaluation_s_loss_is_over_the_answers_and_in_no_unit_of_bytes",
    ),
    mutant(
        "masks-of-other-windows",
        "model/data/token_windows.py",
        "self._answers.gather(indexes) == 0",
        "self._answers.gather(indexes) != 0",
        ANSWERED,
    ),
    mutant(
        "documents-not-masked",
        SETUP,
        'training = spec.training.model_copy(update={"activation_checkpointing": spec.activation_checkpointing})',
        'training = spec.training.model_copy(update={"mask_documents": False})',
        f"{TESTS}::test_attention_stays_within_documents_where_the_run_says_so",
    ),
    mutant(
        "clip-limit-times-ten",
        STEP,
        "grad_norm = float(_clip(state, limit=inputs.training.grad_clip))",
        "grad_norm = float(_clip(state, limit=10 * inputs.training.grad_clip))",
        CLIPPED,
    ),
    mutant(
        "no-limit-clips-to-nothing",
        STEP,
        "    if limit > 0:",
        "    if limit >= 0:",
        f"{TESTS}::test_without_a_limit_the_gradient_is_taken_whole",
    ),
    mutant(
        "last-held-out-batch-counts-whole",
        HELD_OUT,
        "/ len(losses), len(losses)",
        "/ (batches * batch_size), len(losses)",
        "tests/model/test_evaluation.py::test_windows_of_a_last_batch_that_is_not_full_count_as_much_as_others",
    ),
    mutant(
        "tokens-count-windows",
        "model/training/training_loop.py",
        "(step - before.step) * state.global_batch * config.block_size",
        "(step - before.step) * state.global_batch",
        f"{TESTS}::test_a_step_says_when_it_was_how_far_into_the_data_and_on_how_many_processes",
    ),
    mutant(
        "bits-per-byte-of-the-train-split",
        EVALUATOR,
        'bytes_per_token("val")',
        'bytes_per_token("train")',
        f"{EVALUATIONS}::test_bits_per_byte_divide_by_the_bytes_of_a_held_out_token",
    ),
    mutant(
        "held-out-loss-of-the-train-split",
        EVALUATOR,
        "TokenWindows(opened.snapshot.val",
        "TokenWindows(opened.snapshot.train",
        WINDOWS,
    ),
    mutant("evaluated-batches-squared", EVALUATOR, "batches * suite.batch_size", "batches * batches", WINDOWS),
    mutant(
        "small-split-by-slice",
        EVALUATOR,
        "name: len(of) if len(of) <= WHOLE_UP_TO * wanted else wanted for",
        "name: wanted for",
        f"{EVALUATIONS}::test_a_small_split_is_measured_whole_and_a_larger_one_by_the_slice_asked_for",
    ),
    mutant(
        "later-epochs-repeat-the-first",
        ORDER,
        "        block_size=block_size,\n        quarantined",
        "        quarantined",
        f"{TESTS}::test_later_epochs_draw_windows_that_begin_at_other_tokens",
    ),
    mutant(
        "each-source-measured-on-the-first",
        EVALUATOR,
        "start += group.val_tokens",
        "start += 0",
        f"{EVALUATIONS}::test_each_weighted_source_has_a_held_out_loss_of_its_own",
    ),
    mutant("sample-seed-dropped", EVALUATOR, "new_tokens=length, seed=seed", "new_tokens=length, seed=0", SAMPLES),
    mutant("sample-length-dropped", EVALUATOR, "new_tokens=length, seed=seed", "new_tokens=20, seed=seed", SAMPLES),
    mutant(
        "evaluated-without-masking",
        PLAN,
        "mask_documents=config.training.mask_documents",
        "mask_documents=False",
        f"{EVALUATIONS}::test_the_evaluator_masks_documents_where_the_run_does",
    ),
    mutant(
        "evaluation-time-limit-dropped",
        PLAN,
        "timeout_seconds=config.evaluation.timeout_seconds",
        "timeout_seconds=600.0",
        SENT,
    ),
    mutant(
        "evaluator-budget-of-another-reason",
        PLAN,
        "budget=config.budgets.evaluator_failed",
        "budget=config.budgets.hung",
        f"{EVALUATIONS}::test_a_failed_evaluator_is_run_again_as_often_as_its_budget_says",
    ),
    mutant("evaluation-of-another-step", RUN, '"step": reference.step', '"step": reference.attempt', SENT),
    mutant(
        "blames-the-windows-of-the-next-steps",
        TRAINER,
        "for window in self._order.windows_of(step - 1)]",
        "for window in self._order.windows_of(step)]",
        SPIKE,
    ),
    mutant(
        "spike-of-the-default-patience",
        TRAINER,
        "SpikeCheck(spec.divergence,",
        "SpikeCheck(type(spec.divergence)(),",
        SPIKE,
    ),
    mutant("spike-one-step-long", TRAINER, "first = last - self._rule.patience_steps + 1", "first = last", SPIKE),
    mutant(
        "quarantine-dropped-in-the-trainer",
        ORDER,
        "quarantined=frozenset(quarantined)",
        "quarantined=frozenset()",
        f"{TESTS}::test_no_step_draws_a_quarantined_window",
    ),
    mutant(
        "probe-of-the-train-split",
        SETUP,
        "windows=token_windows.TokenWindows(snapshot.val,",
        "windows=TokenWindows(snapshot.train,",
        PROBE,
    ),
    mutant(
        "probe-batches-dropped",
        LOOP,
        "batches, new_tokens = self.training.probe_batches,",
        "batches, new_tokens = 4,",
        PROBE,
    ),
    mutant(
        "tokens-of-one-window",
        TRAINER,
        "spec.training.global_batch * spec.model.block_size",
        "spec.model.block_size",
        COUNTED,
    ),
    mutant(
        "tokens-of-the-last-step",
        TRAINER,
        "self._tokens += self._step_tokens",
        "self._tokens = self._step_tokens",
        COUNTED,
    ),
    mutant(
        "resumed-as-if-fresh",
        TRAINER,
        "CheckpointLoad(self._store, spec.resume if",
        "CheckpointLoad(self._store, None if",
        COUNTED,
    ),
    mutant(
        "every-rank-reads-all",
        SETUP,
        "if readers.get(named.name, ranks.rank) == ranks.rank]",
        "if readers is not None]",
        "tests/tasks/test_rank_resume.py::test_replicated_ranks_read_a_checkpoint_once_between_them",
    ),
    mutant(
        "a-rank-keeps-what-it-read-to-itself",
        SETUP,
        "        if readers:",
        "        if not readers:",
        "tests/tasks/test_rank_resume.py::test_ranks_resume_with_the_bits_that_one_process_staged",
    ),
    mutant(
        "a-process-without-a-window-trains-on-zeros",
        STEP,
        "(part.stop - part.start) / state.global_batch",
        "len(tokens) / state.global_batch",
        "tests/model/test_sharding.py::test_a_process_without_a_window_contributes_nothing",
    ),
    mutant(
        "wrong-products-are-computed-with",
        "model/training/determinism.py",
        "    require_right_products()\n",
        "",
        "tests/model/test_bf16_products.py::test_products_that_are_wrong_are_refused_before_the_first_computation",
    ),
    mutant(
        "a-child-has-the-limits-of-threads-from-outside",
        "storage/stores/child_process.py",
        "if name not in THREAD_LIMITS}",
        "}",
        "tests/model/test_bf16_products.py::test_no_limit_of_threads_reaches_a_child",
    ),
    mutant(
        "a-trainer-computes-natively",
        TRAINER,
        ", arithmetic=spec.training.arithmetic)",
        ")",
        key("instructions_that_every_machine_has"),
    ),
    mutant("lowest-rate-is-zero", OPTIMIZER, "return training.min_lr\n", "return 0.0\n", SCHEDULE),
    mutant(
        "matrices-have-the-others-rate",
        OPTIMIZER,
        "rate * training.muon_lr / training.lr if isinstance",
        "rate if isinstance",
        key("how_gradients_move_weights"),
    ),
    mutant(
        "no-z-loss-of-whole-logits",
        STEP,
        "token_loss(logits, targets, training.z_loss)",
        "token_loss(logits, targets)",
        key("scores_kept_small"),
    ),
    mutant("no-warm-up", OPTIMIZER, "if step <= training.warmup_steps:", "if step <= 0:", SCHEDULE),
    mutant(
        "decay-is-the-default",
        OPTIMIZER,
        '"weight_decay": training.weight_decay',
        '"weight_decay": 0.1',
        key("the_decay_of_the_matrices"),
    ),
    mutant(
        "betas-are-the-default", OPTIMIZER, "betas=training.betas", "betas=(0.9, 0.95)", key("the_decay_of_the_moments")
    ),
    mutant(
        "precision-dropped",
        STEP,
        "AUTOCAST_DTYPES.get(training.precision)",
        'AUTOCAST_DTYPES.get("fp32")',
        key("another_number_format"),
    ),
    mutant(
        "layers-gathered-in-fp32",
        "model/training/train_state.py",
        "AUTOCAST_DTYPES.get(training.precision)",
        'AUTOCAST_DTYPES.get("fp32")',
        "tests/model/test_sharding.py::test_layers_are_gathered_in_the_numbers_that_they_are_computed_in",
    ),
    mutant("order-of-seed-zero", ORDER, "seed=training.seed", "seed=0", key("other_weights_and_another_order")),
    mutant(
        "weights-of-seed-zero",
        "model/training/train_state.py",
        "seed_generators(training_config.seed, device)",
        "seed_generators(0, device)",
        key("other_weights_and_another_order"),
    ),
    mutant(
        "activations-always-kept",
        SETUP,
        '"activation_checkpointing": spec.activation_checkpointing',
        '"activation_checkpointing": False',
        key("activations_computed_twice"),
    ),
    mutant(
        "probe-every-hundred",
        LOOP,
        "step % self.training.probe_every_steps",
        "step % 100",
        key("the_rhythm_of_the_probe"),
    ),
    mutant("trainer-of-one-thread", TRAINER, "threads=spec.threads", "threads=1", key("the_threads_of_the_process")),
    mutant(
        "one-worker-whatever-the-key-says",
        "tasks/policy/attempt_sizes.py",
        'cores if training.workers == "auto" else training.workers',
        "cores",
        key("micro_batches_at_once"),
    ),
    mutant("trainer-of-one-worker", SETUP, "Workers(spec.workers)", "Workers(1)", key("micro_batches_at_once")),
    mutant(
        "always-replicated",
        "tasks/trainer/trainer_channel.py",
        "mode, store, place = spec.training.parallel,",
        'mode, store, place = "ddp",',
        key("how_they_share_the_network"),
    ),
    mutant(
        "always-one-process",
        "tasks/trainer/trainer_group.py",
        "    processes = training.processes\n",
        "    processes = 1\n",
        key("several_processes"),
    ),
    mutant(
        "staging-of-default-patience",
        TRAINER,
        "patience_seconds=patience",
        "patience_seconds=600.0",
        key("how_long_the_store_is_waited_for"),
    ),
    mutant(
        "checkpoint-forgets-its-rate",
        TRAINER,
        "self.learning_rate = result.lr",
        "self.learning_rate = 0.0",
        f"{TESTS}::test_a_checkpoint_says_at_which_rate_it_was_reached",
    ),
    mutant(
        "device-time-of-one-device",
        TRAINER,
        "(time.monotonic() - self._started) * self._devices",
        "time.monotonic() - self._started",
        f"{TESTS}::test_device_time_counts_every_device",
    ),
    mutant(
        "every-error-a-bug",
        "tasks/policy/failures.py",
        "kind=kind or kind_of(error)",
        "kind=kind or ErrorKind.BUG",
        "tests/tasks/test_error_kind.py::test_the_kind_crosses_the_channel",
    ),
    mutant(
        "refusal-resumed",
        "tasks/policy/budgets.py",
        "    if failure.kind in WAITS_FOR_A_PERSON:",
        "    if False:",
        "tests/tasks/test_error_kind.py::test_what_follows_an_error_of_a_kind",
    ),
    mutant(
        "error-without-its-windows",
        "tasks/policy/failures.py",
        'windows=tuple(getattr(error, "windows", ()))',
        "windows=()",
        f"{TESTS}::test_an_error_reaches_the_parent_with_its_step_and_windows",
    ),
    mutant(
        "fork-begins-its-order-anew",
        "flows/run/attempt_trainer.py",
        "        before=trainer_protocol.trained_before(state.origin),\n",
        "",
        "tests/wiring/test_fork_spec.py::test_the_trainer_of_a_fork_is_sent_what_lies_before_it",
    ),
    mutant(
        "replay-of-a-fork-begins-its-order-anew",
        "cairn/operations/unrecorded_training.py",
        "            before=trainer_protocol.trained_before(opened.forked_from),\n",
        "",
        f"{FORK_DATA}::test_a_segment_of_a_fork_with_another_batch_is_recomputed_to_the_same_bits",
    ),
    mutant(
        "fork-counts-one-batch-of-its-own",
        "cairn/operations/person_decisions.py",
        "draws = (step - past.step) * before.training.global_batch",
        "draws = (step - past.step) * config.training.global_batch",
        f"{FORK_DATA}::test_the_origin_says_how_many_samples_and_tokens_lie_before_it",
    ),
    mutant(
        "order-of-a-fork-ignores-its-sources",
        "model/data/sample_order.py",
        "            own += ahead[chosen]\n",
        "",
        "tests/model/test_order_of_fork.py::"
        "test_a_fork_with_other_weights_goes_on_in_each_source_where_its_parent_stopped",
    ),
    mutant(
        "order-of-a-run-ignores-its-stages",
        "tasks/data/snapshot_lookup.py",
        "stages=tuple(stage.step for stage in data.stages),",
        "",
        "tests/tasks/test_weighted_training.py::test_batches_follow_the_weights_of_their_stage",
    ),
)
