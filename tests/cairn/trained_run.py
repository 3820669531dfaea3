"""A run whose attempts really train and commit, in this very process: the log's entries, and the real trainer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.storage.checkpoints.checkpoint import commit_checkpoint
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.network_module import keep_files
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.machine.placement import library_versions, this_placement
from tests.entries import decided, ended, opened_with, spoiled, started_with, superseded, writer
from tests.tasks.trainer_in_process import TrainingWorld

RUN = "bard"


class TrainedRun:
    """Opened on the snapshot of a world; every attempt resumes from the newest commit."""

    def __init__(self, folder: Path, *, files: Mapping[str, bytes] | None = None) -> None:
        """Open it, with a network of one's own if there are files; its entry is net.py:build."""
        self.world = TrainingWorld(folder)
        self.log = RunLog(self.world.store, RUN)
        hashes = {name: sha256(data) for name, data in (files or {}).items()}
        own: dict[str, Any] = {"model": {"module": "net.py:build", "files": hashes}, "training": {"kernels": "stock"}}
        self.own = {**own, "allowed_code": tuple(hashes.values())} if files else {}
        spec = self.world.spec(**self.own)
        keep_files(self.world.store, spec.model, files or {})
        self.config = RunConfig(data=spec.data, model=spec.model, training=spec.training)
        body = opened_with(self.config, RUN, self.world.snapshot_id)
        self.log.append(lambda state: body, writer=writer())

    def attempt(
        self,
        *commits: int,
        dies_at: int | None = None,
        quarantines: Sequence[int] = (),
        micro_batch: int = 4,
        activation_checkpointing: bool = False,
        faults: str = "",
        training: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """Train up to each commit, then on to where the attempt is lost; `changes` are what its entry says."""
        state = self.log.refresh()
        config = self.config.model_copy(update={"training": self.config.training.model_copy(update=training or {})})
        entry = started_with(
            config,
            state.latest_attempt + 1,
            micro_batch=micro_batch,
            activation_checkpointing=activation_checkpointing,
            resumed_from=state.newest_committed.committed.reference if state.newest_committed else None,
            quarantined_samples=len(state.quarantined_windows),
            **{"placement": this_placement(device="cpu", threads=1), "versions": library_versions(), **changes},
        )
        self.log.append(lambda state: entry, writer=writer())
        spec = self.world.spec(
            entry.attempt,
            micro_batch=micro_batch,
            activation_checkpointing=activation_checkpointing,
            quarantined=tuple(sorted(state.quarantined_windows)),
            faults=faults,
            **self.own,
        ).model_copy(update={"run_id": RUN, "resume": entry.resumed_from})
        with self.world.opened(spec) as (trainer, parent):
            for step in commits:
                trainer.train_segment(step)
                trainer._staging.wait()
                staged = parent.last(StagedCheckpoint)
                mine = writer(entry.attempt)
                commit_checkpoint(self.log, staged, writer=mine, tokens=step, gpu_seconds=0.1)
            if dies_at is not None:
                trainer.train_segment(dies_at)
                trainer._staging.wait()
        if quarantines:
            body = spoiled(*quarantines, attempt=entry.attempt)
            self.log.append(lambda state: body, writer=writer(entry.attempt))
        receipt = ended(entry.attempt, "lost", decision=decided(action="resume"), arithmetic=None)
        self.log.append(lambda state: receipt, writer=writer(entry.attempt))

    def supersede(self, *steps: int) -> None:
        """Have retention give these checkpoints up."""
        for record in self.log.refresh().checkpoints:
            if record.committed.step in steps:
                body = superseded(record.committed.reference)
                self.log.append(lambda state, body=body: body, writer=writer())
