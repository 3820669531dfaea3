"""A process of Cairn's, which gets a signal before a given line of its own (`python -m tests.crash.noticed_command`).

Arguments: the signal's name; where it comes, a function such as `run_start.py:_claim` or a number of lines of
Cairn's in the main thread, counted from the first after the arguments are parsed; the file where the number of all
lines and the place are left; and what is run: the `cairn` command's own words, or `prefect.engine`, a worker's process
of a flow run. It trains without tensors.
"""

import atexit
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from cairn.cli import command
from cairn.flows.orchestrator import prefect_settings
from cairn.storage.stores.child_process import child_command
from cairn.tasks.trainer import trainer_group

ROOT = str(Path(__file__).parents[2])
PRODUCT = tuple(f"{ROOT}/{name}/" for name in ("cairn", "flows", "reports", "tasks", "storage", "model"))
ENGINE = "prefect.engine"


class Notice:
    """Counts lines, and sends the signal before one of them."""

    def __init__(self, name: str, at: str, *, begins: tuple[str, str]) -> None:
        """`begins` is the function, and its file, from which on lines are counted."""
        self._number, self._at, self.lines, self._begun = signal.Signals[name], at, 0, False
        self._begins, self.where = begins, ""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Follow functions of the product alone, from the first one on."""
        code, (first, file) = frame.f_code, self._begins
        self._begun |= code.co_name == first and code.co_filename.endswith(file)
        if not self._begun or not code.co_filename.startswith(PRODUCT):
            return None
        if event == "line":
            self.lines += 1
            here = f"{Path(code.co_filename).name}:{code.co_name}"
            if not self.where and self._at in (str(self.lines), here):
                self.where = f"{here} {frame.f_lineno}"
                os.kill(os.getpid(), self._number)
        return self.trace


def main() -> None:
    """Run the command, or the flow run, with the notice in it."""
    name, at, counted, *words = sys.argv[1:]
    trainer_group.TRAINER_COMMAND = child_command("tests.wiring.tensorless_trainer")
    is_engine = words == [ENGINE]
    begins = ("train_gpt", "train_gpt.py") if is_engine else ("train", "train_commands.py")
    notice, leave = Notice(name, at, begins=begins), os._exit

    def note() -> None:
        Path(counted).write_text(f"{notice.lines} {notice.where}")

    def note_and_leave(code: int) -> None:
        note()
        leave(code)

    atexit.register(note)
    os._exit = note_and_leave  # type: ignore[assignment]
    sys.settrace(notice.trace)
    if is_engine:
        sys.argv[1:] = words
        prefect_settings.main()
    else:
        command.main(words)


if __name__ == "__main__":
    main()
