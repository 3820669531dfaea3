r"""Keeps the log of a CI system from taking text for commands, such as `::error::`, `##vso[…]` or `##teamcity[…]`.

Sources: GitHub's workflow commands (a line that begins with `::`), Azure's logging commands (anywhere in a line).
"""

import io
import os
import re
import stat
import sys
from collections.abc import Mapping

_MARKS = ("CI", "GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")
_COMMAND = re.compile(r"((?:^|[\r\n])\s*:)(?=:)|(##[\w.-]*)(?=\[)")
_KEPT_CHARACTERS = 64


def break_commands(text: str) -> str:
    """Return text in which `:|:` and `##…|[` stand for the beginnings of commands."""
    return _COMMAND.sub(r"\g<0>|", text)


def guard_log(environment: Mapping[str, str]) -> None:
    """In a CI job, break the commands in all that is printed from now on, except into a file."""
    if all(environment.get(mark, "").lower() in ("", "0", "false") for mark in _MARKS):
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            setattr(sys, name, CommandFreeStream(stream))


class CommandFreeStream(io.TextIOWrapper):
    """Writes to another stream's buffer; a command is broken even if its characters come one by one."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
        )
        self._line = ""
        self._stream = stream  # it would close the buffer when nothing refers to it

    def write(self, text: str) -> int:
        """Write text; what is added to it depends only on the line so far."""
        whole = self._line + text
        super().write(break_commands(whole)[len(break_commands(self._line)) :])
        line = re.split(r"[\r\n]", whole)[-1].lstrip()
        self._line = line if len(line) <= _KEPT_CHARACTERS else "-" + line[-_KEPT_CHARACTERS:]
        return len(text)
