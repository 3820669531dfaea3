"""The commands that need no run: `ui`, `config`, `doctor` and `completion`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.options import Flag, JsonOption, StoreOption, open_chosen_store
from tasks.configuration.addresses import choose_store
from tasks.errors import InvalidConfiguration
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_facts, print_line, print_table

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """A completion script, or where it was installed."""

    shell: str
    script: str | None = None
    path: str | None = None


def ui(
    where: Annotated[str, Parameter(name="STORE")] = "",
    *,
    port: int = 8460,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Serve the live page: all runs, one run as it trains, several over each other, models; Ctrl-C ends it.

    It reads the store alone, listens on 127.0.0.1, and answers nobody but you where the system tells users apart.

    Args:
        where: folder or URL of the store, as --store.
        port: where it listens; 0 is any that is free [8460].
    """
    from cairn.ui.live_server import LiveAddress, serve

    def announce(found: LiveAddress) -> None:
        line = f"{found.address} shows {found.store}; Ctrl-C ends it"
        print_document(found) if json else print_line(line)
        sys.stdout.flush()

    serve(open_chosen_store(where or store), port=port, environment=os.environ, announce=announce)


def config(key: str = "", *, json: JsonOption = False) -> None:
    """Explain the configuration keys: meaning, rule, unit, default, and whether they are frozen with the run.

    Args:
        key: a key such as training.lr, whose record --json prints alone, or a section such as training [all keys].
    """
    from tasks.configuration.key_reference import list_keys, unknown_key

    keys = [one for one in list_keys() if not key or f"{one.key}.".startswith(f"{key}.")]
    if not keys:
        raise InvalidConfiguration(f"{key}: {unknown_key(key, is_section='.' not in key)}")
    if json:
        print_document(keys[0] if len(keys) == 1 else keys)
    elif len(keys) == 1:
        (one,) = keys
        rule = "yes: a run is continued only with the same value"
        facts = (
            ("key", one.key),
            ("meaning", one.meaning),
            ("must be", one.rule),
            ("unit", one.unit or None),
            ("default", one.default),
            ("frozen", rule if one.frozen else "no: it may change when a run goes on"),
        )
        print_facts(facts)
    else:
        rows = [(one.key, one.default, "yes" if one.frozen else "no", one.meaning) for one in keys]
        print_table(("key", "default", "frozen", "meaning"), rows, empty="no keys")


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

    Args:
        shell: which one [the shell this is typed in].
        install: put the script where the shell looks, and a line into its start-up file; a new shell has it.
    """
    with _refusing_unknown_shell():
        shell = shell or _this_shell()
        if install:
            path = str(install_script(shell))
            view, text = CompletionView(shell=shell, path=path), f"installed: {path}; a new shell completes `cairn`"
        else:
            text = read_script(shell)
            view = CompletionView(shell=shell, script=text)
    print_document(view) if json else print(text.rstrip("\n"))


def _this_shell() -> Shell:
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    if (found := detect_shell()) == "powershell":
        raise ShellDetectionError("there is no completion for PowerShell")
    return found


@contextmanager
def _refusing_unknown_shell() -> Iterator[None]:
    from cyclopts.completion.detect import ShellDetectionError

    try:
        yield
    except ShellDetectionError as error:
        raise InvalidConfiguration(f"{error}; name the shell: `cairn completion bash`, zsh or fish") from error
    except OSError as error:
        raise InvalidConfiguration(f"not installed: {error}; `cairn completion bash` prints the script") from error


def read_script(shell: Shell) -> str:
    """Return the script (completions/) by which a shell asks `cairn` what Tab can add."""
    return (Path(__file__).parent / "completions" / f"cairn.{shell}").read_text(encoding="utf-8")


def install_script(shell: Shell) -> Path:
    """Put the script where the shell looks, and a line into its start-up file; returns where; raises OSError."""
    from cyclopts.completion.install import add_to_rc_file, get_default_completion_path

    path = get_default_completion_path(shell, "cairn").absolute()
    path.write_text(read_script(shell), encoding="utf-8")
    if shell != "fish":
        add_to_rc_file(path, "cairn", shell)
    return path
