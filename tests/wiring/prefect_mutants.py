"""Wrong wires of what is used of Prefect without being its public API, where nothing fails by itself when it goes."""

from tests.wiring.mutant import mutant

SETTINGS = "flows/orchestrator/prefect_settings.py"
FOREIGN = "tests/security/test_foreign_folder.py::test_training_and_a_verb_open_none"

PREFECT_MUTANTS = (
    mutant("environment-file-of-the-folder-is-read", SETTINGS, "Source._read_env_files =", "Source._gone =", FOREIGN),
    mutant("prefect-toml-of-the-folder-is-read", SETTINGS, "ConfigFileSourceMixin._read_files =", "gone =", FOREIGN),
)
