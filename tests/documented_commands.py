"""The command lines and configurations that the documents show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

_PROGRAM = r"(?:[A-Z_]+=\S* )*(?:srun )?(?:\.venv/bin/)?(?:cairn|make|prefect)\b"
_LINE = re.compile(rf"^ {{4,}}(?:\$ )?(?P<line>{_PROGRAM}.*)")
_SPAN = re.compile(rf"`({_PROGRAM} [^`]+)`")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentedCommand:
    """A command line of a document; one that stands in a sentence may leave arguments out."""

    text: str
    is_in_sentence: bool = False

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without comment and redirection."""
        program, *arguments = dropwhile(_is_before_program, shlex.split(self.text, comments=True))
        return [Path(program).name, *takewhile(lambda word: word != ">", arguments)]

    @property
    def variables(self) -> dict[str, str]:
        """The variables that are set before the program."""
        before = takewhile(_is_before_program, shlex.split(self.text, comments=True))
        return dict(word.split("=", 1) for word in before if "=" in word)

    @property
    def exit_code(self) -> int:
        """The exit code that its comment names, else 0."""
        named = re.search(r"# leaves with (\d+)", self.text)
        return int(named[1]) if named else 0


def documented_commands(text: str) -> Iterator[DocumentedCommand]:
    """Yield the commands of a document in order: indented lines with what they go on with, and those in sentences."""
    lines = iter(text.splitlines())
    for line in lines:
        if found := _LINE.match(line):
            command = found["line"]
            while command.endswith("\\") or _is_open(command):
                command = command.removesuffix("\\") + " " + next(lines).strip()
            yield DocumentedCommand(text=command)
        elif not line.startswith("    "):
            yield from (DocumentedCommand(text=span, is_in_sentence=True) for span in _SPAN.findall(line))


def documented_configurations(text: str) -> list[str]:
    """Return the TOML blocks of a document."""
    return _TOML.findall(text)


def documented_module(text: str) -> str:
    """Return the first Python block of a document, empty if it has none."""
    found = _PYTHON.search(text)
    return found[1] if found else ""


def _is_before_program(word: str) -> bool:
    return "=" in word or word == "srun"


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
