"""Tab on a line of `cairn`: what may stand there, as the command answers the shells' scripts, and in real shells."""

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.cli.store_commands import Shell, make_script
from tests.commands import ROOT, Cairn, chosen_folders
from tests.fabricated_run import FabricatedRun
from tests.processes.waiting import patience_seconds

# What a shell is typed, to the Tab, and what then stands there.
TYPED = {
    "cairn che": "cairn checkpoints ",
    "cairn train --ru": "cairn train --run-id ",
    "cairn train notes/my": "cairn train notes/my.toml ",
    "cairn status ba": "cairn status bard ",
    "cairn sample bard@2": "cairn sample bard@20 ",
    "cairn train quickstart --set training.warm": "cairn train quickstart --set training.warmup_steps=",
    "cairn promote bard --alias=cham": "cairn promote bard --alias=champion ",
}
TAKES_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
BEGIN: dict[Shell, tuple[tuple[str, ...], str]] = {
    "bash": (("bash", "--norc", "--noprofile", "-i"), "source {script}"),
    "zsh": (("zsh", "-f", "-i"), "autoload -Uz compinit; compinit -u -D; source {script}"),
    "fish": (("fish", "--no-config", "--interactive"), "source {script}"),
}


def completed(cairn: Cairn, *words: str, **environment: str) -> list[str]:
    """What the shells' scripts ask for, and keep where it begins as the last word does."""
    ended = cairn("__complete", *words, **environment)
    assert (ended.code, ended.err) == (0, "")
    offered = ended.out.partition("\x1fbegin\n")[2].splitlines()
    typed = words[-1].partition("=")[2] if words[-1].startswith("--") else words[-1]
    return [value for row in offered if (value := row.partition("\t")[0]).startswith(typed)]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["completion", "z"], ["zsh"]),
        (["plot", "bard", "out.png", "--x", ""], ["step", "tokens"]),
        (["plot", "bard", "o"], ["out of the way.png"]),
        (["export", "champion", "f"], ["folder/"]),
        (["status", ""], ["bard"]),
        (["train", "--run-id", ""], ["bard"]),
        (["sample", ""], ["champion", "bard"]),
        (["sample", "bard@"], ["bard@30", "bard@20", "bard@10"]),
        (["data", ""], ["bard"]),
        (["rollback", "--alias", ""], ["champion"]),
        (["train", "q"], ["quickstart", "quick.toml"]),
        (["evaluate", "bard", "--suite", "rep"], ["repetition"]),
        (["train", "--set", "training.warm"], ["training.warmup_steps="]),
        (["train", "--set=training.warm"], ["training.warmup_steps="]),
        (["config", "checkpoint.ev"], ["checkpoint.every_steps", "checkpoint.every_seconds"]),
        (["sample", "champion", "--tokens", ""], []),
        (["no-such-verb", ""], []),
    ],
)
def test_a_word_is_completed(
    cairn: Cairn,
    bard: FabricatedRun,
    words: list[str],
    offered: list[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("out of the way.png", "quick.toml"):
        (tmp_path / name).touch()
    assert completed(cairn, *words) == offered


def test_the_store_that_the_line_names_is_the_one_that_is_asked(
    cairn: Cairn, bard: FabricatedRun, tmp_path: Path
) -> None:
    (tmp_path / "store").rename(tmp_path / "another store")
    assert completed(cairn, "status", "--store", f"{tmp_path}/another store", "") == ["bard"]


def test_a_store_that_cannot_be_asked_completes_nothing_and_says_nothing(cairn: Cairn) -> None:
    elsewhere = {"CAIRN_STORE": "gs://no/such", "NO_GCE_CHECK": "true"}  # no machine of the cloud's is looked for
    assert completed(cairn, "status", "", **elsewhere) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_in_a_real_shell_completes_options_files_runs_checkpoints_aliases_and_keys(
    shell: Shell, bard: FabricatedRun, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: completion in it cannot be tried")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "my.toml").touch()
    program = tmp_path / "bin" / "cairn"
    program.parent.mkdir()
    start = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m cairn.cli.command"
    program.write_text(f'#!/bin/sh\n{start} "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(make_script(shell))
    assert type_into(shell, script, tmp_path) == list(TYPED.values())


def type_into(shell: Shell, script: Path, folder: Path) -> list[str]:
    """Type every line of `TYPED` and Tab into the shell, then let it print what stands there."""
    command, begin = BEGIN[shell]
    terminal, side = pty.openpty()
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **chosen_folders(folder), "PATH": path, "TERM": "dumb", "HOME": str(folder)}
    environment = {**variables, "COLUMNS": "200", "HISTFILE": "/dev/null"}
    words = [sys.executable, "-c", TAKES_TERMINAL, *command]
    child = subprocess.Popen(
        words, cwd=folder, env=environment, stdin=side, stdout=side, stderr=side, start_new_session=True
    )
    os.close(side)
    try:
        lines, written = [f"{begin.format(script=script)}\n"], b""
        # Ctrl-E and a quote, Ctrl-A and a quoting command: the shell itself says what stands between.
        lines += [f"{typed}\t'\x01printf '<%s>\\n' '\n" for typed in TYPED]
        for text in lines:
            os.write(terminal, text.encode())
        found = list[str]()
        while len(found) < len(TYPED) and select.select([terminal], [], [], patience_seconds())[0]:
            written += os.read(terminal, 65536)
            found = re.findall(r"^<(cairn .*)>\r$", written.decode(errors="replace"), re.MULTILINE)
        assert len(found) == len(TYPED), written.decode(errors="replace")
        return found
    finally:
        os.close(terminal)
        child.wait()


def test_completion_is_installed_where_the_shell_looks(cairn: Cairn, tmp_path: Path) -> None:
    ended = cairn("completion", "bash", "--install", "--json", HOME=str(tmp_path))
    assert ended.code == 0, ended.err
    installed = [path for path in tmp_path.rglob("*") if path.is_file() and "_cairn()" in path.read_text()]
    assert len(installed) == 1 and str(installed[0]) in ended.out
    assert f'"startup": "{tmp_path}/.bashrc"' in ended.out


def test_the_start_up_file_that_gets_a_line_is_named(cairn: Cairn, tmp_path: Path) -> None:
    said = cairn("completion", "bash", "--install", HOME=str(tmp_path)).out
    assert f", which a line in {tmp_path}/.bashrc loads;" in said and (tmp_path / ".bashrc").exists()


def test_an_unwritable_home_is_refused_in_one_line(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    ended = cairn("completion", "bash", "--install", HOME=str(tmp_path / "home"))
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and "prints the script" in ended.err
