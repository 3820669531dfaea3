"""Wrong wires of somebody's weights: their network, their rows, and what goes on with them."""

from tests.wiring.mutant import mutant

STORED = "tasks/configuration/stored_configuration.py"
ADAPTERS = "tests/cairn/test_adapters.py"
EXPORT = "tests/cairn/test_export_command.py"
REQUEST = "tests/flows/test_training_request.py"

WEIGHTS_MUTANTS = (
    mutant(
        "network-of-an-open-run-not-from-its-log",
        STORED,
        "if config.training.init_from is not None:",
        "if config.training.init_from is None:",
        f"{REQUEST}::test_a_run_that_is_open_has_its_network_from_the_log_and_never_from_the_folder",
    ),
    mutant(
        "network-of-weights-not-adopted",
        "flows/preparation/training_request.py",
        '"model": adopt_network(directory, config.model)',
        '"model": config.model',
        f"{REQUEST}::test_the_network_of_a_new_run_is_that_of_the_weights_it_begins_with",
    ),
    mutant(
        "rows-without-a-token-drawn",
        "model/inference/prediction.py",
        "predict(context)[0, : model.vocab_size]",
        "predict(context)[0]",
        "tests/tasks/test_weights_source.py::test_no_row_beyond_the_ids_is_ever_drawn",
    ),
    mutant(
        "rotations-stretched-the-wrong-way-round",
        "model/kernels/attention.py",
        "(1 - kept) * frequencies / factor + kept * frequencies",
        "kept * frequencies / factor + (1 - kept) * frequencies",
        "tests/tasks/test_model_directory.py::test_what_transformers_saves_begins_a_run_with_its_logits",
    ),
    mutant(
        "documents-of-the-weights-not-exported",
        "cairn/operations/trained_models.py",
        "write_model_directory(folder, opened, card=card, source=source)",
        "write_model_directory(folder, opened, card=card)",
        f"{EXPORT}::test_only_the_known_documents_of_a_store_are_exported_and_none_names_code",
    ),
    mutant(
        "documents-of-the-weights-kept-from-a-command",
        "tasks/evaluator/evaluation_run.py",
        "source_sha256=log.state.opened.initial_source_sha256 if log.state.opened else None",
        "source_sha256=None",
        "tests/wiring/test_evaluator.py::test_a_command_gets_the_documents_of_the_weights_that_the_run_began_with",
    ),
    mutant(
        "base-model-forgotten-by-a-fork",
        "cairn/operations/person_decisions.py",
        "initial_source_sha256=opened.initial_source_sha256",
        "initial_source_sha256=None",
        f"{EXPORT}::test_a_fork_s_card_names_the_base_model_too",
    ),
    mutant(
        "adapters-of-a-fork-beside-nothing",
        "cairn/operations/person_decisions.py",
        "opened.initial_weights_sha256 if config.training.lora else None",
        "None",
        f"{ADAPTERS}::test_a_fork_s_adapters_go_on_beside_the_same_weights_and_no_others",
    ),
    mutant(
        "adapters-resumed-beside-other-weights",
        "tasks/trainer/training_setup.py",
        "if self._opened is None or state.beside:",
        "if self._opened is None:",
        "tests/tasks/test_adapters.py::test_a_run_that_lost_its_machine_goes_on_in_the_bits_of_one_that_did_not",
    ),
    mutant(
        "base-of-adapters-not-in-the-state",
        "tasks/trainer/training_setup.py",
        "state.beside = adapters.name_base(spec.initial_weights_sha256, training.lora)",
        "pass",
        "tests/tasks/test_adapters.py::test_the_digest_of_a_state_covers_the_weights_beside_its_adapters",
    ),
    mutant(
        "adapters-left-out-of-what-is-evaluated",
        "tasks/evaluator/checkpoint_model.py",
        "        adapters.merge(network, trained, alpha)\n",
        "",
        "tests/tasks/test_adapters.py::test_a_checkpoint_opens_as_the_network_that_was_trained",
    ),
    mutant(
        "adapters-passed-by-fused-layers",
        "model/training/train_state.py",
        "and not (training.compile or training.lora)",
        "and not training.compile",
        "tests/model/test_adapters.py::test_only_adapters_move_and_only_they_have_gradients_and_moments",
    ),
    mutant(
        "adapter-asked-for-and-the-whole-written",
        "cairn/cli/model_commands.py",
        "export_model(found, Path(folder), adapter=adapter)",
        "export_model(found, Path(folder))",
        f"{ADAPTERS}::test_a_run_without_adapters_has_none_to_export",
    ),
)
