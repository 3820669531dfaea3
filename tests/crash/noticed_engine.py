"""A worker's process of a flow run, which gets a signal before a given line (`python -m tests.crash.noticed_engine`).

Arguments: the signal's name, where it comes, the file where the place is left; see `tests.crash.noticed_command`. It
trains without tensors.
"""

import atexit
import sys
from pathlib import Path

from cairn.flows.orchestrator import prefect_settings
from cairn.storage.stores.child_process import child_command
from cairn.tasks.trainer import trainer_group
from tests.crash.noticed_command import Notice


def main() -> None:
    """Run the flow run with the notice in it."""
    name, at, counted = sys.argv[1:]
    trainer_group.TRAINER_COMMAND = child_command("tests.wiring.tensorless_trainer")
    notice = Notice(name, at, begins=("train_gpt", "train_gpt.py"))
    atexit.register(lambda: Path(counted).write_text(f"{notice.lines} {notice.where}"))
    sys.settrace(notice.trace)
    sys.argv[1:] = ["prefect.engine"]
    prefect_settings.main()


if __name__ == "__main__":
    main()
