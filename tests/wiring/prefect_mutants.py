"""Wrong wires of what is used of Prefect without being its public API, where nothing fails by itself when it goes."""

from tests.wiring.mutant import mutant

SETTINGS = "flows/orchestrator/prefect_settings.py"
FOREIGN = "tests/flows/test_prefect_settings.py::test_no_file_of_the_working_folder_says_a_setting"

PREFECT_MUTANTS = (
    mutant("environment-file-of-the-folder-is-read", SETTINGS, "Source._read_env_files =", "Source._gone =", FOREIGN),
    mutant("prefect-toml-of-the-folder-is-read", SETTINGS, "ConfigFileSourceMixin._read_files =", "gone =", FOREIGN),
)
