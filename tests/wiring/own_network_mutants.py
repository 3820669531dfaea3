"""Wrong wires of a network of one's own: who may run its files, which files, and whose random numbers it draws."""

from tests.wiring.mutant import mutant

HOSTILE = "tests/security/test_network_of_a_log.py"
MODULE = "tasks/configuration/network_module.py"

OWN_NETWORK_MUTANTS = (
    mutant(
        "code-of-a-store-run-unasked",
        MODULE,
        "if missing or not files:",
        "if not files:",
        f"{HOSTILE}::test_a_log_allows_nothing",
    ),
    mutant(
        "module-of-a-log-read-from-this-machine",
        "tasks/configuration/stored_configuration.py",
        "if config.model.module and not config.model.files:",
        "if False:",
        f"{HOSTILE}::test_a_log_names_its_module_by_digests_and_no_file_of_a_machine",
    ),
    mutant(
        "files-that-a-log-gives-believed",
        "tasks/configuration/run_configuration.py",
        '"code.allow", "code.files"',
        '"code.allow"',
        f"{HOSTILE}::test_a_log_allows_nothing",
    ),
    mutant(
        "file-stored-under-another-digest",
        MODULE,
        'if codec.sha256(files.get(name, b"")) == digest:',
        "if name in files:",
        f"{HOSTILE}::test_a_file_is_stored_only_under_its_own_digest",
    ),
    mutant(
        "module-that-draws-not-seeded",
        "model/configuration/network.py",
        "return bool(self.dropout or self.module)",
        "return bool(self.dropout)",
        "tests/model/test_same_bits_on_any_number_of_processes.py::"
        "test_a_run_moved_between_numbers_of_processes_ends_in_the_bits_of_one_process",
    ),
    mutant(
        "buffer-of-random-numbers-let-through",
        "model/architectures/own_network.py",
        'if name.startswith("buffer") and not torch.equal(tensor.cpu(), others[name].cpu()):',
        "if False:",
        "tests/model/test_own_network.py::test_what_no_checkpoint_could_hold_is_refused_by_name",
    ),
)
