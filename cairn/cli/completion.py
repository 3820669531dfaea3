"""The verb `completion`: what a shell needs to complete verbs and options, printed or put where the shell looks.

Owns the verb's words and refusals. The scripts are cyclopts' own, made from the verbs as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cairn.cli.app import app
from cairn.cli.verb_options import JsonOption
from tasks.errors import InvalidConfiguration
from tasks.text.output import print_document

if TYPE_CHECKING:
    from pathlib import Path

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """A completion script, or where it was put; `shell` is None where it was found out."""

    shell: str | None
    script: str | None = None
    path: str | None = None


def completion(
    shell: Shell | None = None, *, install: Annotated[bool, Parameter(negative="")] = False, json: JsonOption = False
) -> None:
    """Print the script that completes verbs and options in a shell, or install it.

    JSON: shell, script, path (of the two, the one that does not apply is null).

    Args:
        shell: which one [the shell this is typed in].
        install: put the script where the shell looks, and a line into its start-up file; a new shell has it.
    """
    if install:
        path = _installed(shell)
        view = CompletionView(shell=shell, path=str(path))
        print_document(view) if json else print(f"installed: {path}; a new shell completes `cairn`")
        return
    script = _script(shell)
    print_document(CompletionView(shell=shell, script=script)) if json else print(script)


def _script(shell: Shell | None) -> str:
    with _explained():
        return app.generate_completion(shell=shell)


def _installed(shell: Shell | None) -> "Path":
    with _explained():
        return app.install_completion(shell=shell)


@contextmanager
def _explained() -> Iterator[None]:
    from cyclopts.completion.detect import ShellDetectionError

    try:
        yield
    except ShellDetectionError as error:
        raise InvalidConfiguration(f"{error}; name the shell: `cairn completion bash`, zsh or fish") from error
    except OSError as error:
        raise InvalidConfiguration(f"not installed: {error}; `cairn completion bash` prints the script") from error
