"""Wrong wires between a run's log and what `cairn replay` trains again."""

from tests.wiring.mutant import mutant

PLAN, REPLAY = "cairn/operations/unrecorded_plan.py", "cairn/operations/unrecorded_training.py"
TESTS = "tests/cairn/test_replay_command.py"
LEFT_OUT = f"{TESTS}::test_windows_are_left_out_from_the_attempt_on_that_left_them_out"
SIZES = f"{TESTS}::test_attempts_that_were_lost_recomputed_activations_or_had_smaller_micro_batches_are_equal"
NAMED = f"{TESTS}::test_a_flipped_bit_is_named_by_its_segment_and_step"

REPLAY_MUTANTS = (
    mutant("replay-draws-quarantined-windows", REPLAY, "quarantined=segment.quarantined,", "quarantined=(),", LEFT_OUT),
    mutant(
        "replay-leaves-windows-out-too-early",
        PLAN,
        "quarantined_before(number)",
        "quarantined_before(number + 1)",
        LEFT_OUT,
    ),
    mutant(
        "replay-with-the-configured-micro-batch",
        REPLAY,
        "micro_batch=started.micro_batch,",
        "micro_batch=config.training.micro_batch,",
        SIZES,
    ),
    mutant("replay-from-the-attempts-start", PLAN, "start = record.committed.reference", "start = start", SIZES),
    mutant("replay-believes-loss-and-norm-alone", PLAN, "norm, step.weights_digest", "norm, None", NAMED),
    mutant(
        "steps-without-a-digest",
        "model/training/training_loop.py",
        "weights_digest=result.weights_digest,",
        "weights_digest=None,",
        NAMED,
    ),
    mutant(
        "replay-carries-nothing",
        REPLAY,
        "if segment.end.prefix in self._needed_until:",
        "if False:",
        f"{TESTS}::test_a_start_that_retention_removed_is_reached_from_an_earlier_one",
    ),
)
