"""What a run must come to: its steps trained again by the library alone, with the sizes and samples its log names."""

from tests.crash.training_command import RUN, Command
from tests.programs.chaos.reference_run import ReferenceRun, train_reference_of


def reference_run(command: Command, *, keeps_activations: bool = False) -> ReferenceRun:
    """Train the reference run of a command's finished one."""
    folder = command.folder / "reference-run"
    return train_reference_of(command.store, RUN, cache_dir=folder, keeps_activations=keeps_activations)
