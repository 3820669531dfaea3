"""A trainer's process before and after it has its order: started early, it has imported all when the order comes.

Owns the process, its pipes and where its stderr goes. Refuses to know what is said over them. A child that gets no
order ends with its parent's pipe, as one with an order does.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TRAINER_COMMAND = (sys.executable, "-m", "tasks.trainer.trainer")


class TrainerChild:
    """A process group of its own, so that Ctrl-C reaches the parent alone."""

    def __init__(self, work_dir: Path, command: Sequence[str] = TRAINER_COMMAND) -> None:
        """Start it; its stderr has no attempt's name yet."""
        work_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="waiting-", suffix=".stderr", dir=work_dir)
        self.command, self.stderr_path = tuple(command), Path(name)
        with os.fdopen(descriptor, "wb") as stderr:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def keep_stderr(self, path: Path) -> None:
        """Let what it has said and will say be found under `path`, in the same folder tree."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stderr_path.replace(path)
        self.stderr_path = path

    def discard(self) -> None:
        """End it where it has no order, and leave nothing behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.stderr_path.unlink(missing_ok=True)
