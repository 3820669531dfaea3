"""The commands about this machine: `doctor` and `completion`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from cairn.cli.app import app
from cairn.cli.options import Flag, JsonOption, StoreOption
from tasks.configuration.store_choice import choose_store
from tasks.errors import InvalidConfiguration
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_facts

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """A completion script, or where it was installed; `shell` is None if it was detected."""

    shell: str | None
    script: str | None = None
    path: str | None = None


def doctor(*, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Check versions, device, store, orchestrator and disk; exit 1 when something is wrong."""
    from cairn.operations.machine_check import check_machine

    checks = check_machine(choose_store(store, os.environ))
    if json:
        print_document(checks)
    else:
        print_facts((f"{'ok   ' if check.ok else 'WRONG'} {check.name}", check.detail) for check in checks)
    return ExitCode.DONE if all(check.ok for check in checks) else ExitCode.ERROR


def completion(shell: Shell | None = None, *, install: Flag = False, json: JsonOption = False) -> None:
    """Print the script that completes commands and options in a shell, or install it.

    JSON: shell, script, path (of the two, the one that does not apply is null).

    Args:
        shell: which one [the shell this is typed in].
        install: put the script where the shell looks, and a line into its start-up file; a new shell has it.
    """
    with _refusing_unknown_shell():
        if install:
            path = str(app.install_completion(shell=shell))
            view, text = CompletionView(shell=shell, path=path), f"installed: {path}; a new shell completes `cairn`"
        else:
            text = app.generate_completion(shell=shell)
            view = CompletionView(shell=shell, script=text)
    print_document(view) if json else print(text)


@contextmanager
def _refusing_unknown_shell() -> Iterator[None]:
    from cyclopts.completion.detect import ShellDetectionError

    try:
        yield
    except ShellDetectionError as error:
        raise InvalidConfiguration(f"{error}; name the shell: `cairn completion bash`, zsh or fish") from error
    except OSError as error:
        raise InvalidConfiguration(f"not installed: {error}; `cairn completion bash` prints the script") from error


MACHINE_COMMANDS = (doctor, completion)
