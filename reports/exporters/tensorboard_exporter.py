"""A run in TensorBoard: an event file with one unbroken curve, however often the run was interrupted.

Each process that trains the run writes a new file with the whole curve and deletes the files of earlier processes.
A session start in the file makes TensorBoard drop all later steps that came before it.
Source: TensorBoard's event format (event.proto, record_writer.py); a session start purges since "brain.Event:2".
"""

import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from cairn.reports.exporters.curve_follower import CurveUpdate
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.document import sha256


class TensorBoardExporter:
    """Writes one run's event file."""

    name = "TensorBoard"

    def __init__(self, folder: Path, run_id: str, store_url: str) -> None:
        self._folder = folder / run_id
        # Runs of one name from two stores may share the folder: each deletes only its own files.
        self._suffix = f".cairn-{sha256(store_url.encode())[:8]}"
        self._file: BinaryIO | None = None
        self._records: Any = None

    def begin(self, state: RunState) -> None:
        """Start a new file, and delete those of earlier processes."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.end(state)  # that of an update which failed
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = [path for path in self._folder.iterdir() if path.name.endswith(self._suffix)]
        now = time.time()
        unique = f"{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / f"events.out.tfevents.{unique}{self._suffix}").open("xb")
        self._records = RecordWriter(self._file)
        self._add(now, 0, file_version="brain.Event:2")
        self._drop_from(0)
        self._file.flush()
        for path in earlier:
            path.unlink(missing_ok=True)

    def write(self, update: CurveUpdate) -> None:
        """Append the update and flush it to the operating system."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if update.rewind_to is not None:
            self._drop_from(update.rewind_to + 1)
        for point in (*update.steps, *update.evaluations):
            scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            self._add(point.at_seconds, point.step, summary=Summary(value=scalars))
        if self._file is not None:
            self._file.flush()

    def end(self, state: RunState) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _drop_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(time.time(), step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, at_seconds: float, step: int, **content: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=at_seconds, step=step, **content).SerializeToString())
