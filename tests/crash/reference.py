"""What a run must come to: its steps trained again by the library alone, with the sizes and samples its log names."""

from dataclasses import replace

from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.logs.step_log import read_step_records, splice
from tests.crash.training_command import RUN, Command
from tests.programs.chaos.reference_run import ReferenceRun, schedule_of, train_reference_run


def reference_run(command: Command, *, keeps_activations: bool = False) -> ReferenceRun:
    """Train the reference run of a finished one: no flow, no child process, no checkpoint, no resume.

    Activations are recomputed where the run did it, or with `keeps_activations` nowhere.
    """
    state = command.state()
    assert state.opened is not None
    records = read_step_records(command.store, f"runs/{RUN}", state.attempts)
    schedule = schedule_of(state, splice(records, state.attempts))
    if keeps_activations:
        kept = tuple(replace(span, activation_checkpointing=False) for span in schedule.spans)
        schedule = replace(schedule, spans=kept)
    return train_reference_run(
        command.store,
        state.opened.data_snapshot,
        configuration_of(state),
        schedule,
        cache_dir=command.folder / "reference-run",
    )
